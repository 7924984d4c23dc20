"""Kernels that fill and empty slots, one program for each head, and how all kernels compare slots.

Which slot is free: see `kvkeep.types.EMPTY`. What is protected and what goes first: see `kvkeep.kv.ranking`. Nothing is
added up here, so there is no error: victims are exact, to the last tie.

Kernels, here and in the other files, carry no annotations but those that Triton reads, and are hidden from the tests'
checks of shapes.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LAST = tl.constexpr(2**31 - 1)
"""Later than any position, and larger than any slot."""


@triton.jit
@no_type_check
def free_slot(positions, S, SCAN: tl.constexpr):
    """Return the first slot with the smallest position."""
    best = tl.full((SCAN,), LAST, tl.int32)
    slot = tl.full((SCAN,), LAST, tl.int32)
    for begin in range(0, S, SCAN):
        offsets = begin + tl.arange(0, SCAN)
        position = tl.load(positions + offsets, mask=offsets < S, other=LAST).to(tl.int32)
        slot = tl.where(position < best, offsets, slot)
        best = tl.minimum(best, position)
    return tl.min(tl.where(best == tl.min(best, 0), slot, LAST), 0)


@triton.jit
@no_type_check
def shielded(score, position, recent_from, sinks):
    """Compute `kvkeep.kv.ranking.protect` in a kernel."""
    score = tl.where(score != score, float("-inf"), tl.where(score == float("inf"), 3.4028234663852886e38, score))
    return tl.where((position >= recent_from) | (position < sinks), float("inf"), score)


@triton.jit
@no_type_check
def unexpired(position, age, window, SLIDES: tl.constexpr):
    """Compute `kvkeep.kv.ranking.expire` in a kernel, if the layer has a window."""
    return tl.where(position <= age - window, -1, position) if SLIDES else position


@triton.jit
@no_type_check
def earlier(score, position, slot, best, oldest, where):
    """Lane by lane, whichever goes first: an occupied slot, or the best one so far (`kvkeep.kv.ranking.weakest`)."""
    sooner = (position >= 0) & ((score < best) | ((score == best) & (position < oldest)))
    return tl.where(sooner, score, best), tl.where(sooner, position, oldest), tl.where(sooner, slot, where)


@triton.jit
@no_type_check
def first(best, position, slot):
    """Of all lanes, the slot that goes first; `LAST` if there is none."""
    lowest = tl.min(best, 0)
    oldest = tl.min(tl.where(best == lowest, position, LAST), 0)
    return tl.min(tl.where((best == lowest) & (position == oldest), slot, LAST), 0)


@triton.jit
@no_type_check
def number(one, each, row, column, EACH: tl.constexpr):
    """Return the number `one`, which holds for all; with `EACH`, load an entry of the table `each` instead."""
    if EACH:
        one = tl.load(each + row * column).to(tl.int32)
    return one


@triton.jit
@no_type_check
def append(
    keys, values, positions, new_keys, new_values, now, slots,
    key_row, key_head, key_slot, value_row, value_head, value_slot, position_row, position_head,
    new_key_row, new_key_head, new_value_row, new_value_head, now_row, Hk, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Put a row's token into the head's free slot; grid ``(B·Hk,)``.

    Layout: as in `decode.attend_split`; `slots` ``(B, Hk, 1)`` int64 receives the slot.
    Bytes: ``4·S`` of positions, ``2·(D + E)`` elements. FLOPs: none.
    """
    head = tl.program_id(0)
    row, group = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    positions += row * position_row + group * position_head
    slot = free_slot(positions, S, SCAN).to(tl.int64)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    key = tl.load(new_keys + row * new_key_row + group * new_key_head + d, mask=d < D)
    value = tl.load(new_values + row * new_value_row + group * new_value_head + e, mask=e < E)
    tl.store(keys + row * key_row + group * key_head + slot * key_slot + d, key, mask=d < D)
    tl.store(values + row * value_row + group * value_head + slot * value_slot + e, value, mask=e < E)
    tl.store(slots + head, slot)
    tl.debug_barrier()  # all lanes have read the positions before one of them changes
    tl.store(positions + slot, tl.load(now + row * now_row).to(tl.int32))


@triton.jit
@no_type_check
def evict(
    positions, scores, ages, recents, limits,
    position_row, position_head, score_row, score_head, age_row, recent_row, recent_head, limit_row, limit_head,
    Hk, S, window, first_ones, recent, limit,
    SCAN: tl.constexpr, RECENTS: tl.constexpr, LIMITS: tl.constexpr, SLIDES: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Empty the slots that a window has passed, then the weakest slot of a head over its limit; grid ``(B·Hk,)``.

    Layout: positions ``(B, Hk, S)`` int32 and scores ``(B, Hk, S)`` float32, any strides but dense in the last axis;
    ages ``(B,)``: tokens that each row has seen; recents and limits: tables, or one number for all. Without `SCORED`
    the kernel only expires.
    Bytes: ``16·S``, as positions are read twice and written once. FLOPs: none, about ``10·S`` comparisons.
    """
    head = tl.program_id(0)
    row, group = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    positions += row * position_row + group * position_head
    scores += row * score_row + group * score_head
    age = tl.load(ages + row * age_row).to(tl.int32)
    recent_from = age - number(recent, recents, row * recent_row + group * recent_head, 1, RECENTS)
    most = number(limit, limits, row * limit_row + group * limit_head, 1, LIMITS)
    best = tl.full((SCAN,), float("inf"), tl.float32)
    oldest, where, held = (
        tl.full((SCAN,), LAST, tl.int32),
        tl.full((SCAN,), LAST, tl.int32),
        tl.zeros((SCAN,), tl.int32),
    )
    for begin in range(0, S, SCAN):
        slot = begin + tl.arange(0, SCAN)
        position = unexpired(tl.load(positions + slot, mask=slot < S, other=-1), age, window, SLIDES)
        held += (position >= 0).to(tl.int32)
        if SCORED:
            score = shielded(tl.load(scores + slot, mask=slot < S, other=0.0), position, recent_from, first_ones)
            best, oldest, where = earlier(score, position, slot, best, oldest, where)
    victim = tl.where(tl.sum(held, 0) > most, first(best, oldest, where), LAST)
    tl.debug_barrier()
    for begin in range(0, S, SCAN):
        slot = begin + tl.arange(0, SCAN)
        position = unexpired(tl.load(positions + slot, mask=slot < S, other=-1), age, window, SLIDES)
        tl.store(positions + slot, tl.where(slot == victim, -1, position), mask=slot < S)
