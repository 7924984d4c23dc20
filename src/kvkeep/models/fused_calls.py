"""The parts of a decoder layer, and their two calls of the native kernel, with weights that are packed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from kvkeep.backends import layers
from kvkeep.models.fused_parts import FusedGate, FusedLinear, FusedNorm, is_heard

_ORDER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_NAMES = set(_ORDER)
_NONE: dict[str, Any] = {"weight": None}
_LINEAR, _GATED = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def is_decoder(module: nn.Module) -> bool:
    """Whether a module has the parts of a decoder layer that may be fused."""
    return module._modules.keys() == _NAMES and all(part is not None for part in module._modules.values())


class Parts(NamedTuple):
    """The fused modules of a decoder layer; norms of single heads are ``None`` where there are none."""

    attention: Any
    first: FusedNorm
    qkv: tuple[nn.Linear, nn.Linear, nn.Linear]
    heads: tuple[FusedNorm | None, FusedNorm | None]
    output: nn.Linear
    second: FusedNorm
    gated: tuple[nn.Linear, nn.Linear, nn.Linear]
    feed: nn.Module


def parts_of(layer: nn.Module) -> Parts | None:
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
    return Parts(
        attention,
        first,
        (linear[0], linear[1], linear[2]),
        heads,
        linear[3],
        second,
        (gated[0], gated[1], gated[2]),
        feed,
    )


class Calls:
    """The two calls of a layer, as long as its weights lie where they are. Addresses alone keep no weight alive.

    Args:
        layer: a decoder layer.
        parts: its parts.
    """

    def __init__(self, layer: nn.Module, parts: Parts) -> None:
        heads, dim = [None if norm is None else _norm(norm) for norm in parts.heads], parts.attention.head_dim
        self.before = layers.Before(_norm(parts.first), parts.qkv, heads, dim)
        self.behind = layers.Behind(parts.output, _norm(parts.second), *parts.gated)
        self._names, modules = _modules_of(layer)
        self._modules, self._kinds = [*map(id, modules)], [*map(type, modules)]
        self._places = layers.places(_weights_of(modules))

    def weights(self, layer: nn.Module) -> list[object] | None:
        """The weights of a layer, if these are still its calls: nobody has replaced a part or listens to one."""
        names, modules = _modules_of(layer)
        if names != self._names or [*map(id, modules)] != self._modules or [*map(type, modules)] != self._kinds:
            return None
        if any(map(is_heard, modules)):
            return None
        found = _weights_of(modules)
        return found if layers.places(found) == self._places else None


def _modules_of(layer: nn.Module) -> tuple[list[str], list[nn.Module]]:
    """The names of all modules of a layer, in one order, and the modules."""
    own = layer._modules
    names, found = [*own], [*own.values()]
    for one in (own.get("self_attn"), own.get("mlp")):
        if one is not None:
            names += one._modules
            found += one._modules.values()
    return names, [one for one in found if one is not None]


def _weights_of(modules: Sequence[nn.Module]) -> list[object]:
    found: list[object] = []
    for one in modules:
        found += one._parameters.values()
    return found


def _norm(norm: FusedNorm) -> layers.Norm:
    return layers.Norm(norm.weight, norm._epsilon, norm._plus)
