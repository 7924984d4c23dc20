"""The cache that transformers' models and ``generate`` work with: one `Layer` for each layer of the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, NoReturn

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache

from kvkeep.errors import BrokenCacheError, InputError, PolicyError, UnsupportedOperationError
from kvkeep.handing import CountingLayer, CountingStepper, PhasedCache, handing_part
from kvkeep.hybrid import beside_state
from kvkeep.layer import Layer
from kvkeep.layout import Layout, caches_latents, windows_of
from kvkeep.memory import Memory
from kvkeep.policies.base import Policy
from kvkeep.registry import parse


class BoundedLayer(CountingLayer):
    """What transformers sees of a `Layer`: its steps, its length and its rows."""

    layer: Layer

    def __init__(self, layer: Layer):
        super().__init__(layer, layer.window)

    def reset(self) -> None:
        """Forget everything; the memory stays allocated."""
        self.layer.reset()

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was (beam search)."""
        self.layer.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, next to itself."""
        if self.layer.allocated:
            rows = self.layer.seen.new_tensor(range(len(self.layer.seen)))
            self.layer.select_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        """Keep only the rows ``indices``, in that order."""
        self.layer.select_rows(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to roll back: evicted tokens cannot be brought back.

        Raises:
            UnsupportedOperationError: ``tokens_to_remove`` is not 0.
        """
        if tokens_to_remove:
            _refuse_rollback()


class BoundedCache(PhasedCache):
    """A KV cache in a fixed amount of memory, for any attached model.

    Args:
        config: the model's configuration. The model must be attached (`kvkeep.attach`) before it is run.
        policy: a policy or its string, e.g. ``"h2o:recent=512"``.
        budget: tokens kept per layer and KV head, one number or one per row of the batch. Layers with a sliding
            window keep at most the window.
        prefill_chunk: bound memory to ``budget + prefill_chunk`` tokens during the prompt; ``None`` takes the
            whole prompt at once, as the papers do. Pass ``prefill_chunk_size`` to ``generate`` too, so that the
            model's activations are bounded as well.
        sequences: identity of each row for policies with randomness; rows get the same stream if not given.
        layer_budget: how the budget is spread over the layers: ``uniform``, ``ramp:0.2``, ``pyramid:20`` or one weight
            per layer; by default the policy's own rule. See `kvkeep.budget.per_layer`.
        positions: ``true``, or ``slot``: tokens are attended at their rank in the cache, so that a stream may be longer
            than the model's trained length. By default the policy's own mode, where the model allows it.

    Raises:
        BudgetError: the budget is out of range or smaller than what the policy protects.
        InputError: ``config`` is no configuration, or ``positions`` names no mode.
        UnsupportedOperationError: the policy does not work with ``prefill_chunk`` or with sliding windows.
        PolicyError: the policy string is wrong.
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        policy: str | Policy = "h2o",
        budget: int | Sequence[int] = 1024,
        *,
        prefill_chunk: int | None = None,
        sequences: Sequence[int] | None = None,
        layer_budget: str | Sequence[float] | None = None,
        positions: str | None = None,
    ):
        if not isinstance(config, PreTrainedConfig):
            raise InputError(
                f"BoundedCache takes a model's configuration, not {type(config).__name__}: pass model.config."
            )
        self.policy = parse(policy) if isinstance(policy, str) else policy
        if not isinstance(self.policy, Policy):
            raise PolicyError(f"{policy!r} is neither a policy nor the name of one.")
        self.budget = budget
        layout = Layout.of(
            config, self.policy, prefill_chunk=prefill_chunk, layer_budget=layer_budget, positions=positions
        )
        self.position_mode: Literal["true", "slot"] = "true" if layout.rotation is None else "slot"
        self._first = min(layout.windows, default=0)
        cascade = self.policy.cascades(self._first) if self.policy.cascades else None
        layers: list[Any] = DynamicCache(config=config).layers
        for (index, window), numbers in zip(layout.windows.items(), layout.spread(budget), strict=True):
            bounded = Layer(
                self.policy,
                numbers,
                index=index,
                window=window,
                prefill_chunk=prefill_chunk,
                sequences=sequences,
                rotation=layout.rotation,
                cascade=cascade,
            )
            layers[index] = beside_state(BoundedLayer(bounded), layers[index])
        super().__init__(layers=layers)
        self.latent = caches_latents(config)

    def bounded_layers(self) -> dict[int, Layer]:
        """The layers with slots, by their number in the model. State-space and linear layers are left out."""
        parts = enumerate(map(handing_part, self.layers))
        return {i: part.layer for i, part in parts if isinstance(part, BoundedLayer)}

    def positions(self, layer: int = 0) -> Int[Tensor, "B Hk capacity"]:
        """True positions of the tokens in a layer's slots, -1 = empty. The tensor is live: do not change it.

        Raises:
            UnsupportedOperationError: the layer has no slots, or nothing has been cached yet.
        """
        bounded = self.bounded_layers().get(layer)
        if bounded is None or not bounded.allocated:
            raise UnsupportedOperationError(
                f"Layer {layer} holds no slots yet. Run the model once, and ask for one of the layers "
                f"{list(self.bounded_layers())}."
            )
        return bounded.store.positions

    def memory(self) -> Memory:
        """Bytes over all layers with slots, summed over real tensors."""
        return sum((layer.memory() for layer in self.bounded_layers().values()), Memory())

    def update(
        self,
        key_states: Float[Tensor, "B Hk T D"],
        value_states: Float[Tensor, "B Hk T E"],
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B Hk T D"], Float[Tensor, "B Hk T E"]]:
        """Hand new keys and values to a layer. A step begins with the first layer's.

        Raises:
            BrokenCacheError: the previous step failed in some layer, so the layers have seen different tokens.
        """
        if layer_idx == self._first:
            layers = self.bounded_layers().values()
            if len({(layer.columns, layer.moves) for layer in layers}) > 1:
                raise BrokenCacheError("a step, or a selection of rows, ended between two layers")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Refuse what assisted decoding needs.

        Raises:
            UnsupportedOperationError: always.
        """
        _refuse_rollback()

    def __repr__(self) -> str:
        return f"BoundedCache(policy='{self.policy}', budget={self.budget}, layers={len(self.layers)})"


def handing_cache(config: PreTrainedConfig, make: Callable[[int], CountingStepper]) -> PhasedCache:
    """A cache without slots: the stepper of each layer with attention is made from the layer's number in the model.

    Raises:
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """
    layers: list[Any] = DynamicCache(config=config).layers
    for index, window in windows_of(config).items():
        layers[index] = beside_state(CountingLayer(make(index), window), layers[index])
    cache = PhasedCache(layers=layers)
    cache.latent = caches_latents(config)
    return cache


def _refuse_rollback() -> NoReturn:
    raise UnsupportedOperationError(
        "A bounded cache cannot be cropped: tokens that are evicted cannot come back, so a rollback would leave a "
        "history that never was. Assisted decoding needs rollbacks: run it with transformers' DynamicCache."
    )
