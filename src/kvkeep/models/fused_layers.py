"""Decoder layers as calls of the native kernel for a few rows: before their attention and behind it."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvkeep.backends import QuantizedTensor, layer_ops
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, PhasedCache, handed_over, taken_as, usual
from kvkeep.models.attention import ATTENTION, is_known
from kvkeep.models.fused_modules import (
    CALLS,
    EPSILON,
    FORWARD,
    SCALES,
    Described,
    FusedGate,
    FusedLinear,
    FusedNorm,
    GateParts,
    Trials,
    activation_of,
    alike,
    described,
    gate_parts,
    has_global_hooks,
    has_own_forward,
    is_as_tried,
    is_close,
    is_heard,
    mixed,
    norm_of,
    unmixed,
)
from kvkeep.types import AttentionOptions

# The parts of a decoder layer, and their two calls of the native kernel, with weights that are packed once.


class _Kind(NamedTuple):
    """The names of the parts of a decoder layer.

    Attributes:
        first: the norm of what attention takes.
        second: the norm of what the feed-forward layer takes.
        added: norms of what attention, and the feed-forward layer, add to the residual stream; ``()``: it is added as
            it is.
        feed: the feed-forward layer; if its products are the layer's own, these and its activation.
    """

    first: str
    second: str
    added: tuple[str, ...] = ()
    feed: tuple[str, ...] = ("mlp",)

    def names(self) -> frozenset[str]:
        """Return the attribute names of all parts of a decoder layer of this kind, its attention included."""
        return frozenset((_ATTENTION, self.first, self.second, *self.added, *self.feed))


_ATTENTION, _ACTIVATION = "self_attn", "activation_fn"
_KINDS = (
    _Kind("input_layernorm", "post_attention_layernorm"),
    _Kind(
        "input_layernorm",
        "pre_feedforward_layernorm",
        ("post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    _Kind("self_attn_layer_norm", "final_layer_norm", feed=("fc1", "fc2", _ACTIVATION)),
)
_KIND_OF = {kind.names(): kind for kind in _KINDS}
_PROJECTIONS, _JOINED, _OUTPUTS = ("q_proj", "k_proj", "v_proj"), "qkv_proj", ("o_proj", "out_proj")


class FusedParts(NamedTuple):
    """The fused modules of a decoder layer; norms of single heads are ``None`` where there are none.

    ``qkv`` are the layers of query, key and value, or parts of one that joins them. ``feed`` is the feed-forward layer,
    or the decoder layer itself with an ``activation`` of its own. ``linear`` are all linear modules.
    """

    attention: Any
    first: FusedNorm
    qkv: Sequence[nn.Linear | layer_ops.Linear]
    heads: tuple[FusedNorm | None, FusedNorm | None]
    output: nn.Linear
    second: FusedNorm
    gated: GateParts
    feed: nn.Module
    activation: nn.Module | None
    added: tuple[FusedNorm | None, FusedNorm | None]
    linear: tuple[nn.Linear, ...]

    def norms(self) -> list[FusedNorm]:
        """Return all norms among the parts of a decoder layer, those of single heads included."""
        return [norm for norm in (self.first, self.second, *self.heads, *self.added) if norm is not None]

    def feed_forward(self, x: Float[Tensor, "B 1 width"]) -> Float[Tensor, "B 1 width"]:
        """Return the output of the feed-forward layer, computed by its modules one by one, without norm or residual."""
        if self.activation is None:
            return cast(Tensor, self.feed(x))
        up, down = self.gated.modules
        return cast(Tensor, down(self.activation(up(x))))


def parts_of(layer: nn.Module) -> FusedParts | None:
    """Return the fused parts of a decoder layer; ``None`` if the layer is of no known kind, or a part is missing, is
    not fused, has hooks or has changed since it was tried.
    """
    own: dict[str, Any] = {name: part for name, part in layer._modules.items() if not _is_idle(part)}
    if (kind := _KIND_OF.get(frozenset(own))) is None:
        return None
    attention, first, second = own[_ATTENTION], own[kind.first], own[kind.second]
    added, activation = [own[name] for name in kind.added], own.get(_ACTIVATION)
    feed = own[kind.feed[0]] if activation is None else layer
    of_attention: dict[str, Any] = attention._modules
    heads = of_attention.get("q_norm"), of_attention.get("k_norm")
    if not all(isinstance(norm, FusedNorm) for norm in (first, second, *added)):
        return None
    for norm in heads:
        if norm is not None and not isinstance(norm, FusedNorm):
            return None
    modules, gated = _projections(of_attention), gate_parts(feed)
    if gated is None or any(type(module) is not FusedLinear for module in modules):
        return None  # a subclass may have a `forward` of its own
    if activation is None and not isinstance(feed, FusedGate):
        return None
    if not all(map(_is_usable, (*layer._modules.values(), *of_attention.values(), *feed._modules.values()))):
        return None
    *projections, output = modules
    if (qkv := projections if len(projections) > 1 else _split(projections[0], output)) is None:
        return None
    return FusedParts(
        attention,
        first,
        qkv,
        heads,
        output,
        second,
        gated,
        feed,
        activation,
        (added[0], added[1]) if added else (None, None),
        (*modules, *gated.modules),
    )


def _projections(of_attention: dict[str, Any]) -> list[Any]:
    """Return the projections of an attention: of query, key and value, or the one that joins them, and the output's."""
    joined, output = of_attention.get(_JOINED), next(filter(None, map(of_attention.get, _OUTPUTS)), None)
    return [*(map(of_attention.get, _PROJECTIONS) if joined is None else [joined]), output]


def _split(joined: nn.Linear, output: nn.Linear) -> list[layer_ops.Linear] | None:
    """Return the three parts of a projection that puts out the query, then the key, then the value, the last two of
    equal length; ``None`` if it cannot be split so. The query is as long as what ``output`` takes.
    """
    rest = joined.out_features - output.in_features
    return layer_ops.split(joined, [output.in_features, rest // 2, rest // 2]) if rest > 0 else None


def _is_idle(part: nn.Module | None) -> bool:
    """Return whether a part of a layer does nothing: dropout outside of training."""
    return type(part) is nn.Dropout and not part.training


def _is_usable(part: nn.Module | None) -> bool:
    """Return whether a part of a layer has no hooks, and still has the values with which it was tried."""
    if part is None:
        return True
    if isinstance(part, FusedNorm) and not (norm_of(part) is not None and has_own_forward(part)):
        return False
    return not is_heard(part) and (not isinstance(part, FusedGate) or is_as_tried(part))


class LayerRule(NamedTuple):
    """What a trial has found out about a layer: its computation beside its parts.

    Attributes:
        is_rotated: whether queries and keys are rotated.
        query_scale: what queries are multiplied with before attention.
        activation: of the feed-forward layer, one of `layer_ops.ACTIVATIONS`.
    """

    is_rotated: bool
    query_scale: float
    activation: int


class FusedCalls:
    """The two calls of a layer, as long as its weights lie where they are.

    The calls hold addresses, which keep no weight alive; `are_of` compares them before each step.

    Args:
        layer: a decoder layer.
        parts: its parts.
        rule: what its trial has found.
        rotary_dim: number of dims of a head that are rotated.
    """

    def __init__(self, layer: nn.Module, parts: FusedParts, rule: LayerRule, rotary_dim: int) -> None:
        heads, added = ([None if norm is None else _norm(norm) for norm in two] for two in (parts.heads, parts.added))
        dim, second, (_, gate, up, down) = parts.attention.head_dim, _norm(parts.second), parts.gated
        self.before = layer_ops.Before(_norm(parts.first), parts.qkv, heads, dim, rotary_dim, rule.query_scale)
        self.behind = layer_ops.Behind(parts.output, second, gate, up, down, added=added, activation=rule.activation)
        self.rotary_dim = rotary_dim
        owners = [*dict.fromkeys((layer, parts.attention, parts.feed))]
        modules = [layer, *(part for owner in owners for part in owner._modules.values() if part is not None)]
        # each step compares all this, so what can be looked up once is
        self._names = [[*owner._modules] for owner in owners]
        self._ids = [[*map(id, owner._modules.values())] for owner in owners]
        self._parts, self._kinds = modules[1:], [*map(type, modules[1:])]
        self._attributes = [vars(part) for part in self._parts]
        self._weighted = [vars(part) for part in self._parts if part._parameters]
        self._places, self._owners = self._places_now(), [vars(owner) for owner in owners]
        # the dicts of hooks themselves: hooks that come later are in them, unless somebody replaces a dict
        self._hooks = [*chain.from_iterable(map(_HOOKS, self._attributes))]
        # what can change the result while modules and weights stay: epsilons, the mode of dropout, values of the trial
        names_of: list[tuple[nn.Module | None, str]] = [
            (norm, name) for norm in parts.norms() for name in EPSILON if name in vars(norm)
        ]
        names_of += [(part, "training") for part in modules if type(part) is nn.Dropout]
        for owner in dict.fromkeys((layer, parts.feed)):
            tried = vars(owner).get("as_tried", ())
            names_of += [(owner._modules[child] if child else owner, name) for child, name, _ in tried if name]
        every = [(vars(part), _values_of(name for other, name in names_of if other is part)) for part in modules]
        self._told = [(own, values) for own, values in every if values is not id]
        self._values = [values(own) for own, values in self._told]
        self._classes = [*{getattr(type(part), "plain", type(part)) for part in (layer, *self._parts)}]
        self._forwards = [kind.forward for kind in self._classes]

    def are_of(self, layer: nn.Module) -> bool:
        """Return whether these calls still belong to a layer: no module, weight, plain value or hook has changed
        since they were made.
        """
        if vars(layer) is not self._owners[0]:  # a copy
            return False
        for owner, names, ids in zip(self._owners, self._names, self._ids, strict=True):
            modules = owner["_modules"]
            if [*modules] != names or [*map(id, modules.values())] != ids:
                return False
        try:
            if [values(own) for own, values in self._told] != self._values:
                return False
        except KeyError:  # an attribute is gone
            return False
        if [kind.forward for kind in self._classes] != self._forwards:
            return False
        if [*map(type, self._parts)] != self._kinds or any("forward" in own for own in self._attributes):
            return False
        if not all(map(operator.is_, chain.from_iterable(map(_HOOKS, self._attributes)), self._hooks)):
            return False  # somebody has replaced the groups of hooks
        if (any(self._hooks) or has_global_hooks()) and any(map(is_heard, self._parts)):
            return False
        return self._places_now() == self._places

    def _places_now(self) -> list[object]:
        """Return the identity, and what `_place` tells, of every weight of the parts."""
        return [
            (id(weight), _place(weight))
            for own in self._weighted
            for weight in own["_parameters"].values()
            if weight is not None
        ]


def _place(weight: Tensor) -> object:
    """Return the address, dtype, shape and strides of a weight."""
    if isinstance(weight, QuantizedTensor):
        return weight.place
    return weight.data_ptr(), weight.dtype, weight.shape, weight.stride()


_HOOKS = operator.itemgetter("_forward_hooks", "_forward_pre_hooks")


def _values_of(names: Iterable[str]) -> Callable[[dict[str, Any]], object]:
    """Return a fast function that reads these attributes from a module's ``vars``; ``id`` if there are none."""
    asked = [*names]
    return operator.itemgetter(*asked) if asked else id  # the dict of a module is always the same


def _norm(norm: FusedNorm) -> layer_ops.Norm:
    """Return a norm in the form that the kernel takes."""
    found = norm_of(norm)
    assert found is not None
    return found


def is_ours(config: PreTrainedConfig) -> bool:
    """Return whether a model's attention runs in kvkeep, and no attention probabilities are asked for."""
    own = object.__getattribute__(config, "__dict__")  # a layer asks in each step, and properties take long
    try:
        return own["_attn_implementation_internal"] == ATTENTION and not own["_output_attentions"]
    except KeyError:
        return config._attn_implementation == ATTENTION and not config.output_attentions


def repeatable(attention: nn.Module, **told: Any) -> AttentionOptions | None:
    """Return the attention options of a layer's replayed steps; ``None`` if its steps cannot be replayed: it asks for
    more than plain causal attention, for attention matrices or sinks, or does not tell its scaling.

    Args:
        attention: the layer's attention.
        told: the keyword arguments that the layer gives `attention_forward` in every step.
    """
    if not is_known(attention, **told) or told.get("output_attentions") or told.get("s_aux") is not None:
        return None
    scaling: float | None = told.get("scaling")
    if scaling is None:  # it follows from the query then, which is not known yet
        return None
    return AttentionOptions(scaling, window=told.get("sliding_window"), softcap=told.get("softcap"))


Attend: TypeAlias = Callable[
    [Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]], Float[Tensor, "B 1 Hq E"]
]

_RECORDER = "kvkeep_recorder"
_OWN = {*CACHE_ARGUMENTS, "attention_mask", "position_embeddings"}
_KNOWN = {*_OWN, "position_ids", "cache_position", "use_cache"}
_recorded: ContextVar[Callable[..., Tensor]] = ContextVar("_recorded")


def _run(
    parts: FusedParts,
    x: Float[Tensor, "B 1 width"],
    angles: layer_ops.Angles | None,
    attend: Attend,
    calls: FusedCalls,
) -> Tensor | None:
    """Return a decoder layer's output, residuals included, for one token per row, around a given attention; ``None`` if
    the kernel cannot compute the part before it. The part behind it is computed by modules where the kernel cannot.
    """
    heads = calls.before(x, angles)
    if heads is None:
        return None
    attended = attend(*heads).reshape(len(x), 1, -1)
    out = calls.behind(x, attended)
    if out is None:
        first, last = (nn.Identity() if norm is None else norm for norm in parts.added)
        y = x + first(parts.output(attended))
        out = y + last(parts.feed_forward(parts.second(y)))
    return out


class FusedLayer(nn.Module):
    """Mixed into a decoder layer: in a step of a few rows with kvkeep's cache, two calls beside its attention.

    Methods are called by the class: another thread may give the layer its own class back during a step.
    """

    attention_arguments: dict[str, Any]
    attention_options: AttentionOptions | None
    as_tried: Described
    rule: LayerRule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the layer's output, from the fused kernel where the step allows it."""
        # transformers gives the hidden states by position, and all else by name
        out = FusedLayer._decode_step(self, *args, **kwargs) if len(args) == 1 else None
        return unmixed(FusedLayer, type(self)).forward(self, *args, **kwargs) if out is None else out

    def calls(self, rotary_dim: int) -> FusedCalls | None:
        """Return the kernel calls of this layer, kept and made anew if modules or weights have changed; ``None`` if its
        parts can no longer be fused, or it is not as it was tried.

        Args:
            rotary_dim: number of dims of a head that are rotated, if the layer rotates.
        """
        rotary_dim = rotary_dim if self.rule.is_rotated else 0
        calls: FusedCalls | None = vars(self).get(CALLS)
        if calls is None or calls.rotary_dim != rotary_dim or not calls.are_of(self):
            parts = parts_of(self) if FusedLayer._is_as_tried(self) else None
            calls = vars(self)[CALLS] = None if parts is None else FusedCalls(self, parts, self.rule, rotary_dim)
        return calls

    def _is_as_tried(self) -> bool:
        """Return whether the layer's plain values, and the ``forward`` of its class and its attention's, are those that
        it was tried with.
        """
        now = type(_any(self).self_attn).forward
        return is_as_tried(self) and vars(self).setdefault(FORWARD, now) is now

    def _decode_step(self, x: Tensor, **kwargs: Any) -> Tensor | None:
        """Run a decode step of one token per row with kvkeep's cache through the kernel, and return the layer's output;
        ``None`` for any other step, and where the kernel cannot.
        """
        cache, angles = handed_over(kwargs), kwargs.get("position_embeddings")
        if x.ndim != 3 or x.shape[1] != 1 or not isinstance(cache, PhasedCache):
            return None
        if not isinstance(angles, tuple):
            if self.rule.is_rotated:
                return None
            angles = None
        attention: Any = self._modules.get("self_attn")
        if attention is None or attention.training or not is_ours(attention.config):
            return None
        more = (kwargs[name] for name in kwargs.keys() - _KNOWN)
        if not all(argument is None or argument is False for argument in more):
            return None  # the layer is told what it was not in its trial
        parts, calls = parts_of(self), FusedLayer.calls(self, rotary_dim_of(angles))
        if parts is None or calls is None:
            return None
        call, mask = ALL_ATTENTION_FUNCTIONS[ATTENTION], kwargs.get("attention_mask")
        given = {**self.attention_arguments, **{name: kwargs[name] for name in kwargs.keys() - _OWN}}

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            handed = cache.update(key, value, attention.layer_idx)
            attended: Tensor = call(attention, query, *handed, mask, **given)[0]
            return attended

        return _run(parts, x, angles, attend, calls)


def rotary_dim_of(angles: layer_ops.Angles | None) -> int:
    """Return the number of dims of a head that angles rotate."""
    return 0 if angles is None else angles[0].shape[-1]


def fuse_layer(layer: nn.Module, trials: Trials) -> bool:
    """Fuse a decoder layer in place. Return whether it was fused now; any other module stays as it is.

    It is fused if its parts are, it has no other weights, and its outputs on random numbers are the kernel's.

    Args:
        layer: a module.
        trials: what trials of other layers have found, to which this one's is added.
    """
    if isinstance(layer, FusedLayer) or (parts := parts_of(layer)) is None or not _is_all(layer, parts):
        return False
    key = alike(layer)
    if key not in trials:
        trials[key] = _tried(layer, parts)
    if trials[key] is None:
        return False
    attention, (constants, rule) = parts.attention, trials[key]
    vars(layer).update(
        {FORWARD: type(attention).forward},
        as_tried=described(layer),
        rule=rule,
        attention_arguments=constants,
        attention_options=repeatable(attention, **constants),
    )  # first, since another thread may be in the layer
    layer.__class__ = mixed(FusedLayer, type(layer))
    return True


def _is_all(layer: nn.Module, parts: FusedParts) -> bool:
    """Return whether a layer has no weights besides those of its parts: others could change after the trial."""
    known = {id(weight) for part in (*parts.norms(), *parts.linear) for weight in part.parameters()}
    return known == {id(weight) for weight in (*layer.parameters(), *layer.buffers())}


def _twin(layer: nn.Module) -> Any:
    """Return a copy of a layer for a trial, whose attention has its own configuration, since other threads may be
    running the layer. All other parts and all weights are shared.
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
        parts: its parts.
        scales: size of the numbers in each row.

    Attributes:
        heads: the query, key and value that the layer has handed to attention; random numbers were the answer.
        constants: what it has told attention beside them.
        out: its output.
    """

    heads: list[Tensor]
    constants: dict[str, Any] | None = None
    out: object = None

    def __init__(self, layer: nn.Module, parts: FusedParts, scales: Sequence[float]) -> None:
        self._layer, self._parts = _twin(layer), parts
        attention, weight = self._layer.self_attn, parts.first.weight
        draw, rows, dim = torch.Generator().manual_seed(0), len(scales), attention.head_dim
        sizes = torch.tensor(scales)[:, None, None]

        def numbers(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw)

        self._attention, turns = attention, numbers(rows, 1, dim)
        self.x = (numbers(rows, 1, len(weight)) * sizes).to(weight.dtype)
        takes_angles = "position_embeddings" in inspect.signature(type(attention).forward).parameters
        self._angles = (turns.cos().to(weight.dtype), turns.sin().to(weight.dtype)) if takes_angles else None
        answer = numbers(rows, 1, parts.output.in_features)
        # products of the layer's own have not been tried alone, so they are most of what it puts out in the first row
        small = 1.0 if parts.activation is None else sizes.clamp(max=1.0)
        self.answer = (answer * small).to(weight.dtype).view(rows, 1, -1, dim)
        self._cache = taken_as(type(layer)) or usual()
        # far apart, so that numbers which depend on positions differ from row to row
        self._given = {"position_ids": 10**6 * torch.arange(rows)[:, None], "use_cache": True}

    def ask(self) -> bool:
        """Run the layer's own code, with random numbers for attention's output, and record what it passes to
        attention.

        Return whether the layer has called the cache and attention once each, the latter for itself and without a mask.
        """
        cache = _Handed()
        calls: list[tuple[Any, ...]] = []

        def attention(*args: Any, **kwargs: Any) -> Tensor:
            calls.append((*args, {name: value for name, value in kwargs.items() if name not in self._given}))
            return self.answer

        asked: dict[str, Any] = {self._cache: cache, "attention_mask": None}
        if self._angles is not None:
            asked["position_embeddings"] = self._angles
        with _recording(self._attention.config, attention):
            self.out = self._layer(self.x, **asked, **self._given)
        if len(calls) != 1 or cache.indices != [self._attention.layer_idx]:
            return False
        module, *self.heads, mask, self.constants = calls[0]
        return module is self._attention and mask is None

    def rules(self) -> Iterator[LayerRule]:
        """Yield the rules that the layer may follow, with and without rotation and scaled queries; none if the kernel
        does not have its activation.
        """
        own, scaling = self._parts.activation, vars(self._attention).get("scaling")
        activation = vars(self._parts.feed)["_activation"] if own is None else activation_of(own)
        if activation is None:
            return
        for is_rotated in (False,) if self._angles is None else (True, False):
            for query_scale in (1.0, scaling) if isinstance(scaling, float) else (1.0,):
                yield LayerRule(is_rotated, query_scale, activation)

    def follows(self, rule: LayerRule) -> bool:
        """Return whether the kernel, under this rule, computes the query, key, value and output that the layer has
        computed.
        """
        same: list[bool] = []

        def compare(*heads: Tensor) -> Tensor:
            same.extend(map(is_close, heads, self.heads))
            return self.answer

        angles = self._angles if rule.is_rotated else None
        calls = FusedCalls(self._layer, self._parts, rule, rotary_dim_of(angles))
        out = _run(self._parts, self.x, angles, compare, calls)
        return out is not None and all(same) and is_close(out, self.out)


@torch.inference_mode()
def _tried(layer: nn.Module, parts: FusedParts) -> tuple[dict[str, Any], LayerRule] | None:
    """Try the kernel on a layer. Return the keyword arguments that the layer passes to attention, and its rule;
    ``None`` if the kernel's outputs differ, an argument is no plain value, or the layer's code raises an error.
    """
    try:
        trial = _Trial(layer, parts, SCALES)
        if not trial.ask() or not _is_constant(trial.constants):
            return None
    except Exception:  # it takes something else
        return None
    rule = next(filter(trial.follows, trial.rules()), None)
    return None if rule is None or trial.constants is None else (trial.constants, rule)


def _is_constant(given: dict[str, Any] | None) -> bool:
    """Return whether all arguments are plain values, which do not change from step to step."""
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
    """Let layers with this very configuration object call a function in place of attention, in the context. What the
    function returns is attention's output.
    """
    before, token = config._attn_implementation, _recorded.set(attention)
    config._attn_implementation = _RECORDER
    try:
        yield
    finally:
        config._attn_implementation = before
        _recorded.reset(token)


def _record(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Call the function of `_recording`; an attention function of transformers."""
    return _recorded.get()(*args, **kwargs), None


AttentionInterface.register(_RECORDER, _record)
