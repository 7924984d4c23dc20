"""Layers that take whole texts at once and hold nothing afterwards: what passes with hindsight are made of."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.backends import choose
from kvkeep.cache import BoundedCache, BoundedLayer
from kvkeep.errors import ShapeError, UnsupportedOperationError
from kvkeep.layer import Layer
from kvkeep.registry import parse
from kvkeep.statistic import Mass
from kvkeep.types import EMPTY, AttentionOptions, Phase, Slots

BLOCK_BYTES = 64 * 2**20
"""Logits that exist at a time where keys are hidden, but never less than those of one row."""


def with_layers(config: Any, make: Callable[[int, int | None], WholeText]) -> BoundedCache:
    """A cache whose layers are made from their number and their sliding window."""
    cache = BoundedCache(config, "local", budget=1)
    for index, outer in enumerate(cache.layers):
        if isinstance(outer, BoundedLayer):
            outer.layer = make(index, outer.layer.window)
    return cache


def positions_of(real: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """True positions, -1 for padding."""
    return (real.long().cumsum(dim=1) - 1).masked_fill(~real, EMPTY)


class WholeText(Layer):
    """A layer that is given whole texts in one step."""

    def __init__(self, index: int, window: int | None):
        super().__init__(parse("local"), 1, index=index, window=window)

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
        """Attend over the whole texts.

        Raises:
            UnsupportedOperationError: there was a step before.
        """
        if self.columns:
            raise UnsupportedOperationError("A pass with hindsight takes whole texts at once; make a new cache.")
        self.columns = query.shape[2]
        if real is None:
            real = torch.ones(query.shape[0], self.columns, dtype=torch.bool, device=query.device)
        return self.attend(query, keys, values, positions_of(real), options)

    @abc.abstractmethod
    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        positions: Int[Tensor, "B T"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq T E"]:
        """Attention of the texts over themselves."""


class Adding(WholeText):
    """Full attention that adds up what each key receives.

    Attributes:
        mass: column sums by true position, averaged over the query heads of a group; 0 past the end of a text.
    """

    mass: Float[Tensor, "B Hk T"]

    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        positions: Int[Tensor, "B T"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq T E"]:
        """Causal attention; the sums are kept."""
        backend, slots = choose(query.device, query.dtype), Slots(keys, values, positions[:, None])
        out, report = backend.attend(query, slots, positions, statistic=Mass(), options=options)
        mass = report.mass.masked_fill((positions < 0)[:, None], 0.0)
        place = positions.clamp(min=0)[:, None].expand_as(mass)
        self.mass = torch.zeros_like(mass).scatter_add_(-1, place, mass)
        return out


class Hiding(WholeText):
    """Attention that some keys are hidden from, but for their own row and the next few.

    Args:
        index: the layer's number.
        window: its sliding window.
        hidden: which keys, by text and true position.
        recent: rows after a hidden key's own that still see it.
    """

    def __init__(self, index: int, window: int | None, hidden: Bool[Tensor, "N Hk P"], recent: int):
        super().__init__(index, window)
        self.hidden, self.recent = hidden, recent

    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        positions: Int[Tensor, "B T"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq T E"]:
        """Causal attention, a block of rows at a time, in float64.

        Raises:
            ShapeError: keys were chosen for other texts or another model.
        """
        B, Hq, T, D = query.shape
        Hk = keys.shape[1]
        grouped, keys, out = query.view(B, Hk, Hq // Hk, T, D).double(), keys.double(), []
        hidden = self._by_column(positions, Hk)
        for at in torch.arange(T).split(max(1, BLOCK_BYTES // (8 * B * Hq * T))):
            logits = torch.einsum("bhgtd,bhsd->bhgts", grouped[:, :, :, at], keys) * options.scaling
            if options.softcap is not None:
                logits = options.softcap * torch.tanh(logits / options.softcap)
            distance = positions[:, None, at, None] - positions[:, None, None, :]
            sees = (positions >= 0)[:, None, None, :] & (distance >= 0) & (distance < (options.window or T))
            sees = sees & ~(hidden[:, :, None] & (distance > self.recent))
            p = _softmax(logits.masked_fill(~sees[:, :, None], -torch.inf), options.sinks)
            out.append(torch.einsum("bhgts,bhse->bhgte", p, values.double()).flatten(1, 2))
        return torch.cat(out, dim=2).to(query.dtype)

    def _by_column(self, positions: Int[Tensor, "B T"], heads: int) -> Bool[Tensor, "B Hk T"]:
        """Which columns hold a hidden key."""
        N, Hk, P = self.hidden.shape
        if len(positions) != N or Hk != heads or int(positions.max()) >= P:
            raise ShapeError(
                f"Keys were chosen for {N} texts of at most {P} tokens and {Hk} KV heads; the model was given "
                f"{len(positions)} of up to {int(positions.max()) + 1} and has {heads}. Measure these texts first."
            )
        place = positions.clamp(min=0)[:, None].expand(-1, Hk, -1)
        return self.hidden.to(positions.device).gather(-1, place)


def _softmax(logits: Float[Tensor, "B Hk G R T"], sinks: Float[Tensor, " Hq"] | None) -> Float[Tensor, "B Hk G R T"]:
    """Probabilities; padded rows, which see nothing, are zero."""
    if sinks is not None:
        B, Hk, G, R, _ = logits.shape
        extra = sinks.double().view(1, Hk, G, 1, 1).expand(B, -1, -1, R, 1)
        return torch.cat([logits, extra], dim=-1).softmax(dim=-1)[..., :-1]
    return logits.softmax(dim=-1).nan_to_num(0.0)
