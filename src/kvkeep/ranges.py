"""Slots of which each head owns a range of a pool that all heads of its row share.

Positions and a policy's state are small, so they are copied side by side for each step. Keys and values are not: a
backend reads them where they lie, and a policy that looks at them gets a copy.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.lazy import LazySlots, nothing
from kvkeep.types import Slots

Ranges: TypeAlias = tuple[Int[Tensor, "B Hk"], Int[Tensor, "B Hk"]]
"""Of each head, the first entry of its range and the number of entries."""


class PoolSlots(LazySlots):
    """Slots whose keys and values lie in a pool. Slot ``s`` of a head is entry ``starts + s`` of its row's pool.

    As `Slots` they have the shapes of slots side by side, as wide as the longest range needs. What is beyond the end of
    a head's range is empty, and stays empty. ``keys`` and ``values`` are copies that are made when they are first read;
    only `write` changes the pool.

    Attributes:
        pool_keys: keys of all heads.
        pool_values: values of all heads.
        starts: first entry of each head's range.
        sizes: number of entries of each head's range.
        entries: entry of each slot, see `indices`. The last entry of a row's pool belongs to no head.
    """

    pool_keys: Float[Tensor, "B P D"]
    pool_values: Float[Tensor, "B P E"]
    starts: Int[Tensor, "B Hk"]
    sizes: Int[Tensor, "B Hk"]
    entries: Int[Tensor, "B Hk S"]

    @classmethod
    def of(
        cls,
        pool: tuple[Float[Tensor, "B P D"], Float[Tensor, "B P E"]],
        positions: Int[Tensor, "B Hk S"],
        ranges: Ranges,
        entries: Int[Tensor, "B Hk S"],
    ) -> PoolSlots:
        """Slots in a pool.

        Args:
            pool: keys and values.
            positions: true positions, side by side.
            ranges: ``starts`` and ``sizes``.
            entries: entry of each slot.
        """
        made = cls(*nothing(positions), positions)
        made.pool_keys, made.pool_values = pool
        (made.starts, made.sizes), made.entries = ranges, entries
        return made

    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys."""
        return side_by_side(self.pool_keys, self.entries)

    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""
        return side_by_side(self.pool_values, self.entries)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> None:
        """Write one token of each head into the pool, in the given slots."""
        self.forget()
        entry = self.entries.gather(-1, slot)
        put_back(self.pool_keys, entry, keys.to(self.pool_keys.dtype))
        put_back(self.pool_values, entry, values.to(self.pool_values.dtype))


def lying(slots: Slots) -> tuple[Slots, Ranges | None]:
    """Slots as they lie in memory, and the range of each head in a pool; ``None``: they lie side by side.

    Every head is shown the keys and values of its row's whole pool.
    """
    if not isinstance(slots, PoolSlots):
        return slots, None
    heads = slots.positions.shape[1]
    keys, values = (pool[:, None].expand(-1, heads, -1, -1) for pool in (slots.pool_keys, slots.pool_values))
    return Slots(keys, values, slots.positions), (slots.starts, slots.sizes)


def indices(starts: Int[Tensor, "B Hk"], sizes: Int[Tensor, "B Hk"], *, width: int, pool: int) -> Int[Tensor, "B Hk S"]:
    """The entry of each slot of each head, counted over the pools of all rows.

    Args:
        starts: first entry of each head's range, counted in its row.
        sizes: number of entries of each head's range.
        width: slots per head.
        pool: entries of a row. Slots beyond the end of a range share the last one.
    """
    at = torch.arange(width, device=starts.device)
    before = torch.arange(0, len(starts) * pool, pool, device=starts.device)[:, None]
    return torch.where(at < sizes[..., None], at + (starts + before)[..., None], (before + pool - 1)[..., None])


def side_by_side(pool: Tensor, index: Int[Tensor, "B Hk S"]) -> Tensor:
    """Copies of entries of the pools ``(B, P, ...)`` in the order of `indices`, ``(B, Hk, S, ...)``."""
    inner = pool.shape[2:]
    return pool.reshape(-1, *inner).index_select(0, index.flatten()).view(*index.shape, *inner)


def put_back(pool: Tensor, index: Int[Tensor, "B Hk S"], content: Tensor) -> None:
    """Write into the entries of the pools, which must be contiguous; the inverse of `side_by_side`."""
    inner = pool.shape[2:]
    pool.view(-1, *inner).index_copy_(0, index.flatten(), content.reshape(index.numel(), *inner))
