"""Slots of which each head owns a range of a pool that all heads of its row share.

Positions and a policy's state are small, so they are copied side by side for each step. Keys and values are not: a
backend reads them where they lie, and a policy that looks at them gets a copy.
"""

from __future__ import annotations

import functools
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.lazy import LazySlots, nothing
from kvkeep.types import Slots
from kvkeep.vectors import Vectors

Ranges: TypeAlias = tuple[Int[Tensor, "B Hk"], Int[Tensor, "B Hk"]]
"""Of each head, the first entry of its range and the number of entries."""


class PoolSlots(LazySlots):
    """Slots whose keys and values lie in a pool. Slot ``s`` of a head is entry ``starts + s`` of its row's pool.

    As `Slots` they have the shapes of slots side by side, as wide as the longest range needs. What is beyond the end of
    a head's range is empty, and stays empty. ``keys`` and ``values`` are copies that are made when they are first read;
    only `write` changes the pool.

    Attributes:
        pool: keys and values of all heads, ``(B, P, ...)``.
        starts: first entry of each head's range.
        sizes: number of entries of each head's range.
        entries: entry of each slot, see `indices`. The last entry of a row's pool belongs to no head.
    """

    pool: Vectors
    starts: Int[Tensor, "B Hk"]
    sizes: Int[Tensor, "B Hk"]
    entries: Int[Tensor, "B Hk S"]

    @classmethod
    def of(
        cls, pool: Vectors, positions: Int[Tensor, "B Hk S"], ranges: Ranges, entries: Int[Tensor, "B Hk S"]
    ) -> PoolSlots:
        """Slots in a pool.

        Args:
            pool: keys and values.
            positions: true positions, side by side.
            ranges: ``starts`` and ``sizes``.
            entries: entry of each slot.
        """
        made = cls(*nothing(positions), positions)
        made.pool = pool
        (made.starts, made.sizes), made.entries = ranges, entries
        return made

    @functools.cached_property
    def laid(self) -> Slots:
        """Copies of the slots side by side, which hold codes if the pool does."""
        return self.pool.each(self._copied).slots(self.positions) if self.pool.bits else self.copied()

    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys."""
        return self.laid.keys if self.pool.bits else self._copied(self.pool.tensors["keys"])

    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""
        return self.laid.values if self.pool.bits else self._copied(self.pool.tensors["values"])

    def _copied(self, pool: Tensor) -> Tensor:
        return side_by_side(pool, self.entries)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> Bool[Tensor, "B Hk 1"] | None:
        """Write one token of each head into the pool, in the given slots. Return which heads can use theirs."""
        self.forget()
        entry, (new, usable) = self.entries.gather(-1, slot), Vectors.of(keys, values, self.pool.bits)
        for name, pool in self.pool.tensors.items():
            put_back(pool, entry, new.tensors[name].to(pool.dtype))
        return usable

    def forget(self) -> None:
        """Drop the copies, because the slots have changed."""
        super().forget()
        vars(self).pop("laid", None)


def lying(slots: Slots) -> tuple[Slots, Ranges | None]:
    """Slots as they lie in memory, and the range of each head in a pool; ``None``: they lie side by side.

    Every head is shown the keys and values of its row's whole pool.
    """
    if not isinstance(slots, PoolSlots):
        return slots, None
    heads = slots.positions.shape[1]
    shown = slots.pool.each(lambda pool: pool[:, None].expand(-1, heads, -1, -1))
    return shown.slots(slots.positions), (slots.starts, slots.sizes)


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
