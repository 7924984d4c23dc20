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
    """Return the first slot with the smallest position of a head: an empty one if there is any."""
    best = tl.full((SCAN,), LAST, tl.int32)
    slot = tl.full((SCAN,), LAST, tl.int32)
    for begin in range(0, S, SCAN):
        offsets = begin + tl.arange(0, SCAN)
        # an empty slot has position -1, the smallest
        position = tl.load(positions + offsets, mask=offsets < S, other=LAST).to(tl.int32)
        slot = tl.where(position < best, offsets, slot)
        best = tl.minimum(best, position)
    return tl.min(tl.where(best == tl.min(best, 0), slot, LAST), 0)


@triton.jit
@no_type_check
def shielded(score, position, recent_from, sinks, chosen):
    """Compute `kvkeep.backends.base.SlotLimits.ranked` in a kernel; positions below `chosen` go after all others."""
    # NaN is the worst; infinity becomes the largest float32, below what is protected.
    score = tl.where(score != score, float("-inf"), tl.where(score == float("inf"), 3.4028234663852886e38, score))
    score = tl.where(position < chosen, 3.4028234663852886e38, score)
    return tl.where((position >= recent_from) | (position < sinks), float("inf"), score)


@triton.jit
@no_type_check
def unexpired(position, age, window, SLIDES: tl.constexpr):
    """Compute `kvkeep.kv.ranking.expire` in a kernel, if the layer has a window."""
    return tl.where(position <= age - window, -1, position) if SLIDES else position


@triton.jit
@no_type_check
def earlier(score, position, slot, best, oldest, where):
    """Return score, position and index, lane by lane, of whichever slot goes first: `slot` if it is occupied, or the
    one found so far, see `kvkeep.kv.ranking.weakest`.
    """
    sooner = (position >= 0) & ((score < best) | ((score == best) & (position < oldest)))
    return tl.where(sooner, score, best), tl.where(sooner, position, oldest), tl.where(sooner, slot, where)


@triton.jit
@no_type_check
def first(best, position, slot):
    """Return the slot that goes first of those that `earlier` has found in the lanes; `LAST` if no lane has one."""
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
def chosen_before(prompts, row, prompt_row, recent, CHOSEN: tl.constexpr):
    """Return the position before which a prompt's tokens go last: its length without the `recent` newest; 0 without
    `CHOSEN`.
    """
    before = 0
    if CHOSEN:
        before = tl.load(prompts + row * prompt_row).to(tl.int32) - recent
    return before


@triton.jit
@no_type_check
def append(
    keys, values, positions, new_keys, new_values, now, slots,
    key_row, key_head, key_slot, value_row, value_head, value_slot, position_row, position_head,
    new_key_row, new_key_head, new_value_row, new_value_head, now_row, Hk, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Write a row's token into the head's free slot; grid ``(B·Hk,)``.

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
    positions, scores, ages, recents, limits, prompts,
    position_row, position_head, score_row, score_head, age_row, recent_row, recent_head, limit_row, limit_head,
    prompt_row, Hk, S, window, first_ones, recent, limit,
    SCAN: tl.constexpr, RECENTS: tl.constexpr, LIMITS: tl.constexpr, SLIDES: tl.constexpr, SCORED: tl.constexpr,
    CHOSEN: tl.constexpr,
):  # fmt: skip
    """Empty the slots that a window has passed, then the weakest slot of a head over its limit; grid ``(B·Hk,)``.

    Layout: positions ``(B, Hk, S)`` int32 and scores ``(B, Hk, S)`` float32, any strides but dense in the last axis;
    ages ``(B,)``: tokens that each row has seen; recents and limits: tables, or one number for all. Without `SCORED`
    the kernel only expires. `CHOSEN`: prompts ``(B,)``, see `SlotLimits.prompt`.
    Bytes: ``16·S``, as positions are read twice and written once. FLOPs: none, about ``10·S`` comparisons.
    """
    head = tl.program_id(0)
    row, group = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    positions += row * position_row + group * position_head
    scores += row * score_row + group * score_head
    age = tl.load(ages + row * age_row).to(tl.int32)
    newest = number(recent, recents, row * recent_row + group * recent_head, 1, RECENTS)
    recent_from, chosen = age - newest, chosen_before(prompts, row, prompt_row, newest, CHOSEN)
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
            score = shielded(
                tl.load(scores + slot, mask=slot < S, other=0.0), position, recent_from, first_ones, chosen
            )
            best, oldest, where = earlier(score, position, slot, best, oldest, where)
    victim = tl.where(tl.sum(held, 0) > most, first(best, oldest, where), LAST)
    tl.debug_barrier()  # all lanes have read the positions before one of them changes
    for begin in range(0, S, SCAN):
        slot = begin + tl.arange(0, SCAN)
        position = unexpired(tl.load(positions + slot, mask=slot < S, other=-1), age, window, SLIDES)
        tl.store(positions + slot, tl.where(slot == victim, -1, position), mask=slot < S)


# Keys and values in 8 or 4 bits in the kernels of decode; `kvkeep.kv.slot_codec` says how they lie.


@triton.jit
@no_type_check
def vectors(
    numbers, scales, slot, slot_stride, scale_stride, d, shown, like,
    D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Load the vectors of some slots in the dtype of `like`: ``(TILE, BLOCK_D)``, 0 where `shown` is false.

    With 16 `BITS` the numbers are the vectors. Codes are multiplied with their scales in float32, at 4 bits their
    offsets are added, and the result is rounded.
    """
    each = slot.to(tl.int64)[:, None]
    if BITS == 16:
        inside = shown[:, None] & (d[None, :] < D)
        found = tl.load(numbers + each * slot_stride + d[None, :], mask=inside, other=0.0)
    else:
        code = numbers_of(numbers + each * slot_stride, d, shown, D, BITS, GROUP)
        scale = spread(scales + each * scale_stride, d, shown, D, BITS, GROUP)
        # the bits of 1.5 * 2^23 + code; conversion of integers is slow
        number = (code + 0x4B400000).to(tl.float32, bitcast=True) - 12582912.0
        wide = number * scale  # a slot that is not shown has a scale of 0, and an offset of 0
        if BITS == 4:
            wide += spread(scales + each * scale_stride + 1, d, shown, D, BITS, GROUP)
        found = wide.to(like.dtype)
    return found


@triton.jit
@no_type_check
def numbers_of(numbers, d, shown, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Load the codes of some slots' channels as integers, ``(TILE, BLOCK_D)``, 0 where `shown` is false.

    Each byte is read once where groups fill the block.
    """
    BLOCK: tl.constexpr = d.shape[0]
    TILE: tl.constexpr = shown.shape[0]
    GROUPS: tl.constexpr = BLOCK // GROUP
    if BITS == 8:
        code = tl.load(numbers + d[None, :], mask=shown[:, None] & (d[None, :] < D), other=0).to(tl.int32)
    elif GROUPS * GROUP == BLOCK:
        i = tl.arange(0, BLOCK // 2)
        pairs = tl.load(numbers + i[None, :], mask=shown[:, None] & (i[None, :] < D // 2), other=0).to(tl.int32)
        pairs = tl.reshape(pairs, (TILE, GROUPS, GROUP // 2))
        code = tl.reshape(tl.permute(tl.join(pairs & 15, pairs >> 4), (0, 1, 3, 2)), (TILE, BLOCK))
    else:
        half: tl.constexpr = GROUP // 2
        byte, upper = d // GROUP * half + d % half, d % GROUP // half
        both = tl.load(numbers + byte[None, :], mask=shown[:, None] & (d[None, :] < D), other=0).to(tl.int32)
        code = (both >> (upper * 4)[None, :]) & 15
    return code


@triton.jit
@no_type_check
def spread(scales, d, shown, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr):
    """Load for each channel of some slots the scale of its group, ``(TILE, BLOCK_D)`` in float32, 0 where `shown` is
    false; with `scales` one number further, the offset of its group.

    Each is read once where groups fill the block.
    """
    HALVES: tl.constexpr = 2 if BITS == 4 else 1  # numbers of a group
    BLOCK: tl.constexpr = d.shape[0]
    GROUPS: tl.constexpr = BLOCK // GROUP
    TILE: tl.constexpr = shown.shape[0]
    if GROUPS * GROUP == BLOCK:
        j = tl.arange(0, GROUPS)
        few = tl.load(scales + j[None, :] * HALVES, mask=shown[:, None] & (j[None, :] < D // GROUP), other=0.0)
        each = tl.reshape(tl.broadcast_to(few.to(tl.float32)[:, :, None], (TILE, GROUPS, GROUP)), (TILE, BLOCK))
    else:
        wide = tl.load(scales + (d // GROUP * HALVES)[None, :], mask=shown[:, None] & (d[None, :] < D), other=0.0)
        each = wide.to(tl.float32)
    return each


@triton.jit
@no_type_check
def append_codes(
    keys, values, positions, key_scales, value_scales, new_keys, new_values, now, slots,
    key_row, key_head, key_slot, value_row, value_head, value_slot, position_row, position_head,
    key_scale_row, key_scale_head, key_scale_slot, value_scale_row, value_scale_head, value_scale_slot,
    new_key_row, new_key_head, new_value_row, new_value_head, now_row, Hk, S,
    D: tl.constexpr, E: tl.constexpr, SCAN: tl.constexpr,
    KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr, KEY_GROUP: tl.constexpr, VALUE_GROUP: tl.constexpr,
    KEY_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Quantize a row's token into the head's free slot, which stays empty if the token is not finite; grid
    ``(B·Hk,)``.

    Layout: as in `slots.append`; the new key is turned (`kvkeep.kv.slot_codec.hadamard`) and float32. `KEY_BLOCK` and
    `VALUE_BLOCK`: powers of two for the bytes of a group.
    Bytes: ``4·S`` of positions, ``D + E`` elements, their codes and scales. FLOPs: about ``10·(D + E)``.
    Error: the codes are those of `kvkeep.kv.slot_codec.encode`.
    """
    head = tl.program_id(0)
    row, group = (head // Hk).to(tl.int64), (head % Hk).to(tl.int64)
    positions += row * position_row + group * position_head
    slot = free_slot(positions, S, SCAN).to(tl.int64)
    keys += row * key_row + group * key_head + slot * key_slot
    key_scales += row * key_scale_row + group * key_scale_head + slot * key_scale_slot
    values += row * value_row + group * value_head + slot * value_slot
    value_scales += row * value_scale_row + group * value_scale_head + slot * value_scale_slot
    new_keys += row * new_key_row + group * new_key_head
    new_values += row * new_value_row + group * new_value_head
    bad = coded(new_keys, keys, key_scales, D, KEY_BITS, KEY_GROUP, KEY_BLOCK)
    bad += coded(new_values, values, value_scales, E, VALUE_BITS, VALUE_GROUP, VALUE_BLOCK)
    tl.store(slots + head, slot)
    tl.debug_barrier()  # all lanes have read the positions before one of them changes
    tl.store(positions + slot, tl.where(bad > 0, -1, tl.load(now + row * now_row).to(tl.int32)))


@triton.jit
@no_type_check
def coded(
    new, numbers, scales, D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Quantize a vector, and store its codes and scales in a slot. Return how many of its groups hold a number that is
    not finite; all of such a group becomes 0.
    """
    wide: tl.constexpr = GROUP * BITS // 8  # bytes of a group
    at = tl.arange(0, BLOCK)
    inside = at < wide
    bad = 0
    for j in tl.static_range(D // GROUP):
        low = tl.load(new + j * GROUP + at, mask=inside, other=0.0).to(tl.float32)
        high = low
        if BITS == 4:
            high = tl.load(new + j * GROUP + wide + at, mask=inside, other=0.0).to(tl.float32)
        whole = (tl.abs(low) < float("inf")) & (tl.abs(high) < float("inf"))
        broken = 1 - tl.min(whole.to(tl.int32), 0)
        bad += broken
        low, high = tl.where(broken > 0, 0.0, low), tl.where(broken > 0, 0.0, high)
        if BITS == 8:
            scale = half(tl.div_rn(tl.max(tl.abs(low), 0), 127.0))
            tl.store(scales + j, scale)
            code = rounded(low, scale.to(tl.float32), -127.0, 127.0)
        else:
            # + 0.0: zero has one sign
            offset = half(tl.min(tl.where(inside, tl.minimum(low, high), float("inf")), 0) + 0.0)
            from_zero = offset.to(tl.float32)
            most = tl.max(tl.where(inside, tl.maximum(low, high), float("-inf")), 0)
            scale = half(tl.maximum(tl.div_rn(most - from_zero, 15.0), 0.0))
            tl.store(scales + 2 * j, scale)
            tl.store(scales + 2 * j + 1, offset)
            by = scale.to(tl.float32)
            code = rounded(low - from_zero, by, 0.0, 15.0) | (rounded(high - from_zero, by, 0.0, 15.0) << 4)
        tl.store(numbers + j * wide + at, code.to(numbers.dtype.element_ty), mask=inside)
    return bad


@triton.jit
@no_type_check
def half(x):
    """Return the nearest finite float16."""
    return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16)


@triton.jit
@no_type_check
def rounded(x, by, least: tl.constexpr, most: tl.constexpr):
    """Return ``x / by`` rounded to whole numbers (ties to even), limited to `least` and `most`; 0 if `by` is 0."""
    quotient = tl.where(by > 0.0, tl.div_rn(x, tl.where(by > 0.0, by, 1.0)), 0.0)
    quotient = tl.minimum(tl.maximum(quotient, least), most)
    return ((quotient + 12582912.0) - 12582912.0).to(tl.int32)  # 1.5 * 2**23: float32 has no fractions there
