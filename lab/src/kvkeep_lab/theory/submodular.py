"""Set functions on ``[n]`` (H2O, App. D.2, D.3, D.8, D.9): brute-force checks, examples, Algorithm 3 and its bounds.

A check returns the worst violation of a property, so 0 or less means that the property holds. All checks are for small
n. At the end: persisting sparsity (App. D.16), a core of keys that every row supports.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvkeep.errors import InputError
from kvkeep_lab.theory.loops import Vector

Set: TypeAlias = frozenset[int]
SetFunction: TypeAlias = Callable[[Set], float]

EMPTY: Set = frozenset()
GREEDY = 1.0 - 1.0 / math.e
"""The factor of Theorem D.17."""


def subsets(n: int, *, least: Set = EMPTY, at_most: int | None = None) -> Iterator[Set]:
    """Yield all subsets of ``range(n)`` that contain ``least`` and up to ``at_most`` elements, small ones first."""
    rest = [a for a in range(n) if a not in least]
    largest = len(rest) if at_most is None else at_most - len(least)
    for size in range(largest + 1):
        for more in itertools.combinations(rest, size):
            yield least | frozenset(more)


def marginal(f: SetFunction, a: int, S: Set) -> float:
    """Return ``Δ_f(a | S)`` of Definition D.16: the gain of adding ``a`` to ``S``."""
    return f(S | {a}) - f(S)


# -- properties --------------------------------------------------------------------------------------------------------


def submodular_violation(f: SetFunction, n: int, *, Z: Set = EMPTY) -> float:
    """Return the largest ``Δ(a | Y) - Δ(a | X)`` over ``Z ⊆ X ⊆ Y`` and ``a`` outside of ``Y``: Condition 1 of D.1.

    An empty ``Z`` gives the ordinary property (and the strong one of D.3), any other ``Z`` the dynamic one of D.4.
    """
    values = {S: f(S) for S in subsets(n, least=Z)}
    worst = -math.inf
    for Y in values:
        for a in set(range(n)) - Y:
            gain = values[Y | {a}] - values[Y]
            for X in _between(Z, Y):
                worst = max(worst, gain - (values[X | {a}] - values[X]))
    return worst


def union_violation(f: SetFunction, n: int) -> float:
    """Return the largest ``f(S ∪ T) + f(S ∩ T) - f(S) - f(T)``: Condition 2 of Definition D.1."""
    values = {S: f(S) for S in subsets(n)}
    pairs = itertools.combinations(values, 2)
    return max((values[S | T] + values[S & T]) - (values[S] + values[T]) for S, T in pairs)


def pair_violation(f: SetFunction, n: int) -> float:
    """Return the largest ``f(S + a + b) + f(S) - f(S + a) - f(S + b)``: Condition 3 of Definition D.1.

    ``n`` is 2 or more, for a pair.
    """
    values = {S: f(S) for S in subsets(n)}
    return max(
        values[S | {a, b}] + values[S] - values[S | {a}] - values[S | {b}]
        for S in values
        for a, b in itertools.combinations(set(range(n)) - S, 2)
    )


def monotone_violation(f: SetFunction, n: int) -> float:
    """Return the largest drop ``f(S) - f(S + a)`` (Definition D.2); one element at a time is enough."""
    return max(-marginal(f, a, S) for S in subsets(n) for a in set(range(n)) - S)


def _between(Z: Set, Y: Set) -> Iterator[Set]:
    rest = sorted(Y - Z)
    for size in range(len(rest) + 1):
        for more in itertools.combinations(rest, size):
            yield Z | frozenset(more)


# -- maximisation ------------------------------------------------------------------------------------------------------


def greedy(f: SetFunction, n: int, k: int, *, oracle: Callable[[int, Set], float] | None = None) -> Set:
    """Run Algorithm 3, or with an ``oracle`` algorithm A of Corollary D.18. Of equals, the smallest element is chosen.

    Line 4 lets ``i`` range over all of ``[n]``. Only elements outside of ``S_t`` are meant, as the text above it says:
    otherwise nothing would be added once no element gains.

    Args:
        f: the function to maximise.
        n: number of elements to choose from.
        k: number of elements to choose, at most ``n``.
        oracle: ``O(i, S)``, an estimate of the gain of adding ``i`` to ``S``; by default the true gain.
    """
    S = EMPTY
    for _ in range(k):
        gains = {i: oracle(i, S) if oracle else f(S | {i}) for i in range(n) if i not in S}
        S |= {max(gains, key=gains.__getitem__)}
    return S


def optimum(f: SetFunction, n: int, k: int) -> float:
    """Return ``max f(T)`` over all ``T`` of exactly ``k`` elements, by exhaustive search."""
    return max(f(frozenset(T)) for T in itertools.combinations(range(n), k))


def noisy_bound(best: float, k: int, epsilon: float) -> float:
    """Return the value that greedy choice reaches if every marginal is off by ``epsilon`` or less (Corollary D.18)."""
    return GREEDY * best - k * (2.0 - 1.0 / math.e) * epsilon


# -- examples ----------------------------------------------------------------------------------------------------------


def concave_of_modular(weights: Sequence[float], h: Callable[[float], float] = lambda z: z) -> SetFunction:
    """Return ``h(Σ_{s∈T} w_s)``: H2O's score function; with the identity, the linear function of D.2."""
    return lambda T: h(math.fsum(weights[s] for s in T))


def budget_additive(weights: Sequence[float], budget: float) -> SetFunction:
    """Return the function ``min(B, Σ_{s∈T} w_s)``."""
    return lambda T: min(budget, math.fsum(weights[s] for s in T))


def coverage(parts: Sequence[Set], weights: Sequence[float]) -> SetFunction:
    """Return a function: the total weight of the atoms that the chosen parts cover together."""
    return lambda T: math.fsum(weights[atom] for atom in frozenset().union(*(parts[s] for s in T)))


def facility_location(gains: Sequence[Sequence[float]]) -> SetFunction:
    """Return a function: the sum over clients (rows of gains) of the best chosen place; gains are at least 0."""
    return lambda T: math.fsum(max((row[s] for s in T), default=0.0) for row in gains)


def closeness(row: Sequence[float], values: Sequence[Sequence[float]]) -> SetFunction:
    """Return a function: 1 minus the relative error of the attention output over a set of keys.

    The error is that against the output over all keys.

    Without any key the output is 0, so the function starts at 0 and ends at 1.
    """
    everything = frozenset(range(len(row)))

    def output(T: Set) -> list[float]:
        held = math.fsum(row[s] for s in T)
        return [math.fsum(row[s] * values[s][e] for s in T) / held if T else 0.0 for e in range(len(values[0]))]

    full = output(everything)
    return lambda T: 1.0 - math.dist(output(T), full) / math.hypot(*full)


def tight_for_greedy(k: int) -> tuple[SetFunction, int]:
    """Return a coverage function on which `greedy` reaches only the share ``1 - (1 - 1/k)^k`` of the optimum.

    The optimum is the last ``k`` of its ``2k`` elements, which are disjoint. Each of the first ``k`` elements covers
    the k-th part of the uncovered rest of every one of the last ``k``. Gains tie in every step, and greedy takes the
    first of equals.

    Returns:
        The function, and the number of its elements.
    """
    atoms = [(place, turn) for place in range(k) for turn in range(k + 1)]
    whole = [(k - 1) ** turn * k ** (k - 1 - turn) for turn in range(k)] + [(k - 1) ** k]
    baits = [frozenset(n for n, (_, turn) in enumerate(atoms) if turn == t) for t in range(k)]
    best = [frozenset(n for n, (place, _) in enumerate(atoms) if place == p) for p in range(k)]
    return coverage([*baits, *best], [float(whole[turn]) for _, turn in atoms]), 2 * k


# -- persisting sparsity -----------------------------------------------------------------------------------------------


def support(row: Vector, tau: float) -> Set:
    """Return ``supp_τ``: the indices of the entries larger than τ."""
    return frozenset(j for j, p in enumerate(row) if p > tau)


@dataclass(frozen=True)
class Good:
    """The smallest α with which some rows are (α, τ, k)-good in the sense of Definition D.33.

    The definition asks for α below 1 and a core that is not empty.

    Attributes:
        core: ``S_0``.
        alpha: the smallest α.
        union: the supports of all rows together, without the core.
        rows: number of rows.
    """

    core: Set
    alpha: float
    union: Set
    rows: int

    @property
    def allowed(self) -> float:
        """Return ``α k n``, the size that Claim D.34 allows for the union; 0 without a core."""
        return self.alpha * len(self.core) * self.rows if self.core else 0.0


def goodness(rows: Sequence[Vector], tau: float, core: Set | None = None) -> Good:
    """Measure Definition D.33 on rows of one length.

    Args:
        rows: non-negative vectors.
        tau: the threshold.
        core: ``S_0``; by default the largest possible one, the intersection of all supports.

    Raises:
        InputError: the core is not part of every support.
    """
    supports = [support(row, tau) for row in rows]
    common = frozenset.intersection(*supports)
    core = common if core is None else core
    if not core <= common:
        raise InputError(f"the core {sorted(core)} is not in every support; in all of them are {sorted(common)}")
    outside = [support - core for support in supports]
    most = max(len(support) for support in outside)
    alpha = most / len(core) if core else float("inf") if most else 0.0
    return Good(core, alpha, frozenset().union(*outside), len(rows))
