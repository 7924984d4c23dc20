"""H2O's claims about set functions and greedy choice (App. D.2, D.3, D.7 to D.10)."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from kvkeep.research.theory.claim import Claim, Outcome, judge
from kvkeep.research.theory.claims_h2o_eviction import TINY, gauss
from kvkeep.research.theory.h2o import CONCAVE
from kvkeep.research.theory.loops import softmax
from kvkeep.research.theory.submodular import (
    GREEDY,
    Set,
    SetFunction,
    budget_additive,
    closeness,
    concave_of_modular,
    coverage,
    facility_location,
    greedy,
    marginal,
    monotone_violation,
    noisy_bound,
    optimum,
    pair_violation,
    submodular_violation,
    subsets,
    tight_for_greedy,
    union_violation,
)


def _weights(n: int, seed: int) -> list[float]:
    noise = random.Random(seed)
    return [noise.expovariate(1.0) for _ in range(n)]


def _coverage(n: int, seed: int) -> SetFunction:
    noise = random.Random(seed)
    parts = [frozenset(noise.sample(range(2 * n), noise.randint(1, n))) for _ in range(n)]
    return coverage(parts, _weights(2 * n, seed))


EXAMPLES: dict[str, Callable[[int, int], SetFunction]] = {
    "linear": lambda n, seed: concave_of_modular(_weights(n, seed)),
    "budget-additive": lambda n, seed: budget_additive(_weights(n, seed), 0.4 * n),
    "coverage": _coverage,
    "facility location": lambda n, seed: facility_location([_weights(n, 100 * seed + row) for row in range(n)]),
}


def _violation(f: SetFunction, n: int) -> float:
    return max(submodular_violation(f, n), monotone_violation(f, n))


def _score() -> Outcome:
    weights = _weights(6, 0)
    worst = max(_violation(concave_of_modular(weights, h), 6) for h in CONCAVE.values())
    convex = _violation(concave_of_modular(weights, lambda z: z * z), 6)
    by = f"largest violation {max(worst, 0.0):.0e} for three concave h; {convex:.1f} for z²"
    return judge(by, printed=worst <= TINY < convex)


def _conditions() -> Outcome:
    noise, agree, submodular = random.Random(3), 0, 0
    for _ in range(200):
        values = {S: math.sqrt(len(S)) + noise.gauss(0.0, 0.15) for S in subsets(3)}
        checks = (submodular_violation, union_violation, pair_violation)
        verdicts = [check(values.__getitem__, 3) <= 0.0 for check in checks]
        agree += len(set(verdicts)) == 1
        submodular += verdicts[0]
    by = f"agree on {agree} of 200 random functions, {submodular} of them submodular"
    return judge(by, printed=agree == 200)


def _examples() -> Outcome:
    worst = max(_violation(make(6, seed), 6) for make in list(EXAMPLES.values())[:3] for seed in range(3))
    return judge(f"largest violation {max(worst, 0.0):.0e} in 9 examples", printed=worst <= TINY)


def _weaker() -> Outcome:
    def f(S: Set) -> float:
        return math.sqrt(len(S)) if 0 in S else len(S) ** 2 / 100.0

    dynamic, strong = submodular_violation(f, 4, Z=frozenset({0})), submodular_violation(f, 4)
    by = f"a function with violation {max(dynamic, 0.0):.0f} above Z and {strong:.2f} elsewhere"
    return judge(by, printed=dynamic <= 0.0 < strong)


def _scheme() -> Outcome:
    row = softmax([2.0 * x for (x,) in gauss(6, 1, 0)])
    near, mass = closeness(row, gauss(6, 3, 1)), concave_of_modular(row)
    by = (
        f"closeness of the output violates it by {submodular_violation(near, 6):.2f}, and may fall with a key more; "
        f"retained mass by {max(_violation(mass, 6), 0.0):.0e}"
    )
    return judge(by, printed=_violation(near, 6) <= TINY, corrected=_violation(mass, 6) <= TINY)


def _greedy() -> Outcome:
    worst = min(
        f(greedy(f, 8, 3)) / optimum(f, 8, 3)
        for make in EXAMPLES.values()
        for seed in range(5)
        for f in [make(8, seed)]
    )
    f, n = tight_for_greedy(4)
    known = f(greedy(f, n, 4)) / optimum(f, n, 4)
    by = f"worst of 20 random functions {worst:.1%} of the best, worst known (k = 4) {known:.1%}, bound {GREEDY:.1%}"
    return judge(by, printed=min(worst, known) >= GREEDY)


def _noisy() -> Outcome:
    epsilon, slack = 0.2, math.inf
    for make in EXAMPLES.values():
        for seed in range(5):
            f, noise = make(8, seed), random.Random(seed)
            S = greedy(f, 8, 3, oracle=lambda i, S, f=f, noise=noise: _misled(f, i, S, noise.choice((-0.2, 0.2))))  # type: ignore[misc]
            slack = min(slack, f(S) - noisy_bound(optimum(f, 8, 3), 3, epsilon))
    return judge(
        f"20 runs with every marginal off by {epsilon}: at least {slack:.2f} above the bound", printed=slack >= 0
    )


def _misled(f: SetFunction, i: int, S: Set, error: float) -> float:
    return marginal(f, i, S) + error


def _robust() -> Outcome:
    lost = max(GREEDY - noisy_bound(1.0, k, 1.0 / (2 * n)) for n in range(1, 40) for k in range(1, n + 1))
    return judge(f"marginals off by ε/2n lose at most {lost:.2f} ε", printed=lost <= 1.0)


_SETS = "tests/research/test_submodular.py::"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "h2o-score-function",
        "H2O, Remark D.14",
        "With a rising concave h the score function is monotone and submodular.",
        f"{_SETS}test_a_convex_h_is_not_submodular",
        _score,
    ),
    Claim(
        "h2o-definition-d1",
        "H2O, Definition D.1",
        "The three conditions for submodular are the same.",
        f"{_SETS}test_the_three_conditions_are_one",
        _conditions,
    ),
    Claim(
        "h2o-examples",
        "H2O, App. D.2",
        "Linear, budget-additive and coverage functions are monotone and submodular.",
        f"{_SETS}test_the_examples_are_submodular",
        _examples,
    ),
    Claim(
        "h2o-remark-d5",
        "H2O, Remark D.5",
        "Submodular above Z alone is weaker than submodular everywhere.",
        f"{_SETS}test_dynamic_is_weaker_than_strong",
        _weaker,
    ),
    Claim(
        "h2o-attention-scheme",
        "H2O, assumption of Lemma 3.1",
        "The attention scheme is submodular.",
        f"{_SETS}test_mass_is_submodular",
        _scheme,
    ),
    Claim(
        "h2o-theorem-d17",
        "H2O, Theorem D.17, Algorithm 3",
        "Greedy reaches 1 - 1/e of the best set of k, for monotone submodular f with f(∅) = 0.",
        f"{_SETS}test_the_bound_is_nearly_reached",
        _greedy,
    ),
    Claim(
        "h2o-corollary-d18",
        "H2O, Corollary D.18",
        "With marginals off by ε, greedy loses at most k(2 - 1/e)ε more.",
        f"{_SETS}test_corollary_d18",
        _noisy,
    ),
    Claim(
        "h2o-lemma-d19",
        "H2O, Lemma D.19",
        "With differences known to ε/2n, greedy loses at most ε.",
        f"{_SETS}test_lemma_d19_leaves_room",
        _robust,
    ),
)
