"""95 % intervals of shares, of means, and of numbers whose parts come in clusters, such as questions about one text."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvkeep.evals.report import Spread

Interval = tuple[float, float]

_NONE = (math.nan, math.nan)
_NORMAL = 1.960
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's distribution with 1, 2, … degrees of freedom."""


def of_share(right: int, n: int) -> Interval:
    """Wilson's interval of a share of ``n`` answers, in percent. It is not empty at 0 and 100 %."""
    return _wilson(right / n, float(n), _NORMAL) if n else _NONE


def of_mean(spread: Spread) -> Interval:
    """Student's interval of a mean over seeds; NaN for a single seed."""
    if spread.n < 2 or math.isnan(spread.error):
        return _NONE
    half = _quantile(spread.n - 1) * spread.error
    return spread.mean - half, spread.mean + half


def of_clustered_share(clusters: Sequence[tuple[int, int]]) -> Interval:
    """The interval of a share of right answers, in percent, whose questions come in clusters.

    Wilson's interval for as many independent questions as would have the variance between clusters (Korn and Graubard,
    1998), but for no more than there are, with Student's quantile for the number of clusters.

    Args:
        clusters: right answers and questions of each cluster; NaN for fewer than two clusters.
    """
    n, share = sum(size for _, size in clusters), _ratio(clusters)
    if len(clusters) < 2 or not n:
        return _NONE
    variance, alone = _variance(clusters), share * (1 - share) / n
    return _wilson(share, n * (min(1.0, alone / variance) if variance else 1.0), _quantile(len(clusters) - 1))


def of_clusters(right: int, n: int, clusters: int) -> Interval:
    """The narrowest interval that `of_clustered_share` gives to ``n`` questions in so many clusters."""
    return _wilson(right / n, float(n), _quantile(clusters - 1)) if n and clusters > 1 else _NONE


def of_clustered_difference(clusters: Sequence[tuple[int, int]]) -> Interval:
    """The interval of a mean difference between paired answers, in percentage points.

    At least as wide as the interval of a share of 0 among so many questions, since a difference that no question has
    shown may still exist.

    Args:
        clusters: for each cluster, questions that only one side answers less those that only the other one does, and
            the number of questions; NaN for fewer than two clusters.
    """
    n, mean = sum(size for _, size in clusters), 100 * _ratio(clusters)
    if len(clusters) < 2 or not n:
        return _NONE
    quantile = _quantile(len(clusters) - 1)
    half = max(100 * quantile * math.sqrt(_variance(clusters)), _wilson(0.0, float(n), quantile)[1])
    return max(-100.0, mean - half), min(100.0, mean + half)


def _ratio(clusters: Sequence[tuple[int, int]]) -> float:
    n = sum(size for _, size in clusters)
    return sum(count for count, _ in clusters) / n if n else math.nan


def _variance(clusters: Sequence[tuple[int, int]]) -> float:
    """The variance of a ratio of sums over clusters, linearised."""
    ratio, n, C = _ratio(clusters), sum(size for _, size in clusters), len(clusters)
    return C / (C - 1) * sum((count - ratio * size) ** 2 for count, size in clusters) / n**2


def _wilson(share: float, n: float, quantile: float) -> Interval:
    square = quantile**2
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = quantile * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def _quantile(freedom: int) -> float:
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL + 2.4 / freedom
