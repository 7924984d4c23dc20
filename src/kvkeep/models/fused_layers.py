"""Decoder layers as two calls of the native kernel, one before their attention and one behind it, for a few rows."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from operator import is_
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.argument import CACHE_ARGUMENTS, handed_over, taken_as, usual
from kvkeep.backends import layers
from kvkeep.handing import PhasedCache
from kvkeep.models.fused_parts import SCALES, FusedGate, FusedLinear, FusedNorm, is_close, is_heard, mixed
from kvkeep.models.hf import ATTENTION

Attend: TypeAlias = Callable[
    [Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]], Float[Tensor, "B 1 Hq E"]
]

_RECORDER = "kvkeep_recorder"
_OWN = {*CACHE_ARGUMENTS, "attention_mask", "position_embeddings"}
_KNOWN = {*_OWN, "position_ids", "cache_position", "use_cache"}
_ORDER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_NAMES = set(_ORDER)
_LINEAR, _GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
_recorded: ContextVar[Callable[..., Tensor]] = ContextVar("_recorded")


class _Parts(NamedTuple):
    """The fused modules of a decoder layer; norms of single heads are ``None`` where there are none."""

    attention: Any
    first: FusedNorm
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    heads: tuple[FusedNorm | None, FusedNorm | None]
    output: nn.Linear
    second: FusedNorm
    gated: tuple[nn.Linear, nn.Linear, nn.Linear]
    feed: nn.Module


def _parts(layer: nn.Module) -> _Parts | None:
    """The parts of a layer; ``None`` if one is missing, has been replaced, or somebody wants to see its calls."""
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
    for one in (*linear, *gated):
        if type(one) is not FusedLinear:
            return None
    for one in (*own.values(), *of_attention.values(), *of_feed.values()):
        if one is not None and is_heard(one):
            return None
    return _Parts(
        attention,
        first,
        (linear[0], linear[1], linear[2]),
        heads,
        linear[3],
        second,
        (gated[0], gated[1], gated[2]),
        feed,
    )


class _Calls:
    """The two calls of a layer, as long as its parts and their weights stay where they are."""

    def __init__(self, parts: _Parts) -> None:
        self._weights = _weights(parts)
        self._places = layers.places(self._weights)
        heads, dim = [None if norm is None else _norm(norm) for norm in parts.heads], parts.attention.head_dim
        self.before = layers.Before(_norm(parts.first), parts.qkv, heads, dim)
        self.behind = layers.Behind(parts.output, _norm(parts.second), *parts.gated)

    def stand(self, parts: _Parts) -> bool:
        """Whether these are the calls of a layer's present parts."""
        weights = _weights(parts)
        return all(map(is_, weights, self._weights)) and layers.places(weights) == self._places


def _weights(parts: _Parts) -> list[Tensor | None]:
    """All weights of a layer, in one order."""
    norms: list[dict[str, Any]] = [
        one._parameters for one in (parts.first, parts.second, *parts.heads) if one is not None
    ]
    linear: list[dict[str, Any]] = [one._parameters for one in (*parts.qkv, parts.output, *parts.gated)]
    return [own["weight"] for own in norms + linear] + [own["bias"] for own in linear]


def _run(
    parts: _Parts, x: Float[Tensor, "B 1 width"], angles: tuple[Tensor, Tensor], attend: Attend, calls: _Calls
) -> Tensor | None:
    """The output of a layer for a token per row; ``None`` if the kernel cannot compute it."""
    found = calls.before(x, angles)
    if found is None:
        return None
    attended = attend(*found).reshape(len(x), 1, -1)
    out = calls.behind(x, attended)
    if out is None:
        y = x + parts.output(attended)
        out = y + parts.feed(parts.second(y))
    return out


def _norm(norm: FusedNorm) -> layers.Norm:
    return layers.Norm(norm.weight, norm._epsilon, norm._plus)


class FusedLayer(nn.Module):
    """Mixed into a decoder layer: in a step of a few rows with kvkeep's cache, two calls beside its attention."""

    _told: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output."""
        out = self._few(*args, **kwargs) if len(args) == 1 else None
        return super().forward(*args, **kwargs) if out is None else out

    def _few(self, x: Tensor, **kwargs: Any) -> Tensor | None:
        """The output, if this is such a step."""
        cache, angles = handed_over(kwargs), kwargs.get("position_embeddings")
        if x.ndim != 3 or x.shape[1] != 1 or not isinstance(cache, PhasedCache) or not isinstance(angles, tuple):
            return None
        parts = _parts(self)
        if parts is None or parts.attention.training or parts.attention.config._attn_implementation != ATTENTION:
            return None
        attention, call = parts.attention, ALL_ATTENTION_FUNCTIONS[ATTENTION]
        more = (kwargs[name] for name in kwargs.keys() - _KNOWN)
        if angles[0].shape[-1] != attention.head_dim or not all(one is None or one is False for one in more):
            return None  # only part of each head is rotated, or the layer is told what it was not in its trial
        given = {**self._told, **{name: kwargs[name] for name in kwargs.keys() - _OWN}}

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            handed = cache.update(key, value, attention.layer_idx)
            attended: Tensor = call(attention, query, *handed, kwargs.get("attention_mask"), **given)[0]
            return attended

        calls: _Calls | None = vars(self).get("_calls")
        if calls is None or not calls.stand(parts):
            calls = vars(self)["_calls"] = _Calls(parts)
        return _run(parts, x, angles, attend, calls)


def is_decoder(module: nn.Module) -> bool:
    """Whether a module has the parts of a decoder layer that may be fused."""
    return module._modules.keys() == _NAMES and all(part is not None for part in module._modules.values())


def copied(layer: nn.Module) -> nn.Module:
    """A copy of a decoder layer with the same weights."""
    same: list[Any] = [*layer.parameters(), *layer.buffers(), getattr(layer.self_attn, "config", None)]
    return copy.deepcopy(layer, {id(one): one for one in same})


def fuse_layer(layer: nn.Module) -> bool:
    """Fuse a decoder layer whose parts are fused, if that is what it computes."""
    if isinstance(layer, FusedLayer) or (parts := _parts(layer)) is None or not _is_all(layer, parts):
        return False
    if (constants := _constants(layer, parts)) is None:
        return False
    vars(layer)["_told"] = constants  # first, since another thread may be in the layer
    layer.__class__ = mixed(FusedLayer, type(layer))
    return True


def _is_all(layer: nn.Module, parts: _Parts) -> bool:
    """Whether a layer has no weights but those of its parts: others may be changed after the trial."""
    norms = [norm for norm in (parts.first, parts.second, *parts.heads) if norm is not None]
    known = {id(weight) for one in (*norms, *parts.qkv, parts.output, *parts.gated) for weight in one.parameters()}
    return known == {id(weight) for weight in (*layer.parameters(), *layer.buffers())}


def _twin(layer: nn.Module) -> Any:
    """The same layer, whose attention has a configuration of its own, as other threads may be in the layer."""
    twin, attention = copy.copy(layer), copy.copy(_any(layer).self_attn)
    vars(attention)["config"] = copy.deepcopy(attention.config)
    vars(twin)["_modules"] = {**layer._modules, "self_attn": attention}
    return twin


def _any(layer: nn.Module) -> Any:
    """A layer whose attributes have no types."""
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
        self._given = {"position_ids": 10**6 * torch.arange(rows)[:, None], "use_cache": True}

    def ask(self) -> bool:
        """Run the layer; whether it has handed its keys to the cache, and called attention, once."""
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

    def run(self, parts: _Parts, attend: Attend | None = None) -> Tensor | None:
        """The output of the kernel."""
        return _run(parts, self.x, self.angles, attend or (lambda *_: self.answer), _Calls(parts))


@torch.inference_mode()
def _constants(layer: nn.Module, parts: _Parts) -> dict[str, Any] | None:
    """What a layer tells attention in every call, if the kernel computes the same up to rounding; else ``None``."""
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
    """The time of decoder layers one after the other, attention aside; ``None`` if they take something else."""
    took = 0.0
    for layer in layers:
        try:
            trial, parts = _Trial(layer, (1.0,) * rows), _parts(layer) if isinstance(layer, FusedLayer) else None
            start = time.perf_counter()
            if (trial.ask() if parts is None else trial.run(parts)) is None:
                return None
            took += time.perf_counter() - start
        except Exception:
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
    """Let a model ask this function instead of its attention for a while."""
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
