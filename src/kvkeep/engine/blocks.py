"""The slots of the engine's rows: one block for each layer of the model, shared by sequences of several policies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from kvkeep.budget import Number
from kvkeep.held import reach, store_for
from kvkeep.memory import bytes_of
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.store import Block, PooledStore, add_state, lacks, pin_row
from kvkeep.store.heads import shared
from kvkeep.types import Slots


class Blocks:
    """The blocks of all layers with slots, in order. There are none before `allocate`.

    Args:
        policy: the policy that they are made for.
        like: slots of each layer, which show shapes, dtype and device.

    Attributes:
        version: incremented before tensors are replaced or added.
    """

    def __init__(self, policy: Policy, like: Sequence[Slots]) -> None:
        self._policy, self._like, self.version = policy, like, 0
        self._blocks: list[Block] = []

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __getitem__(self, index: int) -> Block:
        return self._blocks[index]

    def row_bytes(self, budgets: Sequence[Number]) -> int:
        """The bytes of one row in all layers, counted on tensors that have shapes but no memory."""
        shapes = (Slots(*(tensor.to("meta") for tensor in like)) for like in self._like)
        blocks = [self._block(1, budget, shape) for budget, shape in zip(budgets, shapes, strict=True)]
        return bytes_of(tensor for block in blocks for tensor in block.per_row().values())

    def allocate(self, count: int, budgets: Sequence[Number]) -> None:
        """Allocate ``count`` empty rows with these budgets of the layers."""
        self.version += 1
        self._blocks = []  # the old memory is freed before new memory is allocated
        pairs = zip(budgets, self._like, strict=True)
        self._blocks = [self._block(count, budget, like) for budget, like in pairs]

    def _block(self, count: int, budget: Number, like: Slots) -> Block:
        """One layer's slots for all rows, empty."""
        starts = {str(i): 0.0 for i in range(len(self._policy.slots))}  # a new token's state is written with it
        keys, values = (x[:, :, :1].expand(count, -1, -1, -1) for x in (like.keys, like.values))
        store = store_for(self._policy, [budget])
        block = Block(keys, values, numbers=[budget], starts=starts, heads=shared(self._policy.summaries), store=store)
        reach(block, self._policy, [budget])
        return block

    def lacks(self, policy: Policy) -> int:
        """The bytes that another policy's state adds to all rows."""
        return sum(lacks(block, policy.slots, policy.summaries) for block in self)

    def begin(self, row: int, policy: Policy, sequence: int) -> None:
        """Empty a row for a sequence under a policy, and add the state that its policy lacks."""
        if self.lacks(policy):
            self.version += 1
            for block in self:
                add_state(block, policy.slots, policy.summaries)
        for block in self:
            block.sequences[row] = sequence
        self.clear(row)

    def clear(self, row: int) -> None:
        """Empty a row."""
        for block in self:
            block.clear_row(row)

    def move(self, source: int, target: int) -> None:
        """Copy a row over another one."""
        for block in self:
            block.move_row(source, target)

    def pin(self, row: int, pins: Spans) -> None:
        """Protect spans of positions in a row."""
        if pins and sum(pin_row(block, row, pins) for block in self):
            self.version += 1

    def limit(self, row: int, budgets: Sequence[Number]) -> None:
        """Give a row a budget in each layer. A row whose heads share a pool must be empty."""
        for block, budget in zip(self, budgets, strict=True):
            if isinstance(block.budget, int) and block.budget != budget:
                self.version += 1
                block.budget = block.seen.new_full((len(block.seen), 1), block.budget)
            if isinstance(block.budget, Tensor):
                block.budget[row] = block.budget.new_tensor(budget)
                if isinstance(block.store, PooledStore):
                    block.store.divide(block.budget[row : row + 1] + 1, slice(row, row + 1))

    def under(self, policy: Policy) -> list[Block]:
        """The blocks as a policy sees them."""
        return [block.under(policy.slots, policy.summaries) for block in self]
