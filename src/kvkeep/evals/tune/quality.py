"""The quality that a candidate keeps of the full cache's, with its 95 % interval.

Both measures are ratios of sums over documents, the units that are drawn: questions about one document have much in
common, and so do tokens of one text.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvkeep.evals.intervals import of_clustered_share, of_clusters, of_mean
from kvkeep.evals.report import over

Tally: TypeAlias = tuple[float, float]
"""One document. Answers: of the questions that the full cache answers, those that stay right; and their number.
Losses: nats beyond the full cache's, summed over tokens; and the number of tokens, the same for all documents."""

Kind: TypeAlias = Literal["answers", "loss"]

_MOST = 2**53


@dataclass(frozen=True)
class Kept:
    """The share of the full cache's quality that a candidate keeps.

    Attributes:
        share: the measured share; may exceed 1 for losses. NaN if there is nothing to compare.
        low: lower end of the 95 % interval; NaN if a single document was measured.
        high: upper end.
        weight: number of questions or tokens.
    """

    share: float
    low: float
    high: float
    weight: float

    def passes(self, target: float) -> bool:
        """Whether the share is at least the target, with confidence."""
        return self.low >= target


def kept(tallies: Sequence[Tally], kind: Kind) -> Kept:
    """The quality that tallies show."""
    weight = float(sum(n for _, n in tallies))
    if not weight:
        return Kept(math.nan, math.nan, math.nan, 0.0)
    if kind == "answers":
        low, high = of_clustered_share([(round(x), round(n)) for x, n in tallies if n])
        return Kept(sum(x for x, _ in tallies) / weight, low / 100, high / 100, weight)
    spread = over([x / n for x, n in tallies if n])
    low, high = of_mean(spread)
    return Kept(_ratio(spread.mean), _ratio(high), _ratio(low), weight)


def most(questions: int, documents: int) -> float:
    """The largest share that so many questions about so many documents can show with confidence: all answers stay."""
    return of_clusters(questions, questions, documents)[0] / 100 if questions and documents > 1 else 0.0


def needed(target: float, each: float) -> tuple[int, int]:
    """The number of questions that can show a target if all answers stay, and of documents with ``each`` of them."""
    documents = bisect_left(range(_MOST), target, key=lambda n: most(round(n * each), n))
    return round(documents * each), documents


def best_case(tallies: Sequence[Tally], expected: float, documents: int) -> float:
    """The lower end of the interval if all answers to the questions that are still to be asked stay.

    Args:
        tallies: of the documents so far.
        expected: questions that are still to be asked.
        documents: number of documents in the end.
    """
    right, asked = (round(sum(column) + expected) for column in zip(*tallies, strict=True))
    return of_clusters(right, asked, documents)[0] / 100 if asked and documents > 1 else 1.0


def _ratio(excess: float) -> float:
    """The full cache's perplexity relative to one with so many more nats per token."""
    return excess if math.isnan(excess) else math.exp(-min(max(excess, -700.0), 700.0))
