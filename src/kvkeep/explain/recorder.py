"""Attention beside a run: over the tokens that a layer holds, and over all tokens.

Both keep every key outside of the bounded memory, at true positions and in the model's dtype. Attention comes from a
backend (`kvkeep.backends`), in float32, which sums what each key receives and never holds a matrix of tokens by tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Mass
from kvkeep.backends import choose, reference
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.eviction import protected_slots
from kvkeep.cache.hf_layers import BoundedLayer, HandingLayer, handed, handing_cache, handing_part
from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import windows_of
from kvkeep.errors import UnsupportedModelError
from kvkeep.policies.base import Policy
from kvkeep.types import EMPTY, AttentionOptions, Phase, Slots, State, View

_MASS = Mass()


class TextKeys:
    """The keys of a whole text.

    Args:
        length: the most tokens that will come.

    Attributes:
        columns: tokens so far; may be set back.
        mass: attention of the newest step, summed over its queries and averaged over the query heads of a group.
        newest: attention of the newest query, averaged in the same way.
    """

    mass: Float[Tensor, "Hk n"]
    newest: Float[Tensor, "Hk n"]
    _keys: Float[Tensor, "1 Hk n D"]

    def __init__(self, length: int):
        self.columns, self._length = 0, length

    def attend(
        self,
        query: Float[Tensor, "1 Hq T D"],
        keys: Float[Tensor, "1 Hk T D"],
        options: AttentionOptions,
        held: Int[Tensor, "Hk S"] | None = None,
        values: Float[Tensor, "1 Hk n E"] | None = None,
    ) -> Float[Tensor, "1 Hq T E"]:
        """Add keys and compute the attention of new queries, in float32.

        Args:
            query: the new queries.
            keys: their keys.
            options: what the model's attention asks for.
            held: positions of the tokens that are seen beside the new ones, -1 = none; ``None``: all of them.
            values: values of all tokens; without them the output means nothing.

        Returns:
            The output.

        Cost:
            That of attention over the tokens that are seen, once.
        """
        first, last = self.columns, self.columns + keys.shape[2]
        if not first:
            self._keys = keys.new_empty(*keys.shape[:2], self._length, keys.shape[3])
        self._keys[:, :, first:last] = keys
        self.columns = last
        new = torch.arange(first, last, dtype=torch.int32, device=keys.device)
        slots = self._all(last, values) if held is None else self._of(held, new)
        now, wide = new[None].long(), query.float()
        out, report = choose(wide.device, wide.dtype).attend(wide, slots, now, statistic=_MASS, options=options)
        self.mass = self._by_position(report.sums["mass"][0], slots)
        sees = reference.visible(now[:, -1:], slots.positions, options.window)
        row = reference.softmax(reference.logits(wide[:, :, -1:], slots.keys, sees, options), options.sinks)
        self.newest = self._by_position(row[0, :, :, 0].mean(dim=1), slots)
        return out

    def _all(self, last: int, values: Float[Tensor, "1 Hk n E"] | None) -> Slots:
        """All tokens so far, in their order."""
        keys = self._keys[:, :, :last].float()
        given = keys if values is None else values[:, :, :last].float()
        return Slots(keys, given, torch.arange(last, dtype=torch.int32, device=keys.device)[None, None])

    def _of(self, held: Int[Tensor, "Hk S"], new: Int[Tensor, " T"]) -> Slots:
        """Some tokens of each head, and the new ones at the end."""
        most = int((held >= 0).sum(dim=-1).amax())
        places = torch.cat([held.topk(most).values, new.expand(len(held), -1)], dim=-1).to(torch.int32)
        index = places.long().clamp(min=0)[None, :, :, None].expand(-1, -1, -1, self._keys.shape[3])
        keys = self._keys.gather(2, index).float()
        return Slots(keys, keys, places[None])

    def _by_position(self, found: Float[Tensor, "Hk S"], slots: Slots) -> Float[Tensor, "Hk n"]:
        places = slots.positions[0].long().expand(found.shape) % (self._length + 1)  # -1 goes to the spare place
        return found.new_zeros(len(found), self._length + 1).scatter_(-1, places, found)[:, : self._length]


class Watch:
    """Takes the steps of a bounded layer, computes their attention a second time, and hands them on.

    Args:
        layer: does the work.
        length: the most tokens that will come.

    Attributes:
        held: which tokens each KV head holds.
        keys: all keys, and the attention of the newest step.
    """

    held: Bool[Tensor, "Hk n"]
    _positions: Int[Tensor, "Hk S"]

    def __init__(self, layer: Layer, length: int):
        self.layer, self.keys, self._length = layer, TextKeys(length), length

    def step(
        self,
        query: Float[Tensor, "1 Hq T D"],
        keys: Float[Tensor, "1 Hk T D"],
        values: Float[Tensor, "1 Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "1 T"] | None = None,
    ) -> Float[Tensor, "1 Hq T E"]:
        """Watch, then as `Layer.step`."""
        if not self.keys.columns:
            self._positions = torch.full((keys.shape[1], 1), EMPTY, device=keys.device)
        self.keys.attend(query, keys, options, self._positions)
        out = self.layer.step(query, keys, values, options=options, phase=phase, real=real)
        self._positions = self.layer.store.positions[0].clone()
        self.held = members(self._positions, self._length)
        return out


class WholeTextRecorder:
    """Takes the steps of a layer and keeps all tokens.

    Args:
        length: the most tokens that will come.

    Attributes:
        keys: all keys, and the attention of the newest step.
    """

    _values: Float[Tensor, "1 Hk n E"]

    def __init__(self, length: int):
        self.keys, self._length = TextKeys(length), length

    @property
    def columns(self) -> int:
        """Tokens so far; may be set back."""
        return self.keys.columns

    @columns.setter
    def columns(self, columns: int) -> None:
        self.keys.columns = columns

    def step(
        self,
        query: Float[Tensor, "1 Hq T D"],
        keys: Float[Tensor, "1 Hk T D"],
        values: Float[Tensor, "1 Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "1 T"] | None = None,
    ) -> Float[Tensor, "1 Hq T E"]:
        """Attend over all tokens so far, in float32."""
        first = self.columns
        if not first:
            self._values = values.new_empty(*values.shape[:2], self._length, values.shape[3])
        last = first + values.shape[2]
        self._values[:, :, first:last] = values
        return self.keys.attend(query, keys, options, values=self._values).to(query.dtype)


def watch(cache: BoundedCache, length: int) -> dict[int, Watch]:
    """Put a watch around every layer of a cache that has slots; by the layer's number in the model."""
    found = {}
    for number, part in enumerate(map(handing_part, cache.layers)):
        if isinstance(part, BoundedLayer):
            part.stepper = found[number] = Watch(part.layer, length)
    return found


class FullCache:
    """A model with a cache that keeps everything and can go back to an earlier token.

    Args:
        model: the model, attached.
        length: the most tokens that it will hold.
    """

    def __init__(self, model: Any, length: int):
        self._model = model
        self._layers = {number: WholeTextRecorder(length) for number in windows_of(model.config)}
        self._cache = handing_cache(model.config, self._layers.__getitem__)

    def feed(self, ids: Int[Tensor, " T"], phase: Phase) -> Float[Tensor, " V"]:
        """Run new tokens and return the logits that follow the last one."""
        return feed(self._model, self._cache, ids, phase)

    def mass(self) -> Float[Tensor, "H n"]:
        """Attention of the newest step, of all heads of all layers."""
        return torch.cat([layer.keys.mass for layer in self._layers.values()]).cpu()

    def newest(self) -> Float[Tensor, "H n"]:
        """Attention of the newest query, of all heads of all layers."""
        return torch.cat([layer.keys.newest for layer in self._layers.values()]).cpu()

    def go_back(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        for layer in self._layers.values():
            layer.columns = tokens


def feed(model: Any, cache: Any, ids: Int[Tensor, " T"], phase: Phase) -> Float[Tensor, " V"]:
    """Run new tokens over a cache and return the logits that follow the last one."""
    cache.phase = phase
    given = ids[None].to(model.device)
    logits: Tensor = model(input_ids=given, **handed(model, cache), use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float()


def refuse_states(name: str, config: Any) -> None:
    """Refuse a model with layers that keep a state, which cannot go back to the end of the prompt.

    Raises:
        UnsupportedModelError: it has such layers.
    """
    cache = handing_cache(config, lambda number: WholeTextRecorder(1))
    if any(not isinstance(layer, HandingLayer) for layer in cache.layers):
        raise UnsupportedModelError(
            f"{name} has layers that keep a state instead of tokens, which cannot be compared with a full cache token "
            "by token. Take a model whose layers all have attention."
        )


def members(positions: Int[Tensor, "Hk S"], length: int) -> Bool[Tensor, "Hk n"]:
    """Which tokens of a text stand in the slots (-1 = empty)."""
    marks = torch.zeros(positions.shape[0], length + 1, dtype=torch.bool, device=positions.device)
    return marks.scatter_(-1, positions.long() % (length + 1), True)[..., :length]  # -1 goes to the spare place


# A policy whose scores are overheard: it decides as it always does, and shows every score that it gives.


@dataclass(frozen=True, eq=False)
class Heard:
    """The scores of one step of a layer, of its first row.

    Attributes:
        positions: true positions of the tokens that were compared, -1 = none.
        scores: the score of each; higher = keep.
        protected: tokens that stay whatever their score is.
    """

    positions: Int[Tensor, "Hk S"]
    scores: Float[Tensor, "Hk S"]
    protected: Bool[Tensor, "Hk S"]


def overheard(policy: Policy, take: Callable[[int, Heard], object]) -> Policy:
    """Return the same policy with a listener. Kernels that never ask for scores leave such a policy to torch.

    Args:
        policy: the policy.
        take: called with a layer's number and its scores.
    """
    kind = type(policy)

    def score(self: Policy, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        found: Tensor = kind.score(self, view, state)
        positions = view.positions[0].clone()  # live, and about to change
        take(view.layer, Heard(positions, found[0].float().clone(), protected_slots(self, view)[0].clone()))
        return found

    body = {"score": score, "__module__": kind.__module__, "__doc__": kind.__doc__}
    made = copy.copy(policy)
    object.__setattr__(made, "__class__", type(kind.__name__, (kind,), body))
    return made
