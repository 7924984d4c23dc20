"""The dynamic guarantee of H2O (App. D.10 to D.14, Theorem 4.4): its bound, and its quantities measured along a run.

Tokens count from 1 as in the paper, ``[i] = {1, …, i}``. When token i arrives, the cache holds ``S_i ⊆ [i-1]``;
afterwards it holds ``S_{i+1} ⊆ [i]``. A function ``f`` of a history ``Z`` and a step ``i`` gives ``f_{Z,i}``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from kvkeep_lab.theory.h2o import CONCAVE, Rising, h2_eviction
from kvkeep_lab.theory.loops import Vector, attend
from kvkeep_lab.theory.submodular import EMPTY, GREEDY, Set, SetFunction

Dynamic: TypeAlias = Callable[[Set, int], SetFunction]
"""``(Z, i)`` → ``f_{Z,i}``, a function of sets of tokens."""


# -- objectives of attention -------------------------------------------------------------------------------------------


def exact(Q: Sequence[Vector], K: Sequence[Vector], h: Rising = CONCAVE["sum"]) -> Dynamic:
    """Return ``h`` of the attention that a set has received in rows up to i, with all keys present (Definition D.9).

    The history has no influence on it.
    """
    sums: list[dict[int, float]] = [{}]
    for i in range(1, len(Q) + 1):
        row = _row(Q, K, range(1, i + 1), i)
        sums.append({s: sums[-1].get(s, 0.0) + o for s, o in row.items()})
    return lambda Z, i: _score(sums[i], h)


def tracked(Q: Sequence[Vector], K: Sequence[Vector], k: int, h: Rising = CONCAVE["sum"]) -> Dynamic:
    """Return the same with only the cache's keys present (Definition D.10): ``õ`` of Algorithm 2 as it is meant.

    The rows before i come from the run of Algorithm 2 with budget ``k``, row i from a cache ``Z``.
    """
    past: list[dict[int, float]] = [{}, {}]
    S: list[int] = []
    for i, after in enumerate(h2_eviction(Q, K, k), start=1):
        row = _row(Q, K, [*S, i], i)
        past.append({s: past[-1].get(s, 0.0) + row.get(s, 0.0) for s in {*past[-1], *row}})
        S = [s + 1 for s in after]

    @cache
    def score(Z: Set, i: int) -> SetFunction:
        row = _row(Q, K, sorted(Z | {i}), i)
        return _score({s: past[i].get(s, 0.0) + row.get(s, 0.0) for s in {*past[i], *row}}, h)

    return score


def current(Q: Sequence[Vector], K: Sequence[Vector], h: Rising = CONCAVE["sum"]) -> Dynamic:
    """Return line 10 of Algorithm 1: ``h`` of the attention that a set receives in row i alone, from a cache ``Z``."""

    @cache
    def score(Z: Set, i: int) -> SetFunction:
        return _score(_row(Q, K, sorted(Z | {i}), i), h)

    return score


def _row(Q: Sequence[Vector], K: Sequence[Vector], visible: Sequence[int], i: int) -> dict[int, float]:
    """Return row i over the visible tokens, which count from 1."""
    return {s + 1: o for s, o in attend(Q[i - 1], K, [s - 1 for s in visible], 1.0).items()}


def _score(weights: dict[int, float], h: Rising) -> SetFunction:
    return lambda T: h(math.fsum(weights.get(s, 0.0) for s in T))


# -- the run and its quantities ----------------------------------------------------------------------------------------


def expand(f: Dynamic, S: Set, i: int, k: int, *, keep_newest: bool = False) -> Set:
    """Return ``S_{i+1}`` of Definition D.20: ``S_i ∪ {i}``, without one token ``v`` if the cache is full.

    It is the ``v`` whose absence leaves the largest ``f_{S_i,i}``; of equals the oldest.

    Args:
        f: the function that decides.
        S: the cache ``S_i``.
        i: the token that arrives.
        k: the budget.
        keep_newest: token i must stay, as in every cache with a recent window.
    """
    if len(S) < k:
        return S | {i}
    G, score = S | {i}, f(S, i)
    return G - {max(sorted(S if keep_newest else G), key=lambda v: score(G - {v}))}


def run(f: Dynamic, n: int, k: int) -> list[Set]:
    """Return ``S_1, …, S_{n+1}`` at the indices 1 to n + 1; index 0 is empty as well."""
    sets = [EMPTY, EMPTY]
    for i in range(1, n + 1):
        sets.append(expand(f, sets[i], i, k))
    return sets


def opt(f: Dynamic, i: int, k: int) -> float:
    """Return ``opt_i`` of Definition D.27, by trying every admissible pair of a history ``X`` and a set ``Y``."""
    best = -math.inf
    for X in _at_most(i - 1, k):
        score = f(X, i)
        for new in (EMPTY, *(frozenset({v}) for v in range(1, i + 1) if v not in X)):
            best = max(best, *(score(old | new) for old in _parts(X) if len(old | new) <= k))
    return best


def _at_most(n: int, k: int) -> Iterator[Set]:
    """Yield the subsets of ``[n]`` with up to ``k`` elements."""
    for size in range(min(n, k) + 1):
        yield from map(frozenset, itertools.combinations(range(1, n + 1), size))


def _parts(X: Set) -> Iterator[Set]:
    for size in range(len(X) + 1):
        yield from map(frozenset, itertools.combinations(X, size))


@dataclass(frozen=True)
class DynamicStep:
    """One step of a run, with the bound that the induction gives for it.

    Attributes:
        i: number of the step.
        value: ``f_{S_i,i}(S_{i+1})``.
        now: ``opt_i``, the best value that step i allows.
        best: ``opt_{i+1}``.
        bound: the part of ``best`` that Lemma D.29 or D.30 promises.
    """

    i: int
    value: float
    now: float
    best: float
    bound: float

    @property
    def holds(self) -> bool:
        """Return whether the value reaches the bound, to rounding."""
        return self.value >= self.bound - 1e-12 * max(1.0, abs(self.best))


@dataclass(frozen=True)
class Guarantee:
    """The smallest quantities with which the conditions of the lemmas hold along one run.

    Attributes:
        theta: Condition 1: ``f̃_{S_i,i}(S_i) ≥ (1 - θ) f̃_{S_{i-1},i-1}(S_i)``.
        gamma: Condition 2 as the lemmas use it: ``opt_i ≥ (1 - γ) opt_{i+1}``.
        gamma_printed: Condition 2 as Definition D.28 prints it: ``opt_i ≥ (1 - γ) opt_{i-1}``.
        epsilon: ``f ≥ f̃ - ε_0`` for every set within the budget; 0 if the run decides by ``f`` itself.
        shortfall: ``f̃_{S_{i-1},i-1}(S_i) ≥ f_{S_{i-1},i-1}(S_i) - shortfall``; Lemma D.30 assumes 0 without saying so.
        steps: the steps of the run.
    """

    theta: float
    gamma: float
    gamma_printed: float
    epsilon: float
    shortfall: float
    steps: tuple[DynamicStep, ...]

    @property
    def needed(self) -> float:
        """Return the largest θ and γ that Theorem D.32 allows: ``α / (10 n)`` with ``α = 1``."""
        return 1.0 / (10.0 * (len(self.steps) + 1))


def measure(f: Dynamic, n: int, k: int, *, approximate: Dynamic | None = None, printed: bool = False) -> Guarantee:
    """Run Definition D.20 over n tokens, or D.22 with an ``approximate`` function, and measure the lemmas' quantities.

    Args:
        f: the function whose value counts.
        n: number of tokens, at most about 12 because every optimum is found by exhaustive search.
        k: the budget.
        approximate: the function ``f̃`` that decides; by default ``f``.
        printed: compute bounds with γ as D.28 prints it and without the shortfall.
    """
    near = approximate or f
    S = run(near, n, k)
    best = [math.nan, *(opt(f, i, k) for i in range(1, n + 1))]
    theta = _largest(_loss(near(S[i], i)(S[i]), near(S[i - 1], i - 1)(S[i])) for i in range(2, n + 1))
    gamma = _largest(_loss(best[i], best[i + 1]) for i in range(1, n))
    back = _largest(_loss(best[i], best[i - 1]) for i in range(2, n + 1))
    epsilon = shortfall = 0.0
    if approximate:
        every = range(1, n + 1)
        epsilon = _largest(near(S[i], i)(X) - f(S[i], i)(X) for i in every for X in _at_most(i, k))
        shortfall = _largest(f(S[i], i)(S[i + 1]) - near(S[i], i)(S[i + 1]) for i in every)
    factor = (1.0 - theta) * (1.0 - (back if printed else gamma))
    lost = epsilon if printed else epsilon + shortfall
    steps = tuple(
        DynamicStep(
            i, f(S[i], i)(S[i + 1]), best[i], best[i + 1], GREEDY * factor ** (i + 1) * best[i + 1] - (i + 1) * lost
        )
        for i in range(1, n)
    )
    return Guarantee(theta, gamma, back, epsilon, shortfall, steps)


def _loss(now: float, before: float) -> float:
    """Return the share of ``before`` that is missing in ``now``; 0 if ``before`` is not positive."""
    return 1.0 - now / before if before > 0.0 else 0.0


def _largest(values: Iterator[float]) -> float:
    return max(0.0, *values)


def theorem_bound(best: float, alpha: float, beta: float) -> float:
    """Return the bound of Theorem D.32: ``(1 - 1/e)(1 - α) opt_i - β``."""
    return GREEDY * (1.0 - alpha) * best - beta
