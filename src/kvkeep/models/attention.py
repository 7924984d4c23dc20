"""The transformers adapter: an attention function, a mask function, and `attach`. Nothing is patched.

Importing this module registers both functions under the name ``kvkeep``; `attach` selects them for one model.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NoReturn, TypeVar, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from kvkeep.backends import AttentionInputs, QuantizedTensor, choose
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import HandingLayer, handed_over, unwrap
from kvkeep.errors import InputError, ShapeError, UnsupportedModelError, UnsupportedOperationError
from kvkeep.head_sharding import Heads
from kvkeep.kv_bits import transforms_keys
from kvkeep.models.device import check_offloaded, without_autocast
from kvkeep.models.key_transforms import key_transforms
from kvkeep.models.packed_weights import PackedLinear
from kvkeep.models.rotary import LengthRule, follows_length, rotate_by_text
from kvkeep.models.support import (
    check_attention,
    check_cache,
    check_has_weights,
    check_placeholders,
    check_positions,
    check_split,
    text_config,
    unwrapped,
)
from kvkeep.models.weight_hash import WeightsOf
from kvkeep.types import EMPTY, AttentionOptions, Slots

# The mask that models hand to kvkeep's attention: which columns are padding. All else follows from positions.

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
        """Raise the error for a model or cache that uses this object as a mask tensor.

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
        """Return a mask of the real ones among the ``T`` new tokens; ``None`` if all are real.

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
        """Return a mask of the padding among the ``T`` new tokens of a prompt; ``None`` if there is none to clear, also
        in a decode step (``T`` is 1), and where the mask does not end with the new tokens.

        Attention of padding is 0, as torch computes it. Otherwise it would leak into states (RecurrentGemma).
        """
        # a single new token is a decode step, in which only rows that an engine leaves idle are padding
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
    """Return a `PaddingMask` in place of the mask tensor that transformers asks for.

    Only the padding in ``attention_mask`` is kept, offsets, the window, and whether the mask is causal otherwise. One
    that is not is refused when attention uses it; some models make masks that they never use.
    """
    expected = causal_mask_function if local_size is None else sliding_window_causal_mask_function(local_size)
    # one token comes after its prompt, with which a mask that cannot be honoured has been refused
    honoured = q_length == 1 or _same_function(mask_function, expected)
    return PaddingMask(attention_mask, int(q_offset), kv_offset, local_size, honoured)


def _same_function(one: object, two: object) -> bool:
    """Return whether two mask functions have the same code and the same closure: transformers makes them anew for each
    mask.
    """
    if isinstance(one, FunctionType) and isinstance(two, FunctionType):
        inner = (tuple(cell.cell_contents for cell in f.__closure__ or ()) for f in (one, two))
        return one.__code__ is two.__code__ and _same_function(*inner)
    if isinstance(one, tuple) and isinstance(two, tuple):
        return len(one) == len(two) and all(map(_same_function, one, two))
    return type(one) is type(two) is int and one == two  # such as the size of a window


def is_known(
    module: torch.nn.Module, *, dropout: float = 0.0, position_bias: Tensor | None = None, **kwargs: Any
) -> bool:
    """Return whether a module asks for plain causal attention, without dropout or biases."""
    asked = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if asked is None else asked
    return not dropout and position_bias is None and bool(causal)


# The projection of attention's heads into a layer's output, found in the module that attends.

NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo", "proj_out", "proj")
"""Names of the projection in models of transformers. Its shape is checked as well."""

_BYTES = 2**24
"""Size of the largest intermediate result."""

_factors: weakref.WeakKeyDictionary[nn.Module, tuple[object, Tensor]] = weakref.WeakKeyDictionary()


class OutputOf:
    """The projection of a module that attends, looked for when it is needed.

    Where there is none that kvkeep can read, norms are those of what the heads put out: a fused or quantised
    projection, one in another module, or weights that are not in memory.

    Args:
        module: the module that attends.
        heads: number of query heads.
    """

    __slots__ = ("_heads", "_module")

    def __init__(self, module: nn.Module, heads: int) -> None:
        self._module, self._heads = module, heads

    def lengths(self, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
        """Return, for each vector, the Euclidean norm of the layer's output if all query heads of its group put it out.

        Without a readable projection, return the lengths of the vectors themselves. Half precision becomes float32.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        linear = self._linear(x.shape[-1])
        if linear is not None:
            x = x @ _factor(linear, self._heads, x.shape[1]).to(x)
        norms: Tensor = x.norm(dim=-1)
        return norms

    def sizes(self, x: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk S"]:
        """Return, for each vector, the L1 norm of the layer's output if one query head of its group puts it out, as a
        mean over the group.

        Without a readable projection, return the L1 norms of the vectors themselves. Half precision becomes float32.
        """
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        linear = self._linear(x.shape[-1])
        if linear is None:
            return x.abs().sum(dim=-1)
        weights = _weights(linear, self._heads).to(x).unflatten(0, (x.shape[1], -1))
        # slots at once, so that no intermediate result is larger than `_BYTES`
        rows = max(1, _BYTES // (x.element_size() * weights.shape[-1] * x.shape[0] * self._heads))
        parts = [(part[:, :, None] @ weights).abs().sum(dim=-1).mean(dim=2) for part in x.split(rows, dim=2)]
        return torch.cat(parts, dim=-1)

    def _linear(self, dim: int) -> nn.Module | None:
        """Return the module of the output projection, which takes the outputs of all heads, each ``dim`` wide; ``None``
        if there is none that can be read.
        """
        width = self._heads * dim
        return next((part for part in _candidates(self._module) if _readable(part) and _taken(part) == width), None)


def _candidates(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of a module whose names are those of output projections."""
    for name in NAMES:
        if isinstance(found := getattr(module, name, None), nn.Module):
            yield getattr(found, "base_layer", found)  # PEFT wraps the layer that it adapts


def _readable(linear: nn.Module) -> bool:
    """Return whether a layer's weights are a matrix of floats in memory, plain or packed by kvkeep."""
    if isinstance(linear, PackedLinear):
        return True
    weight = _own(getattr(linear, "weight", None))
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point() or weight.is_meta:
        return False
    # other tensors that consist of tensors are quantised by another package
    return isinstance(weight, QuantizedTensor) or getattr(weight, "__tensor_flatten__", None) is None


def _own(weight: object) -> object:
    """Return this process's part of weights that processes share; other weights as they are."""
    to_local = getattr(weight, "to_local", None)  # a DTensor, whose module is slow to import
    return weight if to_local is None else to_local()


def _taken(linear: nn.Module) -> int:
    """Return the number of inputs of a linear layer."""
    if isinstance(linear, PackedLinear):
        return linear.in_features
    weight = _own(linear.weight)
    assert isinstance(weight, Tensor)
    return int(weight.shape[0] if _stands(linear) else weight.shape[1])


def _stands(linear: nn.Module) -> bool:
    """Return whether a layer stores its weights as (inputs, outputs), like GPT-2's ``Conv1D``."""
    return hasattr(linear, "nf")  # the number of its outputs, by the name that only `Conv1D` has for it


def _weights(linear: nn.Module, heads: int) -> Float[Tensor, "Hq E M"]:
    """Return this process's weights of an output projection, split by its query heads; ``M`` is the layer's width."""
    weight = _own(linear.weight)
    assert isinstance(weight, Tensor)
    each: Tensor = (weight if _stands(linear) else weight.mT).detach().unflatten(0, (heads, -1))
    return each


def _factor(linear: nn.Module, heads: int, groups: int) -> Float[Tensor, "Hk E E2"]:
    """Return a matrix for each KV head (``groups``), by which vectors times it have the norm that they would have after
    the summed projections of the group's query heads. It is cached until the weights change.
    """
    key: tuple[int, ...] = heads, groups  # enough for packed weights, which never change
    if isinstance(weight := _own(linear._parameters.get("weight")), Tensor) and not weight.is_inference():
        key = heads, groups, weight.data_ptr(), weight._version  # tensors of inference mode have no version
    known = _factors.get(linear)
    if known is None or known[0] != key:
        summed = _weights(linear, heads).double().unflatten(0, (groups, -1)).sum(dim=1)
        # Q is orthogonal and changes no norm, so the small factor R stands for the large product
        upper = torch.linalg.qr(summed.mT, mode="r").R
        known = _factors[linear] = (key, upper.mT.float())
    return known[1]


# The attention function, the mask function, and `attach`.

_Model = TypeVar("_Model", bound=torch.nn.Module)
_ONE_AT_A_TIME = threading.RLock()


def attach(model: _Model) -> _Model:
    """Select kvkeep's attention for a model's text decoder and return the model.

    With a dynamic cache, or without a cache, the model computes what it did before; where its rotary frequencies follow
    the length of a text, each row has those of its own length. A run is refused if it needs
    something that kvkeep's attention does not compute: attention dropout, 4-D masks, packed sequences, attention
    matrices, static caches. Encoders of images and sounds keep their own attention.
    ``model.set_attn_implementation("sdpa")`` undoes it.

    Args:
        model: any decoder of transformers whose attention goes through its attention interface, also if
            ``torch.compile`` or an adapter of PEFT is wrapped around it.

    Raises:
        InputError: ``model`` is no model of transformers.
        UnsupportedModelError: the interface does not reach this model's attention, its cache is no KV cache, its
            weights cannot be brought back from the disk, or kvkeep cannot follow how it is split over processes.
    """
    inner = unwrapped(model)
    check_cache(inner)
    check_offloaded(inner)
    check_split(inner)
    text = text_config(inner)
    # the models whose configuration is the text's: a decoder, also where it is a part of a model of images and text
    decoders = [part for part in inner.modules() if isinstance(part, PreTrainedModel) and part.config is text]
    for part in decoders or [inner]:
        check_attention(part)
    if inner.config is text or not decoders:
        inner.set_attn_implementation(ATTENTION)
    else:
        decoders[0].set_attn_implementation(ATTENTION)
        if inner._can_set_attn_implementation():
            inner.set_attn_implementation({"": ATTENTION})  # for the masks that the outer model makes
    if _tell_ids not in inner._forward_pre_hooks.values():
        inner.register_forward_pre_hook(_tell_ids, with_kwargs=True)
    for module in inner.modules():
        if follows_length(module) and rotate_by_text not in module._forward_hooks.values():
            module.register_forward_hook(rotate_by_text, with_kwargs=True)
    return model


@contextmanager
def attached(model: _Model) -> Iterator[_Model]:
    """Attach a model and put it in evaluation mode for the context. Afterwards its attention, hooks and modes are as
    before.

    Only one thread at a time is let in, since the others would find a model in the wrong state. That thread may attach
    again, as a callback does that evaluates something of its own.

    Raises:
        InputError, UnsupportedModelError: the model cannot be attached, see `attach`.
    """
    inner = unwrapped(model)
    with _ONE_AT_A_TIME:
        modes = [(part, part.training) for part in model.modules()]
        parts = [part.config for part in inner.modules() if isinstance(part, PreTrainedModel)]
        chosen, told = [config._attn_implementation for config in parts], _tell_ids in inner._forward_pre_hooks.values()
        turned = [module for module in inner.modules() if rotate_by_text not in module._forward_hooks.values()]
        try:
            model.eval()
            yield attach(model)
        finally:
            for part, training in modes:
                part.training = training
            for config, implementation in zip(parts, chosen, strict=True):
                config._attn_implementation = implementation
            if not told:  # else the model had been attached before, and stays so
                for number in [number for number, hook in inner._forward_pre_hooks.items() if hook is _tell_ids]:
                    inner._forward_pre_hooks.pop(number)
                    inner._forward_pre_hooks_with_kwargs.pop(number, None)
            for module in turned:
                for number in [number for number, hook in module._forward_hooks.items() if hook is rotate_by_text]:
                    module._forward_hooks.pop(number)
                    module._forward_hooks_with_kwargs.pop(number, None)


def _check_heads(cache: BoundedCache, config: PreTrainedConfig) -> None:
    """Refuse a cache whose layers were made for other heads than this process holds of the model, as one that was made
    before the model was split over processes.

    Args:
        cache: the cache.
        config: the model's configuration.

    Raises:
        InputError: the cache was made from another configuration.
    """
    heads = Heads.of(config)
    if any(layer.heads != heads for layer in cache.bounded_layers().values()):
        raise InputError(
            f"The heads of the model are shared by {heads.ranks} processes, and the cache was made from another "
            "configuration. Make it from that of the loaded model: BoundedCache(model.config, ...)."
        )


def _check_lengths(rule: LengthRule, cache: BoundedCache, new: int) -> None:
    """Refuse to read on where the keys in the cache were rotated with the frequencies of a shorter text.

    Args:
        rule: how the model's frequencies follow the length.
        cache: holds tokens.
        new: number of tokens that each row reads next.

    Raises:
        UnsupportedOperationError: the text of some row would come under other frequencies.
    """
    for seen in next(iter(cache.bounded_layers().values())).seen.tolist():  # every layer has seen the same tokens
        if (why := rule.refusal(seen, seen + new)) is not None:
            raise UnsupportedOperationError(why)


def _tell_ids(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check the bounded cache that a run of the model is given, and tell it the token ids and the weights; a forward
    pre-hook.

    Do nothing for other caches, or while a compiler traces. See `BoundedCache.continue_with`.

    Raises:
        InputError: a prompt has tokens that stand for an image, and there is none, or its positions would be wrong;
            there is no new token; ``use_cache`` is false; the cache is of other heads; or the model has no weights.
        SnapshotError: the cache holds a memory of other weights or adapters.
        UnsupportedOperationError: each row has an adapter of its own, or the text gets so long that keys are rotated in
            another way than those in the cache.
    """
    cache = handed_over(kwargs)
    ids = kwargs.get("input_ids", args[0] if args else None)
    if isinstance(cache, BoundedCache) and isinstance(ids, Tensor) and not torch.compiler.is_compiling():
        check_has_weights(cast(PreTrainedModel, model))
        if kwargs.get("use_cache") is False:
            raise InputError(
                "A cache was given together with use_cache=False, an argument or a line of the generation_config. Each "
                "step would feed the whole text into it again. Pass use_cache=True, or no cache."
            )
        if ids.shape[-1] == 0:
            raise InputError(
                f"The cache already holds {cache.get_seq_length()} tokens, and the prompt has no token after them. For "
                "another text call reset() on the cache or make a new one; for a next turn use cache.continue_with."
            )
        if not (isinstance(cache.weights, WeightsOf) and cache.weights.of(model)):
            _check_heads(cache, cast(PreTrainedModel, model).config)
            cache.feeds(WeightsOf(model))
            if transforms_keys(cache.row_snapshots.settings.kv_bits):
                cache.transform_keys(key_transforms(cast(PreTrainedModel, model)))
        cache.check_adapters()
        # several tokens are a prompt; an answer may grow over the border, as under transformers
        if ids.shape[1] > 1 and cache.get_seq_length() and (rule := LengthRule.of(model)):
            _check_lengths(rule, cache, ids.shape[1])
        if cache.records and ids.shape[1] > 1:
            check_positions(cast(PreTrainedModel, model), ids)
        if cache.get_seq_length() == 0:
            check_placeholders(cast(PreTrainedModel, model), ids, kwargs)
        cache.note(ids, kwargs.get("attention_mask"))


def attention_forward(
    module: torch.nn.Module,
    query: Float[Tensor, "B Hq T D"],
    key: Float[Tensor, "B Hk S D"],
    value: Float[Tensor, "B Hk S E"],
    attention_mask: PaddingMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Float[Tensor, " Hq"] | None = None,
    **kwargs: Any,
) -> tuple[Float[Tensor, "B T Hq E"], None]:
    """Compute attention for transformers: through a bounded layer if the keys come from one, else densely.

    Raises:
        UnsupportedModelError: the model asks for something that attention over positions cannot honour.
        ShapeError: keys or mask do not fit the tokens in the cache.
        CapacityError: the policy does not evict and its budget is exhausted.
    """
    if not is_known(module, dropout=dropout, **kwargs):
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for dropout, a position bias or attention that is not causal, which "
            "kvkeep's attention does not compute. Call model.eval() if the model is in training mode."
        )
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        raise UnsupportedModelError(
            "output_attentions=True asks for a matrix of all attention probabilities, which kvkeep never has. Leave it "
            'out, or go back to the model\'s own attention with model.set_attn_implementation("eager").'
        )
    if isinstance(attention_mask, Tensor):
        raise UnsupportedModelError(
            "A 4-D attention mask was passed; kvkeep derives causality from positions. Pass a 2-D padding mask."
        )
    if attention_mask is not None and not attention_mask.honoured:
        raise UnsupportedModelError(
            "The model wants a mask that is neither causal nor a sliding window: image tokens that see each other, "
            "several texts packed into a row, chunked attention, or an encoder. kvkeep derives visibility from "
            "positions and cannot honour it."
        )
    key, value, layer = unwrap(key, value)
    # without a mask nothing is padded, and the queries are those of the last tokens
    mask = attention_mask or PaddingMask(None, key.shape[2] - query.shape[2], 0, kwargs.get("sliding_window"))
    if mask.window is not None and mask.window < 1:
        raise UnsupportedModelError("A layer has a sliding window of no tokens; check the model's config.json.")
    options = AttentionOptions(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=mask.window,
        softcap=softcap,
        sinks=s_aux,
        output=None if layer is None else OutputOf(module, query.shape[1]),
    )
    with without_autocast(query.device.type):
        if layer is None:
            out = _dense(query, key, value, mask, options)
        else:
            out = _bounded(layer, query, key, value, mask, options)
    if (padding := mask.padding(query.shape[2])) is not None:
        out = out.masked_fill(padding.to(out.device)[:, None, :, None], 0)  # backends leave it undefined there
    return out.transpose(1, 2).contiguous(), None


def _bounded(
    layer: HandingLayer,
    query: Float[Tensor, "B Hq T D"],
    key: Float[Tensor, "B Hk T D"],
    value: Float[Tensor, "B Hk T E"],
    mask: PaddingMask,
    options: AttentionOptions,
) -> Float[Tensor, "B Hq T E"]:
    """Run a step of the bounded layer that the keys come from, and return the attention output.

    Raises:
        UnsupportedModelError: the layer's sliding window is not that of its cache.
        ShapeError: see `PaddingMask.new_tokens`.
    """
    stepper = layer.take()
    if options.window != layer.window:
        raise UnsupportedModelError(
            f"The model asks for a sliding window of {options.window} tokens where its configuration gives the cache "
            f"{layer.window}. Make the cache from this model's own configuration."
        )
    real, phase = mask.new_tokens(query.shape[2]), layer.phase_of(query.shape[2])
    real = None if real is None else real.to(key.device)
    return stepper.step(query, key, value, options=options, phase=phase, real=real)


def _dense(
    query: Float[Tensor, "B Hq T D"],
    key: Float[Tensor, "B Hk S D"],
    value: Float[Tensor, "B Hk S E"],
    mask: PaddingMask,
    options: AttentionOptions,
) -> Float[Tensor, "B Hq T E"]:
    """Compute attention with an ordinary cache, or without one.

    Key ``j`` stands at position ``mask.kv_offset + j``, and query ``t`` at ``mask.q_offset + t``. Keys that are padding
    or stand after the last query, as the unwritten slots of a static cache do, are seen by no query.
    """
    B, T, S = query.shape[0], query.shape[2], key.shape[2]
    k = (mask.kv_offset + torch.arange(S, device=key.device)).expand(B, S)
    if mask.real is not None:
        # columns beyond the mask are slots that are not written yet
        covered = torch.nn.functional.pad(
            mask.real.to(key.device), (0, max(0, mask.kv_offset + S - mask.real.shape[1]))
        )
        k = k.masked_fill(~covered[:, mask.kv_offset : mask.kv_offset + S], EMPTY)
    last = mask.q_offset + T - 1
    k = k.masked_fill(k > last, EMPTY)  # a static cache hands over slots that are not written yet
    q = (mask.q_offset + torch.arange(T, device=key.device)).expand(B, T)
    backend = choose(query.device, query.dtype)
    out, _ = backend.attend(AttentionInputs(query, Slots(key, value, k[:, None]), q, options))
    return out


AttentionInterface.register(ATTENTION, attention_forward)
AttentionMaskInterface.register(ATTENTION, padding_mask)
