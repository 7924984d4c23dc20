"""The native kernel: against the reference in float64, and slot by slot against what torch does."""

import itertools
import platform
from dataclasses import replace

import pytest
import torch

import kvkeep
from kvkeep import eviction, scores
from kvkeep.backends import kernel, reference
from kvkeep.backends.native import Native, build, native, ops
from kvkeep.noise import Gumbel
from kvkeep.statistic import LastHit, Low, Mass, MassAndLast, Nothing
from kvkeep.store import DenseStore
from kvkeep.types import AttentionOptions, Top

pytestmark = pytest.mark.skipif(native().library is None, reason=native().detail)

UNIT = 2.0**-24  # a float32 operation errs by at most this, relative to its result
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOW = 5000


@pytest.fixture
def on_torch(monkeypatch):
    """Call it, and from then on torch does the work."""
    return lambda: monkeypatch.setattr(ops, "native", lambda: Native(None, "a test wants torch"))


def problem(S, D, G, dtype=torch.float32, E=None, seed=0, Hk=2):
    """Six rows: full; a few slots empty; most empty; nothing visible; one key that takes all; a padded query."""
    g = torch.Generator().manual_seed(seed)
    B = 6
    q = torch.randn(B, Hk * G, 1, D, generator=g)
    k = torch.randn(B, Hk, S, D, generator=g)
    v = torch.randn(B, Hk, S, E or D, generator=g)
    positions = torch.stack([torch.randperm(NOW + 1, generator=g)[:S] for _ in range(B * Hk)]).view(B, Hk, S).int()
    positions[1][torch.rand(Hk, S, generator=g) < 0.2] = -1
    positions[2][torch.rand(Hk, S, generator=g) < 0.9] = -1
    positions[:, :, S // 3] = NOW  # the query's own token
    positions[3] = -1
    k[4, :, S // 3] = 20 * q[4, ::G, 0]
    v[positions < 0] = torch.nan  # what is left in an empty slot must not matter
    now = torch.full((B, 1), NOW)
    now[5] = -1
    return q.to(dtype), k.to(dtype), v.to(dtype), now, positions


def check(q, k, v, now, positions, statistic, options):
    """Compare with float64, within what rounding allows: see `bounds`."""
    out, report = kernel.attend(q, k, v, now, positions, statistic=statistic, options=options)
    clean = v.nan_to_num(0.0)
    want, want_report = reference.attend(q, k, clean, now, positions, statistic=statistic, options=options)
    relative = bounds(q, k, positions, options, statistic)
    p = reference.probabilities(q, k, now, positions, options)
    size = torch.einsum("bhgts,bhse->bhgte", p, clean.double().abs()).flatten(1, 2)
    rounding = torch.finfo(q.dtype).eps / 2 * want.abs() + torch.finfo(q.dtype).tiny
    assert out.dtype == q.dtype
    assert out.shape == want.shape
    assert ((out.double() - want).abs() <= relative[..., None] * size + rounding).all()
    assert report.sums.keys() == set(statistic.fields)
    per_head = relative.view(*positions.shape[:2], -1).amax(dim=-1, keepdim=True)
    for name, found in report.sums.items():
        assert found.dtype == torch.float32
        wanted = want_report.sums[name]
        if name == "low":  # a count: only a probability next to the threshold may fall on the other side
            assert ((found.double() - wanted).abs() <= near_threshold(p, now, positions, statistic, per_head)).all()
        else:
            assert ((found.double() - wanted).abs() <= per_head * wanted.abs() + 1e-37).all()


def bounds(q, k, positions, options, statistic):
    """Relative error that float32 allows a probability of each query head, ``(B, Hq, 1)``.

    A logit errs by D + 2 roundings of the sum of its products' sizes, a capped one by 8 roundings of the cap more; e to
    the x turns that into a relative error, once for the numerator and once for the sum, which has S terms more. A gain
    multiplies both. 16 roundings are for the rest.
    """
    B, Hk, S, D = k.shape
    grouped = q.double().abs().view(B, Hk, -1, D)
    sizes = torch.einsum("bhgd,bhsd->bhgs", grouped, k.double().abs()) * options.scaling
    largest = sizes.masked_fill(positions[:, :, None] < 0, 0.0).amax(dim=-1).flatten(1)
    logit = (D + 2) * UNIT * largest + 8 * UNIT * (options.softcap or 0.0)
    gain = torch.as_tensor(getattr(statistic, "gain", 1.0)).double().view(-1, 1)
    return (2 * gain.clamp(min=1.0) * logit + (S + 16) * UNIT)[..., None]


def near_threshold(p, now, positions, statistic, relative):
    mean = p.mean(dim=2).squeeze(2)
    visible = (positions >= 0) & (positions <= now[:, :, None])
    n = visible.sum(-1, keepdim=True) if statistic.live else now[:, :, None] + 1
    return ((mean * n * statistic.theta - 1.0).abs() <= relative * 2).double()


@pytest.mark.parametrize("G", [1, 2, 3, 7])
@pytest.mark.parametrize("D", [7, 32, 33, 64, 80, 128, 256])
def test_equals_the_reference(D, G):
    for S, dtype in itertools.product((1, 17, 257), DTYPES):
        check(*problem(S, D, G, dtype), Mass(), AttentionOptions(scaling=D**-0.5))
    check(*problem(1024, D, G, DTYPES[(D + G) % 3]), Mass(), AttentionOptions(scaling=D**-0.5))


SINKS = torch.tensor([0.3, -1.0, 2.0, 60.0, -torch.inf, 0.0])
OPTIONS = {
    "plain": AttentionOptions(scaling=0.2),
    "window": AttentionOptions(scaling=0.2, window=3000),
    "a window that hides all but one": AttentionOptions(scaling=0.2, window=1),
    "softcap": AttentionOptions(scaling=1.0, softcap=3.0),
    "sinks": AttentionOptions(scaling=0.2, sinks=SINKS),
    "all": AttentionOptions(scaling=0.5, window=3000, softcap=2.0, sinks=SINKS),
}
STATISTICS = {
    "nothing": Nothing(),
    "mass": Mass(),
    "no row": Mass(rows=0),
    "some rows": Mass(rows=torch.tensor([0, 1, 5, 1, 0, 2])),
    "gain": Mass(gain=2.5),
    "gains": Mass(rows=1, gain=torch.tensor([1.0, 1.5, 0.0, 2.0, 0.7, 1.0])),
    "decay": Mass(decay=0.9, last=torch.full((6,), NOW + 3)),
    "last": MassAndLast(last=NOW),
    "not last": MassAndLast(last=torch.tensor([NOW, NOW + 1, NOW, 7, NOW, NOW]), decay=0.5),
    "low": Low(theta=1.3),
    "live": Low(rows=torch.tensor([1, 1, 0, 1, 1, 1]), theta=0.7, live=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS.keys())
def test_options_and_statistics(statistic, options):
    for dtype in DTYPES:
        check(*problem(70, 40, 3, dtype, E=24), statistic, options)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other processors have vectors of one length")
@pytest.mark.parametrize("flags", [["-mno-avx512f"], ["-mno-avx"]], ids=["8 floats", "4 floats"])
def test_shorter_vectors(flags, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *flags))
    library = build._opened(build._compile(build._compiler(), tmp_path, "short"))
    monkeypatch.setattr(ops, "native", lambda: Native(library, "short vectors"))
    for (D, S), dtype in itertools.product([(7, 3), (16, 17), (40, 70), (64, 257)], DTYPES):
        check(*problem(S, D, 3, dtype), Low(live=True), OPTIONS["all"])
        check(*problem(S, D, 3, dtype), Mass(gain=1.5), OPTIONS["plain"])


def test_heads_that_share_positions_and_long_positions():
    """As without a bounded cache: positions are int64, expanded over the rows, and one row of them is for all heads."""
    q, k, v, now, _ = problem(50, 32, 2)
    shared = torch.arange(NOW - 49, NOW + 1).expand(6, 50)[:, None]
    v = v.nan_to_num()
    out, _ = kernel.attend(q, k, v, now, shared, statistic=Nothing(), options=OPTIONS["plain"])
    full = shared.int().expand(6, 2, 50).contiguous()
    again, _ = kernel.attend(q, k, v, now, full, statistic=Nothing(), options=OPTIONS["plain"])
    assert torch.equal(out, again)


def test_views_of_larger_tensors():
    q, k, v, now, positions = problem(40, 32, 2)
    whole, report = kernel.attend(q, k, v, now, positions, statistic=Mass(), options=OPTIONS["plain"])
    wide = torch.zeros(6, 2, 50, 48)
    wide[:, :, :40, :32] = k
    spaced = q.transpose(1, 2).contiguous().transpose(1, 2)
    part = slice(1, 4)
    out, some = kernel.attend(
        spaced[part],
        wide[part, :, :40, :32],
        v[part],
        now[part],
        positions[part],
        statistic=Mass(),
        options=OPTIONS["plain"],
    )
    assert torch.equal(out, whole[part])
    assert torch.equal(some.mass, report.mass[part])


def test_the_number_of_threads_changes_nothing():
    arguments = problem(1024, 64, 3)
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        try:
            out, report = kernel.attend(*arguments, statistic=Mass(gain=1.5), options=OPTIONS["all"])
        finally:
            torch.set_num_threads(1)
        found.append((out, report.mass))
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_broken_key_breaks_its_head_alone(bad):
    q, k, v, now, positions = problem(40, 32, 2)
    whole, report = kernel.attend(q, k, v, now, positions, statistic=Mass(), options=OPTIONS["plain"])
    k[0, 1, 5] = bad
    out, broken = kernel.attend(q, k, v, now, positions, statistic=Mass(), options=OPTIONS["plain"])
    assert out[0, 2:].isnan().all()
    assert broken.mass[0, 1].isnan().all()
    assert torch.equal(out[0, :2], whole[0, :2])
    assert torch.equal(out[1:], whole[1:])
    assert torch.equal(broken.mass[1:], report.mass[1:])


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_every_half_is_widened_and_rounded_exactly(dtype):
    """All 65 536 numbers of a half-precision type, as values of one slot each that is seen alone."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(-1, 1, 1, 64)
    zeros = torch.zeros_like(numbers)
    now = torch.zeros(len(numbers), 1, dtype=torch.int64)
    out, _ = kernel.attend(
        zeros, zeros, numbers, now, now[..., None].int(), statistic=Nothing(), options=AttentionOptions(scaling=1.0)
    )
    assert torch.equal(out.isnan(), numbers.isnan())
    assert torch.equal(out.nan_to_num(), numbers.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_the_mean_of_two_halves_is_rounded_to_even(dtype):
    values = torch.randn(1000, 1, 2, 64, generator=torch.Generator().manual_seed(0)).mul(30.0).exp2().to(dtype)
    zeros, now = torch.zeros_like(values), torch.ones(1000, 1, dtype=torch.int64)
    positions = torch.tensor([0, 1], dtype=torch.int32).expand(1000, 1, 2)
    out, _ = kernel.attend(
        zeros[:, :, :1], zeros, values, now, positions, statistic=Nothing(), options=AttentionOptions(scaling=1.0)
    )
    assert torch.equal(out[:, :, 0], values.float().mean(dim=2).to(dtype))


@pytest.mark.parametrize(
    ("statistic", "options"),
    [
        (LastHit(), OPTIONS["plain"]),
        (Mass(noise=Gumbel(1, 1, torch.arange(6))), OPTIONS["plain"]),
        (Nothing(), replace(OPTIONS["plain"], top=Top(torch.ones(6, dtype=torch.int64), renormalise=True))),
    ],
    ids=["last hit", "noise", "top"],
)
def test_what_the_kernel_does_not_know_is_left_to_torch(statistic, options):
    assert kernel.attend(*problem(40, 32, 2), statistic=statistic, options=options) is None


def test_tensors_that_the_kernel_does_not_take():
    q, k, v, now, positions = problem(40, 32, 2)

    def taken(q, k, v):
        return kernel.attend(q, k, v, now, positions, statistic=Nothing(), options=OPTIONS["plain"]) is not None

    assert taken(q, k, v)
    assert not taken(q.double(), k.double(), v.double())
    assert not taken(q, k, v.bfloat16())
    assert not taken(q, k.mT.contiguous().mT, v)
    assert not taken(q, k, v.clone().requires_grad_())
    assert not taken(q, torch.nn.Parameter(k), v)
    with torch.no_grad():
        assert taken(q, k, v.clone().requires_grad_())


def store(dtype=torch.float32, seed=0, S=37):
    """A store in which empty slots, several empty slots and none at all are met."""
    g = torch.Generator().manual_seed(seed)
    held = DenseStore(torch.randn(6, 3, 1, 20, generator=g).to(dtype), torch.randn(6, 3, 1, 12).to(dtype), capacity=S)
    positions = torch.stack([torch.randperm(3 * S, generator=g)[:S] for _ in range(18)]).view(6, 3, S)
    positions[
        torch.rand(positions.shape, generator=g) < torch.tensor([0.0, 0.02, 0.1, 0.5, 0.9, 1.0])[:, None, None]
    ] = -1
    held.positions.copy_(positions)
    return held


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5)], ids=["all rows", "some rows"])
def test_write_takes_the_slot_that_torch_takes(rows, dtype, on_torch):
    new = torch.randn(6, 1, 3, 32).to(dtype)[rows].transpose(1, 2)  # as models hand them over: heads are not dense
    now = torch.tensor([200, -1, 202, 203, 204, 205])[rows, None]
    results = []
    for attempt in range(2):
        if attempt:
            on_torch()
        held = store(dtype)
        slot = held.part(rows.start, rows.stop).write(new[..., :20].contiguous(), new[..., 20:], now)
        results.append((slot, *held.tensors()))
    assert all(torch.equal(one, two) for one, two in zip(*results, strict=True))


def rated(seed, S=37):
    """Positions, and scores with ties, both zeros, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-2, 3, (6, 3, S), generator=g).float()
    numbers[numbers == 0] *= torch.where(torch.rand(numbers.shape, generator=g) < 0.5, -1.0, 1.0)[numbers == 0]
    for special in (torch.nan, torch.inf, -torch.inf):
        numbers[torch.rand(numbers.shape, generator=g) < 0.05 * (seed % 3)] = special
    return store(seed=seed, S=S).positions, numbers


LIMITS = {
    "a number": 20,
    "none": 0,
    "per row": torch.tensor([[30], [20], [33], [0], [2], [0]]),
    "per head": torch.arange(18).view(6, 3) * 2,
}


@pytest.mark.parametrize("limit", LIMITS.values(), ids=LIMITS.keys())
@pytest.mark.parametrize("recent", [0, 9, torch.arange(6)[:, None] * 30], ids=["none", "a number", "per row"])
@pytest.mark.parametrize("sinks", [0, 30])
def test_evict_takes_the_victim_that_the_scores_name(sinks, recent, limit):
    for seed in range(6):
        positions, score = rated(seed)
        seen = positions.amax(dim=(1, 2)).long() + 1
        shielded = scores.protect(score, positions, seen, sinks=sinks, recent=recent)
        over = (positions >= 0).sum(-1, keepdim=True) > torch.as_tensor(limit).expand(6, 3)[..., None]
        assert ops.count_over(positions, limit) == int(over.sum())
        victim = scores.weakest(shielded, positions)
        want = positions.scatter(-1, victim, positions.gather(-1, victim).masked_fill(over, -1))
        assert ops.evict(positions, score, seen, sinks=sinks, recent=recent, limit=limit)
        assert torch.equal(positions, want)


def test_scores_that_heads_share():
    positions, score = rated(1)
    seen = torch.full((6,), 200)
    want = positions.clone()
    one = score[:, :1].expand(6, 3, 37)
    assert ops.evict(want, one.contiguous(), seen, sinks=0, recent=0, limit=5)
    assert ops.evict(positions, one, seen, sinks=0, recent=0, limit=5)
    assert torch.equal(positions, want)


@pytest.mark.parametrize("window", [1, 20, 1000])
def test_expire(window):
    positions, _ = rated(2)
    seen = torch.arange(6) * 20
    want = scores.expire(positions, seen, window)
    assert ops.expire(positions, seen, window)
    assert torch.equal(positions, want)


POLICIES = ["local", "streaming_llm", "h2o", "h2o:graduate=replace,sinks=2", "h2o_avg", "tova", "ahakv:recent=3",
            "scissorhands", "snapkv:window=4", "adakv:window=4", "random", "knorm"]  # fmt: skip


@pytest.mark.parametrize("window", [None, 14], ids=["full", "window"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_holds_the_same_tokens_on_torch(policy, window, on_torch, monkeypatch):
    """Prompts of different lengths, then single tokens, one of them padding."""
    calls = []
    honest = ops.attend
    monkeypatch.setattr(ops, "attend", lambda *args, **kwargs: calls.append(1) or honest(*args, **kwargs))
    runs = []
    for attempt in range(2):
        if attempt:
            on_torch()
        g = torch.Generator().manual_seed(3)
        layer = kvkeep.Layer(kvkeep.parse(policy), 20, window=window)
        options = AttentionOptions(scaling=0.5, window=window)
        run = []
        for step in range(30):
            T = 1 if step else 31
            q, k, v = (torch.randn(2, heads, T, 16, generator=g) for heads in (6, 2, 2))
            real = torch.ones(2, T, dtype=torch.bool)
            real[1, : 9 if step == 0 else int(step == 5)] = False
            out = layer.step(q, k, v, options=options, real=None if step > 20 else real)
            run.append((out[0], layer.store.positions.clone()))
        runs.append(run)
    assert len(calls) == 2 * 29
    for (out, positions), (want, want_positions) in zip(*runs, strict=True):
        assert torch.equal(positions, want_positions)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


def test_nothing_is_scored_while_there_is_room(monkeypatch):
    scored = []
    monkeypatch.setattr(eviction.ops, "evict", lambda *args, **kwargs: scored.append(1))
    layer = kvkeep.Layer(kvkeep.parse("h2o"), 8)
    for _ in range(8):
        layer.step(*(torch.randn(1, 2, 1, 16) for _ in range(3)), options=OPTIONS["plain"])
    assert scored == []
