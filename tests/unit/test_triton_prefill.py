"""The prefill kernels, interpreted, against the reference in float64. Tolerances follow from float32's rounding."""

import dataclasses
import itertools

import pytest
import torch

from kvkeep.backends import cpu, reference
from kvkeep.noise import Gumbel
from kvkeep.statistic import LastHit, Low, LowRows, Mass, MassAndLast, Nothing, ones
from kvkeep.types import AttentionOptions, Top

pytest.importorskip("triton")
from kvkeep.backends.triton import prefill_launch, prefill_ops, prefill_tiles, switch

if not switch.interprets():
    pytest.skip("kernels run compiled here, not interpreted", allow_module_level=True)

U = 2.0**-24
ROUNDING = {torch.float32: U, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""What is lost by writing a number down; the interpreter cuts bfloat16 where a GPU rounds, to 2^-8."""

PLAIN = AttentionOptions(scaling=0.3)
SINKS = torch.tensor([0.3, -1.0, 2.0, 5.0])


def problem(T=33, S=17, D=32, G=2, *, Hk=2, E=None, dtype=torch.float32, seed=0, pads=0, shared=False, B=2):
    """``S`` unordered slots with holes, ragged, and the keys of a chunk; for one token its own key is in a slot."""
    g = torch.Generator().manual_seed(seed)
    past = 2 * S + 10
    chunk = T if T > 1 else 0
    q = torch.randn(B, T, Hk * G, D, generator=g).transpose(1, 2)  # strided as a model's are
    k = torch.randn(B, Hk, S + chunk, D, generator=g)
    v = torch.randn(B, Hk, S + chunk, E or D, generator=g)
    heads = 1 if shared else Hk
    slots = torch.stack([torch.randperm(past, generator=g)[:S] for _ in range(B * heads)]).view(B, heads, S)
    slots = slots.masked_fill(torch.rand(slots.shape, generator=g) < torch.tensor([0.2, 0.8])[-B:].view(B, 1, 1), -1)
    now = (past + torch.arange(T)).repeat(B, 1)
    if T == 1:
        slots[:, :, S // 2] = past
    else:
        now[-1] = torch.where(torch.arange(T) < pads, -1, now[-1] - pads)
        slots = torch.cat([slots, now[:, None].expand(B, heads, T)], dim=-1)
    return q.to(dtype), k.to(dtype), v.to(dtype), now, slots.to(torch.int32)


def exact(q, k, now, positions, options):
    return reference.probabilities(q, k, now, positions.expand(-1, k.shape[1], -1), options)


def slack(q, k, options, gain=1.0):
    """By what factor a probability may be off: see the docstring of `prefill`."""
    grouped = q.double().abs().unflatten(1, (k.shape[1], -1))
    most = options.scaling * torch.einsum("bhgtd,bhsd->bhgts", grouped, k.double().abs()).max().item()
    S, D = k.shape[2], k.shape[3]
    logit = (D + 4) * U * most + (8 * U * options.softcap if options.softcap else 0.0)
    size = most if options.softcap is None else options.softcap
    size = max(size, 0.0 if options.sinks is None else options.sinks.abs().max().item())
    return 2 * gain * logit + U * (8 * gain * size + 4 * torch.tensor(float(S)).log().item() + S + 20)


def close(found, want, relative, absolute=1e-30):
    error = (found.double() - want).abs()
    allowed = relative * want.abs() + absolute
    worst = (error / allowed).max().item()
    assert worst <= 1.0, f"{worst:.1f} times the bound; error {error.max().item():.1e}"


def check(problem, statistic=None, options=PLAIN, *, gain=1.0, **how):
    """Output and report against the reference."""
    q, k, v, now, positions = problem
    statistic = statistic or Mass()
    found = prefill_ops.attend(q, k, v, now, positions, statistic=statistic, options=options, **how)
    assert found is not None
    out, report = found
    positions = positions.expand(-1, k.shape[1], -1)
    want, want_report = reference.attend(q, k, v, now, positions, statistic=statistic, options=options)
    p, wide = exact(q, k, now, positions, options), slack(q, k, options)
    size = torch.einsum("bhgts,bhse->bhgte", p, v.double().abs()).flatten(1, 2)
    step = ROUNDING[q.dtype]
    bound = (2 * wide + (k.shape[2] + 4) * U + (step if step > U else 0.0)) * size + step * want.abs() + 1e-30
    if q.dtype == torch.float16:  # numbers below 2^-14 have no more than 2^-25 of precision
        bound = bound + 2.0**-25 * (1 + v.double().abs().sum(dim=2).amax())
    real = (now >= 0)[:, None, :, None].expand_as(want)
    assert out.dtype == q.dtype
    assert out.isfinite().all()
    assert ((out.double() - want).abs() <= bound)[real].all()
    assert report.sums.keys() == want_report.sums.keys() == set(statistic.fields)
    rows = now.shape[1] * q.shape[1] // k.shape[1]
    for name in report.sums.keys() - {name for name in report.sums if name.startswith("low")}:
        assert report.sums[name].dtype == torch.float32
        close(report.sums[name], want_report.sums[name], 2 * slack(q, k, options, gain) + (rows + 8) * U)
    for name in {name for name in report.sums if name.startswith("low")}:
        near = nearly_equal_shares(p, statistic, now, positions, 4 * wide)
        found, want = report.sums[name], want_report.sums[name]
        wrong = (found.double() - want).abs() if name == "low" else ones(found.int() ^ want.int())
        assert (wrong <= near).all()
        assert near.sum() <= 0.05 * near.numel()
    return out, report


def nearly_equal_shares(p, statistic, now, positions, slack):
    """Rows in which rounding may decide whether a key has less than its share."""
    visible = (positions[:, :, None] >= 0) & (positions[:, :, None] <= now[:, None, :, None])
    n = visible.sum(-1, keepdim=True) if statistic.live else (now + 1)[:, None, :, None]
    return ((p.mean(dim=2) * n * statistic.theta - 1).abs() <= slack).sum(dim=2)


GROUPS = itertools.cycle([1, 2, 7])
SHAPES = [(*shape, next(GROUPS)) for shape in itertools.product([1, 33], [1, 17, 257], [32, 64, 80, 128])]


@pytest.mark.parametrize(("T", "S", "D", "G"), SHAPES)
def test_shapes(T, S, D, G):
    check(problem(T, S, D, G, Hk=1 if G == 7 else 2, pads=5, B=1 if G == 7 else 2), Mass() if D > 64 else Low())


OPTIONS = {
    "plain": PLAIN,
    "softcap": AttentionOptions(scaling=1.0, softcap=1.5),
    "window": AttentionOptions(scaling=0.3, window=19),
    "sinks": AttentionOptions(scaling=0.3, sinks=SINKS),
    "all": AttentionOptions(scaling=1.0, window=7, softcap=2.0, sinks=SINKS),
}

STATISTICS = {
    "nothing": Nothing(),
    "last": Mass(rows=1),
    "window": Mass(rows=18),
    "none": Mass(rows=0),
    "ragged": Mass(rows=torch.tensor([20, 4])),
    "gain": Mass(gain=torch.tensor([1.5, 0.5])),
    "gain of a window": Mass(rows=7, gain=1.7),
    "decay": Mass(decay=0.9, last=torch.tensor([40, 39])),
    "mass and last": MassAndLast(rows=9, last=torch.tensor([76, 71])),
    "low": Low(),
    "low of a window": Low(rows=11, theta=2.0),
    "live": Low(live=True, theta=0.7),
    "rows": LowRows(rows=33, words=2, last=torch.tensor([76, 71]), due=torch.tensor([4, 0])),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS.keys())
def test_statistics(statistic, options):
    tensors = problem(pads=5, E=48)
    if isinstance(statistic, MassAndLast):
        assert tensors[3].amax(dim=1).equal(statistic.last)
    gain = 1.7 if isinstance(statistic, Mass) and statistic.gain is not Mass().gain else 1.0
    check(tensors, statistic, options, gain=gain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("statistic", [Mass(rows=6), Low(live=True)], ids=["mass", "low"])
def test_half_precision(dtype, statistic):
    check(problem(dtype=dtype, pads=3), statistic)
    check(problem(dtype=dtype, D=80, E=32, G=1), statistic, OPTIONS["all"].__class__(scaling=0.2, softcap=3.0))


def test_large_heads():
    check(problem(T=3, S=5, D=256, G=1))
    check(problem(T=3, S=5, D=24, E=8))


def test_positions_that_all_heads_share():
    tensors = problem(S=40, pads=4, shared=True)
    check(tensors)
    check(tensors, Low(live=True), OPTIONS["window"])


@pytest.mark.parametrize("T", [1, 33])
def test_one_key_that_takes_all(T):
    q, k, v, now, positions = problem(T, S=70)
    q[:] = 0
    q[..., 0] = 40.0
    k[..., 0] = 0.0
    k[:, :, 3, 0] = 40.0
    positions[:, :, 3] = 0
    out, report = check((q, k, v, now, positions))
    torch.testing.assert_close(report.mass[:, :, 3], torch.full((2, 2), float(T)))
    torch.testing.assert_close(out, v[:, :, 3:4].repeat_interleave(2, dim=1).expand_as(out))


@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=2.0), Low(live=True)], ids=["mass", "gain", "low"])
def test_rows_that_see_nothing(statistic):
    q, k, v, now, positions = problem(T=1, S=20)
    empty = torch.full_like(positions, -1)
    for at in (now, torch.full_like(now, -1)):
        out, report = prefill_ops.attend(q, k, v, at, empty, statistic=statistic, options=PLAIN)
        assert (out == 0).all()
        assert all((field == 0).all() for field in report.sums.values())


def test_empty_slots_take_nothing():
    tensors = problem(S=100, pads=33)  # the second row is nothing but padding
    _, report = check(tensors)
    assert (report.mass[tensors[4] < 0] == 0).all()
    assert (report.mass[1] == 0).all()
    torch.testing.assert_close(report.mass[0].sum(-1), torch.full((2,), 33.0))


@pytest.mark.parametrize("statistic", [Mass(), Mass(gain=1.5), Low()], ids=["mass", "gain", "low"])
def test_tiles_outside_of_the_window_are_left_out(statistic, monkeypatch):
    options = AttentionOptions(scaling=0.3, window=24)
    monkeypatch.setattr(prefill_tiles, "CPU", prefill_tiles.CPU._replace(rows=16, slots=64))
    tensors = problem(T=150, S=70, G=1, Hk=1, D=16, pads=20)
    check(tensors, statistic, options, gain=1.5)
    work = prefill_ops.Prefill(*tensors, options)
    q, k = tensors[3], tensors[4]
    seen = (k[:, 0, None] >= 0) & (k[:, 0, None] <= q[..., None]) & (k[:, 0, None] > q[..., None] - 24)
    seen[:, :, :70] = False
    for row in range(2):
        for tile, start in enumerate(work._first_slots(16, 24)[row].tolist()):
            columns = seen[row, 16 * tile : 16 * tile + 16].any(dim=0).nonzero()
            assert start == (columns.min() if len(columns) else 220)
        for tile, end in list(enumerate(work._last_rows(64, 24)[row, 0].tolist()))[2:]:
            assert end == seen[row, :, 64 * tile : 64 * tile + 64].any(dim=1).nonzero().max() + 1


@pytest.mark.parametrize("statistic", [Mass(), Mass(rows=5, gain=1.5), Low()], ids=["mass", "gain", "low"])
def test_work_may_be_split_and_is_the_same_every_time(statistic, monkeypatch):
    tensors = problem(S=70, pads=5)
    monkeypatch.setattr(prefill_tiles, "splits", lambda programs, like: 2)
    out, report = check(tensors, statistic, gain=1.5)
    again, same = check(tensors, statistic, gain=1.5)
    assert out.equal(again)
    assert all(report.sums[name].equal(same.sums[name]) for name in statistic.fields)


def test_a_row_is_the_same_alone_and_among_others():
    q, k, v, now, positions = problem(S=70)
    both = prefill_ops.attend(q, k, v, now, positions, statistic=Mass(), options=PLAIN)
    one = prefill_ops.attend(q[1:], k[1:], v[1:], now[1:], positions[1:], statistic=Mass(), options=PLAIN)
    assert one[0].equal(both[0][1:])
    assert one[1].mass.equal(both[1].mass[1:])


def whole_prompt(**shape):
    """Columns are positions."""
    q, k, v, _, _ = problem(S=1, **shape)
    now = torch.arange(q.shape[2]).repeat(2, 1)
    return q, k[:, :, 1:], v[:, :, 1:], now, now[:, None].to(torch.int32)


@pytest.mark.parametrize("statistic", [Nothing(), Mass(rows=6), Mass(rows=6, gain=2.0), Low(rows=4)], ids=str)
def test_the_output_may_be_torch_s(statistic, monkeypatch):
    calls = []
    theirs = prefill_ops.Prefill.by_torch
    monkeypatch.setattr(prefill_ops.Prefill, "by_torch", lambda work: calls.append(1) or theirs(work))
    check(whole_prompt(), statistic, gain=2.0, output="torch")
    assert calls
    calls.clear()
    check(problem(pads=1, S=1), statistic, gain=2.0, output="torch")  # its mask would be wrong
    check(whole_prompt(), statistic, OPTIONS["sinks"], gain=2.0, output="torch")
    check(whole_prompt(), statistic, gain=2.0)  # short
    assert not calls


def test_torch_is_preferred_for_long_prompts_of_which_few_rows_count(monkeypatch):
    monkeypatch.setattr(prefill_launch, "TORCH_ROWS", 8)
    work = prefill_ops.Prefill(*whole_prompt(dtype=torch.bfloat16), PLAIN)
    on_gpu = type("OnGPU", (torch.Tensor,), {"is_cuda": property(lambda self: True)})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    there = dataclasses.replace(work, query=work.query.as_subclass(on_gpu))
    ask = {"few": Mass(rows=8), "many": Mass(rows=9), "all": Mass(), "each": Mass(rows=torch.tensor([1, 1]))}
    assert {name: there.prefers_torch(one) for name, one in ask.items()} == {
        "few": True,
        "many": False,
        "all": False,
        "each": False,
    }
    assert there.prefers_torch(Nothing())
    assert not work.prefers_torch(Nothing())
    assert not dataclasses.replace(there, query=there.query.float()).prefers_torch(Nothing())  # torch has no flash
    assert not dataclasses.replace(there, values=there.values[..., :8]).prefers_torch(Nothing())  # attention for these
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # it could not look for padding
    assert not there.prefers_torch(Nothing())


UNKNOWN = {
    "noise": {"statistic": Mass(noise=Gumbel(5, 1, torch.tensor([3, 4])))},
    "LastHit": {"statistic": LastHit()},
    "largest": {"options": AttentionOptions(scaling=1.0, top=Top(torch.tensor([1, 1]), True))},
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_what_is_not_known_is_left_to_others(reason):
    asked = {"statistic": Mass(), "options": PLAIN, **UNKNOWN[reason]}
    tensors = problem(T=2, S=3)
    assert prefill_ops.attend(*tensors, **asked) is None
    assert reason in prefill_ops.unknown(*tensors[:3], **asked)


def test_types_and_sizes_that_are_not_known_are_left_to_others():
    q, k, v, now, positions = problem(T=2, S=3)
    plain = {"statistic": Mass(), "options": PLAIN}
    assert "float64" in prefill_ops.unknown(q.double(), k.double(), v.double(), **plain)
    assert "bfloat16" in prefill_ops.unknown(q, k.bfloat16(), v, **plain)
    assert "256" in prefill_ops.unknown(q, k, torch.zeros(2, 2, 5, 257), **plain)
    assert prefill_ops.attend(q.double(), k.double(), v.double(), now, positions, **plain) is None


def test_agrees_with_torch_on_a_strided_chunk():
    q, k, v, now, positions = problem(S=40, pads=2)
    k, v = (x.transpose(2, 3).contiguous().transpose(2, 3) for x in (k, v))  # the last axis is not dense
    found = prefill_ops.attend(q, k, v, now, positions, statistic=Mass(rows=9), options=PLAIN)
    want = cpu.attend(q, k, v, now, positions, statistic=Mass(rows=9), options=PLAIN)
    torch.testing.assert_close(found[1].mass, want[1].mass, rtol=1e-5, atol=1e-6)
    real = (now >= 0)[:, None, :, None].expand_as(want[0])
    torch.testing.assert_close(found[0][real], want[0][real], rtol=1e-5, atol=1e-5)
