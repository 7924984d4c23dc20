"""Attention on plain lists and dictionaries, in which the papers' algorithms are written."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Vector: TypeAlias = list[float]


def dot(a: Vector, b: Vector) -> float:
    """Return the inner product of two vectors."""
    return float(sum(map(operator.mul, a, b)))


def softmax(logits: Vector) -> Vector:
    """Return probabilities in proportion to the exponentials of the logits, of which there has to be one.

    The largest logit is subtracted first, so nothing overflows.
    """
    top = max(logits)
    weights = [math.exp(logit - top) for logit in logits]
    total = sum(weights)
    return [weight / total for weight in weights]


Row: TypeAlias = Mapping[int, float]
"""One row of attention: key position → probability, over the keys that the query sees, in ascending order."""


def attend(query: Vector, keys: Sequence[Vector], visible: Sequence[int], scaling: float) -> dict[int, float]:
    """Return one row of attention: the probabilities of the visible keys under a query."""
    return dict(zip(visible, softmax([scaling * dot(query, keys[j]) for j in visible]), strict=True))


def total(rows: Iterable[Row]) -> dict[int, float]:
    """Return column sums: key position → its probabilities, summed over the rows."""
    sums: dict[int, float] = {}
    for row in rows:
        for j, p in row.items():
            sums[j] = sums.get(j, 0.0) + p
    return sums
