"""Slots that hold codes: every backend does over them what the definition does over the numbers they stand for."""

import dataclasses
import itertools

import pytest
import torch
from sweeps import sweep

from kvkeep.attention_stats import Low, Mass
from kvkeep.backends import Added, AttentionInputs, FusedStep, SlotLimits, in_codes
from kvkeep.backends.torch import TorchBackend
from kvkeep.kv.slot_codec import CodedSlots, Codes, KeyTransform, decode, encode, encode_keys
from kvkeep.kv_bits import HALVES, KV_BITS
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Report, Slots

from .bounds import check
from .cases import BACKENDS, DTYPES, NOW, OF_TOKEN, ON_TOKEN, SLOW, backend_of, chunk, on, token

PLAIN = AttentionOptions(scaling=0.2)
BITS = list(KV_BITS.values())
TURNED = 4e-6
"""The error of an output by the rounding of `hadamard`, with a key that takes all."""
WITH_OFFSETS = 2e-4
"""The same with 4 bits: a logit and an output are the difference of the offsets' part and the codes', both larger."""


def coded(slots, bits, dtype=torch.float32):
    """The slots as codes, with NaN for the scales of empty slots; and the numbers that the codes stand for.

    Keys of 4 bits have exponents and normals, which differ in each row and head.
    """
    transform = KeyTransform.blank(slots.keys, bits)
    if transform.exponents is not None:
        transform.exponents.random_(-2, 3, generator=torch.Generator().manual_seed(0))
        transform.normals.normal_(generator=torch.Generator().manual_seed(0))
        transform.normals.div_(transform.normals.norm(dim=-1, keepdim=True)).mul_(2**0.5)
    keys, values = encode_keys(slots.keys.nan_to_num(), bits[0], transform), encode(slots.values.nan_to_num(), bits[1])
    wide = Slots(transform.restored(decode(keys, torch.float32)), decode(values, torch.float32), slots.positions)
    empty = (slots.positions < 0).expand(keys.scales.shape[:3])
    for codes in (keys, values):
        codes.scales[empty] = torch.nan
    return CodedSlots.of(keys, values, slots.positions.clone(), dtype, transform), wide


def copied(slots):
    """The same codes elsewhere in memory."""
    keys, values = (
        Codes(codes.numbers.clone(), codes.scales.clone(), codes.bits)
        for codes in (slots.coded_keys, slots.coded_values)
    )
    return CodedSlots.of(keys, values, slots.positions.clone(), slots.dtype, slots.transform)


def there(name, slots):
    """The slots where a backend works."""
    parts = on(name, *slots.coded_keys[:2], *slots.coded_values[:2], slots.positions)
    keys, values = Codes(*parts[:2], slots.coded_keys.bits), Codes(*parts[2:4], slots.coded_values.bits)
    transform = KeyTransform(*on(name, *slots.transform.of_rows.values()))
    return CodedSlots.of(keys, values, parts[4], slots.dtype, transform)


class Over:
    """A backend that is asked about numbers, and answers about the codes that stand for them."""

    def __init__(self, name, slots):
        backend = backend_of(name)
        self.name, self.backend, self.slots = name, in_codes(backend, turned=False), there(name, slots)

    def attend(self, inputs):
        return self.backend.attend(inputs._replace(slots=self.slots))


def ask(name, given, bits, statistic, options):
    query, slots, now = given
    slots, wide = coded(slots, bits, query.dtype if name == "native" else torch.float32)
    return check(
        Over(name, slots),
        *on(name, (query, wide, now), statistic, options),
        slack=WITH_OFFSETS if 4 in bits else TURNED,
    )


FAST = [name for name in BACKENDS if name not in SLOW]
ASKED = [
    *(("plain", statistic) for statistic in ON_TOKEN),
    *((options, "mass") for options in OF_TOKEN),
    *(("all", name) for name in ("last", "live", "gains")),
]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize(("option", "statistic"), ASKED)
def test_a_token(name, option, statistic):
    for bits in BITS:
        ask(name, token(70, 40, 3, E=24), bits, ON_TOKEN[statistic], OF_TOKEN[option])


SHAPES = [(D, G, S) for D, G, S in itertools.product([6, 32, 64, 80, 96, 128, 144, 256], [1, 2, 3, 7], [1, 17, 257])]


@pytest.mark.parametrize(("D", "G", "S"), sweep(SHAPES, lambda case: sum(case) % 3 == 0 or case[1:] == (3, 257)))
def test_shapes_of_a_token(D, G, S):
    for number, (bits, dtype) in enumerate(itertools.product(BITS, DTYPES)):
        E = [None, 32, 10][(number + D) % 3]
        ask("native", token(S, D, G, dtype, E=E), bits, Mass(), AttentionOptions(scaling=D**-0.5))


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_thousands_of_slots(bits):
    ask("native", token(4096, 128, 2), bits, Low(), AttentionOptions(scaling=0.1, softcap=20.0, window=4000))


@pytest.mark.long
@pytest.mark.parametrize("name", ["triton", "reference"])
@pytest.mark.parametrize(("D", "G", "S"), [(64, 3, 70), (128, 1, 257), (80, 7, 17), (32, 2, 1), (144, 2, 17)])
def test_backends_that_are_slow(name, D, G, S):
    for bits, option in zip(BITS, ("plain", "all", "softcap"), strict=True):
        options = dataclasses.replace(OF_TOKEN[option], sinks=None)
        ask(name, token(S, D, G), bits, Mass(), options)


@pytest.mark.parametrize(("D", "E"), [(3, 5), (6, 10), (32, 80), (64, 64), (80, 96), (96, 32), (128, 256), (144, 200)])
def test_the_kernel_codes_a_token_as_the_definition_does_bit_for_bit(D, E):
    g = torch.Generator().manual_seed(D)
    _, slots, now = token(20, D, 1, E=E)
    slots.positions[:, :, 7] = -1
    scale = torch.logspace(-9, 5, 12).view(6, 2, 1, 1)  # down to the smallest scales, up to the largest
    new = [torch.randn(6, 2, 1, width, generator=g) * scale for width in (D, E)]
    new[0][1], new[1][1, 0], new[0][2, 1, 0, 1] = 0.0, 3e38, 6e4
    for bits, dtype in itertools.product([(8, 8)] if D % 2 else BITS, DTYPES):
        token_of = [x.nan_to_num().clamp(-6e4, 6e4).to(dtype) if dtype == torch.float16 else x.to(dtype) for x in new]
        found, want = coded(slots, bits, dtype)[0], coded(slots, bits, dtype)[0]
        slot = backend_of("native").append(found, *token_of, now)
        where = in_codes(TorchBackend(), turned=False).append(want, *token_of, now)
        assert torch.equal(slot, where)
        assert torch.equal(found.positions, want.positions)
        for one, two in ((found.coded_keys, want.coded_keys), (found.coded_values, want.coded_values)):
            assert torch.equal(one.numbers, two.numbers)
            assert torch.equal(one.scales.view(torch.int16), two.scales.view(torch.int16))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("part", [0, 1], ids=["key", "value"])
@pytest.mark.parametrize("bits", BITS)
def test_a_token_that_is_not_finite_leaves_its_slot_empty_in_its_head_alone(bits, part, bad):
    query, slots, now = token(20, 64, 2)
    slots.positions[:, :, 7] = -1
    slots = coded(slots, bits)[0]
    new = [torch.randn(6, 2, 1, 64) for _ in range(2)]
    new[part][0, 1, 0, 5] = bad
    backend, sums = backend_of("native"), torch.ones(6, 2, 20)
    parts, whole = copied(slots), copied(slots)
    slot = backend.append(parts, *new, now)
    assert parts.positions[0, 1, slot[0, 1, 0]] == -1
    assert parts.positions[0, 0, slot[0, 0, 0]] == now[0]
    out, _ = backend.attend(AttentionInputs(query, parts, now, statistic=Mass(), options=PLAIN))
    assert out.isfinite().all()
    added, limits = Added((sums,), is_score=True), SlotLimits(now[:, 0] + 1, 0, 1, 20)
    step = backend.step(FusedStep(query, whole, tuple(new), now, Mass(), PLAIN, added, limits))
    assert torch.equal(step, out)
    assert torch.equal(whole.positions, parts.positions)
    assert sums[0, 1, slot[0, 1, 0]] == 0.0


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("bits", BITS)
def test_a_fused_step_is_its_parts(bits, window):
    query, slots, now = token(70, 64, 3)
    slots.positions[:, :, 5] = -1
    parts, whole = coded(slots, bits)[0], coded(slots, bits)[0]
    options = dataclasses.replace(PLAIN, window=window)
    limits = SlotLimits(now[:, 0] + 1, 1, 4, 40, window)
    new, backend = (torch.randn(6, 2, 1, 64), torch.randn(6, 2, 1, 64)), backend_of("native")
    sums, lost = torch.rand(6, 2, 70), torch.zeros(6, 2, 2)
    want = sums.clone()
    slot = backend.append(parts, *new, now)
    out, report = backend.attend(AttentionInputs(query, parts, now, statistic=Mass(), options=options))
    want = torch.scatter(want, -1, slot, 0.0) + report.mass
    if window is not None:
        backend.expire(parts.positions, limits.seen, window)
    backend.evict(parts.positions, want, limits)
    added = Added((sums,), is_score=True, lost=lost)
    found = backend.step(FusedStep(query, whole, new, now, Mass(), options, added, limits))
    assert torch.equal(found, out)
    assert torch.equal(sums, want)
    assert torch.equal(whole.positions, parts.positions)
    for one, two in ((whole.coded_keys, parts.coded_keys), (whole.coded_values, parts.coded_values)):
        assert torch.equal(one.numbers, two.numbers)
        assert torch.equal(one.scales.view(torch.int16), two.scales.view(torch.int16))


def test_the_number_of_threads_changes_nothing():
    query, slots, now = token(1024, 64, 3)
    slots, found = coded(slots, (8, 4))[0], []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            out, report = backend_of("native").attend(
                AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN)
            )
        finally:
            torch.set_num_threads(1)
        found.append((out, report.mass))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.long
@pytest.mark.parametrize(("D", "E"), [(6, 10), (80, 32), (128, 64), (144, 6)])
def test_triton_codes_a_token_as_the_definition_does(D, E):
    _, slots, now = token(20, D, 1, E=E)
    slots.positions[:, :, 7] = -1
    new = [torch.randn(6, 2, 1, width) for width in (D, E)]
    new[0][1], new[1][2] = 0.0, 1e6  # no scale, and the largest one
    new[0][0, 1, 0, 3], new[1][4, 0, 0, 1] = torch.nan, torch.inf
    for bits in BITS:
        found, want = coded(slots, bits)[0], coded(slots, bits)[0]
        whole = there("triton", found)
        slot = in_codes(backend_of("triton"), turned=False).append(whole, *on("triton", *new, now))
        assert torch.equal(slot.cpu(), in_codes(TorchBackend(), turned=False).append(want, *new, now))
        assert torch.equal(whole.positions.cpu(), want.positions)
        for one, two in ((whole.coded_keys, want.coded_keys), (whole.coded_values, want.coded_values)):
            scales, others = (codes.scales.cpu().nan_to_num() for codes in (one, two))
            torch.testing.assert_close(scales, others, rtol=1e-3, atol=1e-7)  # the matrix has another order of sums
            wide = (decode(Codes(codes.numbers.cpu(), others, codes.bits), torch.float32) for codes in (one, two))
            steps = others[..., :: HALVES[one.bits], None]
            first, second = (x.unflatten(-1, (steps.shape[-2], -1)) for x in wide)
            assert ((first - second).abs() <= 1.01 * steps).all()
            assert (first != second).float().mean() < 0.001


@pytest.mark.long
def test_triton_makes_no_copy(monkeypatch):
    query, slots, now = token(40, 64, 2)
    slots.positions[:, :, 5] = -1
    slots, backend = there("triton", coded(slots, (8, 4))[0]), backend_of("triton")
    monkeypatch.delattr(CodedSlots, "copy_keys")
    monkeypatch.delattr(CodedSlots, "copy_values")
    monkeypatch.delattr(CodedSlots, "write")
    given = on("triton", query, torch.randn(2, 6, 2, 1, 64), now)
    backend.append(slots, *given[1], given[2])
    backend.attend(AttentionInputs(given[0], slots, given[2], statistic=Mass(), options=PLAIN))


def test_the_kernel_makes_no_copy(monkeypatch):
    query, slots, now = token(40, 64, 2)
    slots.positions[:, :, 5] = -1
    slots, backend = coded(slots, (4, 4))[0], backend_of("native")
    monkeypatch.delattr(CodedSlots, "copy_keys")
    monkeypatch.delattr(CodedSlots, "copy_values")
    new = torch.randn(2, 6, 2, 1, 64)
    backend.append(slots, *new, now)
    backend.attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    added, limits = Added((), is_score=False), SlotLimits(now[:, 0] + 1, 0, 1, 40)
    asked = {"statistic": ON_TOKEN["nothing"], "options": PLAIN, "added": added, "limits": limits}
    assert backend.step(FusedStep(query, slots, tuple(new), now, **asked)) is not None


LEFT_TO_TORCH = torch.zeros(6, 4, 1, 64), Report({})
DAMAGED = {
    "scales of another dtype": (lambda keys, values: (keys._replace(scales=keys.scales.float()), values), None),
    "bits that the numbers do not have": (lambda keys, values: (keys, values._replace(bits=8)), None),
    "scales that are not dense": (
        lambda keys, values: (keys._replace(scales=keys.scales.repeat(1, 1, 1, 4)[..., ::2]), values),
        None,
    ),
    "scales of fewer slots": (lambda keys, values: (keys, values._replace(scales=values.scales[:, :, 1:])), None),
    "numbers of fewer heads": (lambda keys, values: (keys._replace(numbers=keys.numbers[:, :1]), values), None),
    "groups that do not fit": (
        lambda keys, values: (keys._replace(scales=keys.scales.repeat(1, 1, 1, 3)), values),
        None,
    ),
    "no groups": (lambda keys, values: (keys._replace(scales=keys.scales[..., :0]), values), None),
    "no offsets": (lambda keys, values: (keys, values._replace(scales=values.scales[..., :1])), None),
    "exponents of fewer heads": (lambda *codes: codes, torch.zeros((6, 1, 64), dtype=torch.int8)),
    "exponents of another dtype": (lambda *codes: codes, torch.zeros((6, 2, 64), dtype=torch.int16)),
}


@pytest.mark.usefixtures("no_checked_annotations")
@pytest.mark.parametrize(("damage", "exponents"), DAMAGED.values(), ids=DAMAGED)
def test_codes_that_the_kernel_does_not_take(damage, exponents, monkeypatch):
    query, slots, now = token(40, 64, 2)
    slots, asked = coded(slots, (8, 4))[0], []
    transform = KeyTransform() if exponents is None else KeyTransform(exponents)
    slots = CodedSlots.of(*damage(slots.coded_keys, slots.coded_values), slots.positions, slots.dtype, transform)
    monkeypatch.setattr(TorchBackend, "attend", lambda *one, **more: asked.append(1) or LEFT_TO_TORCH)
    backend_of("native").attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    assert asked == [1]
    new, now = torch.randn(2, 6, 2, 1, 64), torch.full((6, 1), NOW + 1)
    added, limits = Added((torch.ones(6, 2, 40),), is_score=True), SlotLimits(now[:, 0] + 1, 0, 1, 40)
    given = (query, slots, tuple(new), now)
    assert backend_of("native").step(FusedStep(*given, Mass(), PLAIN, added, limits)) is None


@pytest.mark.parametrize("bits", BITS)
def test_a_chunk_over_codes(bits):
    query, slots, now = chunk(33, 40, 64, 2)
    slots, _ = coded(slots, bits)
    for codes in (slots.coded_keys, slots.coded_values):
        codes.scales.nan_to_num_(0.0)  # a chunk's slots are finite
    want, report = backend_of("native").attend(
        AttentionInputs(query, slots.copied(), now, statistic=Mass(), options=PLAIN)
    )
    out, found = backend_of("native").attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    assert torch.equal(out, want)
    assert torch.equal(found.mass, report.mass)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("window", [None, 40])
def test_a_fused_step_under_slot_positions_is_its_parts(bits, window, monkeypatch):
    """The parts take the token unrotated, as torch makes it of the rotated one."""
    rotation = Rotation(1.0 / 100 ** (torch.arange(0, 64, 2) / 64), scaling=1.1)
    query, slots, now = token(70, 64, 3)
    slots.positions.copy_(torch.where(slots.positions >= 0, torch.arange(70, dtype=torch.int32), -1))
    slots.positions[:, :, 5] = -1
    now = now.clamp(max=70)
    parts, whole = coded(slots, bits)[0], coded(slots, bits)[0]
    new, backend = (torch.randn(6, 2, 1, 64), torch.randn(6, 2, 1, 64)), backend_of("native").at_ranks(rotation)
    options = dataclasses.replace(PLAIN, window=window)
    plain, key = rotation.unrotated(query, new[0], now)
    backend.append(parts, key, new[1], now)
    out, report = backend.attend(AttentionInputs(plain, parts, now, statistic=Mass(), options=options))
    monkeypatch.delattr(CodedSlots, "copy_keys")
    sums, limits = torch.zeros(6, 2, 70), SlotLimits(now[:, 0] + 1, 0, 1, 70, window)
    added = Added((sums,), is_score=True)
    found = backend.step(FusedStep(query, whole, new, now, Mass(), options, added, limits))
    real = now[:, 0] >= 0
    torch.testing.assert_close(found[real], out[real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums[real], report.mass[real], rtol=1e-3, atol=1e-6)
    changed = (whole.coded_keys.numbers != parts.coded_keys.numbers).float().mean()
    assert changed < 0.001  # the key is not rounded on its way


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("D", [6, 32, 64, 80, 128])
def test_keys_are_turned_to_their_ranks(bits, D, monkeypatch):
    query, slots, now = token(70, D, 3)
    rotation = Rotation(1.0 / 100 ** (torch.arange(0, D, 2) / D), scaling=1.1)
    slots.positions.copy_(torch.where(slots.positions >= 0, torch.arange(70, dtype=torch.int32), -1))
    slots, wide = coded(slots, bits)
    now = now.clamp(max=70)
    want = TorchBackend().at_ranks(rotation).attend(AttentionInputs(query, wide, now, statistic=Mass(), options=PLAIN))
    monkeypatch.delattr(CodedSlots, "copy_keys")
    out = (
        backend_of("native")
        .at_ranks(rotation)
        .attend(AttentionInputs(query, slots, now, statistic=Mass(), options=PLAIN))
    )
    real = now[:, 0] >= 0
    torch.testing.assert_close(out[0][real], want[0][real], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(out[1].mass[real], want[1].mass[real], rtol=1e-4, atol=1e-6)
