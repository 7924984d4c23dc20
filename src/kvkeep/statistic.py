"""What a policy can ask attention to report, each with the reduction that defines it.

A statistic is reduced block by block inside attention, so the full (rows × keys) matrix never exists. The order is
the same for all: transform the probabilities of each query head, average over the query heads of a group, then
compare or sum over rows, always in float32.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.noise import Gumbel
from kvkeep.types import EMPTY


@dataclass(frozen=True)
class Rows:
    """A block of query rows: their probabilities, and where the rows and the keys stand.

    Attributes:
        probabilities: softmax over the visible keys; zero on the others.
        selected: which rows count.
        queries: true positions of the rows, -1 for padding.
        keys: true positions of the keys, -1 for empty slots.
    """

    probabilities: Float[Tensor, "B Hk G T S"]
    selected: Bool[Tensor, "B T"]
    queries: Int[Tensor, "B T"]
    keys: Int[Tensor, "B #Hk S"]

    @property
    def visible(self) -> Bool[Tensor, "B #Hk T S"]:
        """Which keys each row can see, sliding windows aside."""
        keys = self.keys[:, :, None]
        return (keys >= 0) & (keys <= self.queries[:, None, :, None])


@dataclass(frozen=True, eq=False)
class Statistic(abc.ABC):
    """Base of all statistics.

    Attributes:
        rows: query rows of a step that count: -1 all, 0 none, ``w`` the last ``w`` of each sequence; or one such
            number (not negative) per row of the batch.
        fields: names of the report's fields that the reduction fills.
    """

    fields: ClassVar[tuple[str, ...]] = ("mass",)

    rows: int | Int[Tensor, " B"] = -1

    def selects(self, query_positions: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Which query rows count; padded rows (position -1) never do."""
        real = query_positions >= 0
        if isinstance(self.rows, int) and self.rows < 0:
            return real
        last = query_positions.amax(dim=1, keepdim=True)
        rows = self.rows if isinstance(self.rows, int) else self.rows[:, None]
        return real & (query_positions > last - rows)

    @abc.abstractmethod
    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Reduce a block of rows, one tensor for each of `fields`."""

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"]) -> None:
        """Add a block's result to that of the earlier blocks, in place."""
        total.add_(part)


@dataclass(frozen=True, eq=False)
class Nothing(Statistic):
    """No report: the policy does not look at attention."""

    fields: ClassVar[tuple[str, ...]] = ()

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """No fields."""
        return {}


@dataclass(frozen=True, eq=False)
class Mass(Statistic):
    """The attention probability that each key received, summed over rows.

    Attributes:
        gain: factor on the logits of the counted rows, one number or one per row of the batch; the softmax of
            ``g·x`` follows from that of ``x`` as ``p**g / sum(p**g)``. The model's output is not touched.
        noise: Gumbel noise on the logits of the counted rows, before the gain.
        decay: weight of a row relative to the one after it.
        last: the newest position of each row of the batch, from which decay counts.
    """

    gain: float | Float[Tensor, " B"] = 1.0
    noise: Gumbel | None = None
    decay: float = 1.0
    last: Int[Tensor, " B"] | int = 0

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Transform, group mean, then the sum over the selected rows."""
        p = self._transformed(rows)
        B, Hk, G, T, S = p.shape
        weights = self.weights(rows.selected, rows.queries).to(p.dtype)
        if T == 1:
            return {"mass": p.squeeze(3).mean(dim=2) * weights[:, None]}
        return {"mass": (weights.repeat(1, G)[:, None, None, :] / G @ p.reshape(B, Hk, G * T, S)).squeeze(2)}

    def weights(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """One for each selected row; with decay, less for the earlier ones of the step."""
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
    """Mass, and beside it the probabilities of the newest row alone; ``last`` is that row's position."""

    fields: ClassVar[tuple[str, ...]] = ("mass", "last")

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """The sum over the selected rows, and the newest row if it is in this block."""
        last = torch.as_tensor(self.last, device=rows.queries.device).view(-1, 1)
        newest = Rows(rows.probabilities, rows.selected & (rows.queries == last), rows.queries, rows.keys)
        return {**super().reduce(rows), "last": super().reduce(newest)["mass"]}


@dataclass(frozen=True, eq=False)
class Low(Statistic):
    """How often a key received less than its share: rows with a probability below ``1 / (theta · n)``, and its mass.

    Attributes:
        theta: divides the threshold; above 1 fewer rows count as low.
        live: ``n`` is the number of keys that the row sees; otherwise its number in the sequence, from 1.
    """

    fields: ClassVar[tuple[str, ...]] = ("mass", "low")

    theta: float = 1.0
    live: bool = False

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Group mean, then compare with the threshold and sum over the selected rows."""
        p, low = self._compared(rows)
        counts = rows.selected[:, None, :, None]
        return {"mass": (p * counts).sum(dim=2), "low": (low & counts).sum(dim=2).to(p.dtype)}

    def _compared(self, rows: Rows) -> tuple[Float[Tensor, "B Hk T S"], Bool[Tensor, "B Hk T S"]]:
        """The group's mean, and where it is below the threshold on a key that the row sees."""
        p = rows.probabilities.mean(dim=2)
        visible = rows.visible
        n = visible.sum(dim=-1, keepdim=True) if self.live else (rows.queries + 1)[:, None, :, None]
        return p, (p * n * self.theta < 1.0) & visible


@dataclass(frozen=True, eq=False)
class LowRows(Low):
    """Low, row by row: a bit of a ring for each selected row (see `ring`), and beside the bits two sums of mass.

    The field ``mass`` is the sum over all selected rows, ``due`` over the last of them.

    Attributes:
        words: floats that the ring of bits is made of.
        last: the newest position of each row of the batch.
        due: how many of the last rows the field ``due`` adds up.
    """

    words: int = 1
    last: Int[Tensor, " B"] | int = 0
    due: Int[Tensor, " B"] | int = 0

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]  # their number depends on the window
        """The two sums, and the words of the ring."""
        return ("mass", "due", *word_names(self.words))

    def weights(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "B T"]]:
        """For each field, what a row's mass counts, or what its low bit counts in a word."""
        last, due = (torch.as_tensor(n, device=queries.device).view(-1, 1) for n in (self.last, self.due))
        bits = ring(queries.masked_fill(~selected, EMPTY), self.words).float().unbind(dim=-1)
        sums = {"mass": selected.float(), "due": (selected & (queries > last - due)).float()}
        return sums | dict(zip(word_names(self.words), bits, strict=True))

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Group mean, then compare with the threshold and give every selected row its bit."""
        p, low = self._compared(rows)
        what = {"mass": p, "due": p}
        weights = self.weights(rows.selected, rows.queries)
        return {
            name: (what.get(name, low) * weight[:, None, :, None]).sum(dim=2).to(p.dtype)
            for name, weight in weights.items()
        }


BITS = 25
"""Bits of one word: a float32 holds the whole numbers from ``-2**24`` to ``2**24 - 1`` exactly."""


def word_names(words: int) -> tuple[str, ...]:
    """The names of a ring's words, as fields of a report and of a policy's state."""
    return tuple(f"low{word}" for word in range(words))


def ring(rows: Int[Tensor, "B n"], words: int) -> Int[Tensor, "B n words"]:
    """Each row's bit in a ring of ``BITS * words`` bits: its value in the row's own word, and 0 in the others.

    Row ``i`` has the place ``i % (BITS * words)``, so it takes the bit of the row that came so many rows before. The
    highest bit of a word is its sign. A negative row has no bit.
    """
    place = rows % (BITS * words)
    bit = place % BITS
    value = torch.bitwise_left_shift(torch.ones_like(bit), bit) * (1 - 2 * (bit == BITS - 1).int())
    own = (place // BITS)[..., None] == torch.arange(words, device=rows.device)
    return torch.where(own & (rows >= 0)[..., None], value[..., None], 0).int()


def ring_span(first: Int[Tensor, " B"], stop: Int[Tensor, " B"], words: int) -> Int[Tensor, "B words"]:
    """The bits of the rows from ``first`` up to ``stop``, which is not one of them; at most the last of the ring."""
    rows = stop[:, None] - 1 - torch.arange(BITS * words, device=stop.device)
    return ring(rows.masked_fill(rows < first[:, None], EMPTY), words).sum(dim=1).int()


def ones(bits: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """How many bits of each word are set."""
    pairs = (bits & 0x1555555) + (bits >> 1 & 0x0555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return (halves + (halves >> 16)) & 0x3F


@dataclass(frozen=True, eq=False)
class LastHit(Statistic):
    """The newest row in which a key was among the row's highest probabilities: its position plus 1, 0 for none.

    A row's threshold is the ``quantile`` of its probabilities over all tokens seen so far, evicted ones counted as 0.

    Attributes:
        quantile: in [0, 1); 0.9 lets about a tenth of the tokens be hit.
    """

    fields: ClassVar[tuple[str, ...]] = ("hit",)

    quantile: float = 0.9

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Group mean, then compare with the quantile and take the newest selected row that exceeds it."""
        p = rows.probabilities.mean(dim=2)
        S = p.shape[-1]
        length = rows.queries + 1
        above = length - (self.quantile * length.double() + 1e-9).long()  # values from the quantile's own upwards
        ranked = p.sort(dim=-1, descending=True).values
        place = (above - 1).clamp(min=0)[:, None, :, None].expand(*p.shape[:3], 1)
        threshold = ranked.gather(-1, place.clamp(max=S - 1)).masked_fill(place >= S, 0.0)
        hit = (p > threshold) & rows.visible & rows.selected[:, None, :, None]
        return {"hit": (hit * length[:, None, :, None]).amax(dim=2).to(p.dtype)}

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"]) -> None:
        """The newest of both."""
        torch.maximum(total, part, out=total)
