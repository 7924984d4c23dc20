"""Decode steps of attached models that differ from their layers' last ones in their tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from kvkeep.backends import Repeat
from kvkeep.cache.hf_layers import PhasedCache
from kvkeep.cache.layer import Layer
from kvkeep.models.hf import ATTENTION, is_known
from kvkeep.models.masks import PaddingMask
from kvkeep.types import AttentionOptions, Phase


def is_ours(config: PreTrainedConfig) -> bool:
    """Whether attention of such a model goes to `attention_forward`, and its probabilities are not asked for."""
    own = object.__getattribute__(config, "__dict__")  # a layer asks in each step, and properties take long
    try:
        return own["_attn_implementation_internal"] == ATTENTION and not own["_output_attentions"]
    except KeyError:
        return config._attn_implementation == ATTENTION and not config.output_attentions


def repeatable(attention: nn.Module, **told: Any) -> AttentionOptions | None:
    """What the steps of a layer ask for that `repeat` may make; ``None``: those of such a layer cannot be repeated.

    Args:
        attention: the layer's attention.
        told: the keyword arguments of `attention_forward` that are the same in every step.
    """
    if not is_known(attention, **told) or told.get("output_attentions") or told.get("s_aux") is not None:
        return None
    scaling: float | None = told.get("scaling")
    if scaling is None:
        return None
    return AttentionOptions(scaling, window=told.get("sliding_window"), softcap=told.get("softcap"))


def repeat(
    cache: PhasedCache,
    index: int,
    mask: PaddingMask | None,
    options: AttentionOptions,
    run: Callable[[Repeat], Tensor | None],
) -> Tensor | None:
    """One new token per row in a step that differs from the layer's last one in its tokens alone, see `Layer.repeat`.

    Args:
        cache: holds the layer.
        index: number of the layer in a model of which `is_ours` is true.
        mask: what the model passes as its mask.
        options: what the layer asks for.
        run: makes the step.

    Returns:
        What ``run`` returned; ``None`` if it is another step, and then nothing has changed.

    Raises:
        CapacityError: the policy does not evict and its budget is exhausted.
        BrokenCacheError: the previous step failed.
    """
    if mask is not None and not (isinstance(mask, PaddingMask) and mask.is_plain and mask.window == options.window):
        return None
    part = cache.begin(index)
    if part is None or part.window != options.window or part.phase_of(1) is not Phase.DECODE:
        return None
    layer = part.stepper
    return layer.repeat(options, run) if type(layer) is Layer else None
