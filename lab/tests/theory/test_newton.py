"""Algorithm 4: it goes down with a minus, up with the printed plus; how fast, with which inner matrix."""

import itertools
import math

import pytest
import torch

from kvkeep_lab.theory.regression import (
    algorithm_4,
    diagonal,
    draw,
    errors,
    minimum,
    newton,
    subsample,
    weights_alone,
)

RADIUS = 1.0
ENOUGH = 200.0 * math.exp(RADIUS**2)
"""What Lemma D.47, Part 2 and Theorem D.49 ask of the weights."""


def start(best, distance=0.3):
    return best + distance / math.sqrt(len(best)) * torch.ones_like(best)


@pytest.fixture(params=[0, 1, 2])
def case(request):
    problem = draw(12, 3, radius=RADIUS, least=ENOUGH, seed=request.param)
    best = minimum(problem)
    return problem, best


def test_the_minimum_is_one(case):
    problem, best = case
    assert float(problem.gradient(best).norm()) < 1e-9
    noise = torch.Generator().manual_seed(0)
    for _ in range(20):
        near = best + 1e-3 * torch.randn(3, generator=noise, dtype=torch.float64)
        assert float(problem.loss(near)) > float(problem.loss(best))


def test_the_printed_plus_doubles_the_error(case):
    """Erratum: line 9 prints x + H^{-1} g."""
    problem, best = case
    printed = errors(algorithm_4(problem, start(best), sign=1), best, 4)
    assert [error / 0.3 for error in printed] == pytest.approx([2.0, 4.0, 8.0, 16.0], rel=0.02)
    assert errors(algorithm_4(problem, start(best)), best, 4)[-1] < 1e-12


def test_newton_with_the_whole_hessian_is_quadratic():
    """Of two steps the second squares the error of the first, up to one constant."""
    problem = draw(12, 3, radius=2.0, least=1.0, seed=0, curvature=0.1)
    best = minimum(problem)
    constants = []
    for distance in (0.4, 0.2, 0.1, 0.05):
        (after,) = errors(newton(problem, start(best, distance)), best, 1)
        constants.append(after / distance**2)
    assert max(constants) < 2.0 * min(constants)
    assert constants[-1] > 1e-6


def test_the_weights_alone_contract(case):
    """Lemma D.47, Part 2: W² is within a tenth of the inner matrix, so a step leaves at most 1/9 of the error."""
    problem, best = case
    path = [0.3, *errors(algorithm_4(problem, start(best), curvature=weights_alone), best, 4)]
    assert all(after <= before / 9 for before, after in itertools.pairwise(path))
    assert path[1] > 1e-6  # linear: one step does not end it


def test_the_weights_alone_diverge_when_they_are_too_small():
    problem = draw(12, 1, radius=3.0, least=0.1, seed=0, curvature=0.1)
    best = minimum(problem)
    assert errors(algorithm_4(problem, start(best, 0.01), curvature=weights_alone), best, 1)[0] > 0.02
    assert errors(algorithm_4(problem, start(best, 0.01)), best, 1)[0] < 0.005


@pytest.mark.parametrize("accuracy", [1e-3, 1e-8])
def test_the_iterations_of_theorem_d49(accuracy):
    """log(distance / ε) steps and the one more that the loop takes, rows sampled to a quarter, in 6 of 6 runs."""
    problem = draw(900, 3, radius=RADIUS, least=ENOUGH, seed=3)
    best = minimum(problem)
    steps = math.floor(math.log(0.3 / accuracy)) + 1
    for seed in range(6):
        noise = torch.Generator().manual_seed(seed)
        path = algorithm_4(
            problem, start(best), sample=lambda D, noise=noise: subsample(D, problem.A, 0.25, 0.1, noise)
        )
        found = errors(path, best, steps)
        assert found[-1] <= accuracy
        assert found[0] > 1e-3  # rows are missing: with all of them one step would leave less


def test_epsilon_1_has_to_be_small():
    """Erratum: ε_1 = Θ(1). An inner matrix within 1 ± 0.6 may be 0.4 of the right one: each step overshoots, and the
    error grows by half. The number of steps needs ε_1 / (1 - ε_1) ≤ 1/e, so ε_1 ≤ 1/(1 + e) = 0.27."""
    problem = draw(12, 3, radius=RADIUS, least=ENOUGH, seed=0)
    best = minimum(problem)
    for epsilon_1, factor in ((0.6, 1.5), (1.0 / (1.0 + math.e), 1.0 / math.e)):
        path = errors(algorithm_4(problem, start(best), sample=lambda D, e=epsilon_1: (1.0 - e) * D), best, 3)
        assert path[2] / path[1] == pytest.approx(factor, rel=0.01)


# -- line 6 ------------------------------------------------------------------------------------------------------------


def ratios(problem, D, sampled):
    """Eigenvalues of the sampled matrix in units of the whole one."""
    whole, part = (problem.A.T @ (weights[:, None] * problem.A) for weights in (D, sampled))
    L = torch.linalg.cholesky(whole)
    half = torch.linalg.solve_triangular(L, part, upper=False)
    return torch.linalg.eigvalsh(torch.linalg.solve_triangular(L, half.T, upper=False))


def test_sampled_rows_are_few_and_near():
    problem = draw(900, 3, radius=RADIUS, least=ENOUGH, seed=3)
    D = diagonal(problem, torch.zeros(3, dtype=torch.float64))
    found = []
    for seed in range(20):
        sampled = subsample(D, problem.A, 0.3, 0.1, torch.Generator().manual_seed(seed))
        assert 100 < int((sampled > 0).sum()) < 600
        found.append(float((ratios(problem, D, sampled) - 1.0).abs().max()))
    assert sum(error > 0.3 for error in found) <= 3
    assert max(found) > 0.03


def test_sampling_is_right_on_average():
    """Also where leverage is uneven: the heavy rows always stay, the light ones count for more when they do."""
    problem = draw(60, 2, radius=RADIUS, least=ENOUGH, seed=1)
    D = torch.linspace(0.1, 10.0, 60, dtype=torch.float64) ** 2
    draws = [subsample(D, problem.A, 3.0, 0.5, torch.Generator().manual_seed(seed)) for seed in range(400)]
    mean = torch.stack(draws).mean(dim=0)
    assert 0.05 < float((torch.stack(draws) == 0).double().mean()) < 0.99
    torch.testing.assert_close(ratios(problem, D, mean), torch.ones(2, dtype=torch.float64), rtol=0.1, atol=0.0)


def test_the_diagonal_is_that_of_the_inner_matrix(case):
    problem, best = case
    x = start(best)
    torch.testing.assert_close(diagonal(problem, x), (problem.inner(x) + problem.w.square().diag()).diagonal())
    assert torch.equal(weights_alone(problem, x), problem.w.square())
