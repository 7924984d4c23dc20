"""Set functions: the checks on cases worked out by hand, the paper's examples, greedy against exhaustive search."""

import math
import random

import pytest

from kvkeep_lab.theory.h2o import CONCAVE
from kvkeep_lab.theory.loops import softmax
from kvkeep_lab.theory.submodular import (
    GREEDY,
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

CHECKS = [submodular_violation, union_violation, pair_violation]
ZERO = 1e-12


def weights(n, seed):
    noise = random.Random(seed)
    return [noise.expovariate(1.0) for _ in range(n)]


def random_coverage(n, seed):
    noise = random.Random(seed)
    parts = [frozenset(noise.sample(range(2 * n), noise.randint(1, n))) for _ in range(n)]
    return coverage(parts, weights(2 * n, seed))


def random_places(n, seed):
    return facility_location([weights(n, 100 * seed + row) for row in range(n)])


EXAMPLES = {
    "linear": lambda n, seed: concave_of_modular(weights(n, seed)),
    "budget-additive": lambda n, seed: budget_additive(weights(n, seed), 0.4 * n),
    "coverage": random_coverage,
    "facility location": random_places,
    "sqrt": lambda n, seed: concave_of_modular(weights(n, seed), lambda z: CONCAVE["sqrt"](z) - 1.0),
    "log": lambda n, seed: concave_of_modular(weights(n, seed), CONCAVE["log"]),
}


def test_subsets_are_all_of_them_once():
    assert len(set(subsets(5))) == len(list(subsets(5))) == 32
    assert set(subsets(4, least=frozenset({1}), at_most=2)) == {frozenset({1} | {a}) for a in (0, 1, 2, 3)}


def squared(S):
    return float(len(S) ** 2)


@pytest.mark.parametrize("check", CHECKS)
def test_violations_by_hand(check):
    """|S|² of two elements: the second adds 3, the first 1. Of three, at worst 5 against 1, or 2 between neighbours."""
    assert check(squared, 2) == 2.0
    three = {submodular_violation: 4.0, union_violation: 4.0, pair_violation: 2.0}
    assert check(squared, 3) == three[check]
    assert check(lambda S: float(len(S)), 3) == 0.0
    assert check(lambda S: math.sqrt(len(S)), 3) <= 0.0
    late = [
        0.0,
        1.0,
        1.0,
        3.0,
    ]  # the third adds 2, the second nothing: the worst pair does not begin with the empty set
    assert check(lambda S: late[len(S)], 3) == 2.0


def test_monotone_by_hand():
    assert monotone_violation(lambda S: -2.0 * len(S), 3) == 2.0
    assert monotone_violation(lambda S: min(float(len(S)), 2.0), 4) == 0.0
    cut = [(0, 1), (1, 2), (0, 2)]  # a triangle's cut is submodular and falls from 2 to 0 at the end
    assert monotone_violation(lambda S: float(sum((a in S) != (b in S) for a, b in cut)), 3) == 2.0


def test_the_three_conditions_are_one():
    """On random functions of three elements, of which some are submodular and some are not."""
    noise, found = random.Random(3), set()
    for _ in range(300):
        values = {S: math.sqrt(len(S)) + noise.gauss(0.0, 0.15) for S in subsets(3)}
        verdicts = {check(values.__getitem__, 3) <= 0.0 for check in CHECKS}
        assert len(verdicts) == 1
        found |= verdicts
    assert found == {True, False}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_examples_are_submodular(name, seed):
    f = EXAMPLES[name](6, seed)
    assert all(check(f, 6) <= ZERO for check in CHECKS)
    assert monotone_violation(f, 6) <= ZERO


@pytest.mark.parametrize("h", [lambda z: z * z, math.exp])
def test_a_convex_h_is_not_submodular(h):
    assert submodular_violation(concave_of_modular(weights(5, 0), h), 5) > 0.1


def test_examples_by_hand():
    f = coverage([frozenset({0, 1}), frozenset({1, 2})], [1.0, 2.0, 4.0])
    assert [f(frozenset(T)) for T in ((), (0,), (1,), (0, 1))] == [0.0, 3.0, 6.0, 7.0]
    f = facility_location([[1.0, 3.0], [2.0, 0.5]])
    assert [f(frozenset(T)) for T in ((), (0,), (1,), (0, 1))] == [0.0, 3.0, 3.5, 5.0]
    assert budget_additive([2.0, 2.0], 3.0)(frozenset({0, 1})) == 3.0
    assert marginal(budget_additive([2.0, 2.0], 3.0), 1, frozenset({0})) == 1.0


def test_dynamic_is_weaker_than_strong():
    """Remark D.5: concave on all sets that contain token 0, convex on the others."""

    def f(S):
        return math.sqrt(len(S)) if 0 in S else len(S) ** 2 / 100

    assert submodular_violation(f, 4, Z=frozenset({0})) <= 0.0
    assert submodular_violation(f, 4) > 0.01


# -- Algorithm 3 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", EXAMPLES)
def test_greedy_against_exhaustive_search(name, k):
    for seed in range(6):
        f = EXAMPLES[name](9, seed)
        S = greedy(f, 9, k)
        assert len(S) == k
        assert GREEDY * optimum(f, 9, k) <= f(S) <= optimum(f, 9, k) + ZERO


def test_greedy_is_not_optimal_everywhere():
    assert any(f(greedy(f, 9, 3)) < optimum(f, 9, 3) - 1e-6 for seed in range(20) for f in [random_coverage(9, seed)])


@pytest.mark.parametrize("k", [2, 3, 4])
def test_the_bound_is_nearly_reached(k):
    """On Nemhauser's and Wolsey's kind of instance greedy has 1 - (1 - 1/k)^k, which falls to 1 - 1/e."""
    f, n = tight_for_greedy(k)
    assert greedy(f, n, k) == frozenset(range(k))
    assert f(greedy(f, n, k)) / optimum(f, n, k) == pytest.approx(1.0 - (1.0 - 1.0 / k) ** k)
    assert submodular_violation(f, n) <= ZERO or n > 6


@pytest.mark.parametrize("h", CONCAVE)
def test_greedy_is_exact_for_a_concave_function_of_a_sum(h):
    for seed in range(5):
        w = weights(10, seed)
        f = concave_of_modular(w, CONCAVE[h])
        S = greedy(f, 10, 4)
        assert frozenset(sorted(range(10), key=w.__getitem__)[-4:]) == S
        assert f(S) == optimum(f, 10, 4)


def test_theorem_d17_needs_a_function_that_is_not_negative():
    """Erratum: D.17 asks for monotone and submodular alone. With f(∅) < 0 it breaks; App. D.8 takes f(∅) = 0."""
    f, n = tight_for_greedy(3)
    lowered = lambda S: f(S) - 0.7 * optimum(f, n, 3)  # noqa: E731
    S = greedy(f, n, 3)
    assert submodular_violation(lowered, n) <= ZERO
    assert monotone_violation(lowered, n) <= ZERO
    assert lowered(S) < 0.05 * optimum(lowered, n, 3)
    assert lowered(S) - lowered(frozenset()) >= GREEDY * (optimum(lowered, n, 3) - lowered(frozenset()))


# -- a noisy oracle ----------------------------------------------------------------------------------------------------


def noisy(f, epsilon, seed):
    noise = random.Random(seed)
    return lambda i, S: marginal(f, i, S) + noise.choice((-epsilon, epsilon))


@pytest.mark.parametrize("epsilon", [0.05, 0.5])
@pytest.mark.parametrize("name", EXAMPLES)
def test_corollary_d18(name, epsilon):
    for seed in range(8):
        f = EXAMPLES[name](8, seed)
        S = greedy(f, 8, 3, oracle=noisy(f, epsilon, seed))
        assert f(S) >= noisy_bound(optimum(f, 8, 3), 3, epsilon) - ZERO


def test_the_noise_does_harm():
    """Without its last term the corollary fails: a misled choice can lose everything but the noise."""
    f = concave_of_modular([0.0, 0.9, 0.0, 0.9])
    S = greedy(f, 4, 2, oracle=lambda i, S: marginal(f, i, S) + (-0.5 if i % 2 else 0.5))
    assert f(S) == 0.0
    assert noisy_bound(optimum(f, 4, 2), 2, 0.0) > 0.0 > noisy_bound(optimum(f, 4, 2), 2, 0.5)


@pytest.mark.parametrize("n", [1, 5, 50])
def test_lemma_d19_leaves_room(n):
    """Marginals off by ε/(2n) lose at most ε, for every k up to n."""
    assert all(GREEDY - noisy_bound(1.0, k, 0.3 / (2 * n)) <= 0.3 for k in range(1, n + 1))


# -- is attention submodular? ------------------------------------------------------------------------------------------


def test_mass_is_submodular():
    """Lemma 3.1 assumes that the attention scheme is submodular; what that means decides."""
    noise = random.Random(0)
    row = softmax([noise.gauss(0.0, 1.0) for _ in range(6)])
    values = [[noise.gauss(0.0, 1.0) for _ in range(3)] for _ in range(6)]
    mass, near = concave_of_modular(row), closeness(row, values)
    assert submodular_violation(mass, 6) <= ZERO
    assert monotone_violation(mass, 6) <= 0.0
    assert near(frozenset()) == 0.0
    assert near(frozenset(range(6))) == 1.0
    assert submodular_violation(near, 6) > 0.1
    assert monotone_violation(near, 6) > 0.1


def test_closeness_by_hand():
    near = closeness([0.5, 0.25, 0.25], [[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    full = math.hypot(0.5, 0.5)
    assert near(frozenset({0, 1})) == pytest.approx(1.0 - math.hypot(2 / 3 - 0.5, 2 / 3 - 0.5) / full)


def test_optimum_looks_at_sets_of_exactly_k():
    assert optimum(lambda S: -float(len(S)), 4, 2) == -2.0
    assert optimum(lambda S: math.fsum(S), 4, 2) == 5.0
