"""The rotary embedding of each layer, found by a trial: a small copy of the model reads single tokens.

A text of one token attends to nothing but itself. So what its position changes in a layer's query and key is the
rotation, whatever the model's code makes of its configuration: which dims are paired, which are left alone, which
layers rotate, with which frequencies and which factor. The copy has the model's depth, head dims and rotary settings,
random weights, and few heads and hidden dims.
"""

from __future__ import annotations

import json
import logging
import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    PreTrainedConfig,
)

from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.rotary import Rotation

Rotations = Mapping[int, Rotation | None]
"""The rotation of each layer with attention, by its number; ``None`` for a layer that does not rotate."""

_SLOT_BY_DEFAULT = {
    "gemma", "gemma2", "gpt_neox", "granite", "llama", "mistral", "mixtral", "olmo", "olmo2", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "stablelm", "starcoder2",
}  # fmt: skip
"""Model types that get slot positions where the policy's own mode is slot positions.

Other models get them where they are asked for: their memories of a time without slot positions would no longer open.
"""


class _CannotUndoError(Exception):
    """Why the rotation of a model cannot be undone, as the end of a sentence that began with the model."""


def position_mode(config: PreTrainedConfig, asked: str | None, *, own: str) -> Literal["true", "slot"]:
    """Return the mode in which attention sees positions: ``true``, or ``slot`` for ranks in the cache.

    Args:
        config: the model's configuration.
        asked: the mode that the user asked for, if any. If the model cannot have it, that is an error.
        own: the policy's mode, used if the user asked for none. If the model cannot have slot positions, or is of none
            of the types that get them unasked (`_SLOT_BY_DEFAULT`), positions are true.

    Raises:
        InputError: ``asked`` is not a mode.
        UnsupportedModelError: slot positions were asked for, see `slot_rotations`.
    """
    if asked not in (None, "true", "slot"):
        raise InputError(f"positions={asked!r} is not a mode; use 'true', 'slot' or None for the policy's own.")
    if (asked or own) != "slot":
        return "true"
    if asked is None and config.get_text_config(decoder=True).model_type not in _SLOT_BY_DEFAULT:
        return "true"
    try:
        slot_rotations(config)
    except UnsupportedModelError:
        if asked is None:
            return "true"
        raise
    return "slot"


def slot_rotations(config: PreTrainedConfig) -> Rotations:
    """Return the rotation of each layer by its number, for moving keys to their ranks in the cache; ``None`` for a
    layer that does not rotate. Refuse a model where this is impossible.

    Raises:
        UnsupportedModelError: the model rotates no keys, or rotates them by the length of the text or in a way that
            cannot be undone.
    """
    try:
        rotations = _rotations_of(config)
        if not any(rotations.values()):
            raise _CannotUndoError("has no rotary embeddings")
        if any(rotation is not None and rotation.longest for rotation in rotations.values()):
            raise _CannotUndoError(f"has {_types(config)!r} embeddings, which change with the length of the text")
    except _CannotUndoError as error:
        kind = config.get_text_config(decoder=True).model_type
        raise UnsupportedModelError(
            "Slot positions need rotary embeddings that kvkeep can undo, and whose frequencies do not change with the "
            f"length of the text; this {kind!r} model {error}. Use positions='true'."
        ) from error
    return rotations


def rotations_for(config: PreTrainedConfig, policy: object, *, turns: bool, foresees: bool) -> Rotations:
    """Return the rotation of each layer by its number, for a policy that undoes rotations or turns queries; ``None``
    for a layer that does not rotate. Refuse a model where this is impossible.

    Args:
        config: the model's configuration.
        policy: its name, for errors.
        turns: whether the policy makes no sense without a rotation.
        foresees: whether it reckons with angles of tokens that are still to come.

    Raises:
        UnsupportedModelError: kvkeep cannot undo the model's rotation; there is none, and the policy ``turns``; or it
            changes with the length of the text, and the policy ``foresees``.
    """
    kind = config.get_text_config(decoder=True).model_type
    try:
        rotations = _rotations_of(config)
        if turns and not any(rotations.values()):
            raise _CannotUndoError("has none")
        if foresees and any(rotation is not None and rotation.longest for rotation in rotations.values()):
            raise _CannotUndoError("has 'longrope' embeddings, which change with the length of the text to come")
    except _CannotUndoError as error:
        if turns:
            raise UnsupportedModelError(
                f"{policy} needs rotary positions that kvkeep knows how to turn, and this {kind!r} model {error}. "
                "Choose another policy, for example leverage:rotated=true."
            ) from error
        raise UnsupportedModelError(
            f"{policy} looks at keys before their rotation, which kvkeep cannot undo for this {kind!r} model: it "
            f"{error}. Give the policy rotated=true if it has this option, or choose another policy."
        ) from error
    return rotations


# The rotations of a configuration are tried once: an engine and its caches ask many times.

_MOST_MODELS = 64
"""Configurations whose rotations are remembered."""
_known: dict[str, Rotations | _CannotUndoError] = {}
_lock = threading.Lock()


def _rotations_of(config: PreTrainedConfig) -> Rotations:
    """Return the rotation of each layer by its number, found by a trial and cached by configuration; an empty mapping
    for a configuration without rotary settings.

    Raises:
        _CannotUndoError: it is not known how the model rotates keys, or kvkeep cannot undo it.
    """
    text = config.get_text_config(decoder=True)
    settings = text.to_dict()
    if not any("rope" in name or "rotary" in name for name in settings):  # a model without rotary positions
        return {}
    key = f"{type(text).__module__}.{type(text).__qualname__} {json.dumps(settings, sort_keys=True, default=str)}"
    with _lock:
        if key not in _known:
            try:
                result: Rotations | _CannotUndoError = _tried(text)
            except _CannotUndoError as error:
                result = error
            while len(_known) >= _MOST_MODELS:
                _known.pop(next(iter(_known)))
            _known[key] = result
        known = _known[key]
    if isinstance(known, _CannotUndoError):
        raise _CannotUndoError(*known.args)  # a new one: each raise adds a traceback to its error
    return known


def _tried(text: PreTrainedConfig) -> Rotations:
    """Find the rotation of each layer by running a small copy of the model.

    Raises:
        _CannotUndoError: see `_rotations_of`.
    """
    types = _types(text)
    if "dynamic" in types:
        raise _CannotUndoError("has 'dynamic' embeddings, whose frequencies are others for each length of the text")
    longest = _longest(text) if "longrope" in types else None
    try:
        with _quiet():
            trial = _Trial(_small(text))
            found = _shown_by(trial, longest)
            beyond = {} if longest is None else _shown_by(trial, None, beyond=longest)
    except _CannotUndoError:
        raise
    except Exception as error:  # the code of some model, with numbers that it was not written for
        raise _CannotUndoError(f"could not be tried on random numbers ({error!s:.120})") from error
    if not found:
        raise _CannotUndoError("showed no attention in a trial on random numbers")
    for number, rotation in found.items():
        longer = beyond.get(number)
        if rotation is not None and longer is not None and not _same(rotation, longer):
            rotation = replace(rotation, longest=longest, beyond=longer)
        # equal layers share one, whose angles are computed once for all of them
        found[number] = next((known for known in found.values() if _same(known, rotation)), rotation)
    return found


def _shown_by(trial: _Trial, longest: int | None, *, beyond: int = 0) -> dict[int, Rotation | None]:
    """Measure the rotation of each layer, by its number, as it is in texts of at most ``longest`` tokens (``None``: of
    any length), or with ``beyond`` in texts of more than so many.
    """
    places = trial.places(longest, beyond)
    shown, factors = trial.read(places), trial.factors(beyond)
    return {number: _rotation_of(shown[number], places, factors.get(number, 1.0)) for number in sorted(shown)}


def _types(config: PreTrainedConfig) -> str:
    """Return the types of the rotary embeddings that a configuration names, sorted and joined by commas, such as
    ``default, yarn``; empty if it names none.
    """
    parameters = getattr(config.get_text_config(decoder=True), "rope_parameters", None)
    each = _each_of(parameters) if isinstance(parameters, dict) else ()
    return ", ".join(sorted({str(settings.get("rope_type", "default")) for settings in each}))


def _each_of(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rotary settings of each type of layer, or a list of one if all layers have the same."""
    parts = [part for part in parameters.values() if isinstance(part, dict)]
    return parts or [parameters]


def _longest(text: PreTrainedConfig) -> int:
    """Return the length in tokens up to which a text uses the frequencies of short texts (longrope).

    Raises:
        _CannotUndoError: the configuration does not say how long that is.
    """
    borders = {
        settings.get("original_max_position_embeddings")
        for settings in _each_of(text.rope_parameters)
        if settings.get("rope_type") == "longrope"
    }
    border = borders.pop()
    if borders or not isinstance(border, int):
        raise _CannotUndoError("does not say up to which length its 'longrope' embeddings are those of a short text")
    return border


# The small copy of the model.

_ATTENTION = "kvkeep_rotary_probe"
_TOKENS, _SEED = 4, 20_240_611
"""Tokens that are read at each position, and the seed of the copy's weights."""
_POWERS, _OTHERS = range(0, 31, 3), (7, 777, 5000)
"""Exponents of two: from these positions frequencies are measured. At them and at the others the result is checked."""


class _Shown(NamedTuple):
    """What a layer's attention was given.

    Attributes:
        query: queries of each position, token and head, in float64.
        keys: keys.
        values: values.
    """

    query: Float[Tensor, "P n D"]
    keys: Float[Tensor, "P n D"]
    values: Float[Tensor, "P n E"]


# of each thread its own, since the function below is registered for all of them
_reading: ContextVar[dict[int, tuple[Tensor, ...]] | None] = ContextVar("reading", default=None)


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: object
) -> tuple[Tensor, None]:
    """Record the query, key and value that attention gets, while a `_Trial` reads. Return the value for each query
    head, which is the output for a text of one token, and no probabilities.

    Raises:
        _CannotUndoError: a layer has no number, or gives attention more than one token, or more than once.
    """
    seen, number = _reading.get(), getattr(module, "layer_idx", None)
    if seen is not None:
        if not isinstance(number, int) or number in seen or query.shape[2] != 1 or key.shape[2] != 1:
            raise _CannotUndoError("has attention that does not belong to one layer each")
        seen[number] = query, key, value
    out = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
    return out.transpose(1, 2).contiguous(), None  # as transformers' own attention functions return it


AttentionInterface.register(_ATTENTION, _attend)
AttentionMaskInterface.register(_ATTENTION, lambda *_, **__: None)


class _Trial:
    """A small copy of a model that reads texts of one token.

    Args:
        config: its configuration.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        kind: Any = AutoModel if type(config) in MODEL_MAPPING else AutoModelForCausalLM
        if kind is AutoModelForCausalLM and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _CannotUndoError("is none of transformers' own models")
        # float32 for what a model computes in the dtype of its construction; experts apart, as some kernels for all of
        # them at once take no float64
        made = {"dtype": torch.float32, "attn_implementation": _ATTENTION, "experts_implementation": "eager"}
        self.model: nn.Module = kind.from_config(config, **made, trust_remote_code=False).eval()
        generator = torch.Generator().manual_seed(_SEED)
        for parameter in self.model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).double()
            # a norm behind the rotation would pass for none if all of its weights were the same
            many = parameter.ndim > 1
            parameter.data = noise / math.sqrt(parameter.shape[-1]) if many else 1.0 + 0.3 * noise
        self.reach = int(getattr(config, "max_position_embeddings", None) or 2048)

    def places(self, longest: int | None, beyond: int) -> list[int]:
        """Return the positions to try: 0, powers of two, and a few others, as far as the model can go.

        The model reads tokens there to find out how far that is.

        Args:
            longest: all positions lie below it; ``None``: no such limit.
            beyond: the last one, which makes the model take the text for one of more than so many tokens; 0: none.
        """
        # as far as positions go at all, or else as far as the model's own table does
        limits = [2**31, self.reach] if longest is None else [longest]
        for limit in limits:
            found = [0, *(2**k for k in _POWERS if 2**k < limit), *(n for n in _OTHERS if n < limit), beyond]
            try:
                self.read([0, max(found)])
            except (IndexError, RuntimeError) as error:  # the model has a table of angles
                failure = error  # Python unbinds `error` when its block ends
            else:
                return found
        raise failure

    def read(self, places: list[int]) -> dict[int, _Shown]:
        """Run the copy on the same few single tokens at each of these positions, and return what the attention of each
        layer was given, by the layer's number.
        """
        ids = torch.arange(1, _TOKENS + 1).repeat(len(places))[:, None]
        positions = torch.tensor(places).repeat_interleave(_TOKENS)[:, None]
        seen: dict[int, tuple[Tensor, ...]] = {}
        token = _reading.set(seen)
        try:
            self.model(input_ids=ids, position_ids=positions, use_cache=False)
        finally:
            _reading.reset(token)
        return {
            number: _Shown(*(x[:, :, 0].double().reshape(len(places), -1, x.shape[-1]) for x in given))
            for number, given in seen.items()
        }

    def factors(self, beyond: int) -> dict[int, float]:
        """Measure the factor by which each layer, by its number, scales rotated vectors (YaRN, longrope); 1.0 for none.

        It shows in all positions alike. So the copy reads a second time without it.

        Args:
            beyond: measure in texts of more than so many tokens; 0: in short ones.
        """
        parts = [module for module in self.model.modules() if hasattr(module, "rope_type")]
        given = {value for part in parts for name, value in vars(part).items() if name.endswith("attention_scaling")}
        before = self.read([0, beyond])  # the second position makes the text one of more than `beyond` tokens
        hooks = [part.register_forward_hook(_without_factor) for part in parts]
        after = self.read([0, beyond])
        for hook in hooks:
            hook.remove()
        # at position 0 nothing is turned, so the factor is all that differs
        ratios = {number: _ratio(before[number].keys[:1], after[number].keys[:1]) for number in before}
        # the model's own number has all digits
        known = [1.0, *(value for value in given if isinstance(value, float))]
        return {
            number: next((factor for factor in known if math.isclose(factor, ratio, rel_tol=1e-6)), ratio)
            for number, ratio in ratios.items()
        }


def _without_factor(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Return a rotary embedding's cosines and sines, or its complex numbers, scaled to length 1; any other tensor as it
    is. A forward hook.
    """
    if isinstance(output, Tensor):
        return output / output.abs() if output.is_complex() else output
    cos, sin = output
    size = torch.hypot(cos, sin)
    return cos / size, sin / size


def _ratio(one: Tensor, other: Tensor) -> float:
    """Return the mean ratio of two tensors over the dims in which they differ; 1.0 if they do not differ."""
    # a model may rotate a part of its dims only; the others carry no factor
    changed = ((one - other).abs() > 1e-6 * other.abs()).all(dim=0).all(dim=0)
    return float((one / other)[..., changed].mean()) if bool(changed.any()) else 1.0


_FEW = (
    (2, r"(?!.*(mamba|ssm|linear))(.*_)?(heads?|head_kv)"),
    (16, r"(?!.*(mamba|ssm|linear)).*(intermediate_size|ffn\w*_(dim|size)|n_inner)"),
    (16, r"vocab_size.*|hidden_size_per_layer_input"),
    (8, r"(mamba_)?chunk_size|mamba_d_state|ssm_state_size|mamba_state_size"),
    (2, r"linear_num_(key|value)_heads"),
    (4, r"(num|n)(_\w+)?_experts"),
    (2, r"num_experts_per_tok(en)?|(moe_)?top_?k(_experts)?|moe_k|num_selected_experts"),
    (1, r"n_group|topk_group|num_expert_groups?|mamba_n_?groups|(vocab_size_)?pad_token_id"),
)
"""The largest numbers of a small copy, and the names of the settings that they bound."""

_WITH_WIDTH = r"(mamba|ssm)_(n_heads|num_heads|d_ssm|intermediate_size)"
"""Settings of layers with a state that stand in proportion to the hidden dims."""


def _small(text: PreTrainedConfig) -> PreTrainedConfig:
    """Return a configuration with the model's depth, head dim and rotary settings, and few heads and hidden dims."""
    settings = text.to_dict()
    names = getattr(text, "attribute_map", {})
    width, heads = (names.get(name, name) for name in ("hidden_size", "num_attention_heads"))
    dim = settings.get("head_dim") or settings[width] // settings[heads]
    few = _bounded(settings)
    few[width] = few[heads] * dim
    for name, value in settings.items():
        if re.fullmatch(_WITH_WIDTH, name) and isinstance(value, int):
            few[name] = max(1, value * few[width] // settings[width])
    return type(text).from_dict(few)


def _bounded(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a configuration's settings in which no size is above its limit in `_FEW`; settings of single
    layers included.
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        most = next((number for number, pattern in _FEW if re.fullmatch(pattern, str(name))), None)
        if name == "per_layer_config" and isinstance(value, dict):
            found[name] = {layer: _bounded(own) for layer, own in value.items()}
        elif isinstance(value, int) and not isinstance(value, bool) and most is not None:
            found[name] = min(value, most)
        elif isinstance(value, list) and value and most is not None and all(type(number) is int for number in value):
            found[name] = [min(number, most) for number in value]
        else:
            found[name] = value
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Compute on the CPU whatever the caller has chosen, leave torch's random numbers as they are, and silence what
    transformers says about the copy.
    """
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with (
            torch.random.fork_rng(devices=[]),
            torch.device("cpu"),
            torch.inference_mode(False),
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
        ):
            yield
    finally:
        logger.setLevel(level)


# The rotation that the numbers show.

_NOISE = 1e-5
"""Relative differences up to this size are rounding errors."""


def _rotation_of(shown: _Shown, places: list[int], factor: float) -> Rotation | None:
    """Work out the rotation of a layer from its vectors at several positions; return ``None`` if it does not rotate.

    Raises:
        _CannotUndoError: positions change something else, too.
    """
    if _differ(shown.values, shown.values[:1]):
        raise _CannotUndoError("adds positions elsewhere than in queries and keys")
    keys = shown.keys
    if not _differ(keys, keys[:1]):
        return None
    dims = _pairs(keys)
    half = len(dims) // 2
    pairs = torch.complex(keys[..., dims[:half]], keys[..., dims[half:]])
    phases = (pairs[:1].conj() * pairs).sum(dim=1).angle()  # all tokens turn by one angle
    frequencies = torch.zeros(half, dtype=torch.float64)
    for phase, place in zip(phases, places, strict=True):
        # an angle is known up to whole turns only: the estimate from smaller positions tells how many turns there were,
        # and each larger position makes it more precise
        if place and place & (place - 1) == 0:
            off = phase - frequencies * place
            frequencies += (off - 2 * torch.pi * (off / (2 * torch.pi)).round()) / place
    back = frequencies < 0  # such a pair is turned the other way round: its second dim comes first
    first, second = torch.tensor(dims).unflatten(0, (2, half))
    ordered = [*torch.where(back, second, first).tolist(), *torch.where(back, first, second).tolist()]
    plain = ordered == list(range(2 * half))
    rotation = Rotation(frequencies.abs().float(), factor, None if plain else tuple(ordered))
    undone = [_undone(rotation, x, places) for x in (keys, shown.query)]
    # the lengths of queries may follow their positions, as a temperature
    undone[1] = nn.functional.normalize(undone[1], dim=-1)
    if any(_differ(x, x[:1], 3 * _NOISE) for x in undone):
        raise _CannotUndoError("changes queries or keys by their positions in another way than by rotating pairs")
    return rotation


def _undone(rotation: Rotation, x: Float[Tensor, "P n D"], places: list[int]) -> Float[Tensor, "P n D"]:
    """Return vectors with the rotation to these positions undone."""
    return rotation.undo(x[:, None], torch.tensor(places)[:, None, None].expand(-1, 1, x.shape[1]))[:, 0]


def _pairs(keys: Float[Tensor, "P n D"]) -> list[int]:
    """Find the pairs of dims that are rotated against each other. Return the first dims of all pairs, then the second
    dims.

    A rotation keeps the length of a pair: what one dim gains, squared, the other one loses.

    Raises:
        _CannotUndoError: the dims that change do not come in pairs.
    """
    gains = (keys**2 - keys[:1] ** 2).flatten(0, 1)
    sizes = gains.pow(2).mean(dim=0).sqrt()
    moved = (sizes > _NOISE * keys.pow(2).mean()).nonzero()[:, 0]
    gains = gains[:, moved] / gains[:, moved].norm(dim=0)
    against = gains.T @ gains
    least, partners = against.min(dim=1)
    # partners of a pair gain exactly what the other loses, so their correlation is -1 up to rounding
    if bool((least > -0.99).any()) or not torch.equal(partners[partners], torch.arange(len(moved))):
        raise _CannotUndoError("changes keys by their positions in another way than by rotating pairs of dims")
    first = [i for i, j in enumerate(partners.tolist()) if i < j]
    return [*moved[first].tolist(), *moved[partners[first]].tolist()]


def _differ(one: Tensor, other: Tensor, noise: float = _NOISE) -> bool:
    """Return whether two tensors differ by more than rounding errors."""
    scale = other.pow(2).mean().sqrt()
    return not bool(((one - other).abs() <= noise * scale).all())  # NaN differs


def _same(one: Rotation | None, other: Rotation | None) -> bool:
    """Return whether two rotations are equal up to rounding."""
    if one is None or other is None:
        return one is other
    return (
        _same(one.beyond, other.beyond)
        and one.dims == other.dims
        and len(one.frequencies) == len(other.frequencies)
        and math.isclose(one.scaling, other.scaling, rel_tol=_NOISE)
        and torch.allclose(one.frequencies, other.frequencies, rtol=1e-6, atol=1e-12)
    )
