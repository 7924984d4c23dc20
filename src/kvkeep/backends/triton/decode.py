"""First kernel of a decode step: attention of one token per row over the slots, in splits that `merge` puts together.

All numbers of softmax are to base 2: logits are multiplied by log2(e) once, and probabilities are
2^(x - peak) / total. Between the two kernels lies scratch memory, float32 and dense:

=========  ==========================  ==================================================================
`mixes`    ``(B, Hk, splits, G, E)``   values weighed by 2^(x - the split's peak)
`bounds`   ``(B, Hk, splits, G, 2)``   the split's peak and the sum of 2^(x - peak); -inf and 0 if it sees nothing
`logits`   ``(B, Hk, G, S)``           x of every visible slot; the others are neither written nor read
=========  ==========================  ==================================================================

Each kernel's docstring states its bytes, FLOPs and error; ``u`` is 2^-24, half a unit in the last place of float32.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvkeep.backends.triton.slots import (
    LAST,
    chosen_before,
    earlier,
    first,
    free_slot,
    number,
    shielded,
    unexpired,
    vectors,
)


@triton.jit
@no_type_check
def product(a, b, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply ``a @ b`` with sums in float32; `PRECISION` is the precision of float32 factors.

    `WIDE`: multiply in float32, for the interpreter, which would multiply the bits of bfloat16 as integers. Products
    of two halves are exact in float32, so only the order of the sum can differ.
    """
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def weighed(p, values, WIDE: tl.constexpr):
    """Compute ``p @ values`` for float32 ``p`` in [0, 1]. For half-precision values ``p`` is split into two parts.

    The two parts together miss at most 2^-18 of ``p`` in bfloat16; in float16, 2^-22 of ``p`` or 2^-25.
    """
    if values.dtype == tl.float32:
        return product(p, values, WIDE, "ieee")
    upper = p.to(values.dtype)
    lower = (p - upper.to(tl.float32)).to(values.dtype)
    return product(upper, values, WIDE, "ieee") + product(lower, values, WIDE, "ieee")


@triton.jit
@no_type_check
def binary_logits(dots, scaling, softcap, CAPPED: tl.constexpr):
    """Turn dot products into logits to base 2, scaled and soft-capped."""
    x = dots * scaling  # 1.4426950408889634 below is log2(e)
    if CAPPED:
        size = tl.exp2(tl.abs(x) * (-2.0 * 1.4426950408889634 / softcap))
        capped = softcap * (1.0 - size) / (1.0 + size)  # the hyperbolic tangent, without overflow
        x = tl.where(x < 0, -capped, capped)
    return x * 1.4426950408889634


@triton.jit
@no_type_check
def finite(x):
    """Return ``x`` with minus infinity replaced by 0, so that it can be subtracted where nothing was seen."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
@no_type_check
def attend_split(
    query, keys, values, positions, now, new_keys, new_values, key_scales, value_scales,
    mixes, bounds, logits, slots,
    query_row, query_head, key_row, key_head, key_slot, value_row, value_head, value_slot,
    position_row, position_head, now_row, new_key_row, new_key_head, new_value_row, new_value_head,
    key_scale_row, key_scale_head, key_scale_slot, value_scale_row, value_scale_head, value_scale_slot,
    Hk, S, scaling, softcap, window,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    SCAN: tl.constexpr, CAPPED: tl.constexpr, KEEPS: tl.constexpr, APPENDS: tl.constexpr, WIDE: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr,
):  # fmt: skip
    """Compute attention over one split of a head's slots, for all its query heads; grid ``(B·Hk, splits)``.

    The last split takes a rest of at most a tile as well: with a new token there is one slot more than the budget.
    `APPENDS`: the row's new token is first written into the head's free slot. Its key and value take part from
    registers, `slots` receives the slot, and the next kernel writes the position. `KEEPS`: `logits` are written.
    With 8 or 4 bits, keys and values are codes with `key_scales` and `value_scales`, see `slots.vectors`; with 16 they
    are not. There is no `APPENDS` with codes.

    Layout: query ``(B, Hq, 1, D)``, keys ``(B, Hk, S, D)``, values ``(B, Hk, S, E)``, positions ``(B, #Hk, S)``, any
    strides but dense in the last axis; `BLOCK_G`, `BLOCK_D`, `BLOCK_E` are powers of two from 16; padding is not read.
    Bytes: reads keys and values of the visible slots once, ``(D + E)`` elements each or codes with their scales, and 4
    for a position (`APPENDS`: all positions of the head once more); writes ``4·G·(E + 2)`` per split and, with `KEEPS`,
    ``4·G`` per visible slot.
    FLOPs: ``2·G·S·(D + 2·E)``, in float32 ``2·G·S·(D + E)``; with padding, those of `BLOCK_G` heads instead of G.
    Error: a logit errs by ``(D + 3)·u·Σ|q·k|·scaling``, and a cap adds ``8·u·softcap``: products of halves are exact,
    and float32 adds them up (tensor cores truncate where others round, and err twice as much). A weight errs, relative
    to itself, by the error of its logit and 4 u of ``exp2``. Its product with a value adds 2^-18 in bfloat16 and
    2^-22 + 2^-25 / p in float16. A sum over a split adds S·u, relative to the sum of its terms' sizes.
    """
    head, split = tl.program_id(0), tl.program_id(1)
    row, group = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    g, d, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    begin = split * SPLIT
    end = tl.where(split == tl.num_programs(1) - 1, S, begin + SPLIT)
    at = tl.load(now + row * now_row).to(tl.int32)
    heads = query + row * query_row + (group * G + g[:, None]) * query_head
    q = tl.load(heads + d[None, :], mask=(g[:, None] < G) & (d[None, :] < D), other=0.0)
    keys += row * key_row + group * key_head
    values += row * value_row + group * value_head
    key_scales += row * key_scale_row + group * key_scale_head
    value_scales += row * value_scale_row + group * value_scale_head
    positions += row * position_row + group * position_head
    logits += head.to(tl.int64) * G * S
    peak, total = tl.full((BLOCK_G,), float("-inf"), tl.float32), tl.zeros((BLOCK_G,), tl.float32)
    mix = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    own = -1
    if APPENDS:
        own = free_slot(positions, S, SCAN)
        tl.store(slots + head, own, mask=split == 0)  # all splits find the same slot
        here = (own >= begin) & (own < end)
        fresh_key = moved(
            new_keys + row * new_key_row + group * new_key_head, keys + own.to(tl.int64) * key_slot, d, D, here
        )
        fresh_value = moved(
            new_values + row * new_value_row + group * new_value_head,
            values + own.to(tl.int64) * value_slot,
            e,
            E,
            here,
        )
        own_x = binary_logits(tl.sum(q.to(tl.float32) * fresh_key[None, :], 1), scaling, softcap, CAPPED)
        here &= at >= 0
        if KEEPS:
            tl.store(logits + g * S + own, own_x, mask=here & (g < G))
        peak, total = tl.where(here, own_x, peak), tl.where(here, 1.0, total)
        mix = tl.where(here, fresh_value[None, :], mix)
    inside, rest = begin + tl.arange(0, SPLIT), begin + SPLIT + tl.arange(0, TILE)
    newest = tl.max(tl.load(positions + inside, mask=inside < end, other=-1), 0)
    newest = tl.maximum(newest, tl.max(tl.load(positions + rest, mask=rest < end, other=-1), 0))
    stop = tl.where(newest >= 0, end - begin, 0)  # a young row has whole splits of empty slots
    for start in range(0, stop, TILE):
        slot = begin + start + tl.arange(0, TILE)
        position = tl.load(positions + slot, mask=slot < S, other=-1).to(tl.int32)
        shown = (position >= 0) & (position <= at) & (position > at - window) & (slot != own)
        k = vectors(keys, key_scales, slot, key_slot, key_scale_slot, d, shown, q, D, KEY_BITS, KEY_GROUP)
        x = binary_logits(product(q, k.trans(), WIDE, "ieee"), scaling, softcap, CAPPED)
        x = tl.where(shown[None, :], x, float("-inf"))
        if KEEPS:
            tl.store(logits + g[:, None] * S + slot[None, :], x, mask=shown[None, :] & (g[:, None] < G))
        v = vectors(values, value_scales, slot, value_slot, value_scale_slot, e, shown, q, E, VALUE_BITS, VALUE_GROUP)
        higher = tl.maximum(peak, tl.max(x, 1))
        weight, fade = tl.exp2(x - finite(higher)[:, None]), tl.exp2(peak - finite(higher))
        total = total * fade + tl.sum(weight, 1)
        mix = mix * fade[:, None] + weighed(weight, v, WIDE)
        peak = higher
    part = (head.to(tl.int64) * tl.num_programs(1) + split) * G + g
    tl.store(mixes + part[:, None] * E + e[None, :], mix, mask=(g[:, None] < G) & (e[None, :] < E))
    tl.store(bounds + part * 2, peak, mask=g < G)
    tl.store(bounds + part * 2 + 1, total, mask=g < G)


@triton.jit
@no_type_check
def moved(source, target, d, D: tl.constexpr, here):
    """Load a vector and return it in float32; where `here` is true, also store it at `target` as it is."""
    vector = tl.load(source + d, mask=d < D, other=0.0)
    tl.store(target + d, vector, mask=here & (d < D))
    return vector.to(tl.float32)


# Second kernel of a decode step: put the splits of `decode` together and report, or update the sums and evict.


@triton.jit
@no_type_check
def merged(
    mixes, bounds, sinks, splits, head, Hk,
    G: tl.constexpr, E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Merge all splits of a head. Return for each of its query heads the mixed values, still to be multiplied with
    1 / total; the largest logit; the larger of it and the sink; 1 / total.

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
        # times log2(e), since all logits are in base 2
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
    """Return for each slot the mean over the query heads of ``scale·2^(gain·(x - base))``.

    At a gain of 0, slots that a window hides count 1, see `_powers`.
    """
    return tl.sum(_powers(logits, slot, shown, past, S, base, gain, G, BLOCK_G) * scale[:, None], 0) / G


@triton.jit
@no_type_check
def power_sums(
    logits, positions, at, window, S, base, gain, own, G: tl.constexpr, BLOCK_G: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Return 1 / Σ 2^(gain·(x - base)) for each query head, over the slots that it sees."""
    total = tl.zeros((BLOCK_G,), tl.float32)
    for begin in range(0, S, TILE):
        slot = begin + tl.arange(0, TILE)
        _position, past, shown = seen(positions, slot, S, own, at, window)
        total += tl.sum(_powers(logits, slot, shown, past, S, base, gain, G, BLOCK_G), 1)
    return tl.where(total == 0.0, 0.0, 1.0 / tl.where(total == 0.0, 1.0, total))


@triton.jit
@no_type_check
def _powers(logits, slot, shown, past, S, base, gain, G: tl.constexpr, BLOCK_G: tl.constexpr):
    """Return ``2 ** ((logit - base) * gain)`` of the slots for each query head; 0 outside of ``past``.

    At a gain of 0 a slot in ``past`` that is not ``shown`` has 1, as 0 to the power of 0 in `attention_stats.Mass`.
    """
    g = tl.arange(0, BLOCK_G)[:, None]
    x = tl.load(logits + g * S + slot[None, :], mask=shown[None, :] & (g < G), other=0.0)
    power = tl.where(shown[None, :], tl.exp2((x - finite(base)[:, None]) * gain), tl.where(gain == 0.0, 1.0, 0.0))
    return tl.where(past[None, :] & (g < G), power, 0.0)


@triton.jit
@no_type_check
def seen(positions, slot, S, own, at, window):
    """Load the positions of slots; slot ``own`` has the new token's, ``at``. Return them, which hold a token not after
    the query, and which of those the query sees through its window.
    """
    position = tl.load(positions + slot, mask=slot < S, other=-1).to(tl.int32)
    position = tl.where(slot == own, at, position)
    past = (position >= 0) & (position <= at)
    return position, past, past & (position > at - window)


@triton.jit
@no_type_check
def row_weight(row, at, counted, counts, newest, last, log_decay, COUNTED: tl.constexpr, NEWEST: tl.constexpr):
    """Return the weight of a row of the batch, and how many positions its query is before the newest one. The weight is
    the decay to the power of this distance, 1 if it is not above 0; 0 for padding and a row that does not count.
    """
    if COUNTED:
        counts = tl.load(counted + row).to(tl.int32)
    if NEWEST:
        last = tl.load(newest + row).to(tl.int32)
    ago = last - at
    # at least 1, as the logarithm of a decay of 0 is infinite, and 0 times it no number
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
    """Return the number of a head's slots that hold a token not after the query, sliding windows aside."""
    n = tl.zeros((TILE,), tl.int32)
    for begin in range(0, S, TILE):
        _position, past, _shown = seen(positions, begin + tl.arange(0, TILE), S, -1, at, 0)
        n += past.to(tl.int32)
    return tl.sum(n, 0)


@triton.jit
@no_type_check
def merge_evict(
    out, mixes, bounds, logits, slots, positions, now, sinks, counted, gains, newest,
    total, other, lost, ages, recents, limits, prompts,
    position_row, position_head, now_row, state_row, state_head, lost_row, lost_head,
    age_row, recent_row, recent_head, limit_row, limit_head, prompt_row,
    splits, Hk, S, window, counts, gain, last, log_decay, keep, first_ones, recent, limit,
    G: tl.constexpr, E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr,
    STATES: tl.constexpr, REPORTS: tl.constexpr, BY_SUM: tl.constexpr, SINKS: tl.constexpr, TEMPERED: tl.constexpr,
    COUNTED: tl.constexpr, GAINS: tl.constexpr, NEWEST: tl.constexpr, RECENTS: tl.constexpr, LIMITS: tl.constexpr,
    SLIDES: tl.constexpr, LOSES: tl.constexpr, CHOSEN: tl.constexpr,
):  # fmt: skip
    """Put the splits together as `merge`, then ``state = keep·state + mass``, then evict as `slots.evict`; grid
    ``(B·Hk,)``.

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
    fade = tl.where(at >= 0, keep, 1.0)  # a padded row keeps its sums
    age = tl.load(ages + row * age_row).to(tl.int32)
    newer = number(recent, recents, row * recent_row + group * recent_head, 1, RECENTS)
    recent_from, chosen = age - newer, chosen_before(prompts, row, prompt_row, newer, CHOSEN)
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
            # a row that does not count may have seen nothing, and NaN times 0 is NaN
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
        score = shielded(score, position, recent_from, first_ones, chosen)
        best, oldest, where = earlier(score, position, slot, best, oldest, where)
        of_victim = tl.where(where == slot, added, of_victim)
        of_all += tl.where(position >= 0, added, 0.0)
    victim = tl.where(tl.sum(held, 0) > most, first(best, oldest, where), LAST)
    lose(lost + row * lost_row + group * lost_head, victim, where, of_victim, of_all, LOSES)
    tl.debug_barrier()  # all lanes have read the positions before one of them changes
    for begin in range(0, S, TILE):
        slot = begin + tl.arange(0, TILE)
        position, past, shown = seen(positions, slot, S, own, at, window)
        position = unexpired(position, age, window, SLIDES)
        tl.store(positions + slot, tl.where(slot == victim, -1, position), mask=slot < S)


@triton.jit
@no_type_check
def lose(lost, victim, where, of_victim, of_all, LOSES: tl.constexpr):
    """Add the victim's mass (0 if there is no victim) and the mass of all lanes to the two numbers at ``lost``; do
    nothing without `LOSES`.
    """
    if LOSES:
        gone = tl.sum(tl.where((where == victim) & (victim < LAST), of_victim, 0.0), 0)
        tl.store(lost, tl.load(lost) + gone)
        tl.store(lost + 1, tl.load(lost + 1) + tl.sum(of_all, 0))


@triton.jit
@no_type_check
def updated(sums, slot, S, own, fade, added):
    """Multiply the sums by ``fade``, add ``added``, store and return them; a new token starts at 0."""
    past = tl.load(sums, mask=slot < S, other=0.0)
    summed = tl.where(slot == own, 0.0, past) * fade + added
    tl.store(sums, summed, mask=slot < S)
    return summed
