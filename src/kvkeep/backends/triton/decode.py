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

from kvkeep.backends.triton.codes import vectors
from kvkeep.backends.triton.slots import free_slot


@triton.jit
@no_type_check
def product(a, b, WIDE: tl.constexpr, PRECISION: tl.constexpr):
    """``a @ b``, added up in float32; `PRECISION` is that of float32 factors.

    `WIDE`: multiply in float32, for the interpreter, which would multiply the bits of bfloat16 as integers. Products
    of two halves are exact in float32, so only the order of the sum can differ.
    """
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def weighed(p, values, WIDE: tl.constexpr):
    """``p @ values`` for float32 ``p`` in [0, 1]. Halves are multiplied by the upper and the lower part of ``p``.

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
    """Logits to base 2, scaled and soft-capped, from dot products."""
    x = dots * scaling
    if CAPPED:
        size = tl.exp2(tl.abs(x) * (-2.0 * 1.4426950408889634 / softcap))
        capped = softcap * (1.0 - size) / (1.0 + size)  # the hyperbolic tangent, without overflow
        x = tl.where(x < 0, -capped, capped)
    return x * 1.4426950408889634


@triton.jit
@no_type_check
def finite(x):
    """``x``, with 0 for minus infinity: a peak to subtract where nothing was seen."""
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
    """Attention over one split of a head's slots, for all query heads that share them; grid ``(B·Hk, splits)``.

    The last split takes a rest of at most a tile as well: with a new token there is one slot more than the budget.
    `APPENDS`: the row's new token is first written into the head's free slot. Its key and value take part from
    registers, `slots` receives the slot, and the next kernel writes the position. `KEEPS`: `logits` are written.
    With 8 or 4 bits, keys and values are codes with `key_scales` and `value_scales`, see `codes.vectors`; with 16 they
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
    """Copy a vector where `here` is true, and return it in float32."""
    vector = tl.load(source + d, mask=d < D, other=0.0)
    tl.store(target + d, vector, mask=here & (d < D))
    return vector.to(tl.float32)
