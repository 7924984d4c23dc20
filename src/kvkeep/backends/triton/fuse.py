"""The end of a decode step in one kernel: merge the splits, update the policy's sums, empty the victim's slot."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvkeep.backends.triton.decode import group_mean, merged, power_sums, row_weight, seen
from kvkeep.backends.triton.slots import earlier, number, shielded
from kvkeep.backends.triton.tiles import LAST, first


@triton.jit
@no_type_check
def merge_evict(
    out, mixes, bounds, logits, slots, positions, now, sinks, counted, gains, newest,
    total, other, ages, recents, limits,
    position_row, position_head, now_row, state_row, state_head, age_row, recent_row, limit_row, limit_head,
    splits, Hk, S, window, counts, gain, last, log_decay, keep, first_ones, recent, limit,
    G: tl.constexpr, E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr,
    STATES: tl.constexpr, REPORTS: tl.constexpr, BY_SUM: tl.constexpr, SINKS: tl.constexpr, TEMPERED: tl.constexpr,
    COUNTED: tl.constexpr, GAINS: tl.constexpr, NEWEST: tl.constexpr, RECENTS: tl.constexpr, LIMITS: tl.constexpr,
    SLIDES: tl.constexpr,
):  # fmt: skip
    """What `decode.merge` and `slots.evict` do, and ``state = keep·state + mass`` between them; grid ``(B·Hk,)``.

    Comes after `decode.attend_split` with `APPENDS`, whose token stands in slot `slots`, not yet in the positions.

    Layout: as in these two; `total` and `other` are the policy's sums, ``(B, Hk, S)`` float32, of which there are
    `STATES`. `BY_SUM`: the first is the score, otherwise the position is. `ages`: tokens that each row has seen.
    Bytes: the scratch once (`TEMPERED`: logits twice), ``8·S`` per sum, ``12·S`` of positions. FLOPs: as in `merge`.
    Error: of the mass, as in `decode.merge`; of a sum, u of its size more. The victim is that of the sums as they are.
    """
    head = tl.program_id(0)
    row, group = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    g, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    mix, peak, top, scale = merged(mixes, bounds, sinks, splits, head, Hk, G, E, BLOCK_G, BLOCK_E, SINKS)
    target = out + (head.to(tl.int64) * G + g[:, None]) * E + e[None, :]
    tl.store(target, (mix * scale[:, None]).to(out.dtype.element_ty), mask=(g[:, None] < G) & (e[None, :] < E))
    at = tl.load(now + row * now_row).to(tl.int32)
    own = tl.load(slots + head)
    positions += row * position_row + group * position_head
    logits += head.to(tl.int64) * G * S
    if REPORTS:
        weight, _ago = row_weight(row, at, counted, counts, newest, last, log_decay, COUNTED, NEWEST)
        base = top
        if GAINS:
            gain = tl.load(gains + row)
        if TEMPERED:
            base = peak
            scale = power_sums(logits, positions, at, window, S, base, gain, own, G, BLOCK_G, TILE)
    fade = tl.where(at >= 0, keep, 1.0)
    age = tl.load(ages + row * age_row).to(tl.int32)
    recent_from = age - number(recent, recents, row, recent_row, RECENTS)
    most = number(limit, limits, row * limit_row + group * limit_head, 1, LIMITS)
    best = tl.full((TILE,), float("inf"), tl.float32)
    oldest, where, held = (
        tl.full((TILE,), LAST, tl.int32),
        tl.full((TILE,), LAST, tl.int32),
        tl.zeros((TILE,), tl.int32),
    )
    for begin in range(0, S, TILE):
        slot = begin + tl.arange(0, TILE)
        position, past, shown = seen(positions, slot, S, own, at, window)
        added = tl.zeros((TILE,), tl.float32)
        if REPORTS:
            p = group_mean(logits, slot, shown, past, S, base, scale, gain, G, BLOCK_G)
            added = tl.where(weight == 0.0, 0.0, p * weight)
        score = position.to(tl.float32)
        place = row * state_row + group * state_head + slot
        if STATES >= 1:
            summed = updated(total + place, slot, S, own, fade, added)
            if BY_SUM:
                score = summed
        if STATES == 2:
            updated(other + place, slot, S, own, fade, added)
        position = tl.where(position <= age - window, -1, position) if SLIDES else position
        held += (position >= 0).to(tl.int32)
        score = shielded(score, position, recent_from, first_ones)
        best, oldest, where = earlier(score, position, slot, best, oldest, where)
    victim = tl.where(tl.sum(held, 0) > most, first(best, oldest, where), LAST)
    tl.debug_barrier()
    for begin in range(0, S, TILE):
        slot = begin + tl.arange(0, TILE)
        position, past, shown = seen(positions, slot, S, own, at, window)
        position = tl.where(position <= age - window, -1, position) if SLIDES else position
        tl.store(positions + slot, tl.where(slot == victim, -1, position), mask=slot < S)


@triton.jit
@no_type_check
def updated(sums, slot, S, own, fade, added):
    """Fade the sums, add to them, and return them; a new token starts at 0."""
    past = tl.load(sums, mask=slot < S, other=0.0)
    summed = tl.where(slot == own, 0.0, past) * fade + added
    tl.store(sums, summed, mask=slot < S)
    return summed
