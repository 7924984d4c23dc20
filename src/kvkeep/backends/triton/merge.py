"""Second kernel of a decode step: put the splits of `decode` together and report, or update the sums and evict."""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvkeep.backends.triton.decode import finite
from kvkeep.backends.triton.slots import LAST, earlier, first, number, shielded, unexpired


@triton.jit
@no_type_check
def merged(
    mixes, bounds, sinks, splits, head, Hk,
    G: tl.constexpr, E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """All splits of a head together: the mixed values, the largest logit, the larger of it and the sink, 1 / total.

    1 / total is 0 for a query that sees nothing, and for heads that are padding.
    """
    g, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    peak, total = tl.full((BLOCK_G,), float("-inf"), tl.float32), tl.zeros((BLOCK_G,), tl.float32)
    mix = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    for split in range(splits):
        part = (head.to(tl.int64) * splits + split) * G + g
        more = tl.load(bounds + part * 2, mask=g < G, other=float("-inf"))
        size = tl.load(bounds + part * 2 + 1, mask=g < G, other=0.0)
        values = tl.load(mixes + part[:, None] * E + e[None, :], mask=(g[:, None] < G) & (e[None, :] < E), other=0.0)
        higher = tl.maximum(peak, more)
        fade, rise = tl.exp2(peak - finite(higher)), tl.exp2(more - finite(higher))
        total = total * fade + size * rise
        mix = mix * fade[:, None] + values * rise[:, None]
        peak = higher
    top = peak
    if SINKS:
        sink = tl.load(sinks + (head % Hk) * G + g, mask=g < G, other=float("-inf")) * 1.4426950408889634
        top = tl.maximum(peak, sink)
        fade = tl.exp2(peak - finite(top))
        total = total * fade + tl.exp2(sink - finite(top))
        mix = mix * fade[:, None]
    scale = tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))
    return mix, peak, top, scale


@triton.jit
@no_type_check
def group_mean(logits, slot, shown, past, S, base, scale, gain, G: tl.constexpr, BLOCK_G: tl.constexpr):
    """Mean over the query heads of ``scale·2^(gain·(x - base))``; at a gain of 0 slots that a window hides count 1."""
    return tl.sum(_powers(logits, slot, shown, past, S, base, gain, G, BLOCK_G) * scale[:, None], 0) / G


@triton.jit
@no_type_check
def power_sums(
    logits, positions, at, window, S, base, gain, own, G: tl.constexpr, BLOCK_G: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """1 / Σ 2^(gain·(x - base)) of each query head over the slots that it sees."""
    total = tl.zeros((BLOCK_G,), tl.float32)
    for begin in range(0, S, TILE):
        slot = begin + tl.arange(0, TILE)
        _position, past, shown = seen(positions, slot, S, own, at, window)
        total += tl.sum(_powers(logits, slot, shown, past, S, base, gain, G, BLOCK_G), 1)
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
@no_type_check
def _powers(logits, slot, shown, past, S, base, gain, G: tl.constexpr, BLOCK_G: tl.constexpr):
    g = tl.arange(0, BLOCK_G)[:, None]
    x = tl.load(logits + g * S + slot[None, :], mask=shown[None, :] & (g < G), other=0.0)
    power = tl.where(shown[None, :], tl.exp2((x - finite(base)[:, None]) * gain), tl.where(gain == 0.0, 1.0, 0.0))
    return tl.where(past[None, :] & (g < G), power, 0.0)


@triton.jit
@no_type_check
def seen(positions, slot, S, own, at, window):
    """Positions of slots, the new token's included; which are not after the query; which the query sees."""
    position = tl.load(positions + slot, mask=slot < S, other=-1).to(tl.int32)
    position = tl.where(slot == own, at, position)
    past = (position >= 0) & (position <= at)
    return position, past, past & (position > at - window)


@triton.jit
@no_type_check
def row_weight(row, at, counted, counts, newest, last, log_decay, COUNTED: tl.constexpr, NEWEST: tl.constexpr):
    """The weight of a row, 0 or the decay to the power of its distance from the newest row; and this distance."""
    if COUNTED:
        counts = tl.load(counted + row).to(tl.int32)
    if NEWEST:
        last = tl.load(newest + row).to(tl.int32)
    ago = last - at
    weight = tl.where(ago > 0, tl.exp2(tl.maximum(ago, 1).to(tl.float32) * log_decay), 1.0)
    return tl.where((at >= 0) & (counts != 0), weight, 0.0), ago


@triton.jit
@no_type_check
def merge(
    out, mixes, bounds, logits, positions, now, sinks, mass, extra, counted, gains, newest,
    position_row, position_head, now_row, splits, Hk, S, window, counts, gain, last, log_decay, theta,
    G: tl.constexpr, E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr,
    KIND: tl.constexpr, SINKS: tl.constexpr, TEMPERED: tl.constexpr, COUNTED: tl.constexpr, GAINS: tl.constexpr,
    NEWEST: tl.constexpr, LIVE: tl.constexpr,
):  # fmt: skip
    """Put the splits of a head together, and reduce the policy's statistic; grid ``(B·Hk,)``.

    KIND 0: no report; 1: mass; 2: mass, and in `extra` the mass of the newest row alone; 3: mass, and in `extra`
    whether it is low.

    Layout: out ``(B, Hq, 1, E)``, mass and extra ``(B, Hk, S)`` float32, dense; sinks ``(Hq,)``; one number per row in
    `counted`, `gains`, `newest`; `BLOCK_G` is the smallest power of two that is at least G.
    Bytes: the scratch once (`TEMPERED`: logits and positions twice), ``4·S`` for each of mass and extra. For a head
    that is ``8·S`` and ``4·G·(splits·(E + 2) + S)``, beside ``2·S·(D + E)`` of half-precision keys and values.
    FLOPs: about ``G·(2·splits·E + 5·S)``.
    Error: a probability errs, relative to itself, by twice the error of a logit (its own, and that of the sum), S·u of
    the sum and 16 u of the rest. A gain multiplies the logits' part, the group's mean adds G·u, and a decay adds
    2 u·|log2 of a weight|.
    """
    head = tl.program_id(0)
    row, group = (head // Hk).to(tl.int64), head % Hk
    g, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_E)
    mix, peak, top, scale = merged(mixes, bounds, sinks, splits, head, Hk, G, E, BLOCK_G, BLOCK_E, SINKS)
    target = out + (head.to(tl.int64) * G + g[:, None]) * E + e[None, :]
    tl.store(target, (mix * scale[:, None]).to(out.dtype.element_ty), mask=(g[:, None] < G) & (e[None, :] < E))
    if KIND != 0:
        at = tl.load(now + row * now_row).to(tl.int32)
        weight, ago = row_weight(row, at, counted, counts, newest, last, log_decay, COUNTED, NEWEST)
        positions += row * position_row + group * position_head
        logits += head.to(tl.int64) * G * S
        base = top
        if GAINS:
            gain = tl.load(gains + row)
        if TEMPERED:
            base = peak
            scale = power_sums(logits, positions, at, window, S, base, gain, -1, G, BLOCK_G, TILE)
        n = at + 1
        if LIVE:
            n = count_past(positions, at, S, TILE)
        for begin in range(0, S, TILE):
            slot = begin + tl.arange(0, TILE)
            _position, past, shown = seen(positions, slot, S, -1, at, window)
            p = group_mean(logits, slot, shown, past, S, base, scale, gain, G, BLOCK_G)
            place = head.to(tl.int64) * S + slot
            tl.store(mass + place, tl.where(weight == 0.0, 0.0, p * weight), mask=slot < S)
            if KIND == 2:
                tl.store(extra + place, tl.where(ago == 0, tl.where(weight == 0.0, 0.0, p), 0.0), mask=slot < S)
            if KIND == 3:
                low = past & (p * n.to(tl.float32) * theta < 1.0)
                tl.store(extra + place, tl.where(weight == 0.0, 0.0, low.to(tl.float32)), mask=slot < S)


@triton.jit
@no_type_check
def count_past(positions, at, S, TILE: tl.constexpr):
    """The number of slots that hold a token not after the query."""
    n = tl.zeros((TILE,), tl.int32)
    for begin in range(0, S, TILE):
        _position, past, _shown = seen(positions, begin + tl.arange(0, TILE), S, -1, at, 0)
        n += past.to(tl.int32)
    return tl.sum(n, 0)


@triton.jit
@no_type_check
def merge_evict(
    out, mixes, bounds, logits, slots, positions, now, sinks, counted, gains, newest,
    total, other, lost, ages, recents, limits,
    position_row, position_head, now_row, state_row, state_head, lost_row, lost_head,
    age_row, recent_row, recent_head, limit_row, limit_head,
    splits, Hk, S, window, counts, gain, last, log_decay, keep, first_ones, recent, limit,
    G: tl.constexpr, E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr,
    STATES: tl.constexpr, REPORTS: tl.constexpr, BY_SUM: tl.constexpr, SINKS: tl.constexpr, TEMPERED: tl.constexpr,
    COUNTED: tl.constexpr, GAINS: tl.constexpr, NEWEST: tl.constexpr, RECENTS: tl.constexpr, LIMITS: tl.constexpr,
    SLIDES: tl.constexpr, LOSES: tl.constexpr,
):  # fmt: skip
    """`merge`, then ``state = keep·state + mass``, then `slots.evict`; grid ``(B·Hk,)``.

    Runs after `decode.attend_split` with `APPENDS`: the new token is in slot `slots`, but not yet in the positions.

    Layout: as in these two; `total` and `other` are the policy's sums, ``(B, Hk, S)`` float32; there are `STATES` of
    them. `BY_SUM`: the first sum is the score; otherwise the position is. `ages`: tokens that each row has seen.
    `LOSES`: the victim's mass and that of all tokens are added to `lost`, ``(B, Hk, 2)`` float32.
    Bytes: the scratch once (`TEMPERED`: logits twice), ``8·S`` per sum, ``12·S`` of positions. FLOPs: as in `merge`.
    Error: the mass errs as in `merge`, and a sum by u of its size more. The victim is exact for the sums as stored.
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
    recent_from = age - number(recent, recents, row * recent_row + group * recent_head, 1, RECENTS)
    most = number(limit, limits, row * limit_row + group * limit_head, 1, LIMITS)
    best = tl.full((TILE,), float("inf"), tl.float32)
    oldest, where, held = (
        tl.full((TILE,), LAST, tl.int32),
        tl.full((TILE,), LAST, tl.int32),
        tl.zeros((TILE,), tl.int32),
    )
    of_victim, of_all = tl.zeros((TILE,), tl.float32), tl.zeros((TILE,), tl.float32)
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
        position = unexpired(position, age, window, SLIDES)
        held += (position >= 0).to(tl.int32)
        score = shielded(score, position, recent_from, first_ones)
        best, oldest, where = earlier(score, position, slot, best, oldest, where)
        of_victim = tl.where(where == slot, added, of_victim)
        of_all += tl.where(position >= 0, added, 0.0)
    victim = tl.where(tl.sum(held, 0) > most, first(best, oldest, where), LAST)
    lose(lost + row * lost_row + group * lost_head, victim, where, of_victim, of_all, LOSES)
    tl.debug_barrier()
    for begin in range(0, S, TILE):
        slot = begin + tl.arange(0, TILE)
        position, past, shown = seen(positions, slot, S, own, at, window)
        position = unexpired(position, age, window, SLIDES)
        tl.store(positions + slot, tl.where(slot == victim, -1, position), mask=slot < S)


@triton.jit
@no_type_check
def lose(lost, victim, where, of_victim, of_all, LOSES: tl.constexpr):
    """Add the victim's mass, which the victim's lane has, and the mass of all lanes."""
    if LOSES:
        gone = tl.sum(tl.where((where == victim) & (victim < LAST), of_victim, 0.0), 0)
        tl.store(lost, tl.load(lost) + gone)
        tl.store(lost + 1, tl.load(lost + 1) + tl.sum(of_all, 0))


@triton.jit
@no_type_check
def updated(sums, slot, S, own, fade, added):
    """Fade the sums, add to them, store and return them; a new token starts at 0."""
    past = tl.load(sums, mask=slot < S, other=0.0)
    summed = tl.where(slot == own, 0.0, past) * fade + added
    tl.store(sums, summed, mask=slot < S)
    return summed
