"""Steppers that take whole texts at once and hold nothing afterwards, for passes with hindsight."""

from __future__ import annotations

import abc

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Mass
from kvkeep.backends import choose, reference
from kvkeep.errors import ShapeError, UnsupportedOperationError
from kvkeep.types import EMPTY, AttentionOptions, Phase, Slots

BLOCK_BYTES = 64 * 2**20
"""Most bytes of logits that exist at a time where keys are hidden, but at least those of one row."""


def positions_of(real: Bool[Tensor, "B T"]) -> Int[Tensor, "B T"]:
    """True positions, -1 for padding."""
    return (real.long().cumsum(dim=1) - 1).masked_fill(~real, EMPTY)


class WholeText(abc.ABC):
    """Takes whole texts in one step and has no slots.

    Attributes:
        columns: columns of the texts; 0 before the step.
    """

    def __init__(self) -> None:
        self.columns = 0

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
    """Full attention that adds up the mass of each key.

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
        """Causal attention; keep the sums."""
        backend, slots = choose(query.device, query.dtype), Slots(keys, values, positions[:, None])
        out, report = backend.attend(query, slots, positions, statistic=Mass(), options=options)
        mass = report.mass.masked_fill((positions < 0)[:, None], 0.0)
        place = positions.clamp(min=0)[:, None].expand_as(mass)
        self.mass = torch.zeros_like(mass).scatter_add_(-1, place, mass)
        return out


class Hiding(WholeText):
    """Attention in which some keys are hidden from all rows but their own and the next few.

    Args:
        hidden: which keys, by text and true position.
        recent: rows after a hidden key's own that still see it.
    """

    def __init__(self, hidden: Bool[Tensor, "N Hk P"], recent: int) -> None:
        super().__init__()
        self._hidden, self._recent = hidden, recent

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
        B, Hq, T, _ = query.shape
        hidden = self._by_column(positions, keys.shape[1])[:, :, None]
        keys, values, out = keys.double(), values.double(), []
        for rows in torch.arange(T).split(max(1, BLOCK_BYTES // (8 * B * Hq * T))):
            now = positions[:, rows]
            old = now[:, None, :, None] - positions[:, None, None, :] > self._recent
            sees = reference.visible(now, positions[:, None], options.window) & ~(hidden & old)
            logits = reference.logits(query[:, :, rows].double(), keys, sees, options)
            p = reference.softmax(logits, options.sinks).masked_fill((now < 0)[:, None, None, :, None], 0.0)
            out.append(torch.einsum("bhgts,bhse->bhgte", p, values).flatten(1, 2))
        return torch.cat(out, dim=2).to(query.dtype)

    def _by_column(self, positions: Int[Tensor, "B T"], heads: int) -> Bool[Tensor, "B Hk T"]:
        """Which columns hold a hidden key."""
        N, Hk, P = self._hidden.shape
        if len(positions) != N or Hk != heads or int(positions.max()) >= P:
            raise ShapeError(
                f"Keys were chosen for {N} texts of at most {P} tokens and {Hk} KV heads; the model was given "
                f"{len(positions)} of up to {int(positions.max()) + 1} and has {heads}. Measure these texts first."
            )
        place = positions.clamp(min=0)[:, None].expand(-1, Hk, -1)
        return self._hidden.to(positions.device).gather(-1, place)
