"""Decoder layers as calls of the native kernel for a few rows: before their attention and behind it, or all in one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.backends import Repeat, layers
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, PhasedCache, handed_over, taken_as, usual
from kvkeep.cache.layer import Layer
from kvkeep.models.attention import ATTENTION, PaddingMask, is_known
from kvkeep.models.fused_modules import SCALES, FusedGate, FusedLinear, FusedNorm, is_close, is_heard, mixed
from kvkeep.types import AttentionOptions, Phase

# The parts of a decoder layer, and their two calls of the native kernel, with weights that are packed once.

_ORDER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_NAMES = set(_ORDER)
_NONE: dict[str, Any] = {"weight": None}
_LINEAR, _GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def is_decoder(module: nn.Module) -> bool:
    """Return whether a module has the parts of a decoder layer that may be fused."""
    return module._modules.keys() == _NAMES and all(part is not None for part in module._modules.values())


class FusedParts(NamedTuple):
    """The fused modules of a decoder layer; norms of single heads are ``None`` where there are none."""

    attention: Any
    first: FusedNorm
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    heads: tuple[FusedNorm | None, FusedNorm | None]
    output: nn.Linear
    second: FusedNorm
    gated: tuple[nn.Linear, nn.Linear, nn.Linear]
    feed: nn.Module


def parts_of(layer: nn.Module) -> FusedParts | None:
    """Return a layer's parts for fusing; ``None`` if a part is missing, is not fused, or has hooks."""
    own: dict[str, Any] = layer._modules
    if own.keys() != _NAMES:
        return None
    attention, feed, first, second = (own[name] for name in _ORDER)
    of_attention: dict[str, Any] = attention._modules
    of_feed: dict[str, Any] = feed._modules
    heads = of_attention.get("q_norm"), of_attention.get("k_norm")
    linear: list[Any] = [of_attention.get(name) for name in _LINEAR]
    gated: list[Any] = [of_feed.get(name) for name in _GATED]
    if not (isinstance(first, FusedNorm) and isinstance(second, FusedNorm) and isinstance(feed, FusedGate)):
        return None
    for norm in heads:
        if norm is not None and not isinstance(norm, FusedNorm):
            return None
    for projection in (*linear, *gated):
        if type(projection) is not FusedLinear:  # a subclass may have a `forward` of its own
            return None
    for part in (*own.values(), *of_attention.values(), *of_feed.values()):
        if part is not None and is_heard(part):
            return None
    return FusedParts(
        attention,
        first,
        (linear[0], linear[1], linear[2]),
        heads,
        linear[3],
        second,
        (gated[0], gated[1], gated[2]),
        feed,
    )


class FusedCalls:
    """The two calls of a layer, as long as its weights lie where they are. Addresses alone keep no weight alive.

    Args:
        layer: a decoder layer.
        parts: its parts.
    """

    def __init__(self, layer: nn.Module, parts: FusedParts) -> None:
        heads, dim = [None if norm is None else _norm(norm) for norm in parts.heads], parts.attention.head_dim
        self.before = layers.Before(_norm(parts.first), parts.qkv, heads, dim)
        self.behind = layers.Behind(parts.output, _norm(parts.second), *parts.gated)
        self._names, modules = _modules_of(layer)
        self._modules, self._kinds = [*map(id, modules)], [*map(type, modules)]
        self._places = layers.places(_weights_of(modules))

    def weights(self, layer: nn.Module) -> list[object] | None:
        """Return a layer's weights; ``None`` if its modules or weights have changed since these calls were built."""
        names, modules = _modules_of(layer)
        if names != self._names or [*map(id, modules)] != self._modules or [*map(type, modules)] != self._kinds:
            return None
        if any(map(is_heard, modules)):
            return None
        found = _weights_of(modules)
        return found if layers.places(found) == self._places else None


def _modules_of(layer: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """Return the names and the modules of a layer's parts, always in the same order."""
    own = layer._modules
    names, modules = [*own], [*own.values()]
    for part in (own.get("self_attn"), own.get("mlp")):
        if part is not None:
            names += part._modules
            modules += part._modules.values()
    return names, [module for module in modules if module is not None]


def _weights_of(modules: Sequence[nn.Module]) -> list[object]:
    weights: list[object] = []
    for module in modules:
        weights += module._parameters.values()
    return weights


def _norm(norm: FusedNorm) -> layers.Norm:
    return layers.Norm(norm.weight, norm._epsilon, norm._plus)


# Decode steps of attached models that differ from their layers' last ones in their tokens alone.


def is_ours(config: PreTrainedConfig) -> bool:
    """Return whether a model's attention goes to `attention_forward`, with no attention probabilities asked for."""
    own = object.__getattribute__(config, "__dict__")  # a layer asks in each step, and properties take long
    try:
        return own["_attn_implementation_internal"] == ATTENTION and not own["_output_attentions"]
    except KeyError:
        return config._attn_implementation == ATTENTION and not config.output_attentions


def repeatable(attention: nn.Module, **told: Any) -> AttentionOptions | None:
    """Return the options with which `repeat` may run a layer's steps; ``None`` if they cannot be repeated.

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
    """Replay a layer's last decode step for other tokens, see `Layer.repeat`.

    Args:
        cache: holds the layer.
        index: number of the layer in a model of which `is_ours` is true.
        mask: what the model passes as its mask.
        options: what the layer asks for.
        run: makes the step.

    Returns:
        What ``run`` returned; ``None`` if the step cannot be a replay, and then nothing has changed.

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


Attend: TypeAlias = Callable[
    [Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]], Float[Tensor, "B 1 Hq E"]
]

_RECORDER = "kvkeep_recorder"
_OWN = {*CACHE_ARGUMENTS, "attention_mask", "position_embeddings"}
_KNOWN = {*_OWN, "position_ids", "cache_position", "use_cache"}
_recorded: ContextVar[Callable[..., Tensor]] = ContextVar("_recorded")


def _run(
    parts: FusedParts, x: Float[Tensor, "B 1 width"], angles: tuple[Tensor, Tensor], attend: Attend, calls: FusedCalls
) -> Tensor | None:
    """Compute a layer's output for a token per row; ``None`` if the kernel cannot compute what comes before
    attention.
    """
    found = calls.before(x, angles)
    if found is None:
        return None
    attended = attend(*found).reshape(len(x), 1, -1)
    out = calls.behind(x, attended)
    if out is None:
        y = x + parts.output(attended)
        out = y + parts.feed(parts.second(y))
    return out


class FusedLayer(nn.Module):
    """Mixed into a decoder layer: in a step of a few rows with kvkeep's cache, two calls beside its attention.

    Where attention differs from the last step's in its tokens alone, one call does it all.
    """

    _told: dict[str, Any]
    _repeated: AttentionOptions | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, from the fused kernel where the step allows it."""
        out = self._few(*args, **kwargs) if len(args) == 1 else None
        return super().forward(*args, **kwargs) if out is None else out

    def _few(self, x: Tensor, **kwargs: Any) -> Tensor | None:
        """Return the output of a decode step from the fused kernel; ``None`` for any other step."""
        cache, angles = handed_over(kwargs), kwargs.get("position_embeddings")
        if x.ndim != 3 or x.shape[1] != 1 or not isinstance(cache, PhasedCache) or not isinstance(angles, tuple):
            return None
        attention: Any = self._modules.get("self_attn")
        if attention is None or attention.training or not is_ours(attention.config):
            return None
        calls: FusedCalls | None = vars(self).get("_calls")
        weights = None if calls is None else calls.weights(self)
        if calls is None or weights is None:
            if (parts := parts_of(self)) is None:
                return None
            calls = vars(self)["_calls"] = FusedCalls(self, parts)
            weights = calls.weights(self)
        more = (kwargs[name] for name in kwargs.keys() - _KNOWN)
        if angles[0].shape[-1] != attention.head_dim or not all(
            argument is None or argument is False for argument in more
        ):
            return None  # only part of each head is rotated, or the layer is told what it was not in its trial
        mask, out, known = kwargs.get("attention_mask"), None, calls
        if self._repeated is not None and is_known(attention, **self._told):
            whole = partial(layers.whole, known.before, known.behind, x, angles)
            out = repeat(cache, attention.layer_idx, mask, self._repeated, whole)
        if out is not None or (parts := parts_of(self)) is None:
            return out
        call = ALL_ATTENTION_FUNCTIONS[ATTENTION]
        given = {**self._told, **{name: kwargs[name] for name in kwargs.keys() - _OWN}}

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            handed = cache.update(key, value, attention.layer_idx)
            attended: Tensor = call(attention, query, *handed, mask, **given)[0]
            return attended

        return _run(parts, x, angles, attend, known)


def copied(layer: nn.Module) -> nn.Module:
    """Return a copy of a decoder layer that shares the layer's weights."""
    same: list[Any] = [*layer.parameters(), *layer.buffers(), getattr(layer.self_attn, "config", None)]
    return copy.deepcopy(layer, {id(shared): shared for shared in same})


def fuse_layer(layer: nn.Module) -> bool:
    """Fuse a decoder layer, in place, and return whether it was fused.

    It is fused if its parts are, it has no other weights, and its outputs on random numbers are the kernel's.
    """
    if isinstance(layer, FusedLayer) or (parts := parts_of(layer)) is None or not _is_all(layer, parts):
        return False
    if (constants := _constants(layer, parts)) is None:
        return False
    attention = parts.attention
    vars(layer).update(
        _told=constants, _repeated=repeatable(attention, **constants)
    )  # first, since another thread may be in the layer
    layer.__class__ = mixed(FusedLayer, type(layer))
    return True


def _is_all(layer: nn.Module, parts: FusedParts) -> bool:
    """Return whether a layer has no weights but those of its parts. Other weights could change after the trial."""
    norms = [norm for norm in (parts.first, parts.second, *parts.heads) if norm is not None]
    known = {id(weight) for part in (*norms, *parts.qkv, parts.output, *parts.gated) for weight in part.parameters()}
    return known == {id(weight) for weight in (*layer.parameters(), *layer.buffers())}


def _twin(layer: nn.Module) -> Any:
    """Return a copy of a layer, for a trial, with a configuration of its own, since other threads may be in the
    layer.
    """
    twin, attention = copy.copy(layer), copy.copy(_any(layer).self_attn)
    vars(attention)["config"] = copy.deepcopy(attention.config)
    vars(twin)["_modules"] = {**layer._modules, "self_attn": attention}
    return twin


def _any(layer: nn.Module) -> Any:
    """Return a layer itself, typed as ``Any``, so that type checkers allow every attribute."""
    return layer


class _Trial:
    """A token of several rows, made of random numbers, and what a layer makes of it.

    Args:
        layer: a decoder layer.
        scales: size of the numbers in each row.

    Attributes:
        heads: the query, key and value that the layer has handed to attention; random numbers were the answer.
        constants: what it has told attention beside them.
        out: its output.
    """

    heads: list[Tensor]
    constants: dict[str, Any] | None = None
    out: object = None

    def __init__(self, layer: nn.Module, scales: Sequence[float]) -> None:
        self._layer = _twin(layer)
        attention, weight = self._layer.self_attn, self._layer.input_layernorm.weight
        draw, rows, dim = torch.Generator().manual_seed(0), len(scales), attention.head_dim

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        self._attention, turns = attention, numbers(rows, 1, dim)
        self.x = (numbers(rows, 1, len(weight)) * torch.tensor(scales)[:, None, None]).to(weight.dtype)
        self.angles = turns.cos().to(weight.dtype), turns.sin().to(weight.dtype)
        self.answer = numbers(rows, 1, attention.o_proj.in_features // dim, dim).to(weight.dtype)
        self._cache = taken_as(type(layer)) or usual()
        # far apart, so that numbers which depend on positions differ from row to row
        self._given = {"position_ids": 10**6 * torch.arange(rows)[:, None], "use_cache": True}

    def ask(self) -> bool:
        """Run the layer with random numbers for attention's answer, and record what it hands to attention.

        Return whether the layer has called the cache and attention once each.
        """
        cache = _Handed()
        calls: list[tuple[Any, ...]] = []

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            calls.append((*args, {name: value for name, value in kwargs.items() if name not in self._given}))
            return self.answer

        asked = {self._cache: cache, "attention_mask": None, "position_embeddings": self.angles}
        with _recording(self._attention.config, attention):
            self.out = self._layer(self.x, **asked, **self._given)
        if len(calls) != 1 or cache.indices != [self._attention.layer_idx]:
            return False
        module, *self.heads, mask, self.constants = calls[0]
        return module is self._attention and mask is None

    def run(self, parts: FusedParts, attend: Attend | None = None) -> Tensor | None:
        """Return the layer's output as the kernel computes it; ``None`` if it cannot."""
        return _run(parts, self.x, self.angles, attend or (lambda *_: self.answer), FusedCalls(self._layer, parts))


@torch.inference_mode()
def _constants(layer: nn.Module, parts: FusedParts) -> dict[str, Any] | None:
    """Return the arguments that a layer always hands to attention, if the kernel matches the layer; else ``None``."""
    try:
        trial = _Trial(layer, SCALES)
        if not trial.ask() or not _is_constant(trial.constants):
            return None
    except Exception:  # it takes something else
        return None
    same: list[bool] = []

    def compare(*found: Tensor) -> Tensor:
        same.extend(map(is_close, found, trial.heads))
        return trial.answer

    out = trial.run(parts, compare)
    return trial.constants if out is not None and all(same) and is_close(out, trial.out) else None


@torch.inference_mode()
def seconds(layers: Sequence[nn.Module], rows: int) -> float | None:
    """Return the seconds that decoder layers take in turn, without attention; ``None`` if a layer cannot be run so."""
    took = 0.0
    for layer in layers:
        try:
            trial, parts = _Trial(layer, (1.0,) * rows), parts_of(layer) if isinstance(layer, FusedLayer) else None
            start = time.perf_counter()
            if (trial.ask() if parts is None else trial.run(parts)) is None:
                return None
            took += time.perf_counter() - start
        except Exception:  # it takes something else
            return None
    return took


def _is_constant(given: dict[str, Any] | None) -> bool:
    return given is not None and all(value is None or isinstance(value, (bool, int, float)) for value in given.values())


class _Handed:
    """A cache that holds nothing, and notes which layers hand it their keys."""

    def __init__(self) -> None:
        self.indices: list[int] = []

    def update(self, key: Tensor, value: Tensor, index: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self.indices.append(index)
        return key, value


@contextmanager
def _recording(config: PreTrainedConfig, attention: Callable[..., Tensor]) -> Iterator[None]:
    """Let a model call this function in place of its attention, while the context lasts."""
    before, token = config._attn_implementation, _recorded.set(attention)
    config._attn_implementation = _RECORDER
    try:
        yield
    finally:
        config._attn_implementation = before
        _recorded.reset(token)


def _record(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return _recorded.get()(*args, **kwargs), None


AttentionInterface.register(_RECORDER, _record)
