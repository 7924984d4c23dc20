"""One block for all layers of a model, whose heads share one pool of slots per row. A layer works on its part of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.errors import ShapeError
from kvkeep.kv.block import Block
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.kv_bits import TRANSFORMS
from kvkeep.pins import Spans
from kvkeep.types import EMPTY, MemoryUsage

_OF_HEADS = ("store.starts", "store.sizes", *(f"store.{name}" for name in TRANSFORMS), "lost", "budget")
_OF_LAYERS = ("seen", "prompt")
"""Tensors whose second axis is the heads of all layers, besides the state of heads, and the layers."""


class JointBlock(Block):
    """The blocks of all layers in one. Its heads are those of the first layer, then those of the second, and so on.

    Args:
        keys: keys of one layer, see `Block`.
        values: values of one layer. All layers have keys and values of these shapes.
        layers: number of layers.
        numbers: the budget, see `Block`.
        starts: see `Block`.
        heads: see `Block`.
        others: ``store``, ``sequences`` and ``pins``, see `Block`.

    Attributes:
        layers: number of layers.
        seen: ``(B, L)``, because layers step one after the other. So is ``prompt``.
    """

    layers: int

    def __init__(
        self,
        keys: Float[Tensor, "B Hk _ D"],
        values: Float[Tensor, "B Hk _ E"],
        *,
        layers: int,
        numbers: Sequence[budgets.Number],
        starts: Mapping[str, float],
        heads: Mapping[str, str] = MappingProxyType({}),
        **others: Any,
    ):
        # shapes are all that a block takes from its examples: one head of no token stands for the heads of all layers
        like = (x[:, :1, :0].expand(-1, layers * x.shape[1], -1, -1) for x in (keys, values))
        super().__init__(*like, numbers=numbers, starts=starts, heads=heads, **{"store": PooledStore, **others})
        assert isinstance(self.store, PooledStore)
        self.layers, self.store.waits = layers, True
        self.seen, self.prompt = (x[:, None].repeat(1, layers) for x in (self.seen, self.prompt))

    def layer(self, number: int) -> PartBlock:
        """Return one layer's part as a block that shares this block's memory."""
        # without `__init__`, which allocates
        part = PartBlock.__new__(PartBlock)
        vars(part).update(vars(self), whole=self, number=number)
        part.renew()
        return part

    def of_layer(self, number: int) -> dict[str, Tensor]:
        """Return the tensors of one layer, named as in `per_row`, as views of this block's. The pools and the state of
        slots are those of all layers: the layer's ``starts`` say which entries are its own.
        """
        n = self.lost.shape[1] // self.layers
        mine, of_heads = slice(number * n, (number + 1) * n), {*_OF_HEADS, *(f"state.{name}" for name in self.heads)}
        found = {name: x[:, mine] if name in of_heads else x for name, x in self.per_row().items()}
        return found | {name: found[name][:, number] for name in _OF_LAYERS}

    def full_bytes(self) -> int:
        """Return the bytes of keys and values of all tokens seen."""
        # each layer counts a token in `seen`, and a stored token has the heads of all layers
        return super().full_bytes() // self.layers


class PartBlock(Block):
    """One layer's part of a `JointBlock`.

    Attributes:
        whole: the block of all layers, of the same rows.
        number: the layer's, counted among those with slots.
    """

    whole: JointBlock
    number: int

    def renew(self) -> None:
        """Take the present tensors of ``whole``, which may have been replaced."""
        self._take(self.whole.of_layer(self.number))

    def pin(self, rows: Sequence[Spans]) -> None:
        """Replace the pinned spans of all rows, for this layer and those that take the tensors of ``whole`` later."""
        super().pin(rows)
        self.whole.pins = self.pins

    def equal_budgets(self) -> Int[Tensor, "B 1"] | None:
        """Return the budget of one head in each row if in every row the heads of all layers have the same one,
        otherwise ``None``.
        """
        return self.whole.equal_budgets()

    def divide(self) -> None:
        """Do nothing: the function `divide` gives the heads of all layers their ranges."""

    def part(self, start: int, stop: int) -> PartBlock:
        """Return a range of rows as a block that shares the memory. Its ``whole`` has the same rows of all layers."""
        other = super().part(start, stop)
        other.whole = self.whole.part(start, stop)
        return other

    def under(self, starts: Mapping[str, float], heads: Mapping[str, str]) -> PartBlock:
        """Return the same slots with the state of another policy, as `Block.under`, for this layer and for
        ``whole``.
        """
        other = super().under(starts, heads)
        other.whole = self.whole.under(starts, heads)
        return other

    def select_rows(self, index: Int[Tensor, " n"]) -> None:
        """Select rows as `Block.select_rows` does. The first layer's call selects those of all layers; the others
        take the new tensors.
        """
        if self.number == 0:
            self.whole.select_rows(index)
        self.renew()

    def budget_of(self, row: int) -> int:
        """Return the budget of a row, summed over its heads: the mean over the layers, which share it."""
        return self.whole.budget_of(row) // self.whole.layers

    def memory(self) -> MemoryUsage:
        """Return the memory usage of all layers for the first layer, and zeros for the other layers."""
        return MemoryUsage() if self.number else self.whole.memory()


def divide(parts: Sequence[Block], numbers: Int[Tensor, "b heads"], rows: slice = slice(None)) -> None:
    """Divide the pools of some rows anew among the heads of all layers. The slots lose their content.

    Args:
        parts: the parts of all layers of a `JointBlock`, or the same rows of them.
        numbers: budgets of the heads of all layers, those of the first layer first; each gets one slot more.
        rows: which rows of the parts.

    Raises:
        ShapeError: a row has fewer slots than the heads' budgets need, with one more for each head.
    """
    sizes, store = numbers + 1, store_of(parts[0])  # + 1: see `Block`; the entries are those of all layers
    if bool((sizes.sum(dim=1) >= store.entries.shape[1]).any()):  # the last entry belongs to no head
        most, room = int(sizes.sum(dim=1).max()), store.entries.shape[1] - 1
        raise ShapeError(f"The heads of a row need {most} slots in all layers, and its pool has {room}.")
    of_heads = numbers, sizes, sizes.cumsum(dim=1) - sizes  # starts over the heads of all layers, whose pool is one
    for part, *mine in zip(parts, *(x.chunk(len(parts), dim=1) for x in of_heads), strict=True):
        held = part.budget, store_of(part).sizes, store_of(part).starts
        for tensor, new in zip(held, mine, strict=True):
            assert isinstance(tensor, Tensor)
            tensor[rows] = new
    store.entries[rows] = EMPTY


def give(blocks: Sequence[Block], budgets: Sequence[Int[Tensor, "B Hk"] | None]) -> None:
    """Set the budgets of the heads in all layers with pools, and divide the pools accordingly. The slots lose their
    content. Layers that share one pool get theirs together.

    Args:
        blocks: the block of each layer with slots.
        budgets: the budgets of each layer's heads; ``None``: that layer's block is left as it is.
    """
    pairs = [(block, budget) for block, budget in zip(blocks, budgets, strict=True) if budget is not None]
    if joint := [pair for pair in pairs if isinstance(pair[0], PartBlock)]:
        divide([block for block, _ in joint], torch.cat([budget for _, budget in joint], dim=1))
    for block, budget in pairs:
        if not isinstance(block, PartBlock):
            assert isinstance(block.budget, Tensor)
            block.budget.copy_(budget)
            block.divide()


def store_of(block: Block) -> PooledStore:
    """Return the pool of a block that has one."""
    assert isinstance(block.store, PooledStore)
    return block.store
