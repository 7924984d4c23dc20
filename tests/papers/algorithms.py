"""Whole algorithms as their papers print them, on one head, with attention included.

They share nothing with the rules of `oracles` but softmax and the margin, and say again what H2O is: once as the
ring of the FlexGen code, once as Algorithm 1 of the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction

from .loops import Vector, dot, require_margin, softmax


class FlexGenRing:
    """H2O in the FlexGen code (policies.md §4.6; FMInference/H2O, `h2o_flexgen`, `pytorch_backend.py:529-585`).

    ``2K`` slots: ``[0, K)`` heavy hitters, ``[K, 2K - 1)`` a ring of recent tokens, ``2K - 1`` the working slot.

    Args:
        K: heavy slots, at least 2.
        queries: all queries of one head, the prompt's first.
        keys: all keys of that head.
        prompt: length of the prompt, more than ``2K``.
        compete: the graduate that is weaker than every heavy hitter is overwritten (the project's decision);
            the official code always replaces the weakest heavy hitter.
    """

    def __init__(
        self, K: int, queries: list[Vector], keys: list[Vector], *, prompt: int, scaling: float, compete: bool = False
    ):
        self.K = K
        self.compete = compete
        self.queries, self.keys, self.scaling = queries, keys, scaling
        aggregate = [0.0] * prompt
        for i in range(prompt):
            for j, p in enumerate(self._attend(i, list(range(i + 1)))):
                aggregate[j] += p
        old = prompt - K + 1
        heavy = sorted(range(old), key=lambda j: aggregate[j], reverse=True)[:K]
        self.slots = [*heavy, *range(old, prompt), -1]
        self.acc = [*(aggregate[j] for j in self.slots[:-1]), 0.0]
        self.prompt = prompt

    def decode(self, i: int) -> None:
        """Step ``i = 1, 2, …``: the new token is number ``prompt + i - 1``."""
        K, slots, acc = self.K, self.slots, self.acc
        work = 2 * K - 1
        slots[work], acc[work] = self.prompt + i - 1, 0.0
        for slot, p in enumerate(self._attend(slots[work], slots)):
            acc[slot] += p
        victim = min(range(K), key=acc.__getitem__)
        oldest = work + ((i - 1) % (K - 1)) - (K - 1)
        if not (self.compete and acc[oldest] < acc[victim]):
            slots[victim], acc[victim] = slots[oldest], acc[oldest]
        slots[oldest], acc[oldest] = slots[work], acc[work]

    @property
    def kept(self) -> list[int]:
        """Positions held between steps, ascending; the working slot is free then."""
        return sorted(self.slots[:-1])

    @property
    def heavy(self) -> list[int]:
        return sorted(self.slots[: self.K])

    def _attend(self, i: int, visible: list[int]) -> Vector:
        return softmax([self.scaling * dot(self.queries[i], self.keys[j]) for j in visible])


def algorithm_1(
    queries: list[Vector],
    keys: list[Vector],
    k: int,
    *,
    scaling: float,
    h: Callable[[float], float] = lambda z: z,
) -> Iterator[list[int]]:
    """H2O Algorithms 1 and 2 (App. D.6), read as policies.md §4.1 decides. Yields ``S_i`` for each token.

    Query i attends over ``S_{i-1} ∪ {i}``, scores accumulate from the first token on, and the element leaves whose
    absence gives the largest ``F(T) = h(Σ_{s∈T} õ_s)``.
    """
    S: list[int] = []
    accumulated: dict[int, float] = {}
    for i, query in enumerate(queries):
        G = [*S, i]
        for s, o in zip(G, softmax([scaling * dot(query, keys[j]) for j in G]), strict=True):
            accumulated[s] = accumulated.get(s, 0.0) + o
        S = [s for s in G if s != _leaves(G, accumulated, h)] if len(G) > k else G
        yield S


def _leaves(G: list[int], accumulated: dict[int, float], h: Callable[[float], float]) -> int:
    """``argmax_{v∈G} F(G without v)``; among equals the oldest, as ``G`` is ascending and ``max`` takes the first."""
    lowest, second = sorted(accumulated[s] for s in G)[:2]
    require_margin(lowest, second)
    return max(G, key=lambda v: h(math.fsum(accumulated[s] for s in G if s != v)))


def literal_algorithm_1(queries: list[Vector], keys: list[Vector], k: int) -> list[int]:
    """H2O Algorithm 1 to the letter: rows of ``K`` outside of ``S_{i-1}`` are zero, and line 9 subtracts their 1.

    Returns ``S_n``. The score of the new token is ``exp(0) - 1 = 0`` in every step. Fractions keep the sums of line
    10 exact, however small a score is beside the others.
    """
    S: list[int] = []
    for i, query in enumerate(queries):
        if i < k:
            S = [*S, i]
            continue
        o = [Fraction(math.exp(dot(query, keys[s]))) if s in S else Fraction(0) for s in range(i + 1)]
        D = sum(o)
        G = [*S, i]
        u = max(G, key=lambda v, o=o, D=D, G=G: sum(o[s] / D for s in G if s != v))
        S = [s for s in G if s != u]
    return S
