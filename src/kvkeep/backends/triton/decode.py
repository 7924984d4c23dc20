"""Attention of one token per row over unordered slots, in two kernels: `attend_split` reads, `merge` reports.

All numbers of softmax are to base 2: logits are multiplied by log2(e) once, probabilities are 2^(x - peak) / total. The
scratch between the kernels, float32 and dense:

=========  ==========================  ==================================================================
`mixes`    ``(B, Hk, splits, G, E)``   values weighed by 2^(x - the split's peak)
`bounds`   ``(B, Hk, splits, G, 2)``   the split's peak and the sum of 2^(x - peak); -inf and 0 if it sees nothing
`logits`   ``(B, Hk, G, S)``           x of every visible slot; the others are neither written nor read
=========  ==========================  ==================================================================

Bytes, FLOPs and error: see the kernels. ``u`` is 2^-24, half a unit in the last place of float32.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

from kvkeep.backends.triton.tiles import binary_logits, finite, free_slot, product, weighed


@triton.jit
@no_type_check
def attend_split(
    query, keys, values, positions, now, new_keys, new_values,
    mixes, bounds, logits, slots,
    query_row, query_head, key_row, key_head, key_slot, value_row, value_head, value_slot,
    position_row, position_head, now_row, new_key_row, new_key_head, new_value_row, new_value_head,
    Hk, S, scaling, softcap, window,
    G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, TILE: tl.constexpr, SPLIT: tl.constexpr,
    SCAN: tl.constexpr, CAPPED: tl.constexpr, KEEPS: tl.constexpr, APPENDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One split of one head's slots, for all query heads that share them; grid ``(B·Hk, splits)``.

    The last split takes the rest of at most a tile: with a new token there is one slot more than the budget.
    With `APPENDS` the row's new token is written into the head's free slot first; its key and value take part from
    registers, its position is written by the kernel that comes after; `slots` receives the slot. `KEEPS`: `logits`.

    Layout: query ``(B, Hq, 1, D)``, keys ``(B, Hk, S, D)``, values ``(B, Hk, S, E)``, positions ``(B, #Hk, S)``, any
    strides but dense in the last axis; `BLOCK_G`, `BLOCK_D`, `BLOCK_E` are powers of two from 16; padding is not read.
    Bytes: keys and values of the visible slots once, ``(D + E)`` elements each, 4 for a position (`APPENDS`: and once
    more all positions of the head); writes ``4·G·(E + 2)`` per split and, with `KEEPS`, ``4·G`` per visible slot.
    FLOPs: ``2·G·S·(D + 2·E)``, in float32 ``2·G·S·(D + E)``; with the padding, of `BLOCK_G` instead of G heads.
    Error: a logit errs by ``(D + 3)·u·Σ|q·k|·scaling``, capped by ``8·u·softcap`` more: products of halves are exact
    and float32 adds them up (tensor cores, which cut where others round, err twice as much). A weight errs, relative to
    itself, by that and 4 u of ``exp2``; what it adds to the output by 2^-18 more for bfloat16 values, by 2^-22 + 2^-25
    / p for float16; a sum over a split by S·u, relative to the sum of its terms' sizes.
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
    positions += row * position_row + group * position_head
    logits += head.to(tl.int64) * G * S
    peak, total = tl.full((BLOCK_G,), float("-inf"), tl.float32), tl.zeros((BLOCK_G,), tl.float32)
    mix = tl.zeros((BLOCK_G, BLOCK_E), tl.float32)
    own = -1
    if APPENDS:
        own = free_slot(positions, S, SCAN)
        tl.store(slots + head, own, mask=split == 0)
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
    stop = tl.where(newest >= 0, end - begin, 0)  # a row that is young has whole splits of empty slots
    for start in range(0, stop, TILE):
        slot = begin + start + tl.arange(0, TILE)
        position = tl.load(positions + slot, mask=slot < S, other=-1).to(tl.int32)
        shown = (position >= 0) & (position <= at) & (position > at - window) & (slot != own)
        each = slot.to(tl.int64)[:, None]
        k = tl.load(keys + each * key_slot + d[None, :], mask=shown[:, None] & (d[None, :] < D), other=0.0)
        x = binary_logits(product(q, k.trans(), WIDE), scaling, softcap, CAPPED)
        x = tl.where(shown[None, :], x, float("-inf"))
        if KEEPS:
            tl.store(logits + g[:, None] * S + slot[None, :], x, mask=shown[None, :] & (g[:, None] < G))
        v = tl.load(values + each * value_slot + e[None, :], mask=shown[:, None] & (e[None, :] < E), other=0.0)
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
    """Copy a vector where `here` says so, and return it in float32."""
    vector = tl.load(source + d, mask=d < D, other=0.0)
    tl.store(target + d, vector, mask=here & (d < D))
    return vector.to(tl.float32)


@triton.jit
@no_type_check
def merged(
    mixes, bounds, sinks, splits, head, Hk,
    G: tl.constexpr, E: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_E: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """All splits of a head together: the mixed values, the peak of what is seen, that with the sink, and 1 / total.

    1 / total is 0 for a query that sees nothing, and for the heads that are padding.
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
    """Mean over the query heads of ``scale·2^(gain·(x - base))``; a gain of 0 gives 1 to what a window hides, too."""
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
    """Positions of slots with the new token in its slot; whether the query comes later; whether it sees them."""
    position = tl.load(positions + slot, mask=slot < S, other=-1).to(tl.int32)
    position = tl.where(slot == own, at, position)
    past = (position >= 0) & (position <= at)
    return position, past, past & (position > at - window)


@triton.jit
@no_type_check
def row_weight(row, at, counted, counts, newest, last, log_decay, COUNTED: tl.constexpr, NEWEST: tl.constexpr):
    """What a row counts: 0, or the decay to the power of its distance from the newest one; and that distance."""
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
    """Put the splits of a head together, and reduce what the policy wants to know; grid ``(B·Hk,)``.

    KIND 0: nothing; 1: mass; 2: mass, and in `extra` that of the newest row alone; 3: mass, and whether it is low.

    Layout: out ``(B, Hq, 1, E)``, mass and extra ``(B, Hk, S)`` float32, dense; sinks ``(Hq,)``; one number per row in
    `counted`, `gains`, `newest`; `BLOCK_G` is the power of two that is not below G.
    Bytes: the scratch once (`TEMPERED`: logits and positions twice), ``4·S`` for each of mass and extra; head: ``8·S``
    and ``4·G·(splits·(E + 2) + S)``, beside ``2·S·(D + E)`` of half-precision keys and values.
    FLOPs: about ``G·(2·splits·E + 5·S)``.
    Error: of a probability, relative to itself, twice that of a logit (once of itself, once of the sum), S·u of the sum
    and 16 u of the rest. A gain multiplies the logits' part; the group's mean adds G·u, a decay 2 u·|log2 of a weight|.
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
    """How many slots hold a token that is not after the query."""
    n = tl.zeros((TILE,), tl.int32)
    for begin in range(0, S, TILE):
        _position, past, _shown = seen(positions, begin + tl.arange(0, TILE), S, -1, at, 0)
        n += past.to(tl.int32)
    return tl.sum(n, 0)
