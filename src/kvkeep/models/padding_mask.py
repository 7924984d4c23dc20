"""The mask that models hand to kvkeep's attention: which columns are padding. All else follows from positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn

import torch
from jaxtyping import Bool
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvkeep.errors import ShapeError, UnsupportedModelError

ATTENTION = "kvkeep"
"""The name under which kvkeep's attention and mask functions are registered with transformers."""

# without `to` and `device`: tools that move a model's inputs between devices ask whether these exist
_TENSOR_ATTRIBUTES = {"contiguous", "dim", "dtype", "expand", "ndim", "shape", "size", "unsqueeze", "view"}


@dataclass(frozen=True)
class PaddingMask:
    """The columns of a batch that are padding. Causality and sliding windows follow from positions.

    Attributes:
        real: which columns of the logical key axis hold real tokens; ``None``: all.
        q_offset: column of the first query.
        kv_offset: column of the first key, for caches that drop old keys.
        window: sliding window that the model asked for.
        honoured: whether this is all that the model asked for.
    """

    real: Bool[Tensor, "B columns"] | None
    q_offset: int
    kv_offset: int
    window: int | None
    honoured: bool = True

    def __getattr__(self, name: str) -> NoReturn:
        """Say why there is no mask tensor if a model or cache uses this as one.

        Raises:
            UnsupportedModelError: the attribute is one of a tensor.
            AttributeError: the attribute is another one.
        """
        if name in _TENSOR_ATTRIBUTES:
            raise UnsupportedModelError(
                f"Something wants a mask tensor (its {name!r}): a static or compiled cache, or the model's own code. "
                "kvkeep's attention derives masks from positions. Use a BoundedCache or a DynamicCache, or go back "
                'to the model\'s own attention with model.set_attn_implementation("sdpa").'
            )
        raise AttributeError(name)

    def new_tokens(self, T: int) -> Bool[Tensor, "B T"] | None:
        """Return the part of the mask that belongs to the ``T`` new tokens.

        Raises:
            ShapeError: the mask does not cover the tokens seen so far and the new ones.
        """
        if self.real is None:
            return None
        if self.real.shape[1] != self.q_offset + T:
            raise ShapeError(
                f"attention_mask has {self.real.shape[1]} columns, but {self.q_offset} tokens are in the cache and "
                f"{T} are new. Pass a mask over all {self.q_offset + T}, old and new; or, for another text, call "
                "reset() on the cache or make a new one. With use_cache=False pass no cache."
            )
        return self.real[:, self.q_offset :]

    @property
    def is_plain(self) -> bool:
        """Return whether all tokens are real, and positions alone describe the rest of the mask."""
        return self.real is None and self.honoured

    def padding(self, T: int) -> Bool[Tensor, "B T"] | None:
        """Return which of the ``T`` new tokens of a prompt are padding; ``None``: the mask names none.

        Attention of padding is 0, as torch computes it. Otherwise it would leak into states (RecurrentGemma).
        """
        if self.real is None or T == 1 or self.real.shape[1] != self.q_offset + T:
            return None
        return ~self.real[:, self.q_offset :]


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    *,
    mask_function: Callable[..., Tensor],
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Bool[Tensor, "B columns"] | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> PaddingMask:
    """Return a mask for transformers' interface: its padding, and whether positions describe all the rest.

    A mask that cannot be honoured is refused when attention uses it; some models make masks that they never use.
    """
    expected = causal_mask_function if local_size is None else sliding_window_causal_mask_function(local_size)
    honoured = q_length == 1 or _same_function(mask_function, expected)
    return PaddingMask(attention_mask, int(q_offset), kv_offset, local_size, honoured)


def _same_function(one: object, two: object) -> bool:
    """Return whether two mask functions have the same code and the same closure."""
    if isinstance(one, FunctionType) and isinstance(two, FunctionType):
        inner = (tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, two))
        return one.__code__ is two.__code__ and _same_function(*inner)
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(_same_function, one, two))
    return type(one) is type(two) is int and one == two


def is_known(
    module: torch.nn.Module, *, dropout: float = 0.0, position_bias: Tensor | None = None, **kwargs: Any
) -> bool:
    """Return whether a module asks `attention_forward` for plain causal attention, without dropout or biases."""
    asked = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    return not dropout and position_bias is None and bool(causal)
