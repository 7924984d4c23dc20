"""A ring of bits, one for each of a sequence's newest rows, in floats that hold whole numbers exactly."""

from __future__ import annotations

import functools

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.types import EMPTY

BITS = 25
"""Number of bits in a word. A float32 holds the whole numbers from ``-2**24`` to ``2**24 - 1`` exactly."""


def word_names(words: int) -> tuple[str, ...]:
    """The names of a ring's words in a report and in a policy's state."""
    return tuple(f"low{word}" for word in range(words))


def ring(rows: Int[Tensor, "B n"], words: int) -> Int[Tensor, "B n words"]:
    """The bit of each row in a ring of ``BITS * words`` bits, as its value in each word: 0 in all words but one.

    Row ``i`` has the place ``i % (BITS * words)`` and takes it from an older row. The highest bit of a word is its
    sign. A negative row has no bit.
    """
    places = BITS * words
    return _places(words, rows.device)[torch.where(rows < 0, places, rows % places)]


@functools.cache
def _places(words: int, device: torch.device) -> Int[Tensor, "n words"]:
    """The words of each place in a ring, and no bit at all in the last line."""
    with torch.inference_mode(False):
        bits = [1 << bit for bit in range(BITS - 1)] + [-(1 << BITS - 1)]
        one = torch.tensor(bits, dtype=torch.int32, device=device)[:, None]
        return torch.cat([torch.block_diag(*[one] * words), one.new_zeros((1, words))])


def ring_span(first: Int[Tensor, " B"], stop: Int[Tensor, " B"], words: int) -> Int[Tensor, "B words"]:
    """The bits of the rows from ``first`` to ``stop``, ``stop`` excluded; at most the newest rows that fit the ring."""
    rows = stop[:, None] - 1 - torch.arange(BITS * words, device=stop.device)
    return ring(rows.masked_fill(rows < first[:, None], EMPTY), words).sum(dim=1).int()


def ones(bits: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """The number of bits that are set in each word."""
    pairs = (bits & 0x1555555) + (bits >> 1 & 0x0555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return (halves + (halves >> 16)) & 0x3F
