"""Loss, gradient, Hessian of the regression: each formula against differentiation, each bound on random problems."""

import dataclasses
import math

import pytest
import torch
from torch.autograd.functional import hessian, jacobian

from kvkeep_lab.theory.regression import SoftmaxRegression, draw

FLOAT = torch.float64


def point(d, seed, *, norm=1.0):
    x = torch.randn(d, generator=torch.Generator().manual_seed(1000 + seed), dtype=FLOAT)
    return x * (norm / x.norm())


PROBLEMS = [(draw(n, d, radius=1.5, least=20.0, seed=n + d), point(d, n)) for n, d in ((1, 1), (4, 2), (7, 3), (6, 6))]


def finite(function, x, *, step=1e-5):
    """Central differences, the coordinate of x on the last axis."""
    columns = []
    for i in range(len(x)):
        shift = torch.zeros_like(x)
        shift[i] = step
        columns.append((function(x + shift) - function(x - shift)) / (2 * step))
    return torch.stack(columns, dim=-1)


def close(found, expected, *, rtol=1e-7):
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol * max(1.0, float(expected.abs().max())))


# -- definitions -------------------------------------------------------------------------------------------------------


def test_definitions_by_hand():
    problem = SoftmaxRegression(
        torch.tensor([[0.0], [math.log(3.0)]], dtype=FLOAT),
        torch.tensor([0.5, 0.5], dtype=FLOAT),
        torch.tensor([1.0, 2.0], dtype=FLOAT),
    )
    one = torch.ones(1, dtype=FLOAT)
    close(problem.u(one), torch.tensor([1.0, 3.0], dtype=FLOAT))
    close(problem.f(one), torch.tensor([0.25, 0.75], dtype=FLOAT))
    assert float(problem.alpha(one)) == float(problem.loss_sparse(one)) == pytest.approx(4.0)
    assert float(problem.loss_exp(one)) == pytest.approx(0.5 * 0.125)
    assert float(problem.loss_reg(one)) == pytest.approx(0.5 * (2.0 * math.log(3.0)) ** 2)
    assert float(problem.loss(one)) == pytest.approx(0.0625 + 4.0 + 2.0 * math.log(3.0) ** 2)


@pytest.mark.parametrize(("problem", "x"), PROBLEMS)
def test_claim_d42(problem, x):
    assert float(problem.loss_sparse(x)) == pytest.approx(float(problem.alpha(x)))


@pytest.mark.parametrize(("problem", "x"), PROBLEMS)
def test_definition_d38_means_f_of_d37(problem, x):
    """Erratum: it names itself. Taken so, c = c - b, which nothing solves unless b = 0."""
    close(problem.c(x) + problem.b, (problem.A @ x).softmax(dim=0))
    assert float((problem.c(x) - (problem.c(x) - problem.b)).abs().max()) > 0.1


# -- Lemma D.44 --------------------------------------------------------------------------------------------------------

SLOPES = {
    "Part 1": ("u", "u_slope"),
    "Part 2": ("alpha", "alpha_slope"),
    "Part 4": ("f", "f_slope"),
    "Part 4, c": ("c", "f_slope"),
    "Part 5": ("loss_exp", "gradient_exp"),
    "whole": ("loss", "gradient"),
}


@pytest.mark.parametrize(("problem", "x"), PROBLEMS)
@pytest.mark.parametrize("part", SLOPES)
def test_slopes(part, problem, x):
    function, slope = (getattr(problem, name) for name in SLOPES[part])
    close(slope(x), jacobian(function, x))
    close(slope(x), finite(function, x), rtol=1e-6)


@pytest.mark.parametrize(("problem", "x"), PROBLEMS)
def test_part_3(problem, x):
    close(problem.inverse_alpha_slope(x), jacobian(lambda y: 1.0 / problem.alpha(y), x))


@pytest.mark.parametrize(("problem", "x"), PROBLEMS[1:])
def test_part_5_has_the_wrong_sign(problem, x):
    """Erratum: a plus before f<c, f>. Off by 2 A^T f <c, f>; the corrected form is what differences say."""
    measured = finite(problem.loss_exp, x)
    close(problem.gradient_exp(x), measured, rtol=1e-6)
    printed = problem.gradient_exp_printed(x)
    assert float((printed - measured).norm()) > 0.05 * float(measured.norm())
    f, c = problem.f(x), problem.c(x)
    close(printed - problem.gradient_exp(x), 2.0 * (f @ c) * (problem.A.T @ f))


# -- Lemmas D.45 and D.46, and the Hessian -----------------------------------------------------------------------------


@pytest.mark.parametrize(("problem", "x"), PROBLEMS)
def test_curvatures(problem, x):
    close(problem.u_curvature(x), jacobian(problem.u_slope, x))
    close(problem.alpha_curvature(x), hessian(problem.alpha, x))
    close(problem.hessian(x), hessian(problem.loss, x))
    close(problem.hessian(x), finite(problem.gradient, x), rtol=1e-6)


@pytest.mark.parametrize(("problem", "x"), PROBLEMS)
def test_the_inner_matrix(problem, x):
    loss = lambda z: 0.5 * (z.softmax(dim=0) - problem.b).square().sum()  # noqa: E731
    inner = problem.inner_exp(x)
    close(inner, hessian(loss, problem.A @ x))
    close(inner, inner.T)


# -- Lemma D.47 --------------------------------------------------------------------------------------------------------


def eigenvalues(matrix):
    return torch.linalg.eigvalsh((matrix + matrix.T) / 2)


def corner(problem, seed):
    """The same problem with all of b in one place."""
    b = torch.zeros_like(problem.b)
    b[seed % len(b)] = 1.0
    return dataclasses.replace(problem, b=b)


def test_the_spectrum_of_the_inner_matrix_is_narrow():
    """Within -0.25 and 0.35 for every b of at most 1, so that 20 in Part 1 is far more than is needed."""
    low = high = 0.0
    for seed in range(400):
        problem = corner(draw(2 + seed % 4, 2, radius=0.5 + seed % 8, least=0.0, seed=seed), seed)
        found = eigenvalues(problem.inner_exp(point(2, seed)))
        low, high = min(low, float(found[0])), max(high, float(found[-1]))
    assert -0.25 < low < -0.15
    assert 0.2 < high < 0.35


@pytest.mark.parametrize("curvature", [0.1, 5.0])
@pytest.mark.parametrize("radius", [0.5, 2.0, 4.0])
def test_part_1_of_lemma_d47(radius, curvature):
    for seed in range(20):
        problem = corner(draw(6, 3, radius=radius, least=20.0, seed=seed, curvature=curvature), seed)
        assert float(eigenvalues(problem.hessian(point(3, seed, norm=radius)))[0]) >= curvature


def test_part_1_needs_a_bound_on_b():
    """Erratum: the lemma says nothing of b; with a large one the Hessian is indefinite. Theorem D.49 asks ‖b‖_1 ≤ 1."""
    problem = draw(6, 3, radius=1.0, least=20.0, seed=0)
    huge = dataclasses.replace(problem, b=1e4 * problem.b)
    assert float(eigenvalues(problem.hessian(point(3, 0)))[0]) >= 1.0
    assert float(eigenvalues(huge.hessian(point(3, 0)))[0]) < 0.0


def test_part_1_needs_its_weights():
    """Without the l/σ² in w² the smallest eigenvalue may stay below l."""
    problem = draw(6, 3, radius=0.5, least=20.0, seed=0, curvature=50.0)
    light = dataclasses.replace(problem, w=torch.full_like(problem.w, math.sqrt(20.0)))
    assert float(eigenvalues(light.hessian(point(3, 0)))[0]) < 50.0


@pytest.mark.parametrize("radius", [0.5, 1.0, 2.0])
def test_part_2_of_lemma_d47(radius):
    for seed in range(20):
        problem = corner(draw(6, 3, radius=radius, least=200.0 * math.exp(radius**2), seed=seed), seed)
        whole, weights = (
            problem.inner(point(3, seed, norm=radius)) + problem.w.square().diag(),
            problem.w.square().diag(),
        )
        assert float(eigenvalues(weights - 0.9 * whole)[0]) >= 0.0
        assert float(eigenvalues(1.1 * whole - weights)[0]) >= 0.0


def test_part_2_needs_a_bound_on_b():
    """Erratum: as in Part 1, nothing is said of b."""
    problem, x = draw(6, 3, radius=1.0, least=200.0 * math.e, seed=0), point(3, 0)
    for b, ok in ((problem.b, True), (1e4 * problem.b, False)):
        heavy = dataclasses.replace(problem, b=b)
        weights = heavy.w.square().diag()
        whole = heavy.inner(x) + weights
        bounds = (eigenvalues(weights - 0.9 * whole)[0], eigenvalues(1.1 * whole - weights)[0])
        assert (min(bounds) >= 0.0) == ok


def test_part_2_needs_more_than_the_weights_of_part_1():
    problem = draw(6, 3, radius=2.0, least=20.0, seed=0)
    x = 2.0 * torch.linalg.svd(problem.A).Vh[0]
    x = x * torch.sign((problem.A @ x).sum())
    whole = problem.inner(x) + problem.w.square().diag()
    assert float(eigenvalues(problem.w.square().diag() - 0.9 * whole)[0]) < 0.0


# -- Lemma D.48 --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("radius", [0.3, 1.0, 2.0])
def test_lemma_d48(radius):
    """Both constants hold, for steps of any length within the ball; the first one even without √n and 2."""
    for seed in range(40):
        problem = draw(6, 3, radius=radius, least=20.0, seed=seed)
        x, y = point(3, seed, norm=radius), point(3, seed + 77, norm=radius * (seed % 5) / 5)
        step = float((x - y).norm())
        bound = radius * math.exp(radius**2) * step
        assert float((problem.u(x) - problem.u(y)).norm()) <= bound <= 2.0 * math.sqrt(6.0) * bound
        change = torch.linalg.matrix_norm(problem.hessian(x) - problem.hessian(y), ord=2)
        assert float(change) <= 6**2 * math.exp(40.0 * radius**2) * step


def test_the_first_constant_of_lemma_d48_needs_the_exponential():
    problem = draw(6, 1, radius=2.0, least=20.0, seed=0)
    sign = float(torch.sign(problem.A[problem.A.abs().argmax()]))
    x, y = (torch.tensor([sign * norm], dtype=FLOAT) for norm in (2.0, 1.9))
    assert float((problem.u(x) - problem.u(y)).norm()) > 2.0 * 0.1
