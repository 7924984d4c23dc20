"""Blocks of ggml's quantised types, taken apart into codes, scales and minimums without a change of their values.

The names and layouts are those of the package ``gguf``, whose ``quants.py`` unpacks the same blocks to numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

_Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
_Parts: TypeAlias = tuple[_Array, _Array, _Array]
"""Codes, scales and minimums of some blocks, each with a row for each block."""

K = 256
"""Weights of a block of the types that are named K."""


class BlockType(NamedTuple):
    """How the weights of a type are made: ``scale * code + minimum``.

    Attributes:
        bits: of a code in a `QuantizedTensor`, whose kernel reads no fewer than 4.
        group: weights that share scale and minimum.
        split: takes blocks apart.
    """

    bits: int
    group: int
    split: Callable[[_Array], _Parts]


def _half(columns: _Array) -> _Array:
    """Read pairs of bytes as float16, and return them in float32."""
    return np.ascontiguousarray(columns).view(np.float16).astype(np.float32)


def _nibbles(stored: _Array, width: int) -> _Array:
    """Return codes of 4 bits, a row for each block: of ``width`` bytes first all lower halves, then all upper ones."""
    codes: _Array = (stored.reshape(len(stored), -1, 1, width) >> np.array([0, 4], np.uint8).reshape(2, 1)) & 15
    return codes.reshape(len(stored), -1)


def _upper_bits(stored: _Array, bits: int, width: int) -> _Array:
    """Return the ``bits`` bits that are stored of each code, a row for each block: of ``width`` bytes first the lowest
    bits of all, then the next ones.
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(-1, 1)
    codes: _Array = (stored.reshape(len(stored), -1, 1, width) >> shifts) & (2**bits - 1)
    return codes.reshape(len(stored), -1)


def _one_bit(stored: _Array) -> _Array:
    """Return the bits of each block, the lowest of a byte first."""
    bits: _Array = np.unpackbits(stored, axis=1, bitorder="little")
    return bits


def _q4_0(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q4_0, a row for each block."""
    scale = _half(blocks[:, :2])
    # codes are stored with 8 added, so the smallest number is -8 times the scale
    return _nibbles(blocks[:, 2:], 16), scale, -8 * scale


def _q4_1(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q4_1, a row for each block."""
    return _nibbles(blocks[:, 4:], 16), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q5_0(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q5_0, a row for each block."""
    scale = _half(blocks[:, :2])  # codes are stored with 16 added
    return _nibbles(blocks[:, 6:], 16) | _one_bit(blocks[:, 2:6]) << 4, scale, -16 * scale


def _q5_1(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q5_1, a row for each block."""
    codes = _nibbles(blocks[:, 8:], 16) | _one_bit(blocks[:, 4:8]) << 4
    return codes, _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q8_0(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q8_0, a row for each block."""
    scale = _half(blocks[:, :2])
    return blocks[:, 2:] ^ 128, scale, -128 * scale  # signed codes as unsigned ones


def _q2_k(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q2_K, a row for each block."""
    levels, stored, scale, minimum = np.hsplit(blocks, [16, 80, 82])
    return _upper_bits(stored, 2, 32), _half(scale) * (levels & 15), -_half(minimum) * (levels >> 4)


def _q3_k(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q3_K, a row for each block."""
    upper, stored, levels, scale = np.hsplit(blocks, [32, 96, 108])
    lowest = _nibbles(levels[:, :8], 8)
    highest = _upper_bits(levels[:, 8:], 2, 4)
    scales = _half(scale) * ((lowest | highest << 4).astype(np.float32) - 32)  # of 6 bits with 32 added
    return _upper_bits(stored, 2, 32) | _upper_bits(upper, 1, 32) << 2, scales, -4 * scales  # codes with 4 added


def _levels(stored: _Array) -> tuple[_Array, _Array]:
    """Return the eight 6-bit scales, and the eight minimums, that 12 bytes of each block of Q4_K or Q5_K hold."""
    # of the last four, the lower bits share the last four bytes, and the two upper bits lie above the first four's
    first, second, third = np.hsplit(stored, 3)
    scales = np.hstack((first & 63, (third & 15) | ((first >> 2) & 48)))
    return scales, np.hstack((second & 63, (third >> 4) | ((second >> 2) & 48)))


def _q4_k(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q4_K, a row for each block."""
    scale, minimum, levels, stored = np.hsplit(blocks, [2, 4, 16])
    scales, minimums = _levels(levels)
    return _nibbles(stored, 32), _half(scale) * scales, -_half(minimum) * minimums


def _q5_k(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q5_K, a row for each block."""
    scale, minimum, levels, upper, stored = np.hsplit(blocks, [2, 4, 16, 48])
    scales, minimums = _levels(levels)
    codes = _nibbles(stored, 32) | _upper_bits(upper, 1, 32) << 4
    return codes, _half(scale) * scales, -_half(minimum) * minimums


def _q6_k(blocks: _Array) -> _Parts:
    """Return the codes, scales and minimums of stored blocks of Q6_K, a row for each block."""
    lower, upper, levels, scale = np.hsplit(blocks, [128, 192, 208])
    scales = _half(scale) * levels.view(np.int8)
    return _nibbles(lower, 64) | _upper_bits(upper, 2, 32) << 4, scales, -32 * scales  # codes with 32 added


TYPES = {
    "Q4_0": BlockType(4, 32, _q4_0),
    "Q4_1": BlockType(4, 32, _q4_1),
    "Q5_0": BlockType(5, 32, _q5_0),
    "Q5_1": BlockType(5, 32, _q5_1),
    "Q8_0": BlockType(8, 32, _q8_0),
    "Q2_K": BlockType(4, 16, _q2_k),
    "Q3_K": BlockType(4, 16, _q3_k),
    "Q4_K": BlockType(4, 32, _q4_k),
    "Q5_K": BlockType(5, 32, _q5_k),
    "Q6_K": BlockType(6, 16, _q6_k),
}
"""The types that can be taken apart, by their names in the package ``gguf``."""


def split(kind: BlockType, stored: _Array, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes, scales and minimums of the blocks of some rows of a matrix, one row of each for every row.

    Args:
        kind: one of `TYPES`.
        stored: the blocks, one after the other.
        rows: number of rows.
    """
    codes, scales, minimums = (torch.from_numpy(part).view(rows, -1) for part in kind.split(stored))
    return codes, scales, minimums
