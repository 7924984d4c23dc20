"""What layers are given and what they hold: a `Recorder` wraps a layer and remembers both, a `Tape` is its record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.backends import reference
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import BoundedLayer, handed, handing_part
from kvkeep.cache.layer import Layer
from kvkeep.types import AttentionOptions, Phase, Stepper


@dataclass(frozen=True, eq=False)
class Tape:
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
        """Tokens of each text."""
        return self.keys.shape[2]

    def weights(self, first: int) -> Float[Tensor, "B Hk G R n"]:
        """The full cache's attention of the rows from ``first`` on, in float64."""
        now, columns = self._positions(first)
        return self._softmax(first, reference.visible(now, columns[None], self.options.window))

    def bounded(self) -> Float[Tensor, "B Hk G R n"]:
        """Attention of the generated tokens over what the layer held and themselves, in float64; 0 for other keys."""
        assert self.held is not None
        first = self.length - self.held.shape[2]
        now, columns = self._positions(first)
        held = self.held | (now[0, :, None] == columns)
        return self._softmax(first, held & reference.visible(now, columns[None], self.options.window))

    def feed(self, layer: Stepper, start: int, stop: int) -> None:
        """Give a layer the tokens from ``start`` to ``stop``: a prompt if they are the first, else generated ones."""
        at = slice(start, stop)
        phase = Phase.PREFILL if start == 0 else Phase.DECODE
        layer.step(self.query[:, :, at], self.keys[:, :, at], self.values[:, :, at], options=self.options, phase=phase)

    def _positions(self, first: int) -> tuple[Int[Tensor, "1 R"], Int[Tensor, "1 n"]]:
        columns = torch.arange(self.length, device=self.keys.device)[None]
        return columns[:, first:], columns

    def _softmax(self, first: int, sees: Bool[Tensor, "#B #Hk R n"]) -> Float[Tensor, "B Hk G R n"]:
        logits = reference.logits(self.query[:, :, first:].double(), self.keys.double(), sees, self.options)
        return reference.softmax(logits, self.options.sinks)


class Recorder:
    """Takes the steps of a layer and remembers what it is given, and what it holds before each generated token.

    Args:
        layer: takes the steps in turn.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._given: list[tuple[Tensor, Tensor, Tensor]] = []
        self._held: list[Int[Tensor, "B Hk S"]] = []

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
        """Remember; then as `Layer.step`."""
        if phase is Phase.DECODE:
            self._held.append(self._layer.store.positions.clone())
        self._given.append((query.clone(), keys.clone(), values.clone()))
        self._options = options
        return self._layer.step(query, keys, values, options=options, phase=phase, real=real)

    def tape(self) -> Tape:
        """The record so far."""
        query, keys, values = (_joined(parts) for parts in zip(*self._given, strict=True))
        held = [members(positions, keys.shape[2]) for positions in self._held]
        return Tape(query, keys, values, self._options, torch.stack(held, dim=2) if held else None)


def record(cache: BoundedCache) -> dict[int, Recorder]:
    """Put a recorder around every layer of a cache that has slots; by the layer's number in the model."""
    recorders = {}
    for index, outer in enumerate(map(handing_part, cache.layers)):
        if isinstance(outer, BoundedLayer):
            outer.stepper = recorders[index] = Recorder(outer.layer)
    return recorders


@torch.inference_mode()
def tapes(model: Any, ids: Int[Tensor, "B n"]) -> dict[int, Tape]:
    """Run texts under the full cache and record every layer, by its number in the model."""
    cache = BoundedCache(model.config, "full", ids.shape[1])
    recorders = record(cache)
    model(input_ids=ids.to(model.device), **handed(model, cache), use_cache=True, logits_to_keep=1)
    return {index: recorder.tape() for index, recorder in recorders.items()}


def members(positions: Int[Tensor, "B Hk S"], length: int) -> Bool[Tensor, "B Hk n"]:
    """Which tokens of a text stand in the slots (-1 = empty)."""
    marks = torch.zeros(*positions.shape[:2], length + 1, dtype=torch.bool, device=positions.device)
    return marks.scatter_(-1, positions.long() % (length + 1), True)[..., :length]  # -1 goes to the spare place


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=2)
