"""Slots in a pool: every backend does over ranges what it does over slots side by side."""

import dataclasses

import pytest
import torch

from kvkeep.attention_stats import Low, Mass, Nothing
from kvkeep.backends import Added, AttentionInputs, FusedStep, SlotLimits, in_pool
from kvkeep.kv.pooled_store import PoolSlots, indices, put_back, side_by_side, to_heads
from kvkeep.kv.slot_codec import Vectors
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Ranges, Slots

from .cases import BACKENDS, NOW, OF_TOKEN, ON_TOKEN, backend_of, on, token

PLAIN = AttentionOptions(scaling=0.2)
ROTATION = Rotation(1.0 / 100 ** (torch.arange(0, 32, 2) / 32), scaling=1.1)
S = 70
SIZES = torch.tensor([[70, 3], [1, 40], [17, 33], [16, 16], [70, 70], [2, 64]])
"""Of each row and head: full, a few, one, whole blocks of a vector, and not."""


def vectors(keys, values):
    return Vectors({"keys": keys, "values": values}, (keys.dtype, values.dtype))


def laid(slots, sizes=SIZES):
    """The same slots in a pool with NaN everywhere else, and side by side; slots beyond a range are empty."""
    P = int(sizes.sum(dim=1).max()) + 1
    starts = P - 1 - sizes.flip(1).cumsum(dim=1).flip(1)  # the last head ends where the pool does
    index = indices(starts, sizes, width=slots.keys.shape[2], pool=P)
    positions = slots.positions.masked_fill(torch.arange(slots.keys.shape[2]) >= sizes[..., None], -1)
    pools = []
    for held in slots[:2]:
        pool = held.new_full((len(held), P, held.shape[-1]), torch.nan)
        for row, head in torch.cartesian_prod(*map(torch.arange, sizes.shape)).tolist():
            start, size = int(starts[row, head]), int(sizes[row, head])
            pool[row, start : start + size] = held[row, head, :size]
        pools.append(pool)
    pool = PoolSlots.of(vectors(*pools), positions.clone(), Ranges(starts, sizes.clone()), index)
    return pool, slots._replace(positions=positions)


def moved(pool, name):
    """Slots in a pool where a backend works."""
    parts = (*pool.pool.tensors.values(),), pool.positions, Ranges(pool.starts, pool.sizes), pool.entries
    pools, *others = on(name, *parts)
    return PoolSlots.of(vectors(*pools), *others)


def given(D=32, dtype=torch.float32):
    query, slots, now = token(S, D, 3, dtype)
    return query, *laid(slots), now


ASKED = [
    *(("plain", statistic) for statistic in ON_TOKEN),
    *((options, "mass") for options in OF_TOKEN),
    *(("all", name) for name in ("last", "live", "gains")),
]


@pytest.mark.parametrize("name", [name for name in BACKENDS if name != "dummy"])
@pytest.mark.parametrize(("option", "statistic"), ASKED)
def test_attention_over_ranges_is_that_over_slots_side_by_side(name, option, statistic):
    query, pool, plain, now = given()
    backend, pool = backend_of(name), moved(pool, name)
    query, plain, now, asked = on(name, query, plain, now, (ON_TOKEN[statistic], OF_TOKEN[option]))
    asked = {"statistic": asked[0], "options": asked[1]}
    out, report = in_pool(backend).attend(AttentionInputs(query, pool, now, **asked))
    want, want_report = backend.attend(AttentionInputs(query, plain, now, **asked))
    real = (now >= 0)[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[real], want[real], rtol=1e-5, atol=1e-6)
    assert report.sums.keys() == want_report.sums.keys()
    for field, held in report.sums.items():
        torch.testing.assert_close(held, want_report.sums[field], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("D", [8, 32, 80])
def test_the_kernel_reads_ranges_of_any_dtype_bit_for_bit(D, dtype):
    query, pool, plain, now = given(D, dtype)
    backend = backend_of("native")
    out, report = backend.attend(AttentionInputs(query, pool, now, statistic=Low(), options=PLAIN))
    want, want_report = backend.attend(AttentionInputs(query, plain, now, statistic=Low(), options=PLAIN))
    assert torch.equal(out, want)
    assert all(torch.equal(held, want_report.sums[field]) for field, held in report.sums.items())


def test_the_kernel_turns_keys_of_ranges_to_their_ranks():
    query, pool, plain, now = given()
    for slots in (pool, plain):
        slots.positions.copy_(torch.where(slots.positions >= 0, torch.arange(S, dtype=torch.int32), -1))
    backend, now = backend_of("native").at_ranks(ROTATION), now.clamp(max=S)
    out, report = in_pool(backend).attend(AttentionInputs(query, pool, now, statistic=Mass(), options=PLAIN))
    want, want_report = backend.attend(AttentionInputs(query, plain, now, statistic=Mass(), options=PLAIN))
    assert torch.equal(out, want)
    assert torch.equal(report.mass, want_report.mass)


@pytest.mark.parametrize("name", BACKENDS)
def test_append_writes_into_the_range_of_a_head_and_nowhere_else(name):
    _, pool, _, _ = given()
    pool.positions[:, :, 0] = -1  # every head has an empty slot
    pool = moved(pool, name)
    assert pool.keys.shape == (6, 2, S, 32)  # a copy that is old when the token has been written
    pools = pool.pool.tensors.values()
    before = [held.clone() for held in pools]
    new = [torch.randn(6, 2, 1, 32).to(pool.starts.device) for _ in range(2)]
    now = torch.tensor([NOW + 1, -1, NOW + 1, NOW + 1, NOW + 1, NOW + 1])[:, None].to(pool.starts.device)
    slot = in_pool(backend_of(name)).append(pool, *new, now)
    assert (slot[..., 0] < pool.sizes).all()
    entries = pool.entries.gather(-1, slot)[..., 0] % before[0].shape[1]
    for row in range(6):
        assert pool.positions[row].gather(-1, slot[row]).eq(now[row]).all()
        for old, held, one in zip(before, pools, new, strict=True):
            if now[row] >= 0:
                assert torch.equal(held[row, entries[row]], one[row, :, 0])
            rest = torch.ones(held.shape[1], dtype=torch.bool, device=held.device)
            rest[entries[row]] = False
            assert torch.equal(held[row, rest].nan_to_num(), old[row, rest].nan_to_num())
    real = now[:, 0] >= 0
    assert torch.equal(pool.keys.gather(2, slot[..., None].expand(-1, -1, -1, 32))[real], new[0][real])


@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("rotation", [None, ROTATION], ids=["true", "slot"])
def test_a_fused_step_over_ranges_is_that_over_slots_side_by_side(window, rotation):
    query, pool, plain, now = given()
    where = [pool.sizes - 1, torch.zeros_like(pool.sizes)][window is None]
    for slots in (pool, plain):
        slots.positions.scatter_(-1, where[..., None], -1)
    keys, values = (held.clone() for held in plain[:2])
    plain = Slots(keys, values, plain.positions.clone())
    options = dataclasses.replace(PLAIN, window=window)
    seen, stay = now[:, 0] + 1, (pool.positions >= 0).sum(dim=-1).clamp(min=1)
    limits = SlotLimits(seen, 1, stay // 2, stay, window)  # recent tokens of each head, too
    new, backend, found = (torch.randn(6, 2, 1, 32), torch.randn(6, 2, 1, 32)), backend_of("native"), []
    backend = backend if rotation is None else backend.at_ranks(rotation)
    for slots in (pool, plain):
        sums, lost = torch.ones(6, 2, S), torch.zeros(6, 2, 2)
        added = Added((sums,), is_score=True, lost=lost)
        out = backend.step(FusedStep(query, slots, new, now, Mass(), options, added, limits))
        assert out is not None
        found.append((out, sums, lost, slots.positions))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    held = plain.positions == NOW
    assert torch.equal(pool.keys[held], plain.keys[held])
    assert torch.equal(pool.values[held], plain.values[held])


@pytest.mark.parametrize("statistic", [Mass(), Nothing()], ids=["mass", "nothing"])
@pytest.mark.parametrize("window", [None, 3000])
@pytest.mark.parametrize("rotation", [None, ROTATION], ids=["true", "slot"])
def test_a_fused_step_in_a_whole_pool_is_that_over_slots_side_by_side(statistic, window, rotation):
    """Positions and sums lie in the pool as well, and nothing beyond a head's range is read or written."""
    query, pool, plain, now = given()
    where = (pool.sizes - 1)[..., None]
    plain.positions.scatter_(-1, where, -1)
    numbers = torch.full(pool.pool.tensors["keys"].shape[:2], 7), torch.full(pool.pool.tensors["keys"].shape[:2], 9.0)
    entries, sums = numbers[0].int(), numbers[1]
    put_back(entries, pool.entries, plain.positions)
    entries[:, -1] = 7  # of no head: a victim, if it were a slot
    owned = torch.zeros(entries.shape, dtype=torch.bool)
    put_back(owned, pool.entries, torch.arange(S) < pool.sizes[..., None])
    inner = pool.pool.each(lambda held: to_heads(held, 2)).slots(to_heads(entries, 2))
    stay = (plain.positions >= 0).sum(dim=-1).clamp(min=1)
    limits = SlotLimits(now[:, 0] + 1, 1, stay // 2, stay, window, torch.arange(6) * 900)
    new, backend, found = (torch.randn(6, 2, 1, 32), torch.randn(6, 2, 1, 32)), backend_of("native"), []
    backend = backend if rotation is None else backend.at_ranks(rotation)
    options = dataclasses.replace(PLAIN, window=window)
    laid_sums, ranges = torch.full((6, 2, S), 9.0), Ranges(pool.starts, pool.sizes, S)
    for slots, states, where in ((inner, to_heads(sums, 2), ranges), (plain, laid_sums, None)):
        lost = torch.zeros(6, 2, 2)
        added = Added((states,), is_score=False, lost=lost)
        out = backend.step(FusedStep(query, slots, new, now, statistic, options, added, limits, where))
        assert out is not None
        found.append((out, lost))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    inside = torch.arange(S) < pool.sizes[..., None]
    assert torch.equal(side_by_side(entries, pool.entries)[inside], plain.positions[inside])
    assert torch.equal(side_by_side(sums, pool.entries)[inside], laid_sums[inside])
    assert entries[~owned].eq(7).all()
    assert sums[~owned].eq(9.0).all()
    held = plain.positions == NOW
    for lying, beside in zip((pool.keys, pool.values), plain[:2], strict=True):
        assert torch.equal(lying[held], beside[held])
        assert held.any()


def test_a_batch_of_ranges_is_each_row_alone():
    query, pool, _, now = given()
    backend = backend_of("native")
    out, report = backend.attend(AttentionInputs(query, pool, now, statistic=Mass(), options=PLAIN))
    for row in range(6):
        part = slice(row, row + 1)
        pools, positions = [held[part] for held in pool.pool.tensors.values()], pool.positions[part]
        ranges = Ranges(pool.starts[part], pool.sizes[part])
        one = PoolSlots.of(vectors(*pools), positions, ranges, indices(*ranges[:2], width=S, pool=pools[0].shape[1]))
        got, mass = backend.attend(AttentionInputs(query[part], one, now[part], statistic=Mass(), options=PLAIN))
        assert torch.equal(got, out[part])
        assert torch.equal(mass.mass, report.mass[part])
