"""The KV memory of a batch whose rows come and go: one row per running sequence, all of them allocated once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvkeep.cache import BoundedCache, BoundedLayer
from kvkeep.errors import UnsupportedModelError
from kvkeep.memory import Memory
from kvkeep.policies.base import Policy
from kvkeep.store import Block, Cascade, inference
from kvkeep.types import EMPTY


class RowLayer(BoundedLayer):
    """What the model sees of some rows of a layer; the engine says where each row stands, so this has no length."""

    def get_seq_length(self) -> int:
        """Nothing: positions are given."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The new tokens alone."""
        return query_length, 0


class Rows:
    """Rows of slots in all layers of a model, under one policy.

    Args:
        model: the model, attached.
        policy: what decides which tokens stay.
        budget: the largest budget of a row; every row has memory for it.
        layer_budget: how budgets are spread over the layers, see `BoundedCache`.
        positions: ``true`` or ``slot``, see `BoundedCache`.

    Attributes:
        count: rows there is memory for; none before `allocate`.
        version: changes with the tensors that the rows are made of; as long as it is the same, they are, too.
        row_bytes: what one row takes.

    Raises:
        UnsupportedModelError: the model has layers with a state that is not made of slots.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        policy: Policy,
        budget: int,
        *,
        layer_budget: str | Sequence[float] | None = None,
        positions: str | None = None,
    ) -> None:
        self.policy = policy
        self.count = 0
        self.version = 0
        self._config = model.config
        self._options: dict[str, Any] = {"layer_budget": layer_budget, "positions": positions}
        self._numbers: dict[int, list[int]] = {}
        self._parts: dict[tuple[int, int], Cache] = {}
        probe = self._cache(budget)
        self._layers = probe.bounded_layers()
        if len(self._layers) < len(probe.layers):
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers that keep a state instead of keys and values (state-space or "
                "convolution layers), which the engine cannot give to one row at a time. Use model.generate with a "
                "BoundedCache."
            )
        with torch.inference_mode():  # one token shows the shapes of every layer's keys and values
            model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=model.device), past_key_values=probe)
        self._like = [layer.store for layer in self._layers.values()]
        self.allocate(1)
        self.row_bytes = self.memory().allocated_bytes
        self.allocate(0)

    @inference
    def allocate(self, count: int) -> None:
        """Make the memory for so many rows, all of them empty."""
        self._parts.clear()
        self.version += 1
        self.count = count
        for layer, like in zip(self._layers.values(), self._like, strict=True):
            heads, budget = like.keys.shape[1], max(layer.budgets)
            keys, values = (x[:, :, :1].expand(count, -1, -1, -1) for x in (like.keys, like.values))
            layer.block = Block(keys, values, numbers=[self.policy.most(budget, heads)], starts=self.policy.slots)
            layer.block.budget = budget
            if self.policy.spreads:
                layer.block.budget = layer.block.seen.new_full((count, heads), budget)

    @inference
    def begin(self, row: int, *, budget: int, sequence: int = 0) -> None:
        """Empty a row for a new sequence.

        Raises:
            BudgetError: the policy protects more than the budget.
        """
        for layer, number in zip(self._layers.values(), self.numbers(budget), strict=True):
            block = layer.block
            if isinstance(block.budget, int) and block.budget != number:
                block.budget = block.seen.new_full((self.count, 1), block.budget)
                self._parts.clear()
                self.version += 1
            if isinstance(block.budget, Tensor):
                block.budget[row] = number
            block.store.positions[row] = EMPTY
            block.seen[row] = block.prompt[row] = 0
            block.sequences[row] = sequence

    def move(self, source: int, target: int) -> None:
        """Let a sequence go on in another row; what layers share under a cascading policy does not move."""
        for layer in self._layers.values():
            block = layer.block
            tensors = [*block.store.tensors(), *block.state.values(), block.seen, block.prompt, block.sequences]
            for tensor in [*tensors, *([block.budget] if isinstance(block.budget, Tensor) else [])]:
                tensor[target] = tensor[source]

    def part(self, start: int, stop: int, *, fresh: bool) -> Cache:
        """A range of rows as the cache of one run of the model; ``fresh``: all of them begin a new prompt."""
        if fresh or (start, stop) not in self._parts:
            cascade = Cascade(min(self._layers)) if self.policy.cascades else None
            parts = [layer.part(start, stop, cascade=cascade) for layer in self._layers.values()]
            for part in parts:
                part.columns = int(not fresh)  # a prompt that goes on has its beginning in the slots
            self._parts[start, stop] = Cache(layers=cast(Any, [RowLayer(part) for part in parts]))
        return self._parts[start, stop]

    def numbers(self, budget: int) -> list[int]:
        """A budget, spread over the layers.

        Raises:
            BudgetError: the policy protects more than the budget.
        """
        if budget not in self._numbers:
            self._numbers[budget] = [max(layer.budgets) for layer in self._cache(budget).bounded_layers().values()]
        return self._numbers[budget]

    def memory(self) -> Memory:
        """Bytes over all rows and layers, summed over real tensors."""
        return sum((layer.block.memory() for layer in self._layers.values()), Memory())

    def _cache(self, budget: int) -> BoundedCache:
        return BoundedCache(self._config, self.policy, budget, **self._options)
