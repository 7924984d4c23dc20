"""What only the native kernel has: vectors of other lengths, threads, roundings, and what it leaves to torch."""

import itertools
import platform
from dataclasses import replace

import pytest
import torch
from conformance.bounds import check
from conformance.cases import token

import kvkeep
from kvkeep.backends import SWITCH
from kvkeep.backends.native import Native, NativeBackend, build, native, ops
from kvkeep.backends.torch import TorchBackend
from kvkeep.noise import Gumbel
from kvkeep.statistic import LastHit, Low, Mass, Nothing
from kvkeep.types import AttentionOptions, Phase, Slots, Top

pytestmark = pytest.mark.skipif(native().library is None, reason=native().detail)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PLAIN = AttentionOptions(scaling=0.2)
SINKS = torch.tensor([0.3, -1.0, 2.0, 60.0, -torch.inf, 0.0])
ALL = AttentionOptions(scaling=0.5, window=3000, softcap=2.0, sinks=SINKS)


def by_kernel(query, slots, now, *, options=PLAIN):
    """The output, from the kernel or not at all."""
    found = ops.attend(query, slots.keys, slots.values, now, slots.positions, options=options, wanted=None)
    return None if found is None else found[0]


@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=2.5), Low(live=True)], ids=["mass", "gain", "low"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_that_takes_nearly_all(dtype, statistic):
    """The report of a gain follows from the logits, so it does not underflow with the probabilities."""
    check(NativeBackend(), token(70, 40, 3, dtype, E=24), statistic, AttentionOptions(scaling=0.2, sinks=SINKS))
    check(NativeBackend(), token(70, 40, 3, dtype, E=24), statistic, ALL)


def test_a_query_that_sees_nothing_gives_zeros():
    query, slots, now = token(40, 32, 2)
    out, report = NativeBackend().attend(
        query,
        slots._replace(positions=torch.full_like(slots.positions, -1)),
        torch.full_like(now, 7),
        statistic=Mass(),
        options=PLAIN,
    )
    assert (out == 0).all()
    assert (report.mass == 0).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have vectors of one length")
@pytest.mark.parametrize("flags", [["-mno-avx512f"], ["-mno-avx"]], ids=["8 floats", "4 floats"])
def test_shorter_vectors(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    library = build._opened(build._compile(build._compiler(), tmp_path, "short"))
    monkeypatch.setattr(ops, "native", lambda: Native(library, "short vectors"))
    for (D, S), dtype in itertools.product([(7, 3), (16, 17), (40, 70), (64, 257)], DTYPES):
        check(NativeBackend(), token(S, D, 3, dtype), Low(live=True), ALL)
        check(NativeBackend(), token(S, D, 3, dtype), Mass(gain=1.5), PLAIN)


def test_the_number_of_threads_changes_nothing():
    arguments = token(1024, 64, 3)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            out, report = NativeBackend().attend(*arguments, statistic=Mass(gain=1.5), options=ALL)
        finally:
            torch.set_num_threads(1)
        found.append((out, report.mass))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_half_is_widened_and_rounded_exactly(dtype):
    """All 65 536 numbers of a half-precision type, as values of one slot each that is seen alone."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 1, 1, 64)
    zeros = torch.zeros_like(numbers)
    now = torch.zeros(len(numbers), 1, dtype=torch.int64)
    out = by_kernel(zeros, Slots(zeros, numbers, now[..., None].int()), now)
    assert torch.equal(out.isnan(), numbers.isnan())
    assert torch.equal(out.nan_to_num(), numbers.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_mean_of_two_halves_is_rounded_to_even(dtype):
    values = torch.randn(1000, 1, 2, 64, generator=torch.Generator().manual_seed(0)).mul(30.0).exp2().to(dtype)
    zeros, now = torch.zeros_like(values), torch.ones(1000, 1, dtype=torch.int64)
    positions = torch.tensor([0, 1], dtype=torch.int32).expand(1000, 1, 2)
    out = by_kernel(zeros[:, :, :1], Slots(zeros, values, positions), now)
    assert torch.equal(out[:, :, 0], values.float().mean(dim=2).to(dtype))


@pytest.mark.parametrize(
    ("statistic", "options"),
    [
        (LastHit(), PLAIN),
        (Mass(noise=Gumbel(1, 1, torch.arange(6))), PLAIN),
        (Nothing(), replace(PLAIN, top=Top(torch.ones(6, dtype=torch.int64), renormalise=True))),
    ],
    ids=["last hit", "noise", "top"],
)
def test_what_the_kernel_does_not_know_is_left_to_torch(statistic, options, monkeypatch):
    asked, honest = [], TorchBackend.attend
    monkeypatch.setattr(TorchBackend, "attend", lambda *one, **more: asked.append(1) or honest(*one, **more))
    NativeBackend().attend(*token(40, 32, 2), statistic=Mass(), options=PLAIN)
    assert asked == []
    NativeBackend().attend(*token(40, 32, 2), statistic=statistic, options=options)
    assert asked == [1]


def test_tensors_that_the_kernel_does_not_take():
    q, (k, v, positions), now = token(40, 32, 2)

    def taken(q, k, v):
        return by_kernel(q, Slots(k, v, positions), now) is not None

    assert taken(q, k, v)
    assert not taken(q.double(), k.double(), v.double())
    assert not taken(q, k, v.bfloat16())
    assert not taken(q, k.mT.contiguous().mT, v)
    assert not taken(q, k, v.clone().requires_grad_())
    assert not taken(q, torch.nn.Parameter(k), v)
    with torch.no_grad():
        assert taken(q, k, v.clone().requires_grad_())


def test_nothing_is_scored_while_there_is_room(monkeypatch):
    scored = []
    monkeypatch.setenv(SWITCH, "native")
    monkeypatch.setattr(ops, "evict", lambda *args, **kwargs: scored.append(1))
    layer = kvkeep.Layer(kvkeep.parse("h2o"), 8)
    for _ in range(8):
        layer.step(*(torch.randn(1, 2, 1, 16) for _ in range(3)), options=PLAIN, phase=Phase.DECODE)
    assert scored == []
