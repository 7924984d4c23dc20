"""What a plan is made for: a model, an eviction policy, and the lengths of its rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from kvkeep.backends.torch import BLOCK_BYTES, WIDEN_SLOTS
from kvkeep.budget import Number, by_head
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.layer import Layer
from kvkeep.kv.block import numbers
from kvkeep.planning import cost, slots
from kvkeep.planning.cost import Cost, Packed
from kvkeep.planning.quantised import Scheme
from kvkeep.planning.shapes import Outline
from kvkeep.planning.slots import LayerShape
from kvkeep.policies.base import Policy

_BLOCKS = 3
_BLOCKS_WITH_NOISE = 9
"""Blocks of logits that attention holds at once, without and with a random number for each (keyformer)."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model, an eviction policy and the lengths of its rows; all values are checked.

    Attributes:
        outline: the model.
        policy: the eviction policy.
        budget: tokens per layer and head on average.
        layer_budget: how the budget is spread over the layers; ``None``: the policy's own rule.
        head_budget: how the budget is divided among heads; ``None``: by the policy's own rule.
        kv_bits: bits of keys and values in the slots of kvkeep's cache; ``None``: its dtype.
        positions: ``true`` or ``slot``; ``None``: the policy's own mode.
        context: tokens of a row, prompt and new ones.
        chunk: prompt tokens that are fed in one step, of all rows together.
        dtype: of the cache.
        weights_dtype: of the weights, or of the rest if weights are quantised.
        scheme: how quantised weights are counted; ``None``: all have ``weights_dtype``.
        weights_memory: bytes of all weights as the user gave them; ``None``: they are counted.
    """

    outline: Outline
    policy: Policy
    budget: int
    layer_budget: str | list[float] | None
    positions: Literal["true", "slot"] | None
    context: int
    chunk: int
    dtype: torch.dtype
    weights_dtype: torch.dtype
    scheme: Scheme | None = None
    weights_memory: int | None = None
    head_budget: str | None = None
    kv_bits: str | None = None

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token in all layers."""
        return slots.full_bytes(self.outline.shape.layers, 1, self.dtype.itemsize)

    @property
    def reads_whole(self) -> bool:
        """Whether a prompt is fed in one step."""
        return self.chunk == self.context

    def cache(self) -> BoundedCache:
        """The cache, which allocates nothing before it is used; a `KVKeepError` if it cannot be made."""
        return BoundedCache(
            self.outline.config,
            self.policy,
            self.budget,
            layer_budget=self.layer_budget,
            head_budget=self.head_budget,
            positions=self.positions,
            kv_bits=self.kv_bits,
        )

    def layer_budgets(self) -> list[int]:
        """Each layer's budget; the mean of its heads, rounded up, where these differ."""
        shapes = self.outline.shape.layers
        return [-(-sum(each) // len(each)) for each in map(_by_head, self.numbers(), shapes)]

    def numbers(self) -> list[Number]:
        """Each layer's budget; of each head where heads share it."""
        return [_number(layer, shape) for layer, shape in self._layers()]

    def _layers(self) -> list[tuple[Layer, LayerShape]]:
        """The layers with slots, which have allocated nothing, and their shapes."""
        layers = self.cache().bounded_layers()
        return [
            (layers[index], shape) for index, shape in zip(self.outline.indices, self.outline.shape.layers, strict=True)
        ]

    def _sharing(self) -> list[LayerShape]:
        """The shapes of the layers whose heads share one budget."""
        return [shape for layer, shape in self._layers() if layer.policy.shares_layers]

    def bounded(self) -> Cost:
        """Cost with kvkeep's cache."""
        model, size, per_layer = self.outline.shape, self.dtype.itemsize, self.layer_budgets()
        shared = slots.shared_bytes(per_layer[0], per_layer[-1]) if self.policy.cascades else 0
        workspace = cost.Workspace(
            block_bytes=BLOCK_BYTES,
            blocks=_BLOCKS_WITH_NOISE if self.policy.stochastic else _BLOCKS,
            widened_slots=WIDEN_SLOTS,
            turned=self.cache().position_mode == "slot",
            decoded=0 if self.kv_bits is None else size,
        )
        return Cost(
            **self._weights(),
            row_bytes=self._slot_bytes() + shared,
            prompt_bytes=cost.prompt_bytes(
                model, per_layer, self.chunk, size, fresh=self.reads_whole, workspace=workspace
            )
            + self._waiting_bytes(),
            step_bytes=cost.step_bytes(model, per_layer, size, workspace=workspace),
        )

    def _slot_bytes(self) -> int:
        """Bytes of one row's slots in all layers."""
        sharing, size = self._sharing(), self.dtype.itemsize
        apart = [(_number(layer, shape), shape) for layer, shape in self._layers() if not layer.policy.shares_layers]
        joint = slots.joint_bytes(sharing, self.budget, size, **self._beside(sharing[0])) if sharing else 0
        return joint + sum(
            slots.block_bytes(
                shape,
                number,
                size,
                own_budgets=shape.kv_heads if isinstance(number, tuple) else 0,
                **self._beside(shape),
            )
            for number, shape in apart
        )

    def _beside(self, layer: LayerShape) -> dict[str, Any]:
        """The numbers beside a layer's keys and values, and the bits of these."""
        per_head = numbers(self.policy.summaries, key_dim=layer.key_dim, value_dim=layer.value_dim)
        return {"states": len(self.policy.slots), "per_head": per_head, "kv_bits": self.kv_bits}

    def _waiting_bytes(self) -> int:
        """Bytes of what layers that share a budget hold until the last of them has attended."""
        size, held = self.dtype.itemsize, 0 if self.reads_whole else self.budget + 1
        numbers_each = 4 * (3 + len(self.policy.slots))  # position, score, mass and state
        return sum(
            self.chunk * layer.token_bytes(size)
            + held * layer.slot_bytes(size, self.kv_bits)
            + (self.chunk + held) * layer.kv_heads * numbers_each
            for layer in self._sharing()[1:]
        )

    def full(self) -> Cost:
        """Cost with a full cache."""
        model, size = self.outline.shape, self.dtype.itemsize
        return Cost(
            **self._weights(),
            row_bytes=slots.full_bytes(model.layers, self.context, size),
            prompt_bytes=cost.full_prompt_bytes(model, self.chunk, size),
            step_bytes=cost.full_step_bytes(model, size),
        )

    def _weights(self) -> dict[str, Any]:
        """The arguments of `Cost` that say what the weights are."""
        return {
            "model": self.outline.shape,
            "weight_itemsize": self.weights_dtype.itemsize,
            "packed": Packed() if self.scheme is None else self.outline.packed,
            "known_bytes": self.weights_memory,
        }

    @property
    def weights_format(self) -> str:
        """How the weights are stored, in words."""
        if self.weights_memory is not None:
            return "as given"
        rest = name_of(self.weights_dtype)
        return f"in {rest}" if self.scheme is None else f"in {self.scheme}; the rest in {rest}"


def _number(layer: Layer, shape: LayerShape) -> Number:
    """The budget of a layer; of each head where heads share it."""
    return _by_head(layer.budgets[0], shape) if layer.policy.spreads else layer.budgets[0]


def _by_head(number: Number, layer: LayerShape) -> tuple[int, ...]:
    return by_head([number], layer.kv_heads)[0]


def name_of(dtype: torch.dtype) -> str:
    """A dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")
