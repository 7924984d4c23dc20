"""Rows of attention as plain dictionaries: what the papers' algorithms look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from kvkeep.research.theory.loops import Vector, dot, softmax

Row: TypeAlias = Mapping[int, float]
"""Key position → probability, over the keys that one query sees, in ascending order."""


def attend(query: Vector, keys: Sequence[Vector], visible: Sequence[int], scaling: float) -> dict[int, float]:
    """The probabilities with which a query looks at the keys at some positions."""
    return dict(zip(visible, softmax([scaling * dot(query, keys[j]) for j in visible]), strict=True))


def total(rows: Iterable[Row]) -> dict[int, float]:
    """Key position → the sum of its column over the rows."""
    sums: dict[int, float] = {}
    for row in rows:
        for j, p in row.items():
            sums[j] = sums.get(j, 0.0) + p
    return sums
