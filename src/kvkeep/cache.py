"""The cache that transformers' models and ``generate`` work with: one `Layer` behind each layer's public door."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from kvkeep.errors import UnsupportedModelError, UnsupportedOperationError
from kvkeep.layer import Layer
from kvkeep.memory import Memory
from kvkeep.policies.base import Policy
from kvkeep.registry import parse, spec

ATTENTION = "kvkeep"
"""The name under which the attention function is registered with transformers."""

_LAYER_NOTE = "_kvkeep_layer"

_SUPPORTED_TYPES = {"full_attention", "sliding_attention", "linear_attention", "conv", "mamba", "moe", "mlp"}


class BoundedLayer(CacheLayerMixin):
    """What transformers sees of a `Layer`: it hands new keys and values on, and says how long the sequence is."""

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, layer: Layer):
        super().__init__()  # type: ignore[no-untyped-call]
        self.layer = layer
        self.is_sliding = layer.window is not None

    def lazy_initialization(
        self, key_states: Float[Tensor, "B Hk T D"], value_states: Float[Tensor, "B Hk T E"]
    ) -> None:
        """Nothing to do: `Layer` allocates on its first step."""

    def update(
        self,
        key_states: Float[Tensor, "B Hk T D"],
        value_states: Float[Tensor, "B Hk T E"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B Hk T D"], Float[Tensor, "B Hk T E"]]:
        """Hand the new keys and values on, with a note that leads attention to this layer's `Layer.step`."""
        setattr(key_states, _LAYER_NOTE, self.layer)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Columns seen so far, padding included: the logical length, from which models derive positions."""
        return self.layer.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the logical key axis."""
        return self.layer.columns + query_length, 0

    def get_max_length(self) -> int:
        """No limit on the length of a sequence."""
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length` under its name before transformers 5.16."""
        return -1

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


class BoundedCache(Cache):
    """A KV cache in a fixed amount of memory, for any attached model.

    Args:
        config: the model's configuration; its attention must be attached (`kvkeep.attach`) before the first step.
        policy: a policy or its string, e.g. ``"h2o:recent=512"``.
        budget: tokens kept per layer and KV head, one number or one per row of the batch. Layers with a sliding
            window keep at most the window.
        prefill_chunk: bound memory to ``budget + prefill_chunk`` tokens during the prompt; ``None`` takes the
            whole prompt at once, as the papers do. Pass ``prefill_chunk_size`` to ``generate`` too, so that the
            model's activations are bounded as well.
        sequences: identity of each row for policies with randomness; rows get the same stream if not given.

    Raises:
        BudgetError: the budget is out of range or smaller than what the policy protects.
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
    ):
        self.policy = parse(policy) if isinstance(policy, str) else policy
        self.budget = budget
        self._config = config.get_text_config(decoder=True)
        _check_layer_types(self._config)
        layers = DynamicCache(config=config).layers
        for index, layer in enumerate(layers):
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
                window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
                bounded = Layer(
                    self.policy,
                    budget,
                    index=index,
                    window=window,
                    prefill_chunk=prefill_chunk,
                    sequences=sequences,
                )
                layers[index] = BoundedLayer(bounded)
        super().__init__(layers=layers)

    def update(
        self,
        key_states: Float[Tensor, "B Hk T D"],
        value_states: Float[Tensor, "B Hk T E"],
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B Hk T D"], Float[Tensor, "B Hk T E"]]:
        """Hand the new keys and values to the layer.

        Raises:
            UnsupportedModelError: the model is not attached, so its own attention would see only the new tokens.
        """
        if self._config._attn_implementation != ATTENTION:
            raise UnsupportedModelError(
                f"The model runs the attention {self._config._attn_implementation!r}, which cannot read a "
                "BoundedCache. Call model = kvkeep.attach(model) first."
            )
        result: tuple[Tensor, Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return result

    def bounded_layers(self) -> dict[int, Layer]:
        """The layers with slots, by their number in the model; state-space and linear layers are left out."""
        return {i: layer.layer for i, layer in enumerate(self.layers) if isinstance(layer, BoundedLayer)}

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

    def activate_past_recording(self) -> None:
        """Refuse what assisted decoding needs.

        Raises:
            UnsupportedOperationError: always.
        """
        _refuse_rollback()

    def __repr__(self) -> str:
        return f"BoundedCache(policy={spec(self.policy)!r}, budget={self.budget}, layers={len(self.layers)})"


def layer_behind(keys: Float[Tensor, "B Hk S D"]) -> Layer | None:
    """The layer that handed these keys on, or ``None`` if they come from another cache or from none."""
    return getattr(keys, _LAYER_NOTE, None)


def _refuse_rollback() -> NoReturn:
    raise UnsupportedOperationError(
        "A bounded cache cannot be cropped: the tokens it evicted meanwhile are gone, so a rollback would leave a "
        "history that never was. Assisted decoding needs rollbacks: run it with transformers' DynamicCache."
    )


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
