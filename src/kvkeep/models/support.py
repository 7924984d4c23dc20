"""Which models kvkeep can attend for: what is checked on a model before its attention is replaced."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, handed, handing_cache, state_part, taken_as
from kvkeep.cache.layer_layout import windows_of
from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.models.device import device_of

_TEXT = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "token_type_ids",
    "mm_token_type_ids",
    *CACHE_ARGUMENTS,
    "cache_position",
}
"""Arguments that bring no image or sound."""


def unwrapped(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model within what ``torch.compile`` or PEFT wrapped around it.

    Raises:
        InputError: the object is no such wrapper, and no model of transformers.
        UnsupportedModelError: an adapter of PEFT puts keys of its own before the prompt, or depends on the prompt.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        if isinstance(inner, OptimizedModule):
            inner = inner._orig_mod
        elif hasattr(inner, "get_base_model") and hasattr(inner, "peft_config"):
            _check_adapter(inner)
            inner = inner.get_base_model()
        else:
            raise InputError(f"A {type(inner).__name__} is no model of transformers{_remedy(inner)}")
    return inner


def _remedy(other: object) -> str:
    """Return the end of the message about an object that is no transformers model: its part that is one, or else how to
    load a model.
    """
    parts = other.named_modules() if isinstance(other, nn.Module) else ()
    if inside := next((name for name, part in parts if isinstance(part, PreTrainedModel)), None):
        return f", but holds one: give its part `{inside}`."
    return ". Load one first: model, tokenizer = kvkeep.load(name_or_path)."


def generator(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model that generates text, without wrappers around it.

    Raises:
        InputError: there is no model of transformers, it computes no logits, or it has no weights.
        UnsupportedModelError: see `unwrapped`.
    """
    inner = unwrapped(model)
    if not inner.can_generate():
        raise InputError(
            f"A {type(inner).__name__} computes no logits for tokens, so it cannot generate. Load the whole model, for "
            "example with kvkeep.load or AutoModelForCausalLM."
        )
    check_has_weights(inner)
    return inner


def check_has_weights(model: PreTrainedModel) -> None:
    """Refuse a model on the meta device, unless accelerate brings its weights from elsewhere.

    Raises:
        InputError: its weights have no numbers.
    """
    if model.device.type == "meta" and device_of(model).type == "meta":
        raise InputError(
            f"This {type(model).__name__} is on the meta device: its weights have shapes, but no numbers. Load it with "
            "kvkeep.load or from_pretrained. The command kvkeep plan needs no weights."
        )


def check_split(model: PreTrainedModel) -> None:
    """Refuse a model that is split over processes in a way in which kvkeep cannot follow.

    Raises:
        UnsupportedModelError: it is split in a way that kvkeep does not know, its heads cannot be divided equally, or
            it is split and some layers keep a state.
        InputError: the processes that the model is split over do not run.
    """
    if Heads.of(model.config) != ALONE and any(
        map(state_part, handing_cache(model.config, lambda _: IdleStepper()).layers)
    ):
        raise UnsupportedModelError(
            f"{type(model).__name__} has layers that keep a state, and kvkeep does not follow how it is split over "
            "processes. Run it in one process."
        )


def check_cache(model: PreTrainedModel) -> None:
    """Refuse a model without a KV cache of transformers' kind.

    Raises:
        UnsupportedModelError: it is an encoder-decoder, takes no cache, has no layer that caches keys, or works with a
            cache of its own kind.
    """
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; kvkeep bounds the cache of decoders only.")
    if taken_as(type(model)) is None or not _caches_keys(model.config):
        raise UnsupportedModelError(
            f"{name} takes no KV cache: it keeps a state of fixed size or nothing, or gives no cache to its "
            "inner decoder. So there is nothing that kvkeep could bound."
        )
    own = getattr(model, "_supports_default_dynamic_cache", None)
    if own is not None and not own():
        raise UnsupportedModelError(
            f"{name} works with a cache of its own kind instead of transformers', which kvkeep cannot replace."
        )


def _caches_keys(config: PreTrainedConfig) -> bool:
    """Return whether some decoder layer caches keys; also if its layers are of a kind that no cache can be made for."""
    try:
        return bool(windows_of(config))
    except UnsupportedModelError:  # it says more than this check could, once a cache is made
        return True


def check_attention(model: PreTrainedModel) -> None:
    """Refuse a decoder that computes its attention itself, instead of through transformers' attention interface, by
    which kvkeep's own is put in.

    Raises:
        UnsupportedModelError: it does so.
    """
    if not model._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{type(model).__name__} computes attention itself instead of through transformers' attention interface, "
            "so kvkeep cannot reach it. Models of the Llama, Mistral, Qwen, Gemma, Phi, GPT-2, GPT-NeoX and OPT "
            "families work; docs/models.md lists them all."
        )


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the configuration of the part that generates text.

    Raises:
        UnsupportedModelError: the model has several text models.
    """
    try:
        config: PreTrainedConfig = model.config.get_text_config(decoder=True)
    except ValueError as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} has several text models, and kvkeep cannot tell which one generates. Attach that "
            "part itself."
        ) from error
    return config


def generates_text(config: PreTrainedConfig) -> bool:
    """Return whether transformers has a decoder for this configuration, of text alone or of images and text."""
    return any(type(config) in kinds for kinds in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING))


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' class that makes the model of a configuration that `generates_text`."""
    return AutoModelForCausalLM if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING else AutoModelForImageTextToText


def placeholders(model: PreTrainedModel) -> dict[int, str]:
    """Return the ids of the tokens that stand for an image, a video or a sound, with a word for each kind."""
    config = model.config
    kinds = {"image": "an image", "video": "a video", "audio": "a sound"}
    named = ((getattr(config, f"{kind}_token_{end}", None), kinds[kind]) for kind in kinds for end in ("id", "index"))
    return {token: kind for token, kind in named if isinstance(token, int)}


def check_placeholders(model: PreTrainedModel, ids: Tensor, given: Mapping[str, Any]) -> None:
    """Refuse tokens that stand for an image, a video or a sound where none is given. Any argument with data other than
    text counts as given.

    Args:
        model: the model.
        ids: token ids of a prompt.
        given: all arguments of the model's forward.

    Raises:
        InputError: such a token is in the prompt. The model would read the placeholders as if they were words.
    """
    kinds = {} if ids.is_meta else placeholders(model)  # on the meta device, ids have no numbers
    if not kinds or any(name not in _TEXT and _some(value) for name, value in given.items()):
        return
    found = set(ids.flatten().tolist()) & kinds.keys()
    if found:
        token = min(found)
        raise InputError(
            f"Token {token} of the prompt stands for {kinds[token]}, and none is given. Pass the processor's whole "
            "output to the model (model.generate(**inputs, past_key_values=cache)), or leave the token out."
        )


def check_positions(model: PreTrainedModel, ids: Tensor) -> None:
    """Refuse images and sounds after `BoundedCache.continue_with` if the model itself numbers their positions.

    Args:
        model: the model.
        ids: token ids of a prompt.

    Raises:
        InputError: such a token is in the prompt. The positions that ``continue_with`` returns are those of text.
    """
    if ids.is_meta or not any(hasattr(part, "get_rope_index") for part in (model, model.base_model)):
        return
    kinds = placeholders(model)
    if found := set(ids.flatten().tolist()) & kinds.keys():
        token = min(found)
        raise InputError(
            f"Token {token} stands for {kinds[token]}, whose positions {type(model).__name__} numbers in its own way. "
            "continue_with knows those of text only: pass the processor's output to model.generate with a new cache."
        )


def _some(value: object) -> bool:
    """Return whether an argument carries data, and is no mere setting."""
    if isinstance(value, dict):
        return any(map(_some, value.values()))
    return value is not None and not isinstance(value, int)


class IdleStepper:
    """A stepper that computes nothing: its output has the shape that attention's has.

    Attributes:
        shapes: of the keys and values of its last step; ``None`` before the first one.
    """

    columns = 0

    def __init__(self) -> None:
        self.shapes: tuple[torch.Size, torch.Size] | None = None

    def step(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        **_: object,
    ) -> Float[Tensor, "B Hq T E"]:
        """Note the shapes, and return an uninitialised output of the right shape."""
        self.shapes = keys.shape, values.shape
        return query.new_empty((*query.shape[:-1], values.shape[-1]))


def try_out(skeleton: PreTrainedModel) -> None:
    """Run two tokens through a model on the meta device, and refuse what kvkeep's attention refuses.

    Errors of the model's own code pass: they may come from the missing numbers.

    Args:
        skeleton: the model on the meta device; it becomes bfloat16, since some kernels for experts take no other dtype.

    Raises:
        UnsupportedModelError: kvkeep cannot run this architecture.
    """
    nn.Module.to(skeleton, torch.bfloat16)
    trial, ids = copy.copy(skeleton).eval(), torch.zeros((1, 2), dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            trial(input_ids=ids, **handed(trial, handing_cache(trial.config, lambda index: IdleStepper())))
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{type(skeleton).__name__} cannot run with kvkeep. {error}") from error
    except Exception:  # a model's own code may need numbers; then its first step will show it
        return


_ROUTED = {"XLORA", "POLY"}
"""Kinds of adapters whose weights depend on the prompt, or on an argument of PEFT's forward."""


def _check_adapter(model: Any) -> None:
    """Refuse a model of PEFT whose active adapter kvkeep cannot run: prompt learning, and weights that depend on the
    prompt.

    Raises:
        UnsupportedModelError: the adapter is one of these.
    """
    config: Any = getattr(model, "active_peft_config", None)
    if getattr(config, "is_prompt_learning", False):
        raise UnsupportedModelError(
            f"{type(model).__name__} has learned a prompt or a prefix ({config.peft_type}), whose keys kvkeep cannot "
            "place. Adapters that change weights, such as LoRA, work."
        )
    kind = str(getattr(getattr(config, "peft_type", None), "value", "")).upper()
    if kind in _ROUTED or getattr(config, "alora_invocation_tokens", None):
        raise UnsupportedModelError(
            f"The adapter ({'aLoRA' if kind not in _ROUTED else kind}) chooses its weights for each prompt anew, "
            "in the forward of PEFT that kvkeep does not call. Adapters that change weights, such as LoRA, work."
        )
