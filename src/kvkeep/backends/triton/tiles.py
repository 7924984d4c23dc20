"""What the kernels share: products of tiles, logits, and which slot comes first.

Kernels carry no annotations but those that Triton reads, and are hidden from the tests' checks of shapes.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

LAST = tl.constexpr(2**31 - 1)
"""Later than any position, and larger than any slot."""


@triton.jit
@no_type_check
def product(a, b, WIDE: tl.constexpr):
    """``a @ b``, added up in float32.

    WIDE: multiply in float32. Products of two halves are exact there, so only the order of the sum can differ; the
    interpreter needs it, which would multiply the bits of bfloat16 as integers.
    """
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
@no_type_check
def weighed(p, values, WIDE: tl.constexpr):
    """``p @ values`` for float32 ``p`` in [0, 1]: halves are multiplied by its upper and lower part, one by one.

    The parts leave of ``p`` what is below 2^-18 of it in bfloat16, below 2^-22 of it or 2^-25 in float16.
    """
    if values.dtype == tl.float32:
        return product(p, values, WIDE)
    upper = p.to(values.dtype)
    lower = (p - upper.to(tl.float32)).to(values.dtype)
    return product(upper, values, WIDE) + product(lower, values, WIDE)


@triton.jit
@no_type_check
def binary_logits(dots, scaling, softcap, CAPPED: tl.constexpr):
    """Logits to base 2, scaled and soft-capped: 2 to their power is what softmax adds up."""
    x = dots * scaling
    if CAPPED:
        size = tl.exp2(tl.abs(x) * (-2.0 * 1.4426950408889634 / softcap))
        capped = softcap * (1.0 - size) / (1.0 + size)  # the hyperbolic tangent, without overflow
        x = tl.where(x < 0, -capped, capped)
    return x * 1.4426950408889634


@triton.jit
@no_type_check
def finite(x):
    """Zero for minus infinity: what is subtracted where nothing was seen."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
@no_type_check
def first(best, position, slot):
    """The slot with the smallest (score, position) of all lanes; `LAST` if there is none."""
    lowest = tl.min(best, 0)
    oldest = tl.min(tl.where(best == lowest, position, LAST), 0)
    return tl.min(tl.where((best == lowest) & (position == oldest), slot, LAST), 0)


@triton.jit
@no_type_check
def free_slot(positions, S, SCAN: tl.constexpr):
    """The first slot with the smallest position, which is an empty one if there is any."""
    best = tl.full((SCAN,), LAST, tl.int32)
    slot = tl.full((SCAN,), LAST, tl.int32)
    for begin in range(0, S, SCAN):
        offsets = begin + tl.arange(0, SCAN)
        position = tl.load(positions + offsets, mask=offsets < S, other=LAST).to(tl.int32)
        slot = tl.where(position < best, offsets, slot)
        best = tl.minimum(best, position)
    return tl.min(tl.where(best == tl.min(best, 0), slot, LAST), 0)
