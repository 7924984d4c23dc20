"""Did the tokens that matter later matter before? Scissorhands' persistence ratio, with its chance level.

Take a prefix of ``l`` tokens. A token of its first half is pivotal early if some row of that half gives it more than
the average, 1 / row, and pivotal late if some row of the second half does. The persistence ratio is the share of the
late ones that are early ones. A random set has a chance level: its size, as a share of the half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from kvkeep_lab.analysis.groups._shared import by_layer, mean, percent
from kvkeep_lab.analysis.measure import AttentionRows, Axes, ClaimLine, Context, Measurement, Reading, Result, Verdict

SHORTEST = 256
"""The shortest prefix; half of it is enough for shares of a few percent."""

LONGEST_READ = 2048
"""The reading takes the longest prefix up to this length, the context of the paper's OPT models."""

HIGH = 0.95
"""The paper's persistence ratio in most layers."""

TRIVIAL = 0.8
"""Size of the early set from which the ratio says little: even a random set persists in four of five cases."""

SMALL = 0.5
"""Largest size of the early set with which most tokens never mattered, so that something can be evicted."""

BEYOND_CHANCE = 0.1
"""Least excess of a persistence ratio over its chance level that says something about the model."""


def prefixes(n_tokens: int) -> list[int]:
    """Return the lengths of the text, of its first half, of the first half of that and so on, the shortest first.

    The second halves of these prefixes do not overlap.
    """
    lengths = [n_tokens]
    while lengths[-1] // 2 >= SHORTEST:
        lengths.append(lengths[-1] // 2)
    return lengths[::-1]


def pivotal(weights: Float[Tensor, "heads R S"], first: int) -> Bool[Tensor, "heads R S"]:
    """Return which keys each row gives more than the average.

    Args:
        weights: rows of attention.
        first: index of the first row, from 0; a row's threshold is 1 / (its number, from 1).
    """
    rows = torch.arange(first + 1, first + 1 + weights.shape[1])
    return weights * rows[:, None] > 1.0


@dataclass(frozen=True)
class LayerPersistence:
    """The numbers of one layer in one prefix, averaged over heads.

    Attributes:
        ratio: share of the late pivotal tokens that were pivotal early.
        size: share of the tokens of the first half that were pivotal early: the chance level.
        ratio_without_own: the ratio if a token's attention to itself does not count.
        size_without_own: the size if a token's attention to itself does not count.
    """

    ratio: float | None
    size: float
    ratio_without_own: float | None
    size_without_own: float


class Sets:
    """The pivotal sets of one layer, in memory that grows with the text and not with its rows.

    Args:
        lengths: the prefixes; each is half as long as the next.
    """

    def __init__(self, lengths: Sequence[int]):
        self.found: dict[int, LayerPersistence] = {}
        self._lengths = lengths
        self._others = self._own = torch.zeros(0, 0, dtype=torch.bool)
        self._early: tuple[Tensor, Tensor] | None = None
        self._late = torch.zeros(0, 0, dtype=torch.bool)

    def add(self, weights: Float[Tensor, "heads R S"], first: int) -> None:
        """Take the next rows."""
        last = first + weights.shape[1]
        halves = {length // 2 for length in self._lengths}
        edges = sorted({first, last, *(edge for edge in {*self._lengths, *halves} if first < edge < last)})
        for start, stop in pairwise(edges):
            self._add(weights[:, start - first : stop - first, :stop], start)
            if stop in self._lengths:
                self.found[stop] = self._compare()
            if stop in halves:
                self._early = (self._others, self._others | self._own)
                self._late = torch.zeros_like(self._others)

    def _add(self, weights: Float[Tensor, "heads R S"], first: int) -> None:
        hits = pivotal(weights, first)
        own = hits[:, :, first:].diagonal(dim1=1, dim2=2).clone()
        hits[:, :, first:].diagonal(dim1=1, dim2=2).zero_()
        found = hits.any(dim=1)
        if self._early is not None:
            self._late = self._late | found[:, : self._late.shape[1]]
        new = (0, weights.shape[1])
        heads = weights.shape[0]
        self._others = pad(self._others if first else own.new_zeros(heads, 0), new) | found
        self._own = torch.cat([self._own if first else own.new_zeros(heads, 0), own], dim=1)

    def _compare(self) -> LayerPersistence:
        assert self._early is not None
        others, either = (_compare(early, self._late) for early in self._early)
        return LayerPersistence(*either, *others)


def _compare(early: Bool[Tensor, "heads n"], late: Bool[Tensor, "heads n"]) -> tuple[float | None, float]:
    """Return the persistence ratio and the size of the early set.

    A head without late pivotal tokens has no ratio; if no head has one, it is ``None``.
    """
    ratios = (early & late).sum(dim=1).double() / late.sum(dim=1)
    return mean(ratios.tolist()), early.double().mean().item()


@final
class Persistence(Measurement):
    """The persistence ratio of every layer, with the size of the pivotal set, for prefixes of the text."""

    name: ClassVar[str] = "persistence"
    source: ClassVar[str] = "Scissorhands, Figure 2"
    title: ClassVar[str] = "Tokens that matter later mattered before"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    least_tokens: ClassVar[int] = SHORTEST

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._lengths = prefixes(context.n_tokens)
        self._layers = [Sets(self._lengths) for _ in range(context.n_layers)]

    def rows(self, rows: AttentionRows) -> None:
        """Add to the sets of pivotal tokens."""
        self._layers[rows.layer].add(rows.weights, rows.first)

    def result(self) -> Result:
        """Return ratio and size by prefix and layer, with and without a token's attention to itself."""
        by_prefix = {
            str(length): {
                field.name: [getattr(layer.found[length], field.name) for layer in self._layers]
                for field in fields(LayerPersistence)
            }
            for length in self._lengths
        }
        read = max((n for n in self._lengths if n <= LONGEST_READ), default=self._lengths[0])
        return {
            "prefixes": self._lengths,
            "read": read,
            "ratio": mean(by_prefix[str(read)]["ratio"]),
            "size": mean(by_prefix[str(read)]["size"]),
            "by_prefix": by_prefix,
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Compare the ratio with the paper's and with chance, at the longest prefix that fits the paper's models."""
        found = result["by_prefix"][str(result["read"])]
        ratio, size = result["ratio"], result["size"]
        high = sum(value is not None and value > HIGH for value in found["ratio"])
        return Reading(
            paper="Over 95 % of what matters in the second half mattered in the first, in most layers of OPT, less in "
            "the last ones; the pivotal set is clearly smaller than the first half (Figure 2).",
            here=f"Over {result['read']} tokens {percent(ratio)} persist; {high} of {len(found['ratio'])} layers are "
            f"above 95 %. {percent(size)} of the first half are pivotal, which is what a random set would reach.",
            meaning=_meaning(ratio, size),
            verdict=_verdict(ratio, size, high / len(found["ratio"])),
        )

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return claims about persistence, and about a small pivotal set."""
        found, size = cls.reading(result), result["size"]
        return (
            ClaimLine("What will matter mattered before", cls.source, found.paper, found.here, found.verdict),
            ClaimLine(
                "The pivotal tokens are a small part of the text",
                cls.source,
                "Clearly less than the first half; no number is given.",
                f"{percent(size)} of the first half of {result['read']} tokens.",
                "agree" if size <= SMALL else "differ" if size >= TRIVIAL else "cannot tell",
            ),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw ratio and size of each layer at the prefix of the reading."""
        found = result["by_prefix"][str(result["read"])]
        series = {
            "persistence ratio": found["ratio"],
            "size of the pivotal set (chance)": found["size"],
            "ratio, own row not counted": found["ratio_without_own"],
            "size, own row not counted": found["size_without_own"],
        }
        by_layer(axes, series, y=f"share of tokens, prefix of {result['read']}")
        axes.set_ylim(0, 1.03)


def _verdict(ratio: float | None, size: float | None, high: float) -> Verdict:
    if ratio is None or size is None or size >= TRIVIAL:
        return "cannot tell"
    if high <= 0.5:
        return "differ"
    return "agree" if ratio - size >= BEYOND_CHANCE else "cannot tell"


def _meaning(ratio: float | None, size: float | None) -> str:
    if ratio is None or size is None or size >= TRIVIAL:
        return "Nearly every token was pivotal once, which makes the ratio high by itself: budget by other figures."
    if ratio - size < BEYOND_CHANCE:
        return "Past importance foretells little more than chance does: leave the budget generous."
    return (
        f"A policy that keeps what mattered (scissorhands, h2o) misses {percent(1 - ratio)} of what will matter; a "
        f"budget of {percent(size)} of the tokens would hold all that mattered."
    )
