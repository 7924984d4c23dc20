"""What a statistic is, and those that sum up attention mass."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.noise import Gumbel


@dataclass(frozen=True)
class Rows:
    """The probabilities of a block of query rows, with the positions of rows and keys.

    Attributes:
        probabilities: softmax over the visible keys; zero on the others.
        selected: whether each row counts.
        queries: true positions of the rows, -1 for padding.
        keys: true positions of the keys, -1 for empty slots.
    """

    probabilities: Float[Tensor, "B Hk G T S"]
    selected: Bool[Tensor, "B T"]
    queries: Int[Tensor, "B T"]
    keys: Int[Tensor, "B #Hk S"]

    @property
    def visible(self) -> Bool[Tensor, "B #Hk T S"]:
        """Whether each row can see each key, sliding windows aside."""
        keys = self.keys[:, :, None]
        return (keys >= 0) & (keys <= self.queries[:, None, :, None])


@dataclass(frozen=True, eq=False)
class Statistic(abc.ABC):
    """Base of all statistics.

    Attributes:
        rows: query rows of a step that count: -1 for all, 0 for none, ``w`` for the last ``w`` of each sequence; or one
            such number (not negative) per row of the batch.
        fields: names of the fields that the report has.
    """

    fields: ClassVar[tuple[str, ...]] = ("mass",)

    rows: int | Int[Tensor, " B"] = -1

    def selects(self, query_positions: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Whether each query row counts. Padded rows (position -1) never do."""
        real = query_positions >= 0
        if isinstance(self.rows, int) and self.rows < 0:
            return real
        last = query_positions.amax(dim=1, keepdim=True)
        rows = self.rows if isinstance(self.rows, int) else self.rows[:, None]
        return real & (query_positions > last - rows)

    @abc.abstractmethod
    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Reduce a block of rows to one tensor for each of `fields`."""

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Add a block's result for the field ``name`` to the result of the earlier blocks, in place."""
        total.add_(part)


@dataclass(frozen=True, eq=False)
class Nothing(Statistic):
    """No report, for a policy that does not look at attention."""

    fields: ClassVar[tuple[str, ...]] = ()

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """An empty report."""
        return {}


@dataclass(frozen=True, eq=False)
class Mass(Statistic):
    """The attention probability that each key received, summed over rows.

    Attributes:
        gain: factor on the logits of the rows that count, one number or one per row of the batch. The softmax of
            ``g·x`` is computed from the softmax of ``x`` as ``p**g / sum(p**g)``; the model's output does not change.
        noise: Gumbel noise on the logits of the rows that count, before the gain.
        decay: weight of a row relative to the next one.
        last: the newest position of each row of the batch, whose weight is 1.
    """

    gain: float | Float[Tensor, " B"] = 1.0
    noise: Gumbel | None = None
    decay: float = 1.0
    last: Int[Tensor, " B"] | int = 0

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Transform the probabilities, average over the group, sum over the selected rows."""
        p = self._transformed(rows)
        B, Hk, G, T, S = p.shape
        weights = self.weights(rows.selected, rows.queries).to(p.dtype)
        if T == 1:
            return {"mass": p.squeeze(3).mean(dim=2) * weights[:, None]}
        return {"mass": (weights.repeat(1, G)[:, None, None, :] / G @ p.reshape(B, Hk, G * T, S)).squeeze(2)}

    def weights(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """The weight of each row: 1 if it is selected, else 0. With decay, earlier rows weigh less."""
        if self.decay == 1.0:
            return selected.float()
        last = torch.as_tensor(self.last, device=queries.device).view(-1, 1)
        return selected * self.decay ** (last - queries).clamp(min=0)

    def _transformed(self, rows: Rows) -> Float[Tensor, "B Hk G T S"]:
        p = rows.probabilities
        if self.noise is None and isinstance(self.gain, float) and self.gain == 1.0:
            return p
        gain = self.gain if isinstance(self.gain, float) else self.gain.to(p.dtype).view(-1, 1, 1, 1, 1)
        if self.noise is not None:
            p = p * self.noise.factor(p.shape, rows.queries, rows.keys).to(p.dtype)
        tempered = (p**gain).masked_fill_(~rows.visible[:, :, None], 0.0)
        return tempered / tempered.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


@dataclass(frozen=True, eq=False)
class MassAndLast(Mass):
    """Mass, and in a second field the probabilities of the newest row, whose position is ``last``."""

    fields: ClassVar[tuple[str, ...]] = ("mass", "last")

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """The sum over the selected rows, and the newest row, if this block has it."""
        last = torch.as_tensor(self.last, device=rows.queries.device).view(-1, 1)
        newest = Rows(rows.probabilities, rows.selected & (rows.queries == last), rows.queries, rows.keys)
        return {**super().reduce(rows), "last": super().reduce(newest)["mass"]}


@dataclass(frozen=True, eq=False)
class RowMasses(Statistic):
    """The mass of each of the last rows in a field of its own: row ``i`` has the field ``row{i % places}``.

    Attributes:
        places: number of fields; ``rows`` must not be more.
    """

    places: int = 1

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]  # their number depends on an option
        """The names of the rows' fields."""
        return tuple(f"row{place}" for place in range(self.places))

    def weights_of(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> list[Float[Tensor, "B T"]]:
        """For each field, 1 for the row that it belongs to and 0 for the others."""
        return [(selected & (queries % self.places == place)).float() for place in range(self.places)]

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Average over the group."""
        weights = torch.stack(self.weights_of(rows.selected, rows.queries), dim=1).to(rows.probabilities.dtype)
        found = weights[:, None] @ rows.probabilities.mean(dim=2)
        return dict(zip(self.fields, found.unbind(dim=2), strict=True))
