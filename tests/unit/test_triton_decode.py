"""Triton's kernels for a decode step: against the reference in float64, and slot by slot against what torch does."""

import itertools

import pytest
import torch

import kvkeep
from kvkeep import attention, registry, scores
from kvkeep.backends import reference
from kvkeep.backends.triton import blocks, launch, ops, prefill_ops, switch
from kvkeep.backends.triton.launch import Added, Limits
from kvkeep.errors import InputError
from kvkeep.eviction import fuses
from kvkeep.noise import Gumbel
from kvkeep.statistic import LastHit, Low, Mass, MassAndLast, Nothing
from kvkeep.store import DenseStore
from kvkeep.types import AttentionOptions, Report, Top, View

pytest.importorskip("triton", reason="Triton is not installed; it exists for Linux alone")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
UNIT = 2.0**-24  # a float32 operation errs by at most this, relative to its result
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NOW = 500
WINDOW = 300
LEFT = {torch.float32: 0.0, torch.bfloat16: 2.0**-16, torch.float16: 2.0**-22}
"""What two halves leave of a float32 weight, relative to it. Each leaves at most 2^-9 of what it is given in bfloat16,
2^-11 in float16; where Triton interprets, 2^-8 in bfloat16, for there it cuts instead of rounding."""


@pytest.fixture(autouse=True)
def kernels_on(monkeypatch):
    """Kernels run on a CPU too, and there in large tiles: each operation costs the same, whatever its size."""
    monkeypatch.setenv(switch.SWITCH, "1")
    if DEVICE == "cpu":
        monkeypatch.setitem(blocks.DECODE, "", {1024: blocks.Decode(128, 128, 4, 1)})
    monkeypatch.setattr(prefill_ops, "attend", lambda *args, **kwargs: None)  # torch reads the prompts
    switch.kernels.cache_clear()
    switch.notice.cache_clear()
    yield
    switch.kernels.cache_clear()


@pytest.fixture
def on_torch(monkeypatch):
    """Call it, and from then on torch does the work."""

    def turn_off():
        monkeypatch.setenv(switch.SWITCH, "0")
        switch.kernels.cache_clear()

    return turn_off


def problem(S, D, G, dtype=torch.float32, *, E=None, Hk=1, seed=0):
    """Five rows: ragged; most slots empty; nothing visible; one key that takes all; a padded query."""
    g = torch.Generator().manual_seed(seed)
    B = 5
    q = torch.randn(B, Hk * G, 1, D, generator=g)
    k = torch.randn(B, Hk, S, D, generator=g)
    v = torch.randn(B, Hk, S, E or D, generator=g)
    positions = torch.stack([torch.randperm(NOW + 1, generator=g)[:S] for _ in range(B * Hk)]).view(B, Hk, S).int()
    positions[0][torch.rand(Hk, S, generator=g) < 0.2] = -1
    positions[1][torch.rand(Hk, S, generator=g) < 0.9] = -1
    positions[:, :, S // 3] = NOW  # the query's own token
    if S > 3:
        positions[:, :, :2] = torch.tensor([NOW - WINDOW, NOW - WINDOW + 1])  # just beyond a window, and just within
    positions[2] = -1
    k[3, :, S // 3] = 20 * q[3, ::G, 0]
    k[positions < 0] = torch.nan  # what is left in an empty slot must not matter
    v[positions < 0] = torch.nan
    now = torch.full((B, 1), NOW)
    now[4] = -1
    return tuple(tensor.to(DEVICE) for tensor in (q.to(dtype), k.to(dtype), v.to(dtype), now, positions))


def check(arguments, statistic, options):
    """Compare with float64, within what rounding allows.

    An output errs by what its weights err, `relative`, and by what two halves leave of them, both relative to Σ p·|v|
    (`size`); in float16 a weight below 2^-14 of the largest loses up to 2^-25 of that, in each of S slots; then the
    output is rounded to its dtype. The smallest normal number is for results that underflow.
    """
    q, k, v, now, positions = arguments
    out, report = attention.attend(q, k, v, now, positions, statistic=statistic, options=options)
    clean_k, clean_v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    want, want_report = reference.attend(q, clean_k, clean_v, now, positions, statistic=statistic, options=options)
    relative = bounds(q, clean_k, positions, options, statistic)
    p = reference.probabilities(q, clean_k, now, positions, options)
    size = torch.einsum("bhgts,bhse->bhgte", p, clean_v.double().abs()).flatten(1, 2)
    lost = k.shape[2] * 2.0**-25 * clean_v.double().abs().amax() * (q.dtype == torch.float16)
    rounding = torch.finfo(q.dtype).eps / 2 * want.abs() + torch.finfo(q.dtype).tiny
    assert (out.dtype, out.shape) == (q.dtype, want.shape)
    assert ((out.double() - want).abs() <= (relative[..., None] + LEFT[q.dtype]) * size + lost + rounding).all()
    assert report.sums.keys() == set(statistic.fields)
    per_head = relative.view(*positions.shape[:2], -1).amax(dim=-1, keepdim=True)
    for name, found in report.sums.items():
        assert found.dtype == torch.float32
        wanted = want_report.sums[name]
        if name == "low":  # a count: only a probability next to the threshold may fall on the other side
            assert ((found.double() - wanted).abs() <= near_threshold(p, now, positions, statistic, per_head)).all()
        else:
            assert ((found.double() - wanted).abs() <= per_head * wanted.abs() + torch.finfo(torch.float32).tiny).all()


def bounds(q, k, positions, options, statistic):
    """Relative error that float32 allows a probability of each query head, ``(B, Hq, 1)``.

    A logit errs by D + 3 roundings of the sum of its products' sizes (D of the sum, the scaling, the base of logarithms
    and its own), a capped one by 8 roundings of the cap more; e to the x turns that into a relative error, once for the
    numerator and once for the sum, which has S terms more. A gain multiplies both. 16 roundings are for the rest: the
    powers of 2 in tile, split and merge, 2 units each, their products, the mean over the group, the decay.
    """
    grouped = q.double().abs().view(*k.shape[:2], -1, k.shape[3])
    sizes = torch.einsum("bhgd,bhsd->bhgs", grouped, k.double().abs()) * options.scaling
    largest = sizes.masked_fill(positions[:, :, None] < 0, 0.0).amax(dim=-1).flatten(1)
    logit = (k.shape[3] + 3) * UNIT * largest + 8 * UNIT * (options.softcap or 0.0)
    gain = torch.as_tensor(getattr(statistic, "gain", 1.0)).double().view(-1, 1).to(q.device)
    return (2 * gain.clamp(min=1.0) * logit + (k.shape[2] + 16) * UNIT)[..., None]


def near_threshold(p, now, positions, statistic, relative):
    mean = p.mean(dim=2).squeeze(2)
    visible = (positions >= 0) & (positions <= now[:, :, None])
    n = visible.sum(-1, keepdim=True) if statistic.live else now[:, :, None] + 1
    return ((mean * n * statistic.theta - 1.0).abs() <= relative * 2).double()


@pytest.mark.parametrize("G", [1, 2, 7])
@pytest.mark.parametrize("D", [32, 64, 80, 128])
def test_equals_the_reference(D, G):
    for number, S in enumerate((1, 17, 257)):
        dtype = DTYPES[(number + D // 16 + G) % 3]
        check(problem(S, D, G, dtype), Mass(), AttentionOptions(scaling=D**-0.5))


@pytest.mark.parametrize(("S", "splits"), [(48, 1), (49, 2), (70, 2), (80, 2), (81, 3)])
def test_small_tiles_and_many_splits(monkeypatch, S, splits):
    monkeypatch.setitem(blocks.DECODE, "", {1024: blocks.Decode(16, 32, 4, 1)})
    arguments = problem(S, 40, 3, torch.bfloat16, E=24, Hk=2)
    arguments[4][2, :, :-1], arguments[4][2, :, -1] = -1, NOW  # all that a row holds is in the last slot
    arguments[1][2, :, -1], arguments[2][2, :, -1] = 0.5, 2.0
    check(arguments, Mass(gain=2.0), OPTIONS["all"])
    assert launch.Scratch(*arguments[:3], keeps=False).splits == splits


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 79])
def test_a_new_token_enters_any_split(monkeypatch, place):
    monkeypatch.setitem(blocks.DECODE, "", {1024: blocks.Decode(16, 32, 4, 1)})
    q, k, v, now, _ = problem(80, 40, 3, torch.float32, Hk=2)
    others = torch.arange(79, dtype=torch.int32, device=DEVICE)
    positions = torch.cat([others[:place], others.new_full((1,), -1), others[place:]]).repeat(5, 2, 1)
    k, v = k.nan_to_num(0.1), v.nan_to_num(0.1)
    new, now = (k[:, :, :1] + 1, v[:, :, :1] + 1), torch.full_like(now, 79)
    after = positions.clone()
    after[:, :, place] = 79
    full = [
        torch.cat([old[:, :, :place], one, old[:, :, place + 1 :]], dim=2) for old, one in zip((k, v), new, strict=True)
    ]
    out = ops.step(
        q, (k, v, positions), new, now,
        options=OPTIONS["plain"], wanted=None, added=Added((), is_score=False), limits=Limits(seen=now[:, 0] + 1),
    )  # fmt: skip
    torch.testing.assert_close((k, v), tuple(full), rtol=0, atol=0)
    assert torch.equal(positions, after)
    want, _ = reference.attend(q, *full, now, after, statistic=Nothing(), options=OPTIONS["plain"])
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


SINKS = torch.tensor([0.3, -1.0, 60.0, -torch.inf], device=DEVICE)
OPTIONS = {
    "plain": AttentionOptions(scaling=0.2),
    "window": AttentionOptions(scaling=0.2, window=WINDOW),
    "a window that hides all but one": AttentionOptions(scaling=0.2, window=1),
    "softcap": AttentionOptions(scaling=1.0, softcap=3.0),
    "sinks": AttentionOptions(scaling=0.2, sinks=SINKS),
    "all": AttentionOptions(scaling=0.5, window=WINDOW, softcap=2.0, sinks=torch.arange(6, device=DEVICE) - 2.0),
}
STATISTICS = {
    "nothing": Nothing(),
    "mass": Mass(),
    "no row": Mass(rows=0),
    "some rows": Mass(rows=torch.tensor([0, 5, 1, 1, 2], device=DEVICE)),
    "gain": Mass(gain=2.5),
    "gains": Mass(rows=1, gain=torch.tensor([1.5, 0.0, 2.0, 0.7, 1.0], device=DEVICE)),
    "decay": Mass(decay=0.9, last=torch.full((5,), NOW + 3, device=DEVICE)),
    "decay to nothing": Mass(decay=0.0, last=torch.tensor([NOW, NOW + 1, NOW, NOW, NOW], device=DEVICE)),
    "last": MassAndLast(last=NOW),
    "not last": MassAndLast(last=torch.tensor([NOW + 1, NOW, 7, NOW, NOW], device=DEVICE), decay=0.5),
    "low": Low(theta=1.3),
    "live": Low(rows=torch.tensor([1, 0, 1, 1, 1], device=DEVICE), theta=0.7, live=True),
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_options(options):
    heads = 4 if options.sinks is None else len(options.sinks)
    check(problem(40, 24, heads // 2, torch.float16, E=40, Hk=2), Mass(gain=1.5), options)


@pytest.mark.parametrize("statistic", STATISTICS.values(), ids=STATISTICS.keys())
def test_statistics(statistic):
    check(problem(40, 24, 3), statistic, OPTIONS["window"])


def test_positions_that_heads_share_and_views_of_larger_tensors():
    q, k, v, now, _ = problem(30, 32, 2, Hk=2)
    k, v = k.nan_to_num(), v.nan_to_num()
    shared = torch.arange(NOW - 29, NOW + 1, device=DEVICE).expand(5, 30)[:, None]
    own = shared.int().expand(5, 2, 30).contiguous()
    whole, report = attention.attend(q, k, v, now, own, statistic=Mass(), options=OPTIONS["plain"])
    wide = torch.zeros(5, 2, 40, 48, device=DEVICE)
    wide[:, :, :30, :32] = k
    spaced = q.transpose(1, 2).contiguous().transpose(1, 2)
    part = slice(1, 3)
    out, some = attention.attend(
        spaced[part],
        wide[part, :, :30, :32],
        v[part],
        now[part],
        shared[part],
        statistic=Mass(),
        options=OPTIONS["plain"],
    )
    assert torch.equal(out, whole[part])  # to the bit: what runs beside a row changes nothing
    assert torch.equal(some.mass, report.mass[part])


def test_a_broken_key_breaks_its_head_alone():
    q, k, v, now, positions = problem(17, 32, 2, Hk=2)
    whole, report = attention.attend(q, k, v, now, positions, statistic=Mass(), options=OPTIONS["plain"])
    k[3, 1, 5] = torch.nan
    out, broken = attention.attend(q, k, v, now, positions, statistic=Mass(), options=OPTIONS["plain"])
    assert out[3, 2:].isnan().all()
    assert broken.mass[3, 1].isnan().any()
    assert torch.equal(out[3, :2], whole[3, :2])
    assert torch.equal(out[:3], whole[:3])
    assert torch.equal(broken.mass[:3], report.mass[:3])


@pytest.mark.parametrize(
    ("arguments", "statistic", "options", "reason"),
    [
        (problem(20, 16, 2), LastHit(), OPTIONS["plain"], "LastHit"),
        (problem(20, 16, 2), Mass(noise=Gumbel(1, 1, torch.arange(5))), OPTIONS["plain"], "Mass"),
        (problem(20, 16, 2), Nothing(), AttentionOptions(0.2, top=Top(torch.ones(5).long(), True)), "largest"),
        (problem(20, 16, 2, torch.float64), Mass(), OPTIONS["plain"], "float64"),
        (problem(20, 272, 2), Mass(), OPTIONS["plain"], "head dim of 272"),
        (problem(20, 16, 65), Mass(), OPTIONS["plain"], "65 query heads"),
    ],
    ids=["last hit", "noise", "top", "float64", "long heads", "many heads"],
)
def test_torch_does_what_no_kernel_knows_and_says_so_once(arguments, statistic, options, reason, caplog, on_torch):
    q, k, v, now, positions = arguments
    tensors = (q, k.nan_to_num(), v.nan_to_num(), now, positions)
    for _ in range(2):
        found, _ = attention.attend(*tensors, statistic=statistic, options=options)
    (record,) = caplog.records
    assert reason in record.getMessage()
    on_torch()
    assert torch.equal(found, attention.attend(*tensors, statistic=statistic, options=options)[0])


def test_the_switch(monkeypatch):
    def devices(value, interpret="1"):
        monkeypatch.setenv(switch.SWITCH, value)
        monkeypatch.setenv(switch.INTERPRET, interpret)
        switch.kernels.cache_clear()
        return switch.kernels().devices

    assert devices("1") == {"cuda", "cpu"}
    assert devices("") == {"cuda"}
    assert devices("1", "0") == {"cuda"}
    assert devices("0") == set()
    with pytest.raises(InputError, match="KVKEEP_TRITON='yes'"):
        devices("yes")


def test_tensors_that_are_differentiated_or_spread_are_left_to_torch():
    q, k, *_ = problem(20, 16, 2)
    assert switch.runs(q, k)
    assert not switch.runs(q, k.mT.contiguous().mT)
    assert not switch.runs(q, torch.nn.Parameter(k))
    with torch.no_grad():
        assert switch.runs(q, k.clone().requires_grad_())


def store(dtype=torch.float32, seed=0, S=37):
    """A store in which empty slots, several empty slots and none at all are met."""
    g = torch.Generator().manual_seed(seed)
    held = DenseStore(torch.randn(4, 2, 1, 20, generator=g).to(dtype), torch.randn(4, 2, 1, 12).to(dtype), capacity=S)
    positions = torch.stack([torch.randperm(3 * S, generator=g)[:S] for _ in range(8)]).view(4, 2, S)
    positions[torch.rand(positions.shape, generator=g) < torch.tensor([0.0, 0.02, 0.5, 1.0])[:, None, None]] = -1
    held.keys, held.values = held.keys.to(DEVICE), held.values.to(DEVICE)
    held.positions = positions.int().to(DEVICE)
    return held


@pytest.mark.parametrize("S", [1, 37, 1500])
def test_write_takes_the_slot_that_torch_takes(S, on_torch):
    new = (
        torch.randn(4, 1, 2, 32, device=DEVICE).half().transpose(1, 2)
    )  # as models hand them over: heads are not dense
    now = torch.tensor([4600, -1, 4602, 4603], device=DEVICE)[:, None]
    part = slice(1, 4)
    held = store(torch.half, S=S)
    found = held.part(1, 4)
    slot = ops.write(*found.tensors(), new=(new[part, ..., :20], new[part, ..., 20:]), now=now[part])
    on_torch()
    want = store(torch.half, S=S)
    want_slot = want.part(1, 4).write(new[part, ..., :20].contiguous(), new[part, ..., 20:], now[part])
    assert torch.equal(slot, want_slot)
    assert all(torch.equal(one, two) for one, two in zip(held.tensors(), want.tensors(), strict=True))


def rated(seed, S=37):
    """Positions, and scores with ties, both zeros, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-2, 3, (4, 2, S), generator=g).float()
    numbers[numbers == 0] *= torch.where(torch.rand(numbers.shape, generator=g) < 0.5, -1.0, 1.0)[numbers == 0]
    for special in (torch.nan, torch.inf, -torch.inf):
        numbers[torch.rand(numbers.shape, generator=g) < 0.05 * (seed % 3)] = special
    return store(seed=seed, S=S).positions, numbers.to(DEVICE)


LIMITS = [20, 0, torch.tensor([[30], [20], [0], [2]], device=DEVICE), torch.arange(8, device=DEVICE).view(4, 2) * 4]
RECENTS = [0, 9, torch.arange(4, device=DEVICE)[:, None] * 30]


@pytest.mark.parametrize("limit", LIMITS, ids=["a number", "none", "per row", "per head"])
@pytest.mark.parametrize("recent", RECENTS, ids=["none", "a number", "per row"])
def test_evict_takes_the_victim_that_the_scores_name(recent, limit):
    for seed, sinks in itertools.product(range(3), (0, 30)):
        positions, score = rated(seed, S=1100 if seed == 2 else 37)
        seen = positions.amax(dim=(1, 2)).long() + 1
        shielded = scores.protect(score, positions, seen, sinks=sinks, recent=recent)
        over = (positions >= 0).sum(-1, keepdim=True) > torch.as_tensor(limit).expand(4, 2)[..., None].to(DEVICE)
        victim = scores.weakest(shielded, positions)
        want = positions.scatter(-1, victim, positions.gather(-1, victim).masked_fill(over, -1))
        assert ops.evict(positions, score, Limits(seen, sinks, recent, limit))
        assert torch.equal(positions, want)


@pytest.mark.parametrize("recent", [0, 5000], ids=["none protected", "all protected"])
@pytest.mark.parametrize("turned", [False, True], ids=["oldest first", "oldest last"])
def test_of_equals_the_oldest_goes_wherever_it_stands(turned, recent):
    S = blocks.SCAN + 70  # more than are looked at together
    order = torch.arange(S, dtype=torch.int32, device=DEVICE)
    positions = (order.flip(0) if turned else order).expand(1, 2, S).clone()
    positions[:, 1, 3] = -1
    assert ops.evict(
        positions, torch.zeros(1, 2, S, device=DEVICE), Limits(positions.new_full((1,), S), 0, recent, S - 1)
    )
    gone = (positions[0, 0] < 0).nonzero().flatten().tolist()
    assert gone == [S - 1 if turned else 0]
    assert (positions[0, 1] < 0).sum() == 1  # it held no more than its limit


def test_scores_that_heads_share_and_expiry():
    positions, score = rated(1)
    seen = torch.full((4,), 100, device=DEVICE)
    want = positions.clone()
    one = score[:, :1].expand(4, 2, 37)
    assert ops.evict(want, one.contiguous(), Limits(seen, stay=5))
    assert ops.evict(positions, one, Limits(seen, stay=5))
    assert torch.equal(positions, want)
    want = scores.expire(positions, seen, 30)
    assert not torch.equal(positions, want)
    assert ops.evict(positions, None, Limits(seen, window=30))
    assert torch.equal(positions, want)


FUSED = [
    "local",
    "full",
    "h2o",
    "h2o:recent=0,decay=0.5",
    "h2o:sinks=2,recent=3",
    "ahakv:recent=3",
    "snapkv:window=4,decode=score",
]
ASKED = ["h2o:graduate=replace", "tova", "scissorhands", "snapkv:window=4", "adakv:window=4"]


def run(policy, budget, *, window=None, steps=7, equal=False):
    """A ragged prompt and single tokens, one of them padding; with `equal` all keys are alike, so all masses tie."""
    g = torch.Generator().manual_seed(3)
    layer = kvkeep.Layer(kvkeep.parse(policy), budget, window=window)
    options = AttentionOptions(scaling=0.5, window=window)
    for step in range(steps):
        T = 1 if step else 21
        q, k, v = (torch.randn(2, heads, T, 16, generator=g).to(DEVICE) for heads in (4, 2, 2))
        real = torch.ones(2, T, dtype=torch.bool, device=DEVICE)
        real[1, : 9 if step == 0 else int(step == 3)] = False
        out = layer.step(q, torch.zeros_like(k) if equal else k, v, options=options, real=None if step > 4 else real)
        yield out[0], layer.store.positions.clone(), {name: held.clone() for name, held in layer.state.items()}


def compare(runs):
    for (out, positions, state), (want, want_positions, want_state) in zip(*runs, strict=True):
        assert torch.equal(positions, want_positions)
        torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)
        held = positions >= 0
        for name, tensor in state.items():
            torch.testing.assert_close(tensor[held], want_state[name][held], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", [*FUSED, *ASKED])
def test_a_layer_holds_the_same_tokens_on_torch(policy, on_torch, monkeypatch):
    calls = []
    honest = ops.step
    monkeypatch.setattr(ops, "step", lambda *args, **kwargs: calls.append(1) or honest(*args, **kwargs))
    budget = 40 if policy == "full" else 12
    found = list(run(policy, budget))
    assert len(calls) == (6 if policy in FUSED else 0)
    on_torch()
    compare((found, list(run(policy, budget))))


@pytest.mark.parametrize(("policy", "budget"), [("local", 9), ("h2o:recent=2", [12, 7]), ("tova", [12, 7])])
def test_a_sliding_window_and_budgets_of_rows(policy, budget, on_torch):
    found = list(run(policy, budget, window=14))
    on_torch()
    compare((found, list(run(policy, budget, window=14))))


def test_ties_go_by_position(on_torch):
    """All keys are zero: every visible token receives exactly the same, in whatever slot it stands."""
    found = list(run("h2o:recent=0,decay=0", 6, equal=True, steps=10))
    masses = found[-1][2]["mass"][found[-1][1] >= 0]
    assert len(masses.unique()) == 1
    on_torch()
    compare((found, list(run("h2o:recent=0,decay=0", 6, equal=True, steps=10))))


def told():
    """Every policy that says what its sums are, with the options under which they are so."""
    for name in registry.available():
        sums = kvkeep.parse(name).sums
        if sums is not None:
            options = ",".join(f"{option}={value}" for option, value in sums.only.items())
            yield kvkeep.parse(f"{name}:{options}" if options else name)
    yield kvkeep.parse("h2o:decay=0.75,recent=3")


@pytest.mark.parametrize("policy", list(told()), ids=str)
def test_what_a_policy_says_of_its_sums_is_what_it_does(policy):
    g = torch.Generator().manual_seed(0)
    positions = rated(1)[0]
    view = View(
        positions=positions,
        keys=torch.zeros(4, 2, 37, 1, device=DEVICE),
        values=torch.zeros(4, 2, 37, 1, device=DEVICE),
        seen=torch.full((4,), 111, device=DEVICE),
        budget=30,
        new=torch.tensor([1, 0, 1, 1], device=DEVICE),
        prompt=torch.full((4,), 90, device=DEVICE),
        is_decode=True,
        layer=0,
        sequences=torch.zeros(4, dtype=torch.int64, device=DEVICE),
        past=torch.zeros(4, 0, device=DEVICE),
        alive=torch.zeros(4, 0, dtype=torch.bool, device=DEVICE),
    )
    mass = torch.rand(4, 2, 37, generator=g).to(DEVICE) * (view.new > 0)[:, None, None]
    state = {name: torch.rand(4, 2, 37, generator=g).to(DEVICE) for name in policy.slots}
    fade = (getattr(policy.wants(view), "decay", 1.0) ** view.new)[:, None, None]
    after = policy.observe(state, view, Report({"mass": mass}))
    assert after.keys() == state.keys()
    for name, tensor in state.items():
        torch.testing.assert_close(after[name], tensor * fade + mass)
    want = positions.float() if policy.sums.score is None else after[policy.sums.score]
    assert torch.equal(policy.score(view, after), want)
    assert set(policy.slots.values()) <= {0.0}
    assert fuses(policy, torch.zeros(1, 1, 1, 1, device=DEVICE))


def test_a_policy_that_changes_a_method_is_asked_again():
    class Contrary(type(kvkeep.parse("local"))):
        def score(self, view, state):
            return -view.positions.float()

    assert fuses(kvkeep.parse("local"), torch.zeros(1, 1, 1, 1, device=DEVICE))
    assert not fuses(Contrary(), torch.zeros(1, 1, 1, 1, device=DEVICE))
