"""H2O's claims about Algorithms 1 to 3: their decisions, set functions and greedy choice, sparsity, cache size."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import partial

from kvkeep.planning import cost
from kvkeep_lab.theory.claim import Claim, ClaimOutcome, claim, judge
from kvkeep_lab.theory.h2o import (
    CONCAVE,
    algorithm_1_literal,
    algorithm_2_literal,
    h2_eviction,
    row_of_algorithm_2,
)
from kvkeep_lab.theory.loops import Vector, softmax
from kvkeep_lab.theory.submodular import (
    GREEDY,
    Set,
    SetFunction,
    budget_additive,
    closeness,
    concave_of_modular,
    coverage,
    facility_location,
    goodness,
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

_RUNS = "lab/tests/theory/test_h2o.py::"
_SETS = "lab/tests/theory/test_submodular.py::"

TINY = 1e-12


def gauss(n: int, d: int, seed: int, *, scale: float = 1.0) -> list[Vector]:
    """Return ``n`` random vectors with ``d`` normal components each."""
    noise = random.Random(seed)
    return [[noise.gauss(0.0, scale) for _ in range(d)] for _ in range(n)]


# -- the algorithms ----------------------------------------------------------------------------------------------------


def _with_a_sink(seed: int) -> tuple[list[Vector], list[Vector]]:
    return [[1.0]] * 40, [[5.0], *gauss(39, 1, seed, scale=2.0)]


@claim("h2o-algorithm-1", "H2O, Algorithm 1, lines 8, 9", f"{_RUNS}test_line_9_freezes_the_first_tokens")
def _algorithm_1() -> ClaimOutcome:
    """A new token competes with the kept ones by its attention."""
    entered = {"printed": 0, "meant": 0}
    for seed in range(5):
        Q, K = _with_a_sink(seed)
        for name, sets in (("printed", algorithm_1_literal(Q, K, 6)), ("meant", h2_eviction(Q, K, 6))):
            entered[name] += sum(i in S for i, S in enumerate(sets) if i >= 6)
    by = "of 170 tokens that meet a full cache {printed} get in; {meant} if a row is over S ∪ {{i}}".format(**entered)
    return judge(by, printed=entered["printed"] > 0, corrected=entered["meant"] > 0)


@claim("h2o-rows", "H2O, Algorithm 2, line 8; Definition D.10", f"{_RUNS}test_rows_are_no_probabilities")
def _rows() -> ClaimOutcome:
    """o_i is the normalised attention over the kept tokens."""
    worst = right = 0.0
    for seed in range(10):
        Q, K = gauss(20, 4, seed), gauss(20, 4, seed + 100)
        S = sorted(random.Random(seed).sample(range(19), 5))
        row = row_of_algorithm_2(Q, K, S, 19)
        worst = max(worst, math.fsum(row))
        right = max(right, abs(math.fsum(row[s] for s in S) - 1.0))
    by = f"printed rows sum to as much as {worst:.2f}; to 1 within {right:.0e} over S alone"
    return judge(by, printed=worst <= 1.0 + TINY, corrected=right <= TINY)


@claim("h2o-new-token", "H2O, Algorithm 2, lines 8 to 11", f"{_RUNS}test_the_new_key_has_no_part")
def _new_token() -> ClaimOutcome:
    """Whether a new token stays depends on the attention it receives."""
    # Two runs that differ in the newest token's key alone: do their decisions differ?
    moved = {"printed": 0, "meant": 0}
    for seed in range(30):
        Q, K = _with_a_sink(seed)
        other = [*K[:-1], [7.0]], [*K[:-1], [-7.0]]
        for name, algorithm in (("printed", algorithm_2_literal), ("meant", h2_eviction)):
            high, low = ([*algorithm(Q, keys, 6)][-1] for keys in other)
            moved[name] += high != low
    by = "a loud or a silent key changes {printed} of 30 printed decisions, {meant} with a row over S ∪ {{i}}".format(
        **moved
    )
    return judge(by, printed=moved["printed"] > 0, corrected=moved["meant"] > 0)


@claim(
    "h2o-accumulation", "H2O, Algorithm 2, line 9; Remark D.15", f"{_RUNS}test_rows_before_the_cache_is_full_are_lost"
)
def _accumulation() -> ClaimOutcome:
    """õ_i is the attention that each token has received so far."""
    # Algorithm 2 starts to sum only when the cache is full, so it misses the rows before.
    K, Q = [[3.0], [0.0], [1.0]], [[1.0], [1.0], [-1.0]]
    received = 1.0 + softmax([3.0, 0.0])[0]
    printed, meant = (list(algorithm(Q, K, 2))[-1] for algorithm in (algorithm_2_literal, h2_eviction))
    by = f"token 0 of 3 has received {received:.2f} when the cache is full; printed, {printed} stay, meant, {meant}"
    return judge(by, printed=0 in printed, corrected=0 in meant)


@claim("h2o-any-h", "H2O, Remark D.14", f"{_RUNS}test_no_choice_of_h_changes_what_goes")
def _any_h() -> ClaimOutcome:
    """Every rising h in the score function evicts the same tokens."""
    differ = total = 0
    for seed in range(5):
        Q, K = gauss(40, 4, seed, scale=2.0), gauss(40, 4, seed + 50)
        z, *others = (list(h2_eviction(Q, K, 6, h=h)) for h in CONCAVE.values())
        total += 2 * len(z)
        differ += sum(a != b for other in others for a, b in zip(z, other, strict=True))
    return judge(f"{differ} of {total} sets differ between z, √(z+1) and log(z+1)", printed=differ == 0)


# -- sparsity, and the size of a cache ---------------------------------------------------------------------------------


@claim(
    "h2o-claim-d34", "H2O, Claim D.34 and its proof", "lab/tests/theory/test_sparsity.py::test_the_bound_for_one_row"
)
def _sparsity() -> ClaimOutcome:
    """In (α, τ, k)-good rows the supports have at most αkn tokens outside of the core together."""
    n, k, alpha = 3, 4, 0.5

    def union(each: int) -> int:
        extras = [set(range(k + each * row, k + each * (row + 1))) for row in range(n)]
        rows = [[float(j < k or j in extra) for j in range(k + each * n)] for extra in extras]
        return len(goodness(rows, 0.5).union)

    printed, meant = union(int(alpha * k * n)), union(int(alpha * k))
    by = f"αkn = {alpha * k * n:.0f}: rows with αkn extras have {printed} together, rows with αk have {meant}"
    return judge(by, printed=printed <= alpha * k * n, corrected=meant <= alpha * k * n)


@claim("h2o-cache-size", "H2O, Section 1", "tests/planning/test_cost.py::test_h2o_180_gb")
def _opt_30b() -> ClaimOutcome:
    """OPT-30B at batch 128 and 1024 tokens has a cache of 180 GB."""
    size = 128 * cost.full_bytes((cost.LayerShape(56, 128, 128),) * 48, 1024, 2)
    return judge(f"{size / 1e9:.1f} GB", printed=round(size / 1e10) == 18)


# -- set functions and greedy choice -----------------------------------------------------------------------------------


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


@claim("h2o-score-function", "H2O, Remark D.14", f"{_SETS}test_a_convex_h_is_not_submodular")
def _score() -> ClaimOutcome:
    """With a rising concave h the score function is monotone and submodular."""
    weights = _weights(6, 0)
    worst = max(_violation(concave_of_modular(weights, h), 6) for h in CONCAVE.values())
    convex = _violation(concave_of_modular(weights, lambda z: z * z), 6)
    by = f"largest violation {max(worst, 0.0):.0e} for three concave h; {convex:.1f} for z²"
    return judge(by, printed=worst <= TINY < convex)


@claim("h2o-definition-d1", "H2O, Definition D.1", f"{_SETS}test_the_three_conditions_are_one")
def _conditions() -> ClaimOutcome:
    """The three conditions for submodular are the same."""
    noise, agree, submodular = random.Random(3), 0, 0
    for _ in range(200):
        values = {S: math.sqrt(len(S)) + noise.gauss(0.0, 0.15) for S in subsets(3)}
        checks = (submodular_violation, union_violation, pair_violation)
        verdicts = [check(values.__getitem__, 3) <= 0.0 for check in checks]
        agree += len(set(verdicts)) == 1
        submodular += verdicts[0]
    by = f"agree on {agree} of 200 random functions, {submodular} of them submodular"
    return judge(by, printed=agree == 200)


@claim("h2o-examples", "H2O, App. D.2", f"{_SETS}test_the_examples_are_submodular")
def _examples() -> ClaimOutcome:
    """Linear, budget-additive and coverage functions are monotone and submodular."""
    worst = max(_violation(make(6, seed), 6) for make in list(EXAMPLES.values())[:3] for seed in range(3))
    return judge(f"largest violation {max(worst, 0.0):.0e} in 9 examples", printed=worst <= TINY)


@claim("h2o-remark-d5", "H2O, Remark D.5", f"{_SETS}test_dynamic_is_weaker_than_strong")
def _weaker() -> ClaimOutcome:
    """Submodular above Z alone is weaker than submodular everywhere."""

    def f(S: Set) -> float:
        return math.sqrt(len(S)) if 0 in S else len(S) ** 2 / 100.0

    dynamic, strong = submodular_violation(f, 4, Z=frozenset({0})), submodular_violation(f, 4)
    by = f"a function with violation {max(dynamic, 0.0):.0f} above Z and {strong:.2f} elsewhere"
    return judge(by, printed=dynamic <= 0.0 < strong)


@claim("h2o-attention-scheme", "H2O, assumption of Lemma 3.1", f"{_SETS}test_mass_is_submodular")
def _scheme() -> ClaimOutcome:
    """The attention scheme is submodular."""
    row = softmax([2.0 * x for (x,) in gauss(6, 1, 0)])
    near, mass = closeness(row, gauss(6, 3, 1)), concave_of_modular(row)
    by = (
        f"closeness of the output violates it by {submodular_violation(near, 6):.2f}, and may fall with a key more; "
        f"retained mass by {max(_violation(mass, 6), 0.0):.0e}"
    )
    return judge(by, printed=_violation(near, 6) <= TINY, corrected=_violation(mass, 6) <= TINY)


@claim("h2o-theorem-d17", "H2O, Theorem D.17, Algorithm 3", f"{_SETS}test_the_bound_is_nearly_reached")
def _greedy() -> ClaimOutcome:
    """Greedy reaches 1 - 1/e of the best set of k, for monotone submodular f with f(∅) = 0."""
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


@claim("h2o-corollary-d18", "H2O, Corollary D.18", f"{_SETS}test_corollary_d18")
def _noisy() -> ClaimOutcome:
    """With marginals off by ε, greedy loses at most k(2 - 1/e)ε more."""
    epsilon, slack = 0.2, math.inf
    for make in EXAMPLES.values():
        for seed in range(5):
            f, noise = make(8, seed), random.Random(seed)
            S = greedy(f, 8, 3, oracle=partial(_misled, f, noise))
            slack = min(slack, f(S) - noisy_bound(optimum(f, 8, 3), 3, epsilon))
    return judge(
        f"20 runs with every marginal off by {epsilon}: at least {slack:.2f} above the bound", printed=slack >= 0
    )


def _misled(f: SetFunction, noise: random.Random, i: int, S: Set) -> float:
    return marginal(f, i, S) + noise.choice((-0.2, 0.2))


@claim("h2o-lemma-d19", "H2O, Lemma D.19", f"{_SETS}test_lemma_d19_leaves_room")
def _robust() -> ClaimOutcome:
    """With differences known to ε/2n, greedy loses at most ε."""
    lost = max(GREEDY - noisy_bound(1.0, k, 1.0 / (2 * n)) for n in range(1, 40) for k in range(1, n + 1))
    return judge(f"marginals off by ε/2n lose at most {lost:.2f} ε", printed=lost <= 1.0)


CLAIMS: tuple[Claim, ...] = (
    *(_algorithm_1, _rows, _new_token, _accumulation, _any_h, _sparsity, _opt_30b),
    *(_score, _conditions, _examples, _weaker, _scheme, _greedy, _noisy, _robust),
)
