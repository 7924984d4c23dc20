"""Counter-based random numbers: pure functions of their keys, so results never depend on batching or order.

The generator is the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), applied once per key.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.head_sharding import ALONE, Heads

# minus 2^64: the same bits as signed numbers, for torch shifts no unsigned ones
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_MIX_1 = 0xBF58476D1CE4E5B9 - 2**64
_MIX_2 = 0x94D049BB133111EB - 2**64


def _shift_right(x: Int[Tensor, "..."], bits: int) -> Int[Tensor, "..."]:
    """Return int64 ``x`` shifted right with zeros filled in, as if unsigned: torch shifts no unsigned numbers."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return SplitMix64's finaliser of 64-bit numbers: every input bit changes about half of the output bits."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniform(seed: int, *keys: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return uniform numbers in [0, 1), one for each element of the broadcast ``keys``.

    Args:
        seed: the user's seed.
        keys: integer tensors that broadcast together, e.g. sequence, layer, head and position.

    Returns:
        Float32 with 24 random bits, equal for equal keys on every device.
    """
    signed = (seed + 2**63) % 2**64 - 2**63  # any integer is a seed; int64 holds 64 bits of it
    state = torch.full((), signed, dtype=torch.int64, device=keys[0].device)
    for key in keys:
        state = _mix((state ^ key.to(torch.int64)) + _GOLDEN)
    return _shift_right(state, 40).to(torch.float32) / 2**24  # a float32 holds 24 bits exactly


def spread(key: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    """Return 64 bits for each key that look random, so that keys can be joined by exclusive or. 0 stays 0."""
    return _mix(key.to(torch.int64))


def gumbel(seed: int, *keys: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return standard Gumbel numbers in float64, ``-ln(-ln u)`` with ``u`` from `uniform`, moved to the middle of its
    step. They are equal for equal keys.
    """
    u = uniform(seed, *keys).double() + 2.0**-25  # steps are 2^-24; never 0, whose logarithm is infinite
    return -(-u.log()).log()


@dataclass(frozen=True, eq=False)
class Gumbel:
    """Gumbel noise for every pair of a query row and a key, different for each query head.

    Attributes:
        seed: the user's seed.
        layer: index of the layer.
        sequences: identity of each row of the batch.
        of: which heads of the layer this process holds.
    """

    seed: int
    layer: int
    sequences: Int[Tensor, " B"]
    of: Heads = ALONE

    def factor(
        self, shape: tuple[int, ...], queries: Int[Tensor, "B T"], keys: Int[Tensor, "B #Hk S"]
    ) -> Float[Tensor, "B Hk G T S"]:
        """Return ``exp(noise)``, the factor on attention probabilities before they are normalised again, in float64.

        Args:
            shape: of the probabilities; only the numbers of KV heads and of query heads in a group are read.
            queries: true positions of the query rows.
            keys: true positions of the keys.
        """
        _, Hk, G, _, _ = shape
        heads = self.of.numbers(Hk * G, queries.device).view(1, Hk, G, 1, 1)
        rows, columns = queries[:, None, None, :, None], keys[:, :, None, None]
        sequence, layer = self.sequences.view(-1, 1, 1, 1, 1), queries.new_full((), self.layer)
        return gumbel(self.seed, sequence, layer, heads, rows, columns).exp()
