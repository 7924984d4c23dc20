"""The quality that a candidate keeps of the full cache's, with its 95 % interval.

Both measures are ratios of sums over documents. Documents are the units that are drawn: questions about one document have
much in common, and so do tokens of one text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvkeep.evals.intervals import quantile

Tally: TypeAlias = tuple[float, float]
"""One document. Answers: of the questions that the full cache answers, those that stay right; and their number.
Losses: nats beyond the full cache's, summed over tokens; and the number of tokens."""

Kind: TypeAlias = Literal["answers", "loss"]


@dataclass(frozen=True)
class Kept:
    """The share of the full cache's quality that a candidate keeps.

    Attributes:
        share: the measured share; may exceed 1 for losses.
        low: lower end of the 95 % interval.
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


NOTHING = Kept(math.nan, 0.0, math.inf, 0.0)
"""Without a measurement, or where the full cache answers no question."""


def kept(tallies: Sequence[Tally], kind: Kind) -> Kept:
    """The quality that tallies show."""
    weight = float(sum(n for _, n in tallies))
    if weight == 0:
        return NOTHING
    ratio = sum(x for x, _ in tallies) / weight
    error = _error(tallies, ratio, weight)
    return _answers(ratio, error, weight, len(tallies)) if kind == "answers" else _loss(ratio, error, tallies)


def most(questions: int) -> float:
    """The largest share that so many questions can show with confidence: all answers stay."""
    return _answers(1.0, 0.0, float(questions), questions).low if questions else 0.0


def needed(target: float) -> int:
    """The number of questions that can show a target if all answers stay."""
    n = 1
    while most(n) < target:
        n += max(1, n // 64)
    return n


def best_case(tallies: Sequence[Tally], expected: float) -> float:
    """The lower end of the interval if all answers to the questions that are still to be asked stay."""
    lost = sum(n - x for x, n in tallies)
    questions = sum(n for _, n in tallies) + expected
    return _answers(1.0 - lost / questions, 0.0, questions, 10**6).low if questions else 1.0


def _error(tallies: Sequence[Tally], ratio: float, weight: float) -> float:
    """The standard error of a ratio of sums over documents; 0 for a single document."""
    m = len(tallies)
    if m < 2:
        return 0.0
    squares = sum((x - ratio * n) ** 2 for x, n in tallies)
    return math.sqrt(m / (m - 1) * squares) / weight


def _answers(share: float, error: float, n: float, documents: int) -> Kept:
    """Wilson's interval with as many questions as would be worth the same if they had nothing in common."""
    alone = share * (1.0 - share) / n
    worth = n / max(1.0, error**2 / alone) if alone > 0 else n
    square = quantile(max(1, documents - 1)) ** 2
    middle = (share + square / (2 * worth)) / (1 + square / worth)
    half = math.sqrt(square * (share * (1 - share) / worth + square / (4 * worth**2))) / (1 + square / worth)
    return Kept(share, max(0.0, middle - half), min(1.0, middle + half), n)


def _loss(excess: float, error: float, tallies: Sequence[Tally]) -> Kept:
    """Student's interval. The share is the full cache's perplexity relative to the candidate's."""
    half = quantile(len(tallies) - 1) * error if len(tallies) > 1 else math.inf
    low, share, high = (math.exp(-min(max(value, -700.0), 700.0)) for value in (excess + half, excess, excess - half))
    return Kept(share, low, high, float(sum(n for _, n in tallies)))
