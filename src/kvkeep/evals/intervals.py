"""95 % intervals of shares and of means."""

from __future__ import annotations

import math

from kvkeep.evals.report import Spread

Interval = tuple[float, float]

_NONE = (math.nan, math.nan)
_NORMAL = 1.960
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's distribution with 1, 2, … degrees of freedom."""


def of_share(right: int, n: int) -> Interval:
    """Wilson's interval of a share of ``n`` answers, in percent. It is not empty at 0 and 100 %."""
    if n == 0:
        return _NONE
    share, square = right / n, _NORMAL**2
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = _NORMAL * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def of_mean(spread: Spread) -> Interval:
    """Student's interval of a mean over seeds; NaN for a single seed."""
    if spread.n < 2 or math.isnan(spread.error):
        return _NONE
    half = quantile(spread.n - 1) * spread.error
    return spread.mean - half, spread.mean + half


def quantile(degrees: int) -> float:
    """Student's 97.5 % quantile with so many degrees of freedom."""
    return _STUDENT[degrees - 1] if degrees <= len(_STUDENT) else _NORMAL + 2.4 / degrees
