"""The statistics that a policy can ask attention to report, each with the reduction that defines it.

A statistic is reduced block by block inside attention, so the full (rows × keys) matrix never exists. All statistics
transform the probabilities of each query head, average over the query heads of a group, and then compare or sum over
rows, always in float32. `Peak` and `Worst` take a maximum instead.
"""

from __future__ import annotations

import abc
import functools
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvkeep.noise import Gumbel
from kvkeep.types import EMPTY

# What a statistic is, and those that sum up attention mass.


@dataclass(frozen=True)
class ProbabilityRows:
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
        """Return whether each key has a token that is no later than the query. Sliding windows are left aside."""
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
        """Return whether each query counts for the report: one of the last `rows` of its row of the batch (all: -1).

        Padded queries (position -1) never do.

        Args:
            query_positions: of all queries of the step, since the newest one says which are the last.
        """
        real = query_positions >= 0
        if isinstance(self.rows, int) and self.rows < 0:
            return real
        last = query_positions.amax(dim=1, keepdim=True)
        rows = self.rows if isinstance(self.rows, int) else self.rows[:, None]
        return real & (query_positions > last - rows)

    @abc.abstractmethod
    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return the statistic of a block of query rows: a tensor of a number for each key, for each of `fields`."""

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Add a block's result for the field ``name`` to the result of the earlier blocks, in place."""
        total.add_(part)


@dataclass(frozen=True, eq=False)
class Nothing(Statistic):
    """No report, for a policy that does not look at attention."""

    fields: ClassVar[tuple[str, ...]] = ()

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return an empty report."""
        return {}


@dataclass(frozen=True, eq=False)
class Mass(Statistic):
    """The attention probability that each key received, summed over rows.

    Attributes:
        gain: factor on the logits of the rows that count, one number or one per row of the batch. The softmax of
            ``g·x`` is computed from the softmax of ``x`` as ``p**g / sum(p**g)``; the model's output does not change.
        noise: Gumbel noise on the logits of the rows that count, before the gain.
        decay: weight of a query row relative to the next one.
        last: the newest position of each row of the batch, whose weight is 1. Without decay it is not used.
    """

    gain: float | Float[Tensor, " B"] = 1.0
    noise: Gumbel | None = None
    decay: float = 1.0
    last: Int[Tensor, " B"] | int = 0

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return as ``mass`` the probabilities that each key received, after noise and gain, averaged over the group
        and summed over the rows by their `weights`.
        """
        p = self._transformed(rows)
        B, Hk, G, T, S = p.shape
        weights = self.weights(rows.selected, rows.queries).to(p.dtype)  # float64 in the reference
        if T == 1:  # one row needs no sum over rows
            return {"mass": p.squeeze(3).mean(dim=2) * weights[:, None]}
        # mean over the group and weighted sum over the rows in one product
        return {"mass": (weights.repeat(1, G)[:, None, None, :] / G @ p.reshape(B, Hk, G * T, S)).squeeze(2)}

    def weights(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
        """Return the weight of each query: 1 if it is selected, else 0.

        With `decay`, a selected query weighs ``decay`` to the power of its distance to position `last`.
        """
        if self.decay == 1.0:
            return selected.float()
        last = torch.as_tensor(self.last, device=queries.device).view(-1, 1)
        return selected * self.decay ** (last - queries).clamp(min=0)

    def _transformed(self, rows: ProbabilityRows) -> Float[Tensor, "B Hk G T S"]:
        """Return probabilities times the noise's factors, to the power of ``gain``, normalised over the visible keys;
        as they are if there is no noise and the gain is 1.
        """
        p = rows.probabilities
        if self.noise is None and isinstance(self.gain, float) and self.gain == 1.0:
            return p
        gain = self.gain if isinstance(self.gain, float) else self.gain.to(p.dtype).view(-1, 1, 1, 1, 1)
        if self.noise is not None:
            p = p * self.noise.factor(p.shape, rows.queries, rows.keys).to(p.dtype)
        # 0 to the power of 0 is 1, so keys that are not seen get 0 again; a padded query sees none, and has a sum of 0
        tempered = (p**gain).masked_fill_(~rows.visible[:, :, None], 0.0)
        return tempered / tempered.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


@dataclass(frozen=True, eq=False)
class MassAndLast(Mass):
    """Mass, and in a second field the probabilities of the newest row, whose position is ``last``."""

    fields: ClassVar[tuple[str, ...]] = ("mass", "last")

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return ``mass`` as `Mass` does, and as ``last`` that of the query at position `last` alone: 0 if it is in
        another block, or not selected.
        """
        last = torch.as_tensor(self.last, device=rows.queries.device).view(-1, 1)
        newest = ProbabilityRows(rows.probabilities, rows.selected & (rows.queries == last), rows.queries, rows.keys)
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
        """Return the names of the report's fields: ``row0``, ``row1`` and so on, as many as `places`."""
        return tuple(f"row{place}" for place in range(self.places))

    def weights_of(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> list[Float[Tensor, "B T"]]:
        """Return for each field, in order, the weight of each query: 1 if it is selected and its position modulo the
        number of fields is the field's number, else 0.
        """
        return [(selected & (queries % self.places == place)).float() for place in range(self.places)]

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return the probabilities of each selected row, averaged over the group, in the field that its position
        belongs to; 0 in a field without a row.
        """
        weights = torch.stack(self.weights_of(rows.selected, rows.queries), dim=1).to(rows.probabilities.dtype)
        found = weights[:, None] @ rows.probabilities.mean(dim=2)
        return dict(zip(self.fields, found.unbind(dim=2), strict=True))


# A ring of bits, one for each of a sequence's newest rows, in floats that hold whole numbers exactly.

BITS = 25
"""Number of bits in a word. A float32 holds the whole numbers from ``-2**24`` to ``2**24 - 1`` exactly."""


def word_names(words: int) -> tuple[str, ...]:
    """Return the names that the words of a ring have in a report and in a policy's state."""
    return tuple(f"low{word}" for word in range(words))


def ring(rows: Int[Tensor, "B n"], words: int) -> Int[Tensor, "B n words"]:
    """Return the bit of each row in a ring of ``BITS * words`` bits, as one value per word (0 in all but one).

    Row ``i`` has the place ``i % (BITS * words)`` and takes it from an older row. The highest bit of a word is its
    sign. A negative row has no bit.
    """
    places = BITS * words
    return _places(words, rows.device)[torch.where(rows < 0, places, rows % places)]


@functools.cache
def _places(words: int, device: torch.device) -> Int[Tensor, "n words"]:
    """Return a table of the words that set each bit of a ring, a line for each place. The last line sets no bit."""
    # the table is cached, and its next reader may be outside of inference mode
    with torch.inference_mode(False):
        bits = [1 << bit for bit in range(BITS - 1)] + [-(1 << BITS - 1)]
        one = torch.tensor(bits, dtype=torch.int32, device=device)[:, None]
        return torch.cat([torch.block_diag(*[one] * words), one.new_zeros((1, words))])


def ring_span(first: Int[Tensor, " B"], stop: Int[Tensor, " B"], words: int) -> Int[Tensor, "B words"]:
    """Return the ring's bits for rows ``first`` to ``stop - 1``, or for the newest of them that fit the ring."""
    rows = stop[:, None] - 1 - torch.arange(BITS * words, device=stop.device)
    return ring(rows.masked_fill(rows < first[:, None], EMPTY), words).sum(dim=1).int()


def ones(bits: Int[Tensor, "*n"]) -> Int[Tensor, "*n"]:
    """Return the number of bits that are set in each word; only its lowest `BITS` bits count."""
    # sums of neighbouring bits, side by side in one word; masks of 25 bits cut off the sign's copies above them
    pairs = (bits & 0x1555555) + (bits >> 1 & 0x0555555)
    fours = (pairs & 0x33333333) + (pairs >> 2 & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    halves = eights + (eights >> 8)
    return (halves + (halves >> 16)) & 0x3F


# Statistics that look at the highest probabilities of a key or of a row.


@dataclass(frozen=True, eq=False)
class Peak(Statistic):
    """The largest attention probability that each key received from any row and any query head of the group."""

    fields: ClassVar[tuple[str, ...]] = ("peak",)

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return as ``peak`` the largest probability of each key, over the query heads of the group and the selected
        queries; 0 if none is selected.
        """
        counts = rows.selected[:, None, None, :, None]
        return {"peak": rows.probabilities.masked_fill(~counts, 0.0).amax(dim=(2, 3))}

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Replace ``total`` by the larger of both, in place."""
        torch.maximum(total, part, out=total)


@dataclass(frozen=True, eq=False)
class LastHit(Statistic):
    """The position, plus 1, of the newest row in which a key had one of the highest probabilities; 0 for none.

    A row's threshold is the ``quantile`` of its probabilities over all tokens seen so far, evicted ones counted as 0.

    Attributes:
        quantile: in [0, 1). With 0.9, a row hits about a tenth of the tokens.
    """

    fields: ClassVar[tuple[str, ...]] = ("hit",)

    quantile: float = 0.9

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return as ``hit``, for each key, the position plus 1 of the newest selected row in which its probability,
        averaged over the group, is above the row's quantile; 0 for none.
        """
        p = rows.probabilities.mean(dim=2)
        S = p.shape[-1]
        # tokens seen so far; the evicted ones, of 0, stand in the ranking behind those with slots
        length = rows.queries + 1
        # 1e-9: a product that should be whole may be a little less in floats
        above = length - (self.quantile * length.double() + 1e-9).long()  # values from the quantile's own upwards
        ranked = p.sort(dim=-1, descending=True).values
        place = (above - 1).clamp(min=0)[:, None, :, None].expand(*p.shape[:3], 1)
        threshold = ranked.gather(-1, place.clamp(max=S - 1)).masked_fill(place >= S, 0.0)
        hit = (p > threshold) & rows.visible & rows.selected[:, None, :, None]
        return {"hit": (hit * length[:, None, :, None]).amax(dim=2).to(p.dtype)}

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Replace each row's number in ``total`` by the newer one of both, in place."""
        torch.maximum(total, part, out=total)


@dataclass(frozen=True, eq=False)
class Worst(Statistic):
    """The largest probability that each older key received from any row and query head, and the mass.

    Each row's probabilities over the older keys are first averaged along the positions, as if zeros stood beyond the
    ends, and scaled to the sum that they had. Other keys get 0. ``mass`` is that of older keys, not averaged.

    Attributes:
        before: the position of each row of the batch below which keys are older ones.
        kernel: width of the average, an odd number.
    """

    fields: ClassVar[tuple[str, ...]] = ("mass", "worst")

    before: Int[Tensor, " B"] | int = 0
    kernel: int = 5

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return as ``worst`` the largest smoothed probability of each older key over group and selected rows, and as
        ``mass`` its own probabilities, averaged over the group and summed over these rows; 0 for other keys.

        Smoothed means averaged along the positions, see `Worst`.
        """
        before = torch.as_tensor(self.before, device=rows.keys.device).view(-1, 1, 1)
        older = (rows.keys >= 0) & (rows.keys < before)
        # slots are unordered: the average runs over the keys sorted by position, after the other keys, which are 0
        p = rows.probabilities.masked_fill(~(older[:, :, None, None] & rows.selected[:, None, None, :, None]), 0.0)
        order = rows.keys.masked_fill(~older, EMPTY).argsort(dim=-1, stable=True)
        place = order[:, :, None, None].expand(p.shape)
        smooth = avg_pool1d(p.gather(-1, place).flatten(0, 3)[:, None], self.kernel, 1, self.kernel // 2)
        # what the average has spread to the other keys does not count
        smooth = smooth.view(p.shape).masked_fill(~older.gather(-1, order)[:, :, None, None], 0.0)
        smooth *= p.sum(dim=-1, keepdim=True) / smooth.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        highest = smooth.amax(dim=(2, 3))
        worst = torch.zeros_like(highest).scatter_(-1, order.expand(highest.shape), highest)
        return {"mass": p.mean(dim=2).sum(dim=2), "worst": worst}

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Add the field ``mass``; of other fields take the larger value, in place."""
        if name == "mass":
            total.add_(part)
        else:
            torch.maximum(total, part, out=total)


# Statistics that count the rows in which a key received less than its share.


@dataclass(frozen=True, eq=False)
class Low(Statistic):
    """The number of rows in which a key received less than its share, ``1 / (theta · n)``, and the key's mass.

    Attributes:
        theta: divisor of the threshold. Above 1, fewer rows are low.
        live: whether ``n`` is the number of keys that the row sees. If not, ``n`` is the row's number, from 1.
    """

    fields: ClassVar[tuple[str, ...]] = ("mass", "low")

    theta: float = 1.0
    live: bool = False

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return as ``low`` in how many selected rows each visible key has less than its share, and as ``mass`` the sum
        of its probabilities in them. Both are of probabilities averaged over the group.
        """
        p, low = self._compared(rows)
        counts = rows.selected[:, None, :, None]
        return {"mass": (p * counts).sum(dim=2), "low": (low & counts).sum(dim=2).to(p.dtype)}

    def _compared(self, rows: ProbabilityRows) -> tuple[Float[Tensor, "B Hk T S"], Bool[Tensor, "B Hk T S"]]:
        """Return each key's probability in each row, averaged over the group, and whether the row sees it and gives it
        less than its share.
        """
        p = rows.probabilities.mean(dim=2)
        visible = rows.visible
        n = visible.sum(dim=-1, keepdim=True) if self.live else (rows.queries + 1)[:, None, :, None]
        return p, (p * n * self.theta < 1.0) & visible


@dataclass(frozen=True, eq=False)
class LowRows(Low):
    """Low for each selected row, as one bit of a ring (see `kvkeep.attention_stats`), and two sums of mass.

    The field ``mass`` is the sum over all selected rows, the field ``due`` over the last ``due`` rows.

    Attributes:
        words: number of floats that hold the ring.
        last: the newest position of each row of the batch.
        due: number of rows in the field ``due``.
    """

    words: int = 1
    last: Int[Tensor, " B"] | int = 0
    due: Int[Tensor, " B"] | int = 0

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]  # their number depends on the window
        """Return the names of the report's fields: the two sums, then the words of the ring."""
        return ("mass", "due", *word_names(self.words))

    def weights(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "B T"]]:
        """Return by field a factor of each query: 1 or 0 for the two sums, and its bit for the ring's words.

        Queries that are not selected have 0 everywhere.
        """
        last, due = (torch.as_tensor(n, device=queries.device).view(-1, 1) for n in (self.last, self.due))
        bits = ring(queries.masked_fill(~selected, EMPTY), self.words).float().unbind(dim=-1)
        sums = {"mass": selected.float(), "due": (selected & (queries > last - due)).float()}
        return sums | dict(zip(word_names(self.words), bits, strict=True))

    def reduce(self, rows: ProbabilityRows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Return for each key the ring's words with the bits of the selected rows that give it less than its share, and
        two sums of its probability: over all selected rows, and over the last `due`.
        """
        p, low = self._compared(rows)
        sums = {"mass": p, "due": p}
        weights = self.weights(rows.selected, rows.queries)
        # the fields that are no sums are words of the ring, which add up the bits of the low rows
        return {
            name: (sums.get(name, low) * weight[:, None, :, None]).sum(dim=2).to(p.dtype)
            for name, weight in weights.items()
        }


__all__ = [
    "BITS",
    "LastHit",
    "Low",
    "LowRows",
    "Mass",
    "MassAndLast",
    "Nothing",
    "Peak",
    "ProbabilityRows",
    "RowMasses",
    "Statistic",
    "Worst",
    "ones",
    "ring",
    "ring_span",
    "word_names",
]
