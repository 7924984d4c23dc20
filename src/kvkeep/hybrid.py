"""Layers that have attention and a state of fixed size at once (FalconH1, Zamba)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from kvkeep.errors import UnsupportedOperationError
from kvkeep.handing import HandingLayer


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
        self.keys_part: Any = keys
        self.state = state
        self.is_sliding = keys.is_sliding

    def __getattr__(self, name: str) -> Any:
        """The state's attributes.

        Raises:
            AttributeError: the state has none of this name either.
        """
        if name in ("state", "keys_part") or name.startswith("__"):  # while it is copied
            raise AttributeError(name)
        return getattr(self.state, name)

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hand the new keys and values on."""
        handed: tuple[Tensor, Tensor] = self.keys_part.update(*args, **kwargs)
        return handed

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state's convolution."""
        return self.state.update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Tensor:
        """Update the state's recurrence."""
        return self.state.update_recurrent_state(*args, **kwargs)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: both parts allocate on their first step."""

    def get_seq_length(self) -> int:
        """The logical length of the sequence."""
        return int(self.keys_part.get_seq_length())

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the logical key axis."""
        length, offset = self.keys_part.get_mask_sizes(query_length)
        return length, offset

    def get_max_length(self) -> int:
        """No limit on the length of a sequence."""
        return -1

    def get_max_cache_shape(self) -> int:
        """`get_max_length` under its name before transformers 5.16."""
        return -1

    def reset(self) -> None:
        """Forget both parts."""
        self.keys_part.reset()
        LinearAttentionLayer.reset(self.state)  # its class may be one with keys

    def reorder_cache(self, beam_idx: Any) -> None:
        """Row ``i`` becomes what row ``beam_idx[i]`` was (beam search)."""
        self.keys_part.reorder_cache(beam_idx)
        LinearAttentionLayer.reorder_cache(self.state, beam_idx)

    def batch_select_indices(self, indices: Any) -> None:
        """Keep only the rows ``indices``, in that order."""
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
        """Refuse to roll back, as the part with keys does."""
        self.keys_part.crop(tokens_to_remove)

    def __getstate__(self) -> dict[str, Any]:
        """Both parts, for copies."""
        return dict(vars(self))


def state_part(layer: object) -> object | None:
    """The part of a cache's layer that is a state; ``None`` if it has none."""
    part = layer.state if isinstance(layer, HybridLayer) else layer
    return None if isinstance(part, HandingLayer) else part


def beside_state(keys: HandingLayer, original: object) -> HandingLayer | HybridLayer:
    """A layer that takes the place of transformers' ``original``, whose state it keeps if there is one."""
    return HybridLayer(keys, original) if isinstance(original, LinearAttentionLayer) else keys
