"""The way of new keys and values from transformers to a layer: `HandingLayer` hands them on to attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache as remembered
from typing import Any, Final, NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import caches_latents, windows_of
from kvkeep.errors import UnsupportedModelError, UnsupportedOperationError
from kvkeep.types import Phase, Stepper

_BYPASSED = (
    "The model computes attention itself instead of handing keys and values to kvkeep. If it was not attached, call "
    "model = kvkeep.attach(model) first; otherwise kvkeep does not support it."
)


class HandedKeys(Tensor):
    """New keys on their way from the cache to kvkeep's attention.

    Any other attention would see only the tokens of this step and compute nonsense, so every other use of these keys
    is an error. Reading their shape, dtype and device is allowed. A model with latent attention (DeepSeek) makes keys
    and values of each head from them first; the results are handed keys as well.
    """

    layer: HandingLayer

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation that reads an attribute, such as the shape. While a compiler traces, and on keys of a model
        with latents, run any operation; the tensors that come of latents are handed keys again. Refuse all others.

        Raises:
            UnsupportedModelError: the operation is another one, so the model computes attention itself.
        """
        source = next((leaf.layer for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls)), None)
        latent = source is not None and source.latent
        # "__get__" reads an attribute, such as the shape
        if func.__name__ != "__get__" and not latent and not torch.compiler.is_compiling():
            raise UnsupportedModelError(_BYPASSED)
        with torch._C.DisableTorchFunctionSubclass():  # else the call would come here again
            result = func(*args, **(kwargs or {}))
        return tree_map_only(Tensor, source.tag, result) if latent and source is not None else result


def unwrap(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, HandingLayer | None]:
    """Return keys and values as ordinary tensors, and the layer that tagged them; ``None`` for keys that no kvkeep
    cache handed over.
    """
    if not isinstance(keys, HandedKeys):
        return keys, values, None
    with torch._C.DisableTorchFunctionSubclass():
        return keys.as_subclass(Tensor), values.as_subclass(Tensor), keys.layer


class HandingLayer(CacheLayerMixin):
    """What transformers sees of one layer: it hands new keys and values on to a `Stepper`, and stores nothing itself.

    Args:
        stepper: takes every step of the layer.
        window: sliding window of the layer in tokens.

    Attributes:
        stepper: takes the steps; may be replaced by a wrapper around it.
        phase: phase of the next step's tokens; ``None``: see `phase_of`.
        latent: whether the model expands what it caches before it attends.
    """

    # asked by transformers: eviction has no static shapes and no way back, and slots are made by the first step
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, stepper: Stepper, window: int | None):
        super().__init__()  # type: ignore[no-untyped-call]
        self.stepper = stepper
        self.window = window
        self.handed = False
        self.phase: Phase | None = None
        self.latent = False
        self.is_sliding = window is not None

    @property
    def columns(self) -> int:
        """Return 0, since the caller gives positions; subclasses count the columns seen."""
        return 0

    def lazy_initialization(
        self, key_states: Float[Tensor, "B Hk T D"], value_states: Float[Tensor, "B Hk T E"]
    ) -> None:
        """Do nothing: `Layer` allocates its slots on its first step."""

    def update(
        self,
        key_states: Float[Tensor, "B Hk T D"],
        value_states: Float[Tensor, "B Hk T E"],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B Hk T D"], Float[Tensor, "B Hk T E"]]:
        """Return the new keys and values, with the keys tagged so that attention finds this layer."""
        self.handed = True
        return self.tag(key_states), value_states

    def tag(self, tensor: Tensor) -> HandedKeys:
        """Return the tensor as `HandedKeys` of this layer. They share memory."""
        handed = tensor.as_subclass(HandedKeys)
        handed.layer = self
        return handed

    def phase_of(self, T: int) -> Phase:
        """Return the phase of ``T`` new tokens: the one that is set; else decode for a single token after the first
        call, and prefill for all others.

        By default all other tokens are a prompt: the first call, and a longer piece later on, such as the next turn of
        a conversation.
        """
        return self.phase or (Phase.DECODE if T == 1 and self.columns else Phase.PREFILL)

    def take(self) -> Stepper:
        """Return the stepper of the layer, once for each `update`; refuse a second attention over the same keys.

        Raises:
            UnsupportedModelError: attention was called twice for the same keys.
        """
        if not self.handed:
            raise UnsupportedModelError(
                "The model calls attention several times with the same keys and values (differential attention, for "
                "example), which kvkeep does not support."
            )
        self.handed = False
        return self.stepper

    def get_seq_length(self) -> int:
        """Return how many columns were fed so far, padding and evicted tokens included; models derive positions from
        it.
        """
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the key axis that transformers makes a mask for: all columns fed, evicted ones
        and ``query_length`` new ones included; and 0.
        """
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        """Return -1, which sets no limit on the length of a sequence."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, as `get_max_length`, which has this name before transformers 5.16."""
        return -1


@runtime_checkable
class CountingStepper(Stepper, Protocol):
    """A stepper that counts the columns it has seen, padding included."""

    columns: int


class CountingLayer(HandingLayer):
    """A layer that is as long as its stepper says.

    Attributes:
        layer: counts the columns, even if a wrapper takes the steps.
    """

    def __init__(self, layer: CountingStepper, window: int | None):
        super().__init__(layer, window)
        self.layer = layer

    @property
    def columns(self) -> int:
        """Return the number of columns seen so far, padding included."""
        return self.layer.columns


class BoundedLayer(HandingLayer):
    """What transformers sees of a `Layer`: its steps, its length and its rows.

    Attributes:
        layer: counts the columns, even if a wrapper takes the steps.
    """

    def __init__(self, layer: Layer):
        super().__init__(layer, layer.window)
        self.layer = layer

    @property
    def columns(self) -> int:
        """Return the number of columns seen so far, padding included."""
        return self.layer.columns

    def reset(self) -> None:
        """Empty all slots, see `Layer.reset`."""
        self.layer.reset()

    def reorder_cache(self, beam_idx: Int[Tensor, " B"]) -> None:
        """Replace row ``i`` by what row ``beam_idx[i]`` was, for all rows (beam search)."""
        self.layer.select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row ``repeats`` times, next to itself. Do nothing before the first step."""
        if self.layer.allocated:
            rows = self.layer.seen.new_tensor(range(len(self.layer.seen)))
            self.layer.select_rows(rows.repeat_interleave(repeats))

    def batch_select_indices(self, indices: Int[Tensor, " n"]) -> None:
        """Keep only the rows ``indices``, in that order. An index may occur several times."""
        self.layer.select_rows(indices)

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to roll back, since evicted tokens cannot be brought back; do nothing for 0 tokens.

        Raises:
            UnsupportedOperationError: ``tokens_to_remove`` is not 0.
        """
        if tokens_to_remove:
            refuse_rollback()


def handing_part(layer: object) -> HandingLayer | None:
    """Return the part of a cache layer that hands keys over to attention; ``None`` for a layer without keys."""
    part = getattr(layer, "keys_part", layer)
    return part if isinstance(part, HandingLayer) else None


class PhasedCache(Cache):
    """A cache whose owner can set the phase of the next call's tokens.

    Attributes:
        phase: the phase; ``None``: see `HandingLayer.phase_of`.
        latent: see `HandingLayer`.
    """

    phase: Phase | None = None
    latent = False

    def phase_at(self, columns: int) -> Phase | None:
        """Return ``None``. A subclass may know the phase of the tokens from column ``columns`` on."""
        return None

    def update(
        self,
        key_states: Float[Tensor, "B Hk T D"],
        value_states: Float[Tensor, "B Hk T E"],
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Tensor, "B Hk T D"], Float[Tensor, "B Hk T E"]]:
        """Tag the new keys of a layer so that attention finds the layer, and return them with the values.

        Raises:
            UnsupportedModelError: the model attended to latents by itself.
        """
        self.begin(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def begin(self, layer_idx: int) -> HandingLayer | None:
        """Set the phase of a layer that is about to get new tokens, and return the layer; ``None`` if it has no
        slots.

        Raises:
            UnsupportedModelError: the model attended to latents by itself.
        """
        if (layer := handing_part(self.layers[layer_idx])) is not None:
            layer.phase, layer.latent = self.phase or self.phase_at(layer.columns), self.latent
            # keys that are still untaken when the next layer begins were attended by the model's own code
            if self.latent and any(part.handed for part in map(handing_part, self.layers) if part is not None):
                raise UnsupportedModelError(_BYPASSED)  # a layer before this one, or the last one of the last step
        return layer


def refuse_rollback() -> NoReturn:
    """Raise the error for a caller who wants the newest tokens of a cache removed.

    Raises:
        UnsupportedOperationError: always.
    """
    raise UnsupportedOperationError(
        "A bounded cache cannot be cropped: tokens that are evicted cannot come back, so a rollback would leave a "
        "history that never was. Assisted decoding needs rollbacks: run it with transformers' DynamicCache."
    )


# Layers that have attention and a state of fixed size at once (FalconH1, Zamba).


class HybridLayer(LinearAttentionLayer, CacheLayerMixin):
    """A layer with attention and a state beside it: keys go to one part, and the state of fixed size is the other.

    Args:
        keys: the part with keys and values.
        state: transformers' own layer, of which only the state is used.
    """

    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, keys: HandingLayer, state: LinearAttentionLayer):
        # no super().__init__(): attributes of its own would hide those of the state, see `__getattr__`
        self.keys_part: Any = keys
        self.state = state
        self.is_sliding = keys.is_sliding

    def __getattr__(self, name: str) -> Any:
        """Return an attribute that this layer does not have itself from its state of fixed size.

        Raises:
            AttributeError: the state has no attribute of this name either, or it is one of Python's own ``__names__``.
        """
        if name in ("state", "keys_part") or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.state, name)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values to the part with keys, see `HandingLayer.update`."""
        handed: tuple[Tensor, Tensor] = self.keys_part.update(*args, **kwargs)
        return handed

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state's convolution."""
        return self.state.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state's recurrence."""
        return self.state.update_recurrent_state(*args, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Both parts allocate on their first step."""

    def get_seq_length(self) -> int:
        """Return how many columns were fed so far, padding and evicted tokens included."""
        return int(self.keys_part.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the logical key axis, see `HandingLayer.get_mask_sizes`."""
        length, offset = self.keys_part.get_mask_sizes(query_length)
        return length, offset

    def get_max_length(self) -> int:
        """Return -1, which sets no limit on the length of a sequence."""
        return -1

    def get_max_cache_shape(self) -> int:
        """Return -1, as `get_max_length`, which has this name before transformers 5.16."""
        return -1

    def reset(self) -> None:
        """Empty the slots, and reset the state."""
        self.keys_part.reset()
        LinearAttentionLayer.reset(self.state)  # its class may be one with keys

    def reorder_cache(self, beam_idx: Any) -> None:
        """Replace row ``i`` by what row ``beam_idx[i]`` was, in both parts (beam search)."""
        self.keys_part.reorder_cache(beam_idx)
        LinearAttentionLayer.reorder_cache(self.state, beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only the rows ``indices``, in that order, in both parts."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refuse to repeat rows, which transformers does not do for a state.

        Raises:
            UnsupportedOperationError: always.
        """
        raise UnsupportedOperationError(
            "Rows of a cache with states cannot be repeated. Repeat the rows of input_ids before the first call."
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse to roll back; do nothing for 0 tokens. See `BoundedLayer.crop`."""
        self.keys_part.crop(tokens_to_remove)

    def __getstate__(self) -> dict[str, Any]:
        """Return both parts as a mapping, for copies."""
        return dict(vars(self))


def state_part(layer: object) -> object | None:
    """Return the part of a cache layer that holds a state of fixed size; ``None`` for a layer with keys and values
    alone.
    """
    part = layer.state if isinstance(layer, HybridLayer) else layer
    return None if isinstance(part, HandingLayer) else part


def beside_state(keys: HandingLayer, original: object) -> HandingLayer | HybridLayer:
    """Return the layer that replaces ``original`` in a cache: ``keys``, joined with the state of ``original`` if it
    has one.
    """
    return HybridLayer(keys, original) if isinstance(original, LinearAttentionLayer) else keys


def handing_cache(config: PreTrainedConfig, make: Callable[[int], CountingStepper]) -> PhasedCache:
    """Return a cache that stores nothing: each attention layer hands its tokens to a stepper.

    ``make`` returns the stepper for a layer's number in the model.

    Raises:
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """
    layers: list[Any] = DynamicCache(config=config).layers
    for number, window in windows_of(config).items():
        layers[number] = beside_state(CountingLayer(make(number), window), layers[number])
    cache = PhasedCache(layers=layers)
    cache.latent = caches_latents(config)
    return cache


# The argument by which a decoder of transformers takes its cache: ``cache`` since 5.24, ``past_key_values`` before.

CACHE_ARGUMENTS: Final = ("cache", "past_key_values")
"""The names, the newest first."""


def taken_as(kind: type) -> str | None:
    """Return the name of the argument by which a model class takes its cache; ``None`` if it has no such argument."""
    return _among(getattr(kind, "forward", kind.__call__))


def handed(model: object, cache: object) -> dict[str, Any]:
    """Return a cache as the keyword argument by which a model takes it.

    A wrapper that passes everything on gets the name that is usual in transformers.
    """
    return {taken_as(type(model)) or usual(): cache}


def handed_over(given: Mapping[str, Any]) -> Any:
    """Return the cache among the keyword arguments of a forward call; ``None`` if there is none."""
    return next((given[name] for name in CACHE_ARGUMENTS if given.get(name) is not None), None)


def usual() -> str:
    """Return the argument name by which decoders of the installed transformers take a cache."""
    from transformers import GenerationMixin  # here: it imports all of `generate`, which the rest does without

    return _among(GenerationMixin.prepare_inputs_for_generation) or CACHE_ARGUMENTS[-1]


@remembered
def _among(function: Callable[..., Any]) -> str | None:
    """Return the first of `CACHE_ARGUMENTS` that a function takes; ``None`` if it takes none."""
    known = inspect.signature(function).parameters
    return next((name for name in CACHE_ARGUMENTS if name in known), None)
