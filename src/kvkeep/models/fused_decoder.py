"""A whole decoder as one call of the native kernel, for steps that differ from the last ones in their tokens alone."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from kvkeep.backends import Repeat, layer_ops
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import CACHE_ARGUMENTS, PhasedCache, handed, handed_over
from kvkeep.cache.layer import Layer
from kvkeep.models.attention import PaddingMask, is_known
from kvkeep.models.fused_layers import FusedLayer, is_ours, rotary_dim_of
from kvkeep.models.fused_modules import TRIAL, has_own_forward, is_heard, mixed, unmixed
from kvkeep.types import Phase

_ROTARY, _LEARNED = "rotary_emb", "embed_positions"
_NORMS = {
    frozenset(("embed_tokens", "layers", "norm", _ROTARY)): "norm",
    frozenset(("embed_tokens", "layers", "final_layer_norm", _LEARNED)): "final_layer_norm",
}
"""The parts of decoders, and which of them is the last norm. Positions are rotary angles, or embeddings that are added
to those of the tokens."""

_KNOWN = {"input_ids", "attention_mask", "position_ids", "use_cache", "cache_position", *CACHE_ARGUMENTS}
_TRIAL_POSITIONS = (0, 700, 1_900)
"""Positions of a trial's tokens, so far apart that each kind of rotation shows; fewer if the model has no more."""

_TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""Length of the difference over that of the output, by dtype. Layers have been compared closely before; what is left to
find is a decoder that does something beside them."""


class Replays(NamedTuple):
    """The recorded steps of all layers of a decoder.

    Attributes:
        layers: the layers of the cache.
        calls: their recorded steps of attention.
    """

    layers: list[Layer]
    calls: list[Repeat]


class FusedDecoder(nn.Module):
    """Mixed into a decoder, the part of a model between token ids and the head: one call for all of its layers.

    A step is made so if it has one token per row, and all layers may replay their last steps of attention for other
    tokens, see `Layer.replayable`. Embeddings, angles and the last norm are computed by their modules.

    Methods are called by the class: another thread may give the decoder its own class back during a step.
    """

    config: Any
    embed_tokens: Any
    embed_positions: Any
    layers: Any
    rotary_emb: Any
    rotation_kinds: tuple[str, ...]
    kinds: list[int]
    is_checked: bool | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the decoder's output, from the kernel where the step allows it."""
        # transformers calls a decoder by keywords; what a position means, only its own signature says
        out = None if args else FusedDecoder._step(self, **kwargs)
        return unmixed(FusedDecoder, type(self)).forward(self, *args, **kwargs) if out is None else out

    def _step(self, **kwargs: Any) -> BaseModelOutputWithPast | None:
        """Run a decode step of one token per row as one call of the kernel, and return the decoder's output; ``None``,
        with the cache unchanged, if these arguments of ``forward`` cannot be run so.

        Raises:
            CapacityError: the policy does not evict and its budget is exhausted.
            MemoryError: there was no memory for all of it. The cache is broken then.
        """
        ids, cache, positions = kwargs.get("input_ids"), handed_over(kwargs), kwargs.get("position_ids")
        if not isinstance(cache, PhasedCache) or not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] != 1:
            return None
        if (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or self.training
            or not FusedDecoder._answers(self, kwargs)
        ):
            return None
        if (norm_name := _NORMS.get(frozenset(self._modules))) is None:
            return None  # it has other parts now
        mask = kwargs.get("attention_mask")
        if (replays := FusedDecoder._replays(self, cache, mask)) is None or not FusedDecoder._is_checked(self):
            return None
        x, angles = FusedDecoder._embedded(self, ids, mask, positions, cache.get_seq_length())
        if (step := FusedDecoder._recorded(self, replays, angles)) is None or not _replayed(replays, step, x, angles):
            return None
        held: dict[str, Any] = {_returned(): cache}
        return BaseModelOutputWithPast(last_hidden_state=getattr(self, norm_name)(x), **held)

    def _embedded(
        self, ids: Int[Tensor, "B 1"], mask: object, positions: Int[Tensor, "_B 1"] | None, seen: int
    ) -> tuple[Float[Tensor, "B 1 width"], list[layer_ops.Angles | None]]:
        """Return what goes into the first layer, which the step may overwrite, and the rotary angles of each kind of
        layer; ``[None]`` where positions are embeddings, which are added then.

        Args:
            ids: a token per row.
            mask: as the decoder was given it; only embeddings of positions need it.
            positions: of the tokens; ``None``: for embeddings the number of real tokens before them by the mask, for
                angles ``seen``.
            seen: number of tokens before these, padding included.
        """
        x = self.embed_tokens(ids)
        if _LEARNED in self._modules:
            real = mask if isinstance(mask, Tensor) else ids.new_ones(len(ids), seen + 1)
            return x + self.embed_positions(real, seen, position_ids=positions), [None]
        if positions is None:
            positions = torch.full((1, 1), seen, device=ids.device)
        # a copy: a hook may keep what the embedding returns, or return a weight
        return x.clone(), [*FusedDecoder.angles(self, x, positions)]

    def _answers(self, asked: dict[str, Any]) -> bool:
        """Return whether a step in one call gives all that the keyword arguments of ``forward`` and the configuration
        ask for: no argument that is unknown here, no hidden states, no tuple, kvkeep's attention, no replaced
        ``forward``.
        """
        if any(asked[name] is not None and asked[name] is not False for name in asked.keys() - _KNOWN):
            return False
        config = self.config
        if config.output_hidden_states or asked.get("return_dict", config.return_dict) is False:
            return False
        return is_ours(config) and has_own_forward(self)

    def _is_checked(self) -> bool:
        """Return whether the kernel was found to compute what the decoder's own class computes, trying it on the
        first call.

        The first step tries it, since the trial needs the model as it runs. While there are hooks, which would be told
        the tokens of the trial, it is put off, and the answer is no. Within the trial itself the answer is yes.
        """
        if TRIAL.get():
            return True
        if self.is_checked is None and not _has_hooks(self):
            vars(self)["is_checked"] = _agrees(self)
        return bool(self.is_checked)

    def angles(self, like: Tensor, positions: Int[Tensor, "_B 1"]) -> list[tuple[Tensor, Tensor]]:
        """Return the cosines and sines of the positions, a pair for each type of layer; one pair if all share them."""
        if not self.rotation_kinds:
            return [self.rotary_emb(like, position_ids=positions)]
        return [self.rotary_emb(like, positions, kind) for kind in self.rotation_kinds]

    def _replays(self, cache: PhasedCache, mask: object) -> Replays | None:
        """Return the layers of a cache and their recorded attention steps, in order; ``None`` if one of them cannot be
        replayed for this step, or the mask hides a new token.

        Raises:
            CapacityError: the policy does not evict and its budget is exhausted.
        """
        replays = Replays([], [])
        if not _is_plain(mask, cache):
            return None
        if not len(self.layers) == len(self.kinds) == len(cache.layers) == self.config.num_hidden_layers:
            return None  # layers have been taken out
        for index, fused in enumerate(self.layers):
            if not isinstance(fused, FusedLayer) or fused.attention_options is None or is_heard(fused):
                return None
            part, options = cache.begin(index), fused.attention_options
            if part is None or part.window != options.window or part.phase_of(1) is not Phase.DECODE:
                return None
            layer, attention = part.stepper, fused.get_submodule("self_attn")
            if type(layer) is not Layer or not is_known(attention, **fused.attention_arguments):
                return None
            if attention.layer_idx != index:  # layers have been exchanged
                return None
            if (recorded := layer.replayable(options)) is None:
                return None
            replays.layers.append(layer)
            replays.calls.append(recorded.call)
        return replays

    def _recorded(self, replays: Replays, angles: Sequence[layer_ops.Angles | None]) -> layer_ops.ModelStep | None:
        """Return the kernel call for all layers, which is kept with the first recorded step, and made anew if weights
        or recorded steps have changed; ``None`` if the kernel cannot run them. Of the angles only the width counts.
        """
        rotary_dims = [*map(rotary_dim_of, angles)]
        kinds = [*zip(self.layers, self.kinds, strict=True)]
        found = [FusedLayer.calls(layer, rotary_dims[kind]) for layer, kind in kinds]
        fused = [calls for calls in found if calls is not None]
        recorded = [call for call in replays.calls if layer_ops.is_native(call)]
        if len(fused) < len(found) or len(recorded) < len(fused):
            return None
        first = recorded[0]
        within: _ModelCall | None = first.within
        made_of = [*fused, *recorded[1:]]
        if within is None or len(within.made_of) != len(made_of) or any(map(_differ, within.made_of, made_of)):
            each = zip(fused, recorded, self.kinds, strict=True)
            step = layer_ops.ModelStep([(calls.before, call, calls.behind, kind) for calls, call, kind in each])
            # the first layer's step owns the call, so the call must not hold it; nor must a cache hold a model
            within = first.within = _ModelCall(step, [*map(weakref.ref, made_of)])
        return within.step if within.step.fits else None


class _ModelCall(NamedTuple):
    """A call for all layers, and what it was made of."""

    step: layer_ops.ModelStep
    made_of: list[weakref.ref[Any]]


def _has_hooks(decoder: nn.Module) -> bool:
    """Return whether some part of a decoder has hooks, those on its rotary embedding aside, which may be kvkeep's
    own, and those on the decoder itself.
    """
    # "" is the decoder itself, whose hooks run around `forward`: a trial calls that without them
    parts = (part for name, part in decoder.named_modules() if name and not name.startswith("rotary_emb"))
    return any(map(is_heard, parts))


def _differ(reference: weakref.ref[Any], part: object) -> bool:
    """Return whether a weak reference points to another object, or to none any more."""
    return reference() is not part


def _is_plain(mask: object, cache: PhasedCache) -> bool:
    """Return whether a mask, as a decoder is given it, says no more than that every row's new token is real; ``None``
    says so.
    """
    if mask is None:
        return True
    if isinstance(mask, dict):  # one for each kind of layer
        return all(isinstance(part, PaddingMask) and part.is_plain for part in mask.values())
    if isinstance(mask, Tensor) and isinstance(cache, BoundedCache):  # an engine's masks say that a row is padding
        return mask.ndim == 2 and mask.shape[1] == cache.get_seq_length() + 1 and bool(mask[:, -1].all())
    return isinstance(mask, PaddingMask) and mask.is_plain


def _replayed(
    replays: Replays, step: layer_ops.ModelStep, x: Tensor, angles: Sequence[layer_ops.Angles | None]
) -> bool:
    """Run the step and count it in all layers of the cache. Return whether the kernel could run it; if not, drop the
    recorded steps.

    Raises:
        MemoryError: there was no memory for all of it. The cache is broken then.
    """
    for layer in replays.layers:
        layer.broken = True  # until the step has ended
    done = step(x, angles)
    for layer in replays.layers:
        layer.end_replay(done=done)
    return done


@functools.cache
def _returned() -> str:
    """Return the name under which a decoder's output has its cache."""
    return next(name for name in CACHE_ARGUMENTS if name in BaseModelOutputWithPast.__dataclass_fields__)


def fuse_decoder(module: nn.Module) -> bool:
    """Fuse a decoder whose layers are fused, in place, and return whether it was fused now.

    It is fused if it consists of an embedding, layers, a norm, and rotary angles or embeddings of positions. Before its
    first step as one call its output for a few tokens is compared with the kernel's. Any other module stays as it is.
    """
    if isinstance(module, FusedDecoder) or frozenset(module._modules) not in _NORMS:
        return False
    parts: Any = module
    if not isinstance(parts.layers, nn.ModuleList) or not parts.layers:
        return False
    if not all(isinstance(layer, FusedLayer) and layer.attention_options is not None for layer in parts.layers):
        return False
    rotary = module._modules.get(_ROTARY)
    per_kind = rotary is not None and "layer_type" in inspect.signature(rotary.forward).parameters
    kinds = tuple(sorted(set(parts.config.layer_types))) if per_kind else ()
    # first, since another thread may be in the module
    each = [kinds.index(kind) for kind in parts.config.layer_types] if kinds else [0] * len(parts.layers)
    vars(module).update(rotation_kinds=kinds, kinds=each, is_checked=None)
    module.__class__ = mixed(FusedDecoder, type(module))
    return True


@torch.inference_mode()
def _agrees(decoder: Any) -> bool:
    """Return whether a decode step of a fused decoder in one call gives the same output as its own class, by running
    three tokens in caches of their own. An error counts as another output.
    """
    plain: Any = functools.partial(unmixed(FusedDecoder, type(decoder)).forward, decoder)
    last = getattr(decoder.config, "max_position_embeddings", None) or _TRIAL_POSITIONS[-1] + 1
    ids, positions = torch.arange(3)[None] + 5, torch.tensor([_TRIAL_POSITIONS]).clamp(max=last - 1)

    def run(forward: Any, cache: BoundedCache, columns: slice) -> Any:
        given = {"input_ids": ids[:, columns], "position_ids": positions[:, columns], "use_cache": True}
        return forward(**given, **handed(decoder, cache))

    whole, steps = (BoundedCache(decoder.config, "local", 8) for _ in range(2))  # with room for all three tokens
    token = TRIAL.set(True)
    try:
        expected = run(plain, whole, slice(0, 3)).last_hidden_state[:, -1].float()
        for column in range(2):  # a prompt, and a decode step that is recorded: the third token replays it
            run(plain, steps, slice(column, column + 1))
        output = run(functools.partial(FusedDecoder._step, decoder), steps, slice(2, 3))
    except Exception:  # it takes something else
        return False
    finally:
        TRIAL.reset(token)
    if output is None:
        return False
    difference = (output.last_hidden_state[:, -1].float() - expected).norm() / expected.norm()
    return bool(difference <= _TRIAL_TOLERANCE[decoder.dtype])
