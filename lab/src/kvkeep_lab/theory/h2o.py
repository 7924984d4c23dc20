"""Algorithms 1 and 2 of H2O (Zhang et al.) as plain loops on one head: once to the letter, once as they are meant.

The letters are the paper's: queries ``Q``, keys ``K``, budget ``k``. Before token ``i`` the cache holds ``S =
S_{i-1}``. ``o`` is the row of attention and ``õ`` the sum of the rows so far. The element ``u`` of ``G = S ∪ {i}`` is
evicted. Tokens count from 0. Each generator yields ``S_i`` for every token, ascending. Algorithm 3 is in `submodular`,
Algorithm 4 in `regression`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from kvkeep_lab.theory.loops import Vector, attend, dot

Rising: TypeAlias = Callable[[float], float]
"""The ``h`` of the score function ``F(T) = h(Σ_{s∈T} õ_s)``."""

CONCAVE: Mapping[str, Rising] = {
    "sum": lambda z: z,
    "sqrt": lambda z: math.sqrt(z + 1.0),
    "log": lambda z: math.log(z + 1.0),
}
"""The functions ``h`` of Remark D.14."""


def h2_eviction(
    Q: Sequence[Vector], K: Sequence[Vector], k: int, *, scaling: float = 1.0, h: Rising = CONCAVE["sum"]
) -> Iterator[list[int]]:
    """Run Algorithms 1 and 2 as they are meant: the first with ``h(z) = z``, the second with any other concave ``h``.

    Token i attends over ``S_{i-1} ∪ {i}``, so it has a score of its own. Scores accumulate from the first token on. The
    evicted element is the one whose absence gives the largest ``F``.
    """
    S: list[int] = []
    accumulated: dict[int, float] = {}
    for i, query in enumerate(Q):
        G = [*S, i]
        for s, o in attend(query, K, G, scaling).items():
            accumulated[s] = accumulated.get(s, 0.0) + o
        S = _without(G, victim(G, accumulated, h)) if len(G) > k else G
        yield S


def victim(G: Sequence[int], score: Mapping[int, float], h: Rising = CONCAVE["sum"]) -> int:
    """Return ``argmax_{v∈G} F(G without v)``; of equals the oldest, since ``G`` ascends and ``max`` takes the first."""
    return max(G, key=lambda v: h(math.fsum(score[s] for s in G if s != v)))


def algorithm_1_literal(Q: Sequence[Vector], K: Sequence[Vector], k: int) -> Iterator[list[int]]:
    """Run Algorithm 1 to the letter: rows of ``K`` outside of ``S_{i-1}`` are 0, and lines 8 and 9 subtract 1 for each.

    Token i is outside of ``S_{i-1}`` as well, so its score is ``exp(0) - 1 = 0`` in every step. Line 10 uses the
    current row alone. Sums are fractions, which are exact however small a score is beside the others.
    """
    S: list[int] = []
    for i, query in enumerate(Q):
        G = [*S, i]
        if i >= k:
            row = [Fraction(math.exp(dot(query, K[s]))) if s in S else Fraction(0) for s in range(i + 1)]
            D = sum(row)
            o = [score / D for score in row]
            others = {v: sum(o[s] for s in G if s != v) for v in G}
            G = _without(G, max(G, key=others.__getitem__))
        S = G
        yield S


def row_of_algorithm_2(Q: Sequence[Vector], K: Sequence[Vector], S: Sequence[int], i: int) -> Vector:
    """Return ``o_i`` over all tokens up to i, by lines 7 and 8 of Algorithm 2 to the letter and Definition D.10.

    The indicator is subtracted in ``D_i`` but stays in the row, so every token outside of ``S`` has ``exp(0) / D_i``.
    """
    row = [math.exp(dot(Q[i], K[s])) if s in S else 1.0 for s in range(i + 1)]
    D = math.fsum(row[s] for s in S)
    return [score / D for score in row]


def algorithm_2_literal(
    Q: Sequence[Vector], K: Sequence[Vector], k: int, *, h: Rising = CONCAVE["sum"]
) -> Iterator[list[int]]:
    """Run Algorithm 2 to the letter, except that line 11 gets its ``F_score`` back.

    ``õ`` starts to accumulate only when the cache is full, and the score of token i does not depend on its key.
    """
    S: list[int] = []
    accumulated: dict[int, float] = {}
    for i in range(len(Q)):
        G = [*S, i]
        if i >= k:
            for s, o in enumerate(row_of_algorithm_2(Q, K, S, i)):
                accumulated[s] = accumulated.get(s, 0.0) + o
            G = _without(G, victim(G, accumulated, h))
        S = G
        yield S


def _without(G: Sequence[int], u: int) -> list[int]:
    return [s for s in G if s != u]
