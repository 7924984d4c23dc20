"""H2O's claims about its regression: derivatives and bounds (App. D.17 to D.21), and Newton steps (App. D.22)."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvkeep_lab.theory.claim import Claim, ClaimOutcome, claim, judge
from kvkeep_lab.theory.regression import (
    SoftmaxRegression,
    algorithm_4,
    draw,
    errors,
    minimum,
    subsample,
    weights_alone,
)

_LOSS = "lab/tests/theory/test_regression.py::"
_STEPS = "lab/tests/theory/test_newton.py::"

SMALL = 1e-6
ENOUGH = 200.0 * math.e
"""The weights that Lemma D.47, Part 2 asks for at R = 1."""


def point(d: int, seed: int, *, norm: float = 1.0) -> Tensor:
    """Return a random point at a distance of ``norm`` from the origin."""
    x = torch.randn(d, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    return x * (norm / float(x.norm()))


def _problems() -> Iterator[tuple[SoftmaxRegression, Tensor]]:
    for seed, (n, d) in enumerate(((4, 2), (7, 3), (6, 6))):
        yield draw(n, d, radius=1.5, least=20.0, seed=seed), point(d, seed)


def _differences(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return central differences; the last axis is the coordinate of x."""
    shifts = 1e-5 * torch.eye(len(x), dtype=torch.float64)
    return torch.stack([(function(x + shift) - function(x - shift)) / 2e-5 for shift in shifts], dim=-1)


def _apart(found: Tensor, measured: Tensor) -> float:
    return float((found - measured).norm() / measured.norm())


def _lowest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0])


def _heavier(problem: SoftmaxRegression, factor: float) -> SoftmaxRegression:
    return dataclasses.replace(problem, b=factor * problem.b)


# -- derivatives -------------------------------------------------------------------------------------------------------


@claim("h2o-definition-d38", "H2O, Definition D.38", f"{_LOSS}test_definition_d38_means_f_of_d37")
def _self_reference() -> ClaimOutcome:
    """c = f - b with the f of Definition D.38."""
    # As printed, f is c itself, and the equation c = c - b is off by b.
    left = meant = 0.0
    for problem, x in _problems():
        c = problem.c(x)
        left = max(left, float((c - (c - problem.b)).abs().max()))
        meant = max(meant, float((c + problem.b - (problem.A @ x).softmax(dim=0)).abs().max()))
    by = f"c = c - b is off by {left:.2f}, with the f of D.37 by {meant:.0e}"
    return judge(by, printed=left < SMALL, corrected=meant < SMALL)


@claim("h2o-lemma-d44", "H2O, Lemma D.44, Parts 1 to 4", f"{_LOSS}test_slopes")
def _slopes() -> ClaimOutcome:
    """The slopes of u, α, 1/α and f."""
    worst = 0.0
    for p, x in _problems():
        inverse = lambda y, p=p: 1.0 / p.alpha(y)  # noqa: E731
        parts = ((p.u, p.u_slope), (p.alpha, p.alpha_slope), (inverse, p.inverse_alpha_slope), (p.f, p.f_slope))
        worst = max(worst, *(_apart(slope(x), _differences(function, x)) for function, slope in parts))
    return judge(f"within {worst:.0e} of differences", printed=worst < SMALL)


@claim("h2o-lemma-d44-part-5", "H2O, Lemma D.44, Part 5", f"{_LOSS}test_part_5_has_the_wrong_sign")
def _part_5() -> ClaimOutcome:
    """The gradient of L_exp is A^T(f<c, f> + f∘c)."""
    printed = corrected = 0.0
    for problem, x in _problems():
        measured = _differences(problem.loss_exp, x)
        printed = max(printed, _apart(problem.gradient_exp_printed(x), measured))
        corrected = max(corrected, _apart(problem.gradient_exp(x), measured))
    by = f"off by up to {printed:.0%} of the gradient; with a minus before f<c, f> within {corrected:.0e}"
    return judge(by, printed=printed < SMALL, corrected=corrected < SMALL)


@claim("h2o-lemmas-d45-d46", "H2O, Lemmas D.45 and D.46", f"{_LOSS}test_curvatures")
def _curvatures() -> ClaimOutcome:
    """The second derivatives of u and α."""
    worst = 0.0
    for p, x in _problems():
        parts = ((p.u_slope, p.u_curvature), (p.alpha_slope, p.alpha_curvature))
        worst = max(worst, *(_apart(curvature(x), _differences(slope, x)) for slope, curvature in parts))
    return judge(f"within {worst:.0e} of differences", printed=worst < SMALL)


@claim("h2o-hessian", "H2O, App. D.20", f"{_LOSS}test_the_inner_matrix")
def _form() -> ClaimOutcome:
    """The Hessian of the whole loss is A^T(B(x) + W²)A."""
    worst = uneven = 0.0
    for problem, x in _problems():
        worst = max(worst, _apart(problem.hessian(x), _differences(problem.gradient, x)))
        inner = problem.inner(x)
        uneven = max(uneven, float((inner - inner.T).abs().max()))
    by = f"within {worst:.0e} of differences of the gradient, B symmetric to {uneven:.0e}"
    return judge(by, printed=max(worst, uneven) < SMALL)


# -- bounds ------------------------------------------------------------------------------------------------------------


@claim("h2o-lemma-d47-part-1", "H2O, Lemma D.47, Part 1", f"{_LOSS}test_part_1_needs_a_bound_on_b")
def _part_1() -> ClaimOutcome:
    """If w_i² ≥ 20 + l/σ_min(A)², the Hessian is at least l."""
    least, heavy = math.inf, math.inf
    for seed in range(20):
        problem, x = draw(6, 3, radius=2.0, least=20.0, seed=seed), point(3, seed, norm=2.0)
        least = min(least, _lowest(problem.hessian(x)))
        heavy = min(heavy, _lowest(_heavier(problem, 1e4).hessian(x)))
    by = f"asked for 1, smallest eigenvalue {least:.1f} with ‖b‖_1 = 1, {heavy:.0f} with 10000, which the lemma allows"
    return judge(by, printed=heavy >= 1.0, corrected=least >= 1.0)


@claim("h2o-lemma-d47-part-2", "H2O, Lemma D.47, Part 2", f"{_LOSS}test_part_2_needs_a_bound_on_b")
def _part_2() -> ClaimOutcome:
    """If w_i² ≥ 200 exp(R²) + l/σ_min(A)², W² is the inner matrix to a tenth."""

    def share(problem: SoftmaxRegression, x: Tensor) -> float:
        """Return how far W² is from the inner matrix, as a share of the latter."""
        weights = problem.w.square()
        root = weights.rsqrt()
        spectrum = torch.linalg.eigvalsh(root[:, None] * (problem.inner(x) + weights.diag()) * root)
        return float((1.0 / spectrum - 1.0).abs().max())

    problems = [(draw(6, 3, radius=1.0, least=ENOUGH, seed=seed), point(3, seed)) for seed in range(20)]
    light = max(share(problem, x) for problem, x in problems)
    heavy = max(share(_heavier(problem, 1e4), x) for problem, x in problems)
    by = f"allowed is a tenth; {light:.4f} with ‖b‖_1 = 1, {heavy:.1f} with 10000, which the lemma allows"
    return judge(by, printed=heavy <= 0.1, corrected=light <= 0.1)


def _lipschitz(change: Callable[[SoftmaxRegression, Tensor], Tensor], bound: Callable[[float], float]) -> float:
    """Return the largest ratio of a change between two points to its bound."""
    worst = 0.0
    for seed in range(40):
        radius = (0.3, 1.0, 2.0)[seed % 3]
        problem = draw(6, 3, radius=radius, least=20.0, seed=seed)
        x, y = point(3, seed, norm=radius), point(3, seed + 77, norm=radius * (seed % 5) / 5)
        moved = torch.linalg.matrix_norm(change(problem, x) - change(problem, y), ord=2)
        worst = max(worst, float(moved / (x - y).norm()) / bound(radius))
    return worst


@claim("h2o-lemma-d48-u", "H2O, proof of Lemma D.48", f"{_LOSS}test_lemma_d48")
def _u_lipschitz() -> ClaimOutcome:
    """u changes by at most 2√n R exp(R²) times the distance."""
    bound = lambda R: 2.0 * math.sqrt(6.0) * R * math.exp(R * R)  # noqa: E731
    worst = _lipschitz(lambda problem, x: problem.u(x)[:, None], bound)
    return judge(f"at most {worst:.1%} of the bound for 40 pairs of points, R up to 2", printed=worst <= 1.0)


@claim("h2o-lemma-d48", "H2O, Lemma D.48", f"{_LOSS}test_lemma_d48")
def _hessian_lipschitz() -> ClaimOutcome:
    """The Hessian changes by at most n² exp(40R²) times the distance."""
    worst = _lipschitz(lambda problem, x: problem.hessian(x), lambda R: 36.0 * math.exp(40.0 * R * R))
    return judge(f"at most {worst:.0e} of the bound for 40 pairs of points, R up to 2", printed=worst <= 1.0)


# -- Newton steps ------------------------------------------------------------------------------------------------------


def _start() -> tuple[SoftmaxRegression, Tensor, Tensor]:
    """Return a problem, its minimum and a point at a distance of 0.3."""
    problem = draw(12, 3, radius=1.0, least=ENOUGH, seed=0)
    best = minimum(problem)
    return problem, best, best + 0.3 * point(3, 0)


@claim("h2o-algorithm-4", "H2O, Algorithm 4, line 9", f"{_STEPS}test_the_printed_plus_doubles_the_error")
def _sign() -> ClaimOutcome:
    """x + H^(-1)g is a step to the minimum."""
    problem, best, x = _start()
    up, down = (errors(algorithm_4(problem, x, sign=sign), best, 3) for sign in (1, -1))
    by = f"from 0.3 to {up[-1]:.2f} in 3 steps; with a minus to {down[-1]:.0e}"
    return judge(by, printed=up[-1] < 0.3, corrected=down[-1] < 0.3)


@claim("h2o-theorem-d49", "H2O, Theorem D.49", f"{_STEPS}test_the_iterations_of_theorem_d49")
def _iterations() -> ClaimOutcome:
    """log(‖x_0 - x*‖/ε) steps with sampled rows end within ε, with probability 1 - δ."""
    problem = draw(900, 3, radius=1.0, least=ENOUGH, seed=3)
    best = minimum(problem)
    x, epsilon, reached = best + 0.3 * point(3, 0), 1e-6, 0
    steps = math.floor(math.log(0.3 / epsilon)) + 1
    noise, used = torch.Generator().manual_seed(0), []

    def sample(D: Tensor) -> Tensor:
        sampled = subsample(D, problem.A, 0.25, 0.1, noise)
        used.append(int((sampled > 0).sum()))
        return sampled

    for _ in range(10):
        reached += errors(algorithm_4(problem, x, sample=sample), best, steps)[-1] <= epsilon
    by = f"{reached} of 10 runs reach 1e-06 within {steps} steps, with up to {max(used)} of {len(problem.b)} rows"
    return judge(by, printed=reached >= 9)


@claim("h2o-weights-alone", "H2O, Lemma D.47, Part 2, in Algorithm 4", f"{_STEPS}test_the_weights_alone_contract")
def _ninth() -> ClaimOutcome:
    """A step with W² alone leaves at most a ninth of the error."""
    problem, best, x = _start()
    path = [0.3, *errors(algorithm_4(problem, x, curvature=weights_alone), best, 3)]
    left = max(after / before for before, after in itertools.pairwise(path))
    return judge(f"a step leaves at most {left:.1%} of the error, allowed is 1/9", printed=left <= 1.0 / 9.0)


@claim("h2o-epsilon-1", "H2O, Algorithm 4, line 6", f"{_STEPS}test_epsilon_1_has_to_be_small")
def _epsilon_1() -> ClaimOutcome:
    """Any constant ε_1 is small enough for that number of steps."""
    # The worst inner matrix within ``1 ± ε_1`` is ``1 - ε_1`` times the right one.
    problem, best, x = _start()

    def factor(epsilon: float) -> float:
        path = errors(algorithm_4(problem, x, sample=lambda D: (1.0 - epsilon) * D), best, 3)
        return path[2] / path[1]

    wide, narrow = factor(0.6), factor(1.0 / (1.0 + math.e))
    by = f"with 0.6 a step leaves {wide:.2f} of the error, with 1/(1+e) {narrow:.3f}; asked for is 1/e"
    return judge(by, printed=wide <= 1.0 / math.e, corrected=narrow <= 1.01 / math.e)


CLAIMS: tuple[Claim, ...] = (
    *(_self_reference, _slopes, _part_5, _curvatures, _form, _part_1, _part_2, _u_lipschitz, _hessian_lipschitz),
    *(_sign, _iterations, _ninth, _epsilon_1),
)
