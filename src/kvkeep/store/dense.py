"""Slots in the model's dtype: allocated once, written in place, moved only when a whole chunk is cut."""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.native import ops
from kvkeep.types import EMPTY


class DenseStore:
    """Keys, values and positions of one layer, ``capacity`` slots per row and KV head.

    The layout is drawn in ``docs/layouts.md``. The tensors are never replaced: their storage pointers stay the
    same for the life of the store, unless the number of rows is changed.

    Attributes:
        keys: ``(B, Hk, capacity, D)``.
        values: ``(B, Hk, capacity, E)``.
        positions: true positions, ``-1`` = empty.
    """

    keys: Float[Tensor, "B Hk capacity D"]
    values: Float[Tensor, "B Hk capacity E"]
    positions: Int[Tensor, "B Hk capacity"]

    def __init__(self, like_keys: Float[Tensor, "B Hk _ D"], like_values: Float[Tensor, "B Hk _ E"], capacity: int):
        B, Hk, _, D = like_keys.shape
        self.keys = like_keys.new_zeros((B, Hk, capacity, D))
        self.values = like_values.new_zeros((B, Hk, capacity, like_values.shape[-1]))
        self.positions = torch.full((B, Hk, capacity), EMPTY, dtype=torch.int32, device=like_keys.device)

    @property
    def capacity(self) -> int:
        """Slots per row and head."""
        return self.positions.shape[-1]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Every tensor that takes memory."""
        return (self.keys, self.values, self.positions)

    def write(
        self,
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        positions: Int[Tensor, "B 1"],
    ) -> Int[Tensor, "B Hk 1"]:
        """Put one token per row into an empty slot of each head, in place, and say which slot it was.

        Empty slots carry position -1, the smallest, so the smallest position names one. A padded token writes
        position -1: its slot stays empty.
        """
        found = ops.write(self.keys, self.values, self.positions, new=(keys, values), now=positions)
        if found is not None:
            return found
        slot: Int[Tensor, "B Hk 1"] = self.positions.argmin(dim=-1, keepdim=True)
        blocks = torch.arange(slot.numel(), device=slot.device) * self.capacity
        rows = blocks + slot.flatten()  # index of (row, head, slot) in the flattened store
        self.keys.view(-1, self.keys.shape[-1]).index_copy_(0, rows, keys.flatten(0, 2))
        self.values.view(-1, self.values.shape[-1]).index_copy_(0, rows, values.flatten(0, 2))
        new = positions.to(self.positions.dtype)[:, :, None].expand(slot.shape)
        self.positions.scatter_(2, slot, new)
        return slot

    def fill(
        self,
        keys: Float[Tensor, "B Hk n D"],
        values: Float[Tensor, "B Hk n E"],
        positions: Int[Tensor, "B Hk n"],
    ) -> None:
        """Replace the content by ``n <= capacity`` tokens, in place; the other slots become empty."""
        n = positions.shape[-1]
        self.keys[:, :, :n] = keys
        self.values[:, :, :n] = values
        self.positions[:, :, :n] = positions
        self.positions[:, :, n:] = EMPTY

    def beside(
        self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"], *, used: int
    ) -> tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"]]:
        """Copies of the first ``used`` slots with new tokens after them. What is left in empty slots becomes 0."""
        empty = (self.positions[:, :, :used] < 0)[..., None]
        found = [torch.cat([self.keys[:, :, :used], keys], dim=2), torch.cat([self.values[:, :, :used], values], dim=2)]
        for tensor in found:
            tensor[:, :, :used].masked_fill_(empty, 0.0)
        return found[0], found[1]

    def used(self) -> int:
        """Slots up to the last occupied one of any head; on a GPU, where asking means waiting, all of them."""
        if self.positions.device.type != "cpu":
            return self.capacity
        occupied = (self.positions >= 0).flatten(0, 1).any(dim=0).nonzero()
        return int(occupied[-1]) + 1 if len(occupied) else 0

    def clear(self) -> None:
        """Empty every slot."""
        self.positions.fill_(EMPTY)

    def fits(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> bool:
        """Whether new keys and values have this store's rows, heads, head dims, dtype and device."""
        return all(
            (new.shape[:2], new.shape[3], new.dtype, new.device)
            == (held.shape[:2], held.shape[3], held.dtype, held.device)
            for new, held in ((keys, self.keys), (values, self.values))
        )

    def part(self, start: int, stop: int) -> DenseStore:
        """A range of rows as a store of its own that shares this one's memory."""
        part = copy.copy(self)
        part.keys, part.values, part.positions = (tensor[start:stop] for tensor in self.tensors())
        return part

    def select_rows(self, index: Int[Tensor, " n"]) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; in place while the number of rows stays the same."""
        for name in ("keys", "values", "positions"):
            held: Tensor = getattr(self, name)
            selected = held.index_select(0, index)
            if len(selected) == len(held):
                held.copy_(selected)
            else:
                setattr(self, name, selected)
