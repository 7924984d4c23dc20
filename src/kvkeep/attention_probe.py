"""The instrument that watches attention: a model runs, and probes see what each of its layers is given and attends to.

A probe takes the steps of one layer. It wraps a layer of a bounded cache, and sees what the layer holds:

    cache = BoundedCache(model.config, "h2o", budget=64)
    recorders = wrap_layers(cache, TapeRecorder)
    model(ids, past_key_values=cache)
    recorders[0].tape().bounded()

or it stands in for a layer, and attends over all tokens itself:

    cache, probes = probe_cache(model.config, lambda index: FullAttention(length))

A new kind of probe is a subclass of `Probe` with one method. Attention of `BoundedAttention` and `FullAttention` comes
from a backend (`kvkeep.backends`) in float32, which sums what each key receives and never holds a matrix of tokens by
tokens.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Mass
from kvkeep.backends import AttentionInputs, choose, reference
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import (
    BoundedLayer,
    CountingStepper,
    HandingLayer,
    PhasedCache,
    handed,
    handing_cache,
    handing_part,
)
from kvkeep.cache.layer import Layer
from kvkeep.errors import ShapeError, UnsupportedOperationError
from kvkeep.types import EMPTY, AttentionOptions, Phase, Slots, Stepper

_MASS = Mass()


@dataclass(frozen=True, eq=False)
class LayerStep:
    """What one layer is given for new tokens; see `kvkeep.Layer.step`."""

    query: Float[Tensor, "B Hq T D"]
    keys: Float[Tensor, "B Hk T D"]
    values: Float[Tensor, "B Hk T E"]
    options: AttentionOptions
    phase: Phase
    real: Bool[Tensor, "B T"] | None = None

    @property
    def positions(self) -> Int[Tensor, "B T"]:
        """Return the tokens' positions in their texts, -1 for padding. The step must be the first of its texts."""
        if self.real is not None:
            return positions_of(self.real)
        return positions_of(
            torch.ones(len(self.query), self.query.shape[2], dtype=torch.bool, device=self.query.device)
        )

    def run(self, layer: Stepper) -> Float[Tensor, "B Hq T E"]:
        """Give this step's tokens to a layer, and return the attention output that the layer gives for them."""
        return layer.step(self.query, self.keys, self.values, options=self.options, phase=self.phase, real=self.real)


class Probe(abc.ABC):
    """Takes the steps of one layer, as a wrapper around it or in its place."""

    def step(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B Hq T E"]:
        """Wrap new tokens into a `LayerStep` and return what `take` returns."""
        return self.take(LayerStep(query, keys, values, options, phase, real))

    @abc.abstractmethod
    def take(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Take the new tokens of the layer's step, and return their attention output, with which the model goes on."""


P = TypeVar("P", bound=Stepper)
C = TypeVar("C", bound=CountingStepper)


def wrap_layers(cache: BoundedCache, wrap: Callable[[Layer], P]) -> dict[int, P]:
    """Put a probe around each layer of a cache, and return the probes by the layer's number in the model.

    The cache changes: its steps go to the probes from now on. Layers without slots are left as they are.

    Args:
        cache: the cache.
        wrap: returns the probe around a layer.
    """
    probes: dict[int, P] = {}
    for index, part in enumerate(map(handing_part, cache.layers)):
        if isinstance(part, BoundedLayer):
            part.stepper = probes[index] = wrap(part.layer)
    return probes


def probe_cache(config: Any, make: Callable[[int], C]) -> tuple[PhasedCache, dict[int, C]]:
    """Return a cache that hands new tokens to probes and does not store them, and the probes by the layer's number.

    Each layer with attention has a probe; layers that keep a state keep it as usual.

    Args:
        config: the model's configuration.
        make: returns a probe for a layer's number in the model.
    """
    probes: dict[int, C] = {}

    def made(index: int) -> C:
        probes[index] = make(index)
        return probes[index]

    return handing_cache(config, made), probes


def keeps_states(config: Any) -> bool:
    """Return whether any layer of a model keeps a state of fixed size, which cannot go back to an earlier token.

    A layer with attention beside its state is such a layer, too.

    Args:
        config: the model's configuration.
    """
    # nothing runs, so the length may be any
    layers = probe_cache(config, lambda index: FullAttention(1))[0].layers
    return any(not isinstance(layer, HandingLayer) for layer in layers)


def positions_of(real: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """Return the positions of tokens in their texts, counted over the real columns of each row; -1 for padding."""
    return (real.long().cumsum(dim=1) - 1).masked_fill(~real, EMPTY)


def members(positions: Int[Tensor, "*rows S"], length: int) -> Bool[Tensor, "*rows n"]:
    """Return a mask over the positions of a text: true for those that stand in the slots of a head.

    Args:
        positions: position of each slot's token, -1 = empty.
        length: number of positions; all in slots are smaller.
    """
    marks = torch.zeros(*positions.shape[:-1], length + 1, dtype=torch.bool, device=positions.device)
    # -1 modulo the width is the last column, which is cut off: empty slots mark no token
    return marks.scatter_(-1, positions.long() % (length + 1), True)[..., :length]


# Tapes: all that a layer was given, and what it held.


@dataclass(frozen=True, eq=False)
class LayerTape:
    """All that one layer was given for texts of equal length.

    Attributes:
        query: queries of all tokens.
        keys: keys of all tokens.
        values: values of all tokens.
        options: what the model's attention asks for.
        held: the tokens that the layer held before each generated token; these are the last ``R``.
    """

    query: Float[Tensor, "B Hq n D"]
    keys: Float[Tensor, "B Hk n D"]
    values: Float[Tensor, "B Hk n E"]
    options: AttentionOptions
    held: Bool[Tensor, "B Hk R n"] | None = None

    @property
    def length(self) -> int:
        """Return the number of tokens of each text."""
        return self.keys.shape[2]

    def weights(self, first: int) -> Float[Tensor, "B Hk G R n"]:
        """Return what the queries from position ``first`` on attend to under a full cache: probabilities in float64.

        The query heads of a group are not averaged; keys after a query, or outside of its sliding window, get 0.
        """
        now, columns = self._positions(first)
        return self._softmax(first, reference.visible(now, columns[None], self.options.window))

    def bounded(self) -> Float[Tensor, "B Hk G R n"]:
        """Return what generated tokens attend to among the held tokens and themselves: probabilities in float64.

        They are the last ``R`` tokens; other keys get 0. There must be generated tokens on the tape.
        """
        assert self.held is not None
        first = self.length - self.held.shape[2]
        now, columns = self._positions(first)
        held = self.held | (now[0, :, None] == columns)  # positions have one row, which all texts share
        return self._softmax(first, held & reference.visible(now, columns[None], self.options.window))

    def feed(self, layer: Stepper, start: int, stop: int) -> None:
        """Run tokens ``start`` to ``stop`` through a layer: as a prompt if ``start`` is 0, else as generated tokens."""
        at = slice(start, stop)
        phase = Phase.PREFILL if start == 0 else Phase.DECODE
        layer.step(self.query[:, :, at], self.keys[:, :, at], self.values[:, :, at], options=self.options, phase=phase)

    def _positions(self, first: int) -> tuple[Int[Tensor, "1 R"], Int[Tensor, "1 n"]]:
        """Return the positions of the queries from ``first`` on, and of all keys."""
        columns = torch.arange(self.length, device=self.keys.device)[None]
        return columns[:, first:], columns

    def _softmax(self, first: int, sees: Bool[Tensor, "#B #Hk R n"]) -> Float[Tensor, "B Hk G R n"]:
        """Return the attention probabilities of the queries from ``first`` on over the keys they see, in float64."""
        logits = reference.logits(self.query[:, :, first:].double(), self.keys.double(), sees, self.options)
        return reference.softmax(logits, self.options.sinks)


class TapeRecorder(Probe):
    """Wraps a layer and remembers what it is given, and what it holds before each generated token.

    Args:
        layer: takes the steps in turn.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._given: list[tuple[Tensor, Tensor, Tensor]] = []
        self._held: list[Int[Tensor, "B Hk S"]] = []

    def take(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Record a copy of a step's tensors, then let the layer take the step, and return its output.

        Before a generated token, record the positions of the tokens that the layer holds as well.
        """
        if step.phase is Phase.DECODE:
            self._held.append(self._layer.store.positions.clone())
        self._given.append((step.query.clone(), step.keys.clone(), step.values.clone()))
        self._options = step.options
        return step.run(self._layer)

    def tape(self) -> LayerTape:
        """Return the tokens of all steps so far as one record, joined in order. There must have been a step."""
        query, keys, values = (_joined(parts) for parts in zip(*self._given, strict=True))
        held = [members(positions, keys.shape[2]) for positions in self._held]
        return LayerTape(query, keys, values, self._options, torch.stack(held, dim=2) if held else None)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Return parts along the tokens as one tensor, without a copy if there is only one."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)


@torch.inference_mode()
def tapes(model: Any, ids: Int[Tensor, "B n"]) -> dict[int, LayerTape]:
    """Run texts of equal length under the full cache, all tokens in one step, and return what each layer was given.

    The tapes are by the layer's number in the model; layers without slots have none.
    """
    cache = BoundedCache(model.config, "full", ids.shape[1])  # a budget for all tokens: full never evicts
    recorders = wrap_layers(cache, TapeRecorder)
    model(input_ids=ids.to(model.device), **handed(model, cache), use_cache=True, logits_to_keep=1)
    return {index: recorder.tape() for index, recorder in recorders.items()}


# Probes that attend over a whole text of one row, which comes piece by piece: over what a layer holds, or over all.


class TextTensor:
    """Keys or values of a whole text, one piece after another, in the model's dtype and one allocation.

    Args:
        length: the most tokens that will come.
    """

    _tokens: Float[Tensor, "1 Hk n D"]

    def __init__(self, length: int):
        self._length = length

    def put(self, first: int, new: Float[Tensor, "1 Hk T D"]) -> Float[Tensor, "1 Hk S D"]:
        """Write the keys (or values) of new tokens from position ``first`` on, and return those of positions 0 to the
        last new one, as a view. Position 0 begins a new text.

        Raises:
            ShapeError: the text grows longer than was announced.
        """
        last = first + new.shape[2]
        if last > self._length:
            raise ShapeError(f"This probe has room for {self._length} tokens and was given {last}.")
        if not first:
            self._tokens = new.new_empty(*new.shape[:2], self._length, new.shape[3])
        self._tokens[:, :, first:last] = new
        return self._tokens[:, :, :last]


class AttentionSums:
    """The attention that the tokens of a text receive in the newest step.

    Args:
        length: the most tokens that will come.

    Attributes:
        mass: attention of the step, summed over its queries and averaged over the query heads of a group.
        newest: attention of the newest query, averaged in the same way.
    """

    mass: Float[Tensor, "Hk n"]
    newest: Float[Tensor, "Hk n"]

    def __init__(self, length: int):
        self._length = length

    def attend(self, step: LayerStep, slots: Slots, now: Int[Tensor, "1 T"]) -> Float[Tensor, "1 Hq T E"]:
        """Compute the attention of a step over some slots, in float32, set ``mass`` and ``newest``, and return the
        output.

        Args:
            step: the step, of which the queries count.
            slots: keys and values, in float32.
            now: positions of the queries.

        Cost:
            That of attention over these slots, once.
        """
        query, options = step.query.float(), step.options
        backend = choose(query.device, query.dtype)
        # the backend reports sums over all queries, so the newest query's own row is computed beside them
        out, report = backend.attend(AttentionInputs(query, slots, now, options, _MASS))
        self.mass = self._by_position(report.sums["mass"][0], slots)
        sees = reference.visible(now[:, -1:], slots.positions, options.window)
        row = reference.softmax(reference.logits(query[:, :, -1:], slots.keys, sees, options), options.sinks)
        self.newest = self._by_position(row[0, :, :, 0].mean(dim=1), slots)
        return out

    def _by_position(self, received: Float[Tensor, "Hk S"], slots: Slots) -> Float[Tensor, "Hk n"]:
        """Return a number of each slot as a number of each position of the text; positions without a slot get 0."""
        # -1 modulo the width is the last column, which is cut off: empty slots receive nothing
        columns = slots.positions[0].long().expand(received.shape) % (self._length + 1)
        return received.new_zeros(len(received), self._length + 1).scatter_(-1, columns, received)[:, : self._length]


class BoundedAttention(Probe):
    """Wraps a bounded layer and computes its attention a second time, outside of the bounded memory.

    Args:
        layer: takes the steps in turn.
        length: the most tokens that will come.

    Attributes:
        held: which tokens each KV head holds.
        sums: the attention of the newest step.
    """

    held: Bool[Tensor, "Hk n"]
    _positions: Int[Tensor, "Hk S"]

    def __init__(self, layer: Layer, length: int):
        self.layer, self.sums = layer, AttentionSums(length)
        self._keys, self._length, self._columns = TextTensor(length), length, 0

    def take(self, step: LayerStep) -> Float[Tensor, "1 Hq T E"]:
        """Let the layer take a step, and return its output.

        Before, set ``sums`` from the attention of the step over what the layer holds and over the step's own tokens;
        afterwards, set ``held`` to what the layer holds then.
        """
        first, heads = self._columns, step.keys.shape[1]
        keys = self._keys.put(first, step.keys)
        self._columns = keys.shape[2]
        if not first:
            self._positions = torch.full((heads, 1), EMPTY, device=keys.device)
        new = torch.arange(first, self._columns, dtype=torch.int32, device=keys.device)
        self.sums.attend(step, self._seen(keys, new), new[None].long())
        out = step.run(self.layer)
        # the layer's own positions change in the next step
        self._positions = self.layer.store.positions[0].clone()
        self.held = members(self._positions, self._length)
        return out

    def _seen(self, keys: Float[Tensor, "1 Hk S D"], new: Int[Tensor, " T"]) -> Slots:
        """Return slots with the tokens that each head holds, and the new ones at the end; their keys are in float32."""
        # heads may hold different numbers of tokens: the largest positions first, and empty slots fill up the rest
        most = int((self._positions >= 0).sum(dim=-1).amax())
        positions = torch.cat([self._positions.topk(most).values, new.expand(keys.shape[1], -1)], dim=-1).to(
            torch.int32
        )
        # an empty slot gets any key: its position says that nobody sees it
        index = positions.long().clamp(min=0)[None, :, :, None].expand(-1, -1, -1, keys.shape[3])
        seen = keys.gather(2, index).float()
        return Slots(seen, seen, positions[None])  # only what keys receive is asked for, so values may be any


class WholeHistory(Probe):
    """Stands in for a layer and keeps all tokens.

    Args:
        length: the most tokens that will come.

    Attributes:
        columns: tokens so far; may be set back.
    """

    def __init__(self, length: int):
        self.columns = 0
        self._keys, self._values = TextTensor(length), TextTensor(length)

    def take(self, step: LayerStep) -> Float[Tensor, "1 Hq T E"]:
        """Append the step's keys and values to the history, and return the attention output of its queries over all
        tokens so far, computed in float32.
        """
        first = self.columns
        keys, values = self._keys.put(first, step.keys), self._values.put(first, step.values)
        self.columns = keys.shape[2]
        return self.attend(step, keys.float(), values.float()).to(step.query.dtype)

    @abc.abstractmethod
    def attend(
        self, step: LayerStep, keys: Float[Tensor, "1 Hk S D"], values: Float[Tensor, "1 Hk S E"]
    ) -> Float[Tensor, "1 Hq T E"]:
        """Return the attention output of a step's queries over all tokens so far; the step's own come last."""


class FullAttention(WholeHistory):
    """Stands in for a layer with the attention of a full cache.

    Args:
        length: the most tokens that will come.

    Attributes:
        sums: the attention of the newest step.
    """

    def __init__(self, length: int):
        super().__init__(length)
        self.sums = AttentionSums(length)

    def attend(
        self, step: LayerStep, keys: Float[Tensor, "1 Hk S D"], values: Float[Tensor, "1 Hk S E"]
    ) -> Float[Tensor, "1 Hq T E"]:
        """Return the attention output of a step's queries over all tokens, and set ``sums`` to what each token
        receives from them.
        """
        positions = torch.arange(self.columns, dtype=torch.int32, device=keys.device)[None]
        now = positions[:, -step.query.shape[2] :].long()
        return self.sums.attend(step, Slots(keys, values, positions[None]), now)


class FullCache:
    """A model with a cache that keeps everything and can go back to an earlier token.

    Args:
        model: the model, attached.
        length: the most tokens that it will hold.
    """

    def __init__(self, model: Any, length: int):
        self._model = model
        self._cache, self._layers = probe_cache(model.config, lambda index: FullAttention(length))

    def feed(self, ids: Int[Tensor, " T"], phase: Phase) -> Float[Tensor, " V"]:
        """Run new tokens of the text, keep them, and return the logits that follow the last one, in float32."""
        return next_logits(self._model, self._cache, ids, phase)

    def mass(self) -> Float[Tensor, "H n"]:
        """Return what each token received in the newest step, by KV head of all layers one after the other, on the CPU.

        It is the attention summed over the step's queries and averaged over the query heads of a group.
        """
        return torch.cat([layer.sums.mass for layer in self._layers.values()]).cpu()

    def newest(self) -> Float[Tensor, "H n"]:
        """Return what each token received from the newest query alone, by KV head of all layers, on the CPU; see
        `mass`.
        """
        return torch.cat([layer.sums.newest for layer in self._layers.values()]).cpu()

    def go_back(self, tokens: int) -> None:
        """Forget all tokens of the text but the first ``tokens`` ones, so that others can be fed after these."""
        for layer in self._layers.values():
            layer.columns = tokens


def next_logits(model: Any, cache: PhasedCache, ids: Int[Tensor, " T"], phase: Phase) -> Float[Tensor, " V"]:
    """Run new tokens of one text over a cache, which then holds them, and return the logits that follow the last one.

    The cache's phase is set and stays.
    """
    cache.phase = phase
    given = ids[None].to(model.device)
    logits: Tensor = model(input_ids=given, **handed(model, cache), use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].float()


class OnePass(Probe):
    """Stands in for a layer that takes whole texts in one step and keeps nothing.

    Attributes:
        columns: columns of the texts; 0 before the step.
    """

    def __init__(self) -> None:
        self.columns = 0

    def take(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Return the attention output of a step that brings whole texts; it must be the only one.

        Raises:
            UnsupportedOperationError: there was a step before.
        """
        if self.columns:
            raise UnsupportedOperationError("A pass with hindsight takes whole texts at once; make a new cache.")
        self.columns = step.query.shape[2]
        return self.attend(step)

    @abc.abstractmethod
    def attend(self, step: LayerStep) -> Float[Tensor, "B Hq T E"]:
        """Return the attention output of the texts over themselves."""
