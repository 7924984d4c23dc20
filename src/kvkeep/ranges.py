"""Slots of which each head owns a range of a pool that all heads of its row share.

Positions and a policy's state are small, so they are copied side by side for each step. Keys and values are not: a
backend reads them where they lie, and a policy that looks at them gets a copy.
"""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.types import Slots, View

Ranges: TypeAlias = tuple[Int[Tensor, "B Hk"], Int[Tensor, "B Hk"]]
"""Of each head, the first entry of its range and the number of entries."""


class PoolSlots(Slots):
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
        made = cls(pool[0], pool[1], positions)
        made.pool_keys, made.pool_values = pool
        (made.starts, made.sizes), made.entries = ranges, entries
        return made

    @functools.cached_property
    def keys(self) -> Float[Tensor, "B Hk S D"]:
        """A copy of the keys."""
        return side_by_side(self.pool_keys, self.entries)

    @functools.cached_property
    def values(self) -> Float[Tensor, "B Hk S E"]:
        """A copy of the values."""
        return side_by_side(self.pool_values, self.entries)

    def __iter__(self) -> Any:
        return iter(self.copied())

    def __getitem__(self, item: Any) -> Any:
        return self.copied()[item]

    def _replace(self, **changes: Any) -> Slots:  # type: ignore[override]
        return self.copied()._replace(**changes)

    def copied(self) -> Slots:
        """The same slots side by side, as copies."""
        return Slots(self.keys, self.values, self.positions)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> None:
        """Write one token of each head into the pool, in the given slots."""
        self.forget()
        entry = self.entries.gather(-1, slot)
        put_back(self.pool_keys, entry, keys.to(self.pool_keys.dtype))
        put_back(self.pool_values, entry, values.to(self.pool_values.dtype))

    def forget(self) -> None:
        """Drop the copies, because the pool has changed."""
        vars(self).pop("keys", None)
        vars(self).pop("values", None)


class PoolView(View):
    """A view of slots in a pool. Keys and values are copied when the policy first looks at them."""

    _slots: PoolSlots

    @classmethod
    def of(cls, slots: PoolSlots, **others: Any) -> PoolView:
        """A view of these slots.

        Args:
            slots: the slots.
            others: the other attributes of `View`.
        """
        nothing = slots.pool_keys.new_empty((*slots.positions.shape, 0))
        view = cls(slots.positions, nothing, nothing, **others)
        own = vars(view)
        del own["keys"], own["values"]
        own["_slots"] = slots
        return view

    @functools.cached_property
    def keys(self) -> Float[Tensor, "B Hk S D"]:
        """A copy of the keys."""
        return self._slots.keys

    @functools.cached_property
    def values(self) -> Float[Tensor, "B Hk S E"]:
        """A copy of the values."""
        return self._slots.values


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
