"""Every backend fills and empties slots as the definition does; and a fused step is its parts, one after the other."""

import itertools

import pytest
import torch

from kvkeep.attention_stats import Mass, Nothing
from kvkeep.backends import Added, AttentionInputs, FusedStep, SlotLimits
from kvkeep.backends.reference import ReferenceBackend
from kvkeep.backends.triton import launch
from kvkeep.types import EMPTY, AttentionOptions, Slots

from .cases import BACKENDS, DTYPES, SLOW, backend_of, device_of, on, there

REFERENCE = ReferenceBackend()
B, Hk, D, E = 6, 3, 20, 12


def held(seed=0, S=37):
    """Positions of slots: one head full, one with a slot left, a few, half, most, all of them empty."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(3 * S, generator=g)[:S] for _ in range(B * Hk)]).view(B, Hk, S)
    share = torch.tensor([0.0, 0.02, 0.1, 0.5, 0.9, 1.0])[:, None, None]
    return positions.masked_fill(torch.rand(positions.shape, generator=g) < share, -1).int()


def slots_of(positions, dtype, *, turned=False):
    """Slots with something in them; turned: as a store would have them that keeps the heads of a slot together."""
    g = torch.Generator().manual_seed(1)
    found = [torch.randn(*positions.shape, dim, generator=g).to(dtype) for dim in (D, E)]
    found = [tensor.transpose(1, 2).contiguous().transpose(1, 2) if turned else tensor for tensor in found]
    return Slots(*found, positions.clone())


TOKENS = [*((dtype, dtype) for dtype in (*DTYPES, torch.float64)), (torch.bfloat16, torch.float32)]


@pytest.mark.parametrize("turned", [False, True], ids=["dense", "turned"])
@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5)], ids=["all rows", "some rows"])
@pytest.mark.parametrize(("model", "store"), TOKENS, ids=lambda dtype: str(dtype)[6:])
def test_append_fills_one_empty_slot_of_each_head(backend, model, store, rows, turned):
    positions = held()
    positions[:, :, 5] = -1  # at least one
    whole = there(slots_of(positions, store, turned=turned), device_of(backend.name))
    slots = Slots(*(tensor[rows] for tensor in whole))
    new = torch.randn(B, 1, Hk, D + E).to(whole.keys.device, model)[rows].transpose(1, 2)  # heads are not dense
    now = torch.tensor([200, -1, 202, 203, 204, 205], device=new.device)[rows, None]
    want = Slots(*(tensor.clone() for tensor in whole))
    before = slots.positions.clone()
    slot = backend.append(slots, new[..., :D].contiguous(), new[..., D:], now)
    assert (slot.shape, slot.dtype) == ((*before.shape[:2], 1), torch.int64)
    assert (before.gather(-1, slot) == -1).all()
    for row, head in itertools.product(range(len(now)), range(Hk)):
        at = (row + rows.start, head, int(slot[row, head]))
        if now[row] < 0:
            assert slots.positions[row, head, at[2]] == -1
            want.keys[at], want.values[at] = whole.keys[at], whole.values[at]  # what is left there does not matter
        else:
            want.keys[at], want.values[at] = new[row, head, 0, :D].to(store), new[row, head, 0, D:].to(store)
            want.positions[at] = int(now[row])
    assert all(torch.equal(one, two) for one, two in zip(whole, want, strict=True))


def test_an_append_finds_the_only_empty_slot(backend):
    for S, place in ((1, 0), (37, 36), (1500, 1100)):
        positions = torch.arange(S, dtype=torch.int32).repeat(B, Hk, 1)
        positions[:, :, place] = -1
        slots = there(slots_of(positions, torch.float16), device_of(backend.name))
        new = [tensor[:, :, :1].clone() for tensor in slots[:2]]
        slot = backend.append(slots, *new, torch.full((B, 1), S, device=slots.keys.device))
        assert (slot == place).all()
        assert (slots.positions[:, :, place] == S).all()


def rated(seed, S=37):
    """Positions, and scores with ties, both zeros, infinities and NaN."""
    g = torch.Generator().manual_seed(seed)
    numbers = torch.randint(-2, 3, (B, Hk, S), generator=g).float()
    numbers[numbers == 0] *= torch.where(torch.rand(numbers.shape, generator=g) < 0.5, -1.0, 1.0)[numbers == 0]
    for special in (torch.nan, torch.inf, -torch.inf):
        numbers[torch.rand(numbers.shape, generator=g) < 0.05 * (seed % 3)] = special
    return held(seed, S), numbers


STAY = {
    "a number": 20,
    "none": 0,
    "per row": torch.tensor([[30], [20], [33], [0], [2], [0]]),
    "per head": torch.arange(B * Hk).view(B, Hk) * 2,
}
RECENT = {
    "none": 0,
    "a number": 9,
    "per row": torch.arange(B)[:, None] * 30,
    "per head": torch.arange(B * Hk).view(B, Hk) * 7 % 40,
}


@pytest.mark.long
@pytest.mark.parametrize("stay", STAY)
@pytest.mark.parametrize("recent", RECENT)
@pytest.mark.parametrize("sinks", [0, 30])
def test_evict_takes_the_victim_of_the_definition(backend, sinks, recent, stay):
    for seed in range(6) if backend.name not in SLOW else range(2):
        positions, score, limit, newest = on(backend.name, *rated(seed), STAY[stay], RECENT[recent])
        limits = SlotLimits(positions.amax(dim=(1, 2)).long() + 1, sinks, newest, limit)
        want = positions.clone()
        REFERENCE.evict(want, score, limits)
        backend.evict(positions, score, limits)
        assert torch.equal(positions, want)


@pytest.mark.parametrize("recent", RECENT)
def test_evict_takes_the_chosen_tokens_of_a_prompt_last(backend, recent):
    """Some rows have no other token to go, and prompts end before, among and behind the tokens that are held."""
    for seed in range(6) if backend.name not in SLOW else range(2):
        prompt, stay = torch.tensor([0, 40, 90, 111, 60, 5]), STAY["per row"]
        positions, score, *given = on(backend.name, *rated(seed), prompt, stay, RECENT[recent])
        prompt, stay, newest = given
        seen = positions.amax(dim=(1, 2)).long() + 1
        limits = SlotLimits(seen, 3, newest, stay, prompt=prompt)
        want = positions.clone()
        REFERENCE.evict(want, score, limits)
        backend.evict(positions, score, limits)
        assert torch.equal(positions, want)


@pytest.mark.parametrize("stay", STAY)
def test_is_over_where_some_head_holds_more_than_its_limit(backend, stay):
    for seed, more in itertools.product(range(3), (0, 20, 40)):
        positions, limit = on(backend.name, held(seed), STAY[stay])
        limit = limit + more
        over = [
            (positions[row, head] >= 0).sum() > torch.as_tensor(limit).expand(B, Hk)[row, head]
            for row, head in itertools.product(range(B), range(Hk))
        ]
        assert backend.is_over(positions, limit) == (any(over) or positions.is_cuda)


@pytest.mark.parametrize("recent", [0, 5000], ids=["none protected", "all protected"])
@pytest.mark.parametrize("turned", [False, True], ids=["oldest first", "oldest last"])
def test_of_equals_the_oldest_goes_wherever_it_stands(backend, turned, recent):
    S = launch.SCAN + 70  # more than Triton's kernels look at together
    order = torch.arange(S, dtype=torch.int32)
    positions = (order.flip(0) if turned else order).expand(1, 2, S).clone()
    positions[:, 1, 3] = -1
    positions, score, seen = on(backend.name, positions, torch.zeros(1, 2, S), torch.tensor([S]))
    backend.evict(positions, score, SlotLimits(seen, 0, recent, S - 1))
    assert (positions[0, 0] < 0).nonzero().flatten().tolist() == [S - 1 if turned else 0]
    assert (positions[0, 1] < 0).sum() == 1  # it held no more than its limit


def test_a_protected_token_outlasts_infinite_scores(backend):
    positions = torch.tensor([[[3, 9], [0, 5]]], dtype=torch.int32)
    positions, score, seen = on(backend.name, positions, torch.full((1, 2, 2), torch.inf), torch.tensor([20]))
    backend.evict(positions, score, SlotLimits(seen, sinks=4, stay=1))
    assert positions.tolist() == [[[3, EMPTY], [0, EMPTY]]]


def test_scores_that_heads_share(backend):
    positions, score, seen = on(backend.name, *rated(1), torch.full((B,), 200))
    one, want = score[:, :1].expand(B, Hk, -1), positions.clone()
    REFERENCE.evict(want, one, SlotLimits(seen, stay=5))
    backend.evict(positions, one, SlotLimits(seen, stay=5))
    assert torch.equal(positions, want)


@pytest.mark.parametrize("rows", [slice(0, 6), slice(2, 5)], ids=["all rows", "some rows"])
@pytest.mark.parametrize("window", [1, 20, 1000])
def test_expire_empties_what_no_later_query_can_see(backend, window, rows):
    positions, seen = on(backend.name, held(2), torch.arange(B) * 20)
    want = [
        [[p if p > seen[row] - window or not rows.start <= row < rows.stop else -1 for p in head] for head in heads]
        for row, heads in enumerate(positions.tolist())
    ]
    backend.expire(positions[rows], seen[rows], window)
    assert positions.tolist() == want


LIMITS = {
    "nothing goes": {},
    "a number": {"stay": 18, "sinks": 3, "recent": 4},
    "per row": {"stay": torch.tensor([[20], [18], [30], [3], [2], [0]]), "recent": torch.arange(B)[:, None]},
    "per head": {"stay": torch.arange(B * Hk).view(B, Hk) + 8, "sinks": 2},
    "a window": {"stay": 18, "window": 60},
    "chosen tokens": {"stay": torch.arange(B * Hk).view(B, Hk) + 8, "prompt": torch.arange(B) * 20, "recent": 5},
}
SUMS = {
    "none, by position": (Nothing(), 0, False),
    "one that stays, by position": (Nothing(), 1, False),
    "two that stay": (Nothing(), 2, True),
    "one": (Mass(), 1, True),
    "one, by position": (Mass(), 1, False),
    "two that fade": (Mass(decay=0.5, last=torch.full((B,), 120)), 2, True),
    "of some rows, with a gain": (Mass(rows=torch.tensor([1, 1, 0, 1, 1, 1]), gain=1.5), 1, True),
}


FUSED = [
    ("none, by position", "a number"),
    ("one that stays, by position", "chosen tokens"),
    ("two that stay", "chosen tokens"),
    ("one", "nothing goes"),
    ("one", "per row"),
    ("one, by position", "per head"),
    ("two that fade", "a window"),
    ("two that fade", "per head"),
    ("of some rows, with a gain", "a number"),
]


def ordered(slots, states):
    """What the slots hold in the order of positions, and 0 in the empty ones: slots have no order."""
    order = slots.positions.argsort(dim=-1, stable=True)
    kept = slots.positions.gather(-1, order) >= 0
    tensors = (*slots[:2], *(state[..., None] for state in states), slots.positions[..., None])
    return [tensor.gather(2, order[..., None].expand_as(tensor)).masked_fill(~kept[..., None], 0) for tensor in tensors]


def parts(step):
    """Make a step as `Backend.step` is defined."""
    query, slots, new, now, statistic, options, added, limits, _ = step
    slot = REFERENCE.append(slots, *new, now)
    out, report = REFERENCE.attend(AttentionInputs(query, slots, now, statistic=statistic, options=options))
    fade = torch.where(now >= 0, getattr(statistic, "decay", 1.0), 1.0)[:, :, None]
    for state in added.states:
        state.scatter_(-1, slot, 0.0)
        if report.sums:
            state.copy_(state * fade + report.mass)
    if limits.window is not None:
        REFERENCE.expire(slots.positions, limits.seen, limits.window)
    score = added.states[0] if added.is_score else slots.positions.float()
    REFERENCE.evict(slots.positions, score, limits)
    return out


STEPS = [(dtype, *case) for dtype in DTYPES for case in FUSED if dtype == torch.float32 or case[1] == "per head"]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "sums", "limits"), STEPS)
@pytest.mark.parametrize("name", [name for name, kind in BACKENDS.items() if kind.fuses])
def test_a_fused_step_is_its_parts(name, dtype, sums, limits):
    backend, (statistic, n, is_score) = backend_of(name), SUMS[sums]
    g = torch.Generator().manual_seed(0)
    positions = held(3)
    positions[:, :, 7] = -1
    query = torch.randn(B, 2 * Hk, 1, D, generator=g).to(dtype)
    new = torch.randn(B, 1, Hk, D + E, generator=g).to(dtype).transpose(1, 2)
    states = tuple(torch.rand(positions.shape, generator=g) for _ in range(n))
    now = torch.full((B, 1), 120)
    now[1] = -1
    found = []
    for step in (backend.step, parts):
        given = (query, slots_of(positions, dtype), (new[..., :D], new[..., D:]), now, statistic)
        at = SlotLimits(torch.where(now < 0, 111, now)[:, 0] + 1, **LIMITS[limits])
        added = Added(tuple(state.clone() for state in states), is_score)
        *given, asked, added, at = on(name, *given, added, at)
        options = AttentionOptions(scaling=0.3, window=at.window)
        out = step(FusedStep(*given, asked, options, added, at))
        assert out is not None
        found.append((out[now[:, 0].to(out.device) >= 0], *ordered(given[1], added.states)))
    torch.testing.assert_close(*(one[0] for one in found), rtol=max(1e-4, torch.finfo(dtype).eps), atol=1e-5)
    for one, two in zip(*(one[1:] for one in found), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("place", [0, 31, 32, 63, 64, 79])
@pytest.mark.parametrize("name", [name for name, kind in BACKENDS.items() if kind.fuses])
def test_a_fused_step_puts_its_token_anywhere(name, place, monkeypatch):
    """Into any tile and split of Triton's kernels: their tiles have 16 slots here, and their splits 32."""
    monkeypatch.setattr(launch, "DECODE", {"": {1024: launch.Decode(16, 32, 4, 1)}})
    g = torch.Generator().manual_seed(0)
    positions = torch.arange(79, dtype=torch.int32)
    positions = torch.cat([positions[:place], positions.new_full((1,), EMPTY), positions[place:]]).repeat(B, 1, 1)
    query, keys, values = (torch.randn(B, heads, S, 40, generator=g) for heads, S in ((3, 1), (1, 80), (1, 80)))
    new, now = (keys[:, :, :1] + 1, values[:, :, :1] + 1), torch.full((B, 1), 79)
    found = []
    for step in (backend_of(name).step, parts):
        slots = Slots(keys.clone(), values.clone(), positions.clone())
        given = on(name, query, slots, new, now)
        limits, added = SlotLimits(given[3][:, 0] + 1), Added((), is_score=False)
        options = AttentionOptions(scaling=0.2)
        out = step(FusedStep(*given, Nothing(), options, added, limits))
        found.append((out, *given[1]))
    torch.testing.assert_close(*(one[0] for one in found), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(one, two) for one, two in zip(found[0][1:], found[1][1:], strict=True))
    assert (found[0][3][:, :, place] == 79).all()


@pytest.mark.parametrize("name", [name for name, kind in BACKENDS.items() if not kind.fuses])
def test_a_backend_that_does_not_fuse_does_nothing(name):
    slots, query, now = slots_of(held(), torch.float32), torch.zeros(B, Hk, 1, D), torch.full((B, 1), 120)
    before = [tensor.clone() for tensor in slots]
    new, limits, options = (
        (slots.keys[:, :, :1], slots.values[:, :, :1]),
        SlotLimits(now[:, 0] + 1),
        AttentionOptions(0.3),
    )
    added = Added((), is_score=False)
    asked = {"statistic": Nothing(), "options": options, "added": added, "limits": limits}
    assert BACKENDS[name]().step(FusedStep(query, slots, new, now, **asked)) is None
    assert all(torch.equal(one, two) for one, two in zip(slots, before, strict=True))
