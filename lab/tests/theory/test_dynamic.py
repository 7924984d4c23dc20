"""The dynamic guarantee: its quantities by brute force, its bound along runs, the slips of its statement and proof."""

import itertools
import math
import random

import pytest

from kvkeep_lab.theory.dynamic import current, exact, expand, measure, opt, run, theorem_bound, tracked
from kvkeep_lab.theory.h2o import CONCAVE, h2_eviction
from kvkeep_lab.theory.loops import softmax
from kvkeep_lab.theory.submodular import EMPTY, GREEDY, monotone_violation, submodular_violation


def heads(seed, n=9, d=3, *, scale=1.5):
    noise = random.Random(seed)
    return [[[noise.gauss(0.0, scale) for _ in range(d)] for _ in range(n)] for _ in range(2)]


def fixed(*weights):
    """A function that no history and no step changes: the sum of the weights, of token 1 first."""
    return lambda Z, i: lambda T: math.fsum(weights[s - 1] for s in T)


def every_subset(n):
    return [frozenset(T) for size in range(n + 1) for T in itertools.combinations(range(1, n + 1), size)]


# -- the objectives ----------------------------------------------------------------------------------------------------


def test_objectives_by_hand():
    """One-number keys, so that a query of 1 looks at tokens 1, 2, 3 in proportion to 1, 3 and 4."""
    Q, K = [[1.0]] * 3, [[0.0], [math.log(3.0)], [math.log(4.0)]]
    two = frozenset({2})
    assert exact(Q, K)(EMPTY, 3)(two) == pytest.approx(3 / 4 + 3 / 8)
    assert exact(Q, K)(EMPTY, 2)(frozenset({1, 2})) == pytest.approx(2.0)
    assert current(Q, K)(frozenset({1}), 3)(frozenset({1, 3})) == pytest.approx(1.0)
    assert current(Q, K)(frozenset({1}), 3)(frozenset({3})) == pytest.approx(4 / 5)
    assert current(Q, K)(frozenset({1}), 3)(two) == 0.0
    # budget 1: token 1 has 1 + 1/4, token 2 leaves with its 3/4; row 3 is over tokens 1 and 3
    assert tracked(Q, K, 1)(frozenset({1}), 3)(frozenset({1})) == pytest.approx(1.0 + 1 / 4 + 1 / 5)
    assert tracked(Q, K, 1)(frozenset({1}), 3)(two) == pytest.approx(3 / 4)
    assert exact(Q, K, CONCAVE["log"])(EMPTY, 1)(frozenset({1})) == pytest.approx(math.log(2.0))


@pytest.mark.parametrize("h", CONCAVE)
def test_every_objective_is_monotone_and_dynamic_submodular(h):
    Q, K = heads(0, n=5)
    for f in (exact(Q, K, CONCAVE[h]), tracked(Q, K, 2, CONCAVE[h]), current(Q, K, CONCAVE[h])):
        for Z in (EMPTY, frozenset({1, 3})):
            shifted = lambda T, f=f, Z=Z: f(Z, 5)(frozenset(s + 1 for s in T))  # noqa: E731
            assert submodular_violation(shifted, 5, Z=frozenset(s - 1 for s in Z)) <= 1e-12
            assert monotone_violation(shifted, 5) <= 0.0


@pytest.mark.parametrize("k", [1, 2, 4])
def test_the_run_of_definition_d20_is_algorithm_2(k):
    Q, K = heads(4, n=12)
    printed = [frozenset(s + 1 for s in kept) for kept in h2_eviction(Q, K, k)]
    assert run(tracked(Q, K, k), 12, k)[2:] == printed


# -- Definition D.27 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [exact, current])
@pytest.mark.parametrize(("i", "k"), [(1, 1), (4, 1), (4, 2), (5, 3)])
def test_opt_by_brute_force(make, i, k):
    f = make(*heads(1, n=5))
    pairs = [
        (X, Y) for X in every_subset(i - 1) for Y in every_subset(i) if max(len(X), len(Y)) <= k and len(Y - X) <= 1
    ]
    assert opt(f, i, k) == max(f(X, i)(Y) for X, Y in pairs)


def test_opt_may_add_no_more_than_one_token_to_its_history():
    """Only an empty history has any value, and from there one token can be reached, not the two of the budget."""
    f = lambda Z, i: lambda T: 0.0 if Z else float(len(T))  # noqa: E731
    assert opt(f, 5, 2) == 1.0


# -- the lemmas along runs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("h", CONCAVE)
@pytest.mark.parametrize("seed", range(3))
def test_lemma_d29_along_a_run(seed, h):
    Q, K = heads(seed)
    for f in (exact(Q, K, CONCAVE[h]), current(Q, K, CONCAVE[h])):
        found = measure(f, 9, 2)
        assert [step.i for step in found.steps] == list(range(1, 9))
        assert all(step.holds for step in found.steps)
        assert found.epsilon == found.shortfall == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_lemma_d30_along_a_run(seed):
    """The cache's own sums decide, those of full attention count; the cache's are never below, as fewer keys share."""
    Q, K = heads(seed)
    found = measure(exact(Q, K), 9, 2, approximate=tracked(Q, K, 2))
    assert all(step.holds for step in found.steps)
    assert found.epsilon > 0.0
    assert found.shortfall <= 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_the_quantities_are_the_smallest_for_which_the_conditions_hold(seed):
    Q, K = heads(seed, n=8)
    f, near = exact(Q, K), tracked(Q, K, 2)
    S, found = run(near, 8, 2), measure(f, 8, 2, approximate=near)
    best = [opt(f, i, 2) for i in range(1, 9)]
    sets = [X for i in range(1, 9) for X in every_subset(i) if len(X) <= 2]

    def conditions(shrink):
        theta, gamma, epsilon = found.theta * shrink, found.gamma * shrink, found.epsilon * shrink
        ok = 1e-12
        one = all(near(S[i], i)(S[i]) >= (1 - theta) * near(S[i - 1], i - 1)(S[i]) - ok for i in range(2, 9))
        two = all(now >= (1 - gamma) * after - ok for now, after in itertools.pairwise(best))
        three = all(
            f(S[i], i)(X) >= near(S[i], i)(X) - epsilon - ok
            for i in range(1, 9)
            for X in sets
            if max(X, default=0) <= i
        )
        return one, two, three

    assert conditions(1.0) == (True, True, True)
    assert conditions(0.99) == (found.theta == 0.0, False, False)


def test_theta_is_measured_on_the_row_objective():
    """Row 3 has nothing left for token 1, all that the cache of one holds: condition 1 wants θ near 1."""
    Q, K = [[0.0], [0.0], [40.0]], [[0.0], [-1.0], [1.0]]
    found = measure(current(Q, K), 3, 1)
    assert found.theta > 0.999
    assert found.gamma < 1e-9


def test_the_mild_assumption_is_far_away():
    """D.32 wants θ and γ of α/(10n). The best sum over i rows grows with i, by a ninth in the last of 9 steps."""
    for seed in range(5):
        Q, K = heads(seed)
        for k in (1, 2):
            found = measure(exact(Q, K), 9, k)
            assert found.needed == 1 / 90
            assert found.gamma >= 1 / 9
        assert measure(current(Q, K), 9, 2).theta > 10 * found.needed


def test_the_sets_are_much_better_than_what_is_promised():
    for seed in range(5):
        found = measure(exact(*heads(seed)), 9, 2)
        assert min(step.value / step.now for step in found.steps) > 0.6
        assert found.steps[-1].bound < 0.05 * found.steps[-1].best


def test_theorem_d32_follows_from_lemmas():
    for n, alpha, beta in itertools.product((1, 7, 500), (0.01, 0.5, 0.99), (0.0, 2.0)):
        theta, lost = alpha / (10 * n), beta / (10 * n)
        for i in range(1, n + 1):
            induction = GREEDY * (1 - theta) ** (2 * i) - 2 * i * lost  # twice: with the corrected D.30, too
            assert induction >= theorem_bound(1.0, alpha, beta)
    assert theorem_bound(2.0, 0.5, 0.1) == pytest.approx(GREEDY - 0.1)


# -- errata ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_definition_d28_looks_the_wrong_way(seed):
    """Printed: opt_i ≥ (1-γ) opt_{i-1}; the lemmas use opt_{i+1}. Sums only grow, so the printed γ is 0 and the lemma's
    conclusion fails with it; with the γ of the lemmas it holds."""
    f = exact(*heads(seed))
    printed = measure(f, 9, 2, printed=True)
    assert printed.gamma_printed == 0.0
    assert printed.theta == 0.0
    assert not all(step.holds for step in printed.steps)
    assert all(step.holds for step in measure(f, 9, 2).steps)


def test_the_first_step_is_not_monotonicity():
    """f(S_{i+1}) ≥ f(S_i) is put down to monotonicity, but S_i is no part of S_{i+1}. It holds as i may leave, too."""
    weights = (5.0, 4.0, 1.0, 2.0, 0.5)
    f = fixed(*weights)
    S = frozenset({1, 2})
    assert monotone_violation(lambda T: f(EMPTY, 5)(frozenset(s + 1 for s in T)), 5) <= 0.0
    forced = expand(f, S, 3, 2, keep_newest=True)
    assert forced == {1, 3}
    assert f(S, 3)(forced) < f(S, 3)(S)  # monotone, and yet it falls
    assert f(S, 3)(expand(f, S, 3, 2)) >= f(S, 3)(S)


@pytest.mark.parametrize("seed", range(4))
def test_a_free_choice_of_the_victim_never_lowers_the_value(seed):
    Q, K = heads(seed, n=12)
    rows = run(current(Q, K), 12, 3)
    assert any(not before <= after for before, after in itertools.pairwise(rows))
    for f in (tracked(Q, K, 3), current(Q, K)):
        S = run(f, 12, 3)
        assert all(f(S[i], i)(S[i + 1]) >= f(S[i], i)(S[i]) - 1e-12 for i in range(1, 13))


def test_the_third_line_has_a_stray_term():
    """Line 3 with its -i ε_0 does not give line 4; without it, it does. (θ = γ, opt_i = (1-γ) opt_{i+1}.)"""
    theta, gamma, i, after = 0.01, 0.01, 5, 3.0
    now = (1 - gamma) * after
    line_4 = (1 - theta) * GREEDY * (1 - theta) ** i * (1 - gamma) ** (i + 1) * after

    def line_3(stray):
        return (1 - theta) * (GREEDY * (1 - theta) ** i * (1 - gamma) ** i * now - i * stray)

    assert line_3(0.1) < line_4
    assert line_3(0.0) >= line_4 - 1e-12


def test_lemma_d30_needs_both_sides():
    """Erratum: its fourth line takes f̃(S_i) ≥ f(S_i), which no condition gives. With f̃ = 0 every printed condition
    holds for ε_0 = 0, and the run throws the only valuable token away."""
    f, nothing = fixed(1.0, 0.0, 0.0), lambda Z, i: lambda T: 0.0
    printed = measure(f, 3, 1, approximate=nothing, printed=True)
    assert (printed.theta, printed.gamma_printed, printed.gamma, printed.epsilon) == (0.0, 0.0, 0.0, 0.0)
    assert not all(step.holds for step in printed.steps)
    corrected = measure(f, 3, 1, approximate=nothing)
    assert corrected.shortfall == 1.0
    assert all(step.holds for step in corrected.steps)


@pytest.mark.parametrize("seed", range(6))
def test_lemma_d30_with_two_sided_errors(seed):
    """Random f̃ around a fixed f: the corrected bound holds in every step."""
    noise = random.Random(seed)
    f = fixed(*softmax([noise.gauss(0.0, 1.0) for _ in range(7)]))
    near = fixed(*[max(0.0, f(EMPTY, 7)(frozenset({s})) + noise.uniform(-0.1, 0.1)) for s in range(1, 8)])
    found = measure(f, 7, 2, approximate=near)
    assert all(step.holds for step in found.steps)
    assert found.epsilon > 0.0
