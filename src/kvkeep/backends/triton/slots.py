"""Slots: where a token goes, what a sliding window has passed, and which one is emptied. Each kernel does one head.

Nothing is added up here, so there is no error: the slots are those that `kvkeep.scores` names, to the last tie.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvkeep.backends.triton.tiles import LAST, first, free_slot


@triton.jit
@no_type_check
def append(
    keys, values, positions, new_keys, new_values, now, slots,
    key_row, key_head, key_slot, value_row, value_head, value_slot, position_row, position_head,
    new_key_row, new_key_head, new_value_row, new_value_head, now_row, Hk, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Put a row's token into the first slot with the smallest position, an empty one if there is any; grid ``(B·Hk,)``.

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
def shielded(score, position, recent_from, sinks):
    """Scores without NaN, which has no order and goes first; those of protected tokens are infinite."""
    score = tl.where(score != score, float("-inf"), score)
    return tl.where((position >= recent_from) | (position < sinks), float("inf"), score)


@triton.jit
@no_type_check
def earlier(score, position, slot, best, oldest, where):
    """Lane by lane the smaller (score, position) of an occupied slot and of the best one so far."""
    sooner = (position >= 0) & ((score < best) | ((score == best) & (position < oldest)))
    return tl.where(sooner, score, best), tl.where(sooner, position, oldest), tl.where(sooner, slot, where)


@triton.jit
@no_type_check
def number(one, each, row, column, EACH: tl.constexpr):
    """A number for all, or one of a table."""
    if EACH:
        one = tl.load(each + row * column).to(tl.int32)
    return one


@triton.jit
@no_type_check
def evict(
    positions, scores, seen, recents, limits,
    position_row, position_head, score_row, score_head, seen_row, recent_row, limit_row, limit_head,
    Hk, S, window, sinks, recent, limit,
    SCAN: tl.constexpr, RECENTS: tl.constexpr, LIMITS: tl.constexpr, SLIDES: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    """Empty what a window has passed, then the weakest slot if a head holds more than its limit; grid ``(B·Hk,)``.

    Layout: positions ``(B, Hk, S)`` int32 and scores ``(B, Hk, S)`` float32, any strides but dense in the last axis;
    seen ``(B,)``; recents and limits: tables, or one number for all. Without `SCORED` nothing but expiry happens.
    Bytes: ``16·S``, positions read twice and written. FLOPs: none, about ``10·S`` comparisons.
    """
    head = tl.program_id(0)
    row, group = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    positions += row * position_row + group * position_head
    scores += row * score_row + group * score_head
    now = tl.load(seen + row * seen_row).to(tl.int32)
    recent_from = now - number(recent, recents, row, recent_row, RECENTS)
    most = number(limit, limits, row * limit_row + group * limit_head, 1, LIMITS)
    best = tl.full((SCAN,), float("inf"), tl.float32)
    oldest, where, held = (
        tl.full((SCAN,), LAST, tl.int32),
        tl.full((SCAN,), LAST, tl.int32),
        tl.zeros((SCAN,), tl.int32),
    )
    for begin in range(0, S, SCAN):
        slot = begin + tl.arange(0, SCAN)
        position = unexpired(positions, slot, S, now, window, SLIDES)
        held += (position >= 0).to(tl.int32)
        if SCORED:
            score = shielded(tl.load(scores + slot, mask=slot < S, other=0.0), position, recent_from, sinks)
            best, oldest, where = earlier(score, position, slot, best, oldest, where)
    victim = tl.where(tl.sum(held, 0) > most, first(best, oldest, where), LAST)
    tl.debug_barrier()
    for begin in range(0, S, SCAN):
        slot = begin + tl.arange(0, SCAN)
        position = unexpired(positions, slot, S, now, window, SLIDES)
        tl.store(positions + slot, tl.where(slot == victim, -1, position), mask=slot < S)


@triton.jit
@no_type_check
def unexpired(positions, slot, S, now, window, SLIDES: tl.constexpr):
    """Positions, -1 for those that no later query can see."""
    position = tl.load(positions + slot, mask=slot < S, other=-1)
    return tl.where(position <= now - window, -1, position) if SLIDES else position
