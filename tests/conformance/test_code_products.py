"""Products of codes: queries that are hard to write as whole numbers, odd groups, rows that lie apart, processors."""

import itertools
import platform

import pytest
import torch

from kvkeep.attention_stats import Mass
from kvkeep.backends import AttentionInputs, reference
from kvkeep.backends.native import Native, bindings, build
from kvkeep.kv.slot_codec import CodedSlots, Codes, encode, encode_keys, hadamard
from kvkeep.kv_bits import KV_BITS
from kvkeep.types import AttentionOptions, Slots

from .cases import DTYPES, NOW, backend_of, token
from .test_slot_codec import ask, coded

PLAIN = AttentionOptions(scaling=0.2)
BITS = list(KV_BITS.values())


@pytest.mark.parametrize("size", [0.0, 1e-42, 1e-36, 1e-28, 1e-10, 1e10, 1e30])
def test_queries_of_any_size(size):
    query, slots, now = token(70, 64, 3)
    options = AttentionOptions(scaling=min(0.2 / max(size, 1e-37), 1e30))
    for bits in BITS:
        ask("native", (query * size, slots, now), bits, Mass(), options)


@pytest.mark.parametrize("D", [10, 70, 80, 100, 136, 250])
def test_groups_of_odd_sizes(D):
    for bits, G in zip(BITS, (1, 5, 2), strict=True):
        ask("native", token(33, D, G), bits, Mass(), AttentionOptions(scaling=D**-0.5, softcap=5.0))


def test_groups_whose_bytes_end_just_behind_half_a_register():
    for bits in BITS:
        for D in (34, 36, 66, 70, 72):
            ask("native", token(17, D, 1), bits, Mass(), AttentionOptions(scaling=D**-0.5))


@pytest.mark.parametrize("outlier", [1.0, 30.0, 1000.0])
def test_rounding_the_query_is_far_below_the_error_of_the_codes(outlier):
    """One channel of the turned query takes the whole range, so that the others are rounded most coarsely."""
    g = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 2, 4, 500, 64, generator=g)
    turned = torch.randn(2, 12, 1, 64, generator=g)
    turned[..., 5] *= outlier
    query, now = hadamard(turned), torch.full((2, 1), 499)
    slots = Slots(keys, values, torch.arange(500, dtype=torch.int32).repeat(2, 4, 1))
    options, backend = AttentionOptions(scaling=0.2 / outlier), backend_of("native")
    exact = reference.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=options))
    for bits in BITS:
        codes, wide = coded(slots, bits)
        want = reference.attend(AttentionInputs(query, wide, now, statistic=Mass(), options=options))
        found = backend.attend(AttentionInputs(query, codes, now, statistic=Mass(), options=options))
        for one, two, three in ((found[0], want[0], exact[0]), (found[1].mass, want[1].mass, exact[1].mass)):
            assert (one - two).norm() < 2e-4 * (two - three).norm()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", BITS)
def test_a_query_that_is_not_finite_spoils_its_own_head(bits, bad):
    query, slots, now = token(70, 64, 5)
    slots, backend = coded(slots, bits)[0], backend_of("native")
    want, report = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    query[0, 2, 0, 9] = bad
    out, found = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    assert out[0, 2].isnan().all()
    out[0, 2] = want[0, 2]
    assert torch.equal(out, want)
    assert found.mass[0, 0].isnan().any()
    found.mass[0, 0] = report.mass[0, 0]
    assert torch.equal(found.mass, report.mass)


@pytest.mark.parametrize("D", [32, 64, 80, 128])
@pytest.mark.parametrize("bits", BITS)
def test_rows_that_lie_apart(bits, D):
    query, slots, now = token(257, D, 3)
    dense, backend = coded(slots, bits)[0], backend_of("native")
    want, report = backend.attend(AttentionInputs(query, dense, now, statistic=Mass(), options=PLAIN))

    def apart(codes):
        wide = torch.full((*codes.numbers.shape[:3], codes.numbers.shape[3] + 3), 77, dtype=codes.numbers.dtype)
        wide[..., :-3] = codes.numbers
        return Codes(wide[..., :-3], codes.scales, codes.bits)

    coding = apart(dense.coded_keys), apart(dense.coded_values)
    slots = CodedSlots.of(*coding, dense.positions, dense.dtype, dense.transform)
    out, found = backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    assert torch.equal(out, want)
    assert torch.equal(found.mass, report.mass)


@pytest.mark.parametrize("S", [1, 7, 127, 128, 129, 300])
@pytest.mark.parametrize("kv_bits", [None, "8"])
def test_a_token_takes_the_first_free_slot_and_the_right_one_goes(S, kv_bits):
    backend = backend_of("native")
    for free in {0, S // 2, S - 1}:
        positions = torch.arange(S, dtype=torch.int32).repeat(1, 2, 1)
        positions[..., free] = -1
        keys = torch.randn(2, 1, 2, S, 32)
        slots = Slots(*keys, positions)
        if kv_bits:
            slots = CodedSlots.of(encode_keys(keys[0], 8), encode(keys[1], 8), positions, torch.float32)
        slot = backend.append(slots, *torch.randn(2, 1, 2, 1, 32), torch.tensor([[NOW]]))
        assert slot.flatten().tolist() == [free, free]
        assert positions[..., free].tolist() == [[NOW, NOW]]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have instructions of one kind")
@pytest.mark.parametrize("flag", ["-mno-avx512vnni", "-mno-avx512f", "-mno-avx"])
def test_processors_with_fewer_instructions(flag, tmp_path, monkeypatch):
    backend_of("native")
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, flag))
    library = build._opened(build._compile(build._compiler(), tmp_path, "fewer"))
    monkeypatch.setattr(bindings, "native", lambda: Native(library, flag))
    for (D, G, S), dtype in itertools.product([(6, 1, 3), (32, 7, 17), (80, 2, 70), (128, 3, 257)], DTYPES):
        for bits in BITS:
            ask("native", token(S, D, G, dtype, E=40), bits, Mass(gain=1.5), AttentionOptions(scaling=D**-0.5))
