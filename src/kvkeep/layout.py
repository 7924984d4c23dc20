"""The layers of a model's cache and their budgets, before anything is allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from kvkeep import budget as budgets
from kvkeep.errors import UnsupportedModelError, UnsupportedOperationError
from kvkeep.policies.base import Policy
from kvkeep.rotary.embedding import rotation_for
from kvkeep.rotary.ranks import Rotation

_SUPPORTED_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "moe", "mlp"}


@dataclass(frozen=True)
class Layout:
    """The layers of a model that hold slots, and how a policy's budget is spread over them.

    Attributes:
        policy: the eviction policy.
        windows: sliding window of each layer with slots, see `windows_of`.
        layer_budget: how budgets are spread over the layers, see `kvkeep.budget.per_layer`.
        rotation: the rotary embedding that slot positions need; ``None`` under true positions.
    """

    policy: Policy
    windows: dict[int, int | None]
    layer_budget: str | Sequence[float]
    rotation: Rotation | None

    @classmethod
    def of(
        cls,
        config: PreTrainedConfig,
        policy: Policy,
        *,
        prefill_chunk: int | None = None,
        layer_budget: str | Sequence[float] | None = None,
        positions: str | None = None,
    ) -> Layout:
        """The layout for a model; arguments as for `kvkeep.BoundedCache`.

        Raises:
            InputError: ``positions`` names no mode.
            UnsupportedOperationError: the policy does not work with ``prefill_chunk`` or with sliding windows.
            UnsupportedModelError: the model has layers whose cache cannot be bounded.
        """
        windows = windows_of(config)
        rotation = rotation_for(config, positions, own=policy.defaults.positions)
        if policy.cascades and (prefill_chunk or any(windows.values())):
            raise UnsupportedOperationError(
                f"{policy} prunes through the layers of a model, which works neither with sliding windows "
                "nor with prefill_chunk (a layer would run ahead of the others; give generate prefill_chunk_size)."
            )
        return cls(policy, windows, policy.defaults.layer_budget if layer_budget is None else layer_budget, rotation)

    def spread(self, budget: int | Sequence[int]) -> list[Sequence[int]]:
        """The budget of each layer with slots: one number for all rows, or one per row.

        Raises:
            BudgetError: the budget is out of range, or too small for a layer.
        """
        numbers, layers = budgets.check(budget), len(self.windows)
        if self.layer_budget == "uniform":
            return [numbers] * layers
        each = (budgets.per_layer(self.layer_budget, number, layers, least=self.policy.least) for number in numbers)
        return list(zip(*each, strict=True))

    def slots(self, budget: int) -> list[int]:
        """The most tokens that a head of each layer may hold: the layer's budget, at most its sliding window.

        Raises:
            BudgetError: see `spread`; or the policy protects more than a layer's budget.
        """
        found = []
        for (number,), window in zip(self.spread(budget), self.windows.values(), strict=True):
            self.policy.check(number)
            found.append(number if window is None else min(number, window))
        return found

    def room(self, budget: int) -> int | None:
        """The most tokens that a sequence may have if none is evicted; ``None`` if every budget holds its window.

        Raises:
            BudgetError: see `slots`.
        """
        pairs = zip(self.slots(budget), self.windows.values(), strict=True)
        return min((number for number, window in pairs if window is None or number < window), default=None)


def windows_of(config: PreTrainedConfig) -> dict[int, int | None]:
    """Sliding window of each layer with keys and values, by its number in the model; ``None`` for full attention.

    Layers with a state of fixed size (state-space, convolution) are left out.

    Raises:
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """
    _check_layer_types(config.get_text_config(decoder=True))
    return {
        i: layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        for i, layer in enumerate(DynamicCache(config=config).layers)
        if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
    }


def _check_layer_types(config: PreTrainedConfig) -> None:
    types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) is not None:
        types.add("chunked_attention")
    if getattr(config, "num_kv_shared_layers", None):
        types.add("layers that share the keys of others")
    if strange := types - _SUPPORTED_TYPES:
        raise UnsupportedModelError(
            f"{type(config).__name__} has {', '.join(sorted(strange))}, whose cache kvkeep cannot bound. Supported "
            f"layer types: {', '.join(sorted(_SUPPORTED_TYPES))}."
        )
