"""H2O's claims about the derivatives of its regression (App. D.17 to D.21)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from kvkeep.research.theory.claim import Claim, Outcome, judge
from kvkeep.research.theory.regression import SoftmaxRegression, draw

SMALL = 1e-6
ENOUGH = 200.0 * math.e
"""Weights that Lemma D.47, Part 2 asks for at R = 1."""


def point(d: int, seed: int, *, norm: float = 1.0) -> Tensor:
    """A random point at a distance of ``norm`` from the origin."""
    x = torch.randn(d, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    return x * (norm / float(x.norm()))


def _problems() -> Iterator[tuple[SoftmaxRegression, Tensor]]:
    for seed, (n, d) in enumerate(((4, 2), (7, 3), (6, 6))):
        yield draw(n, d, radius=1.5, least=20.0, seed=seed), point(d, seed)


def _differences(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Central differences, the coordinate of x on the last axis."""
    shifts = 1e-5 * torch.eye(len(x), dtype=torch.float64)
    return torch.stack([(function(x + shift) - function(x - shift)) / 2e-5 for shift in shifts], dim=-1)


def _apart(found: Tensor, measured: Tensor) -> float:
    return float((found - measured).norm() / measured.norm())


def _lowest(matrix: Tensor) -> float:
    return float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0])


def _heavier(problem: SoftmaxRegression, factor: float) -> SoftmaxRegression:
    return dataclasses.replace(problem, b=factor * problem.b)


# -- derivatives -------------------------------------------------------------------------------------------------------


def _self_reference() -> Outcome:
    """``c = f - b`` with the f of D.37; with c itself in the place of f the equation leaves b over."""
    left = meant = 0.0
    for problem, x in _problems():
        c = problem.c(x)
        left = max(left, float((c - (c - problem.b)).abs().max()))
        meant = max(meant, float((c + problem.b - (problem.A @ x).softmax(dim=0)).abs().max()))
    by = f"c = c - b is off by {left:.2f}, with the f of D.37 by {meant:.0e}"
    return judge(by, printed=left < SMALL, corrected=meant < SMALL)


def _slopes() -> Outcome:
    worst = 0.0
    for p, x in _problems():
        inverse = lambda y, p=p: 1.0 / p.alpha(y)  # noqa: E731
        parts = ((p.u, p.u_slope), (p.alpha, p.alpha_slope), (inverse, p.inverse_alpha_slope), (p.f, p.f_slope))
        worst = max(worst, *(_apart(slope(x), _differences(function, x)) for function, slope in parts))
    return judge(f"within {worst:.0e} of differences", printed=worst < SMALL)


def _part_5() -> Outcome:
    printed = corrected = 0.0
    for problem, x in _problems():
        measured = _differences(problem.loss_exp, x)
        printed = max(printed, _apart(problem.gradient_exp_printed(x), measured))
        corrected = max(corrected, _apart(problem.gradient_exp(x), measured))
    by = f"off by up to {printed:.0%} of the gradient; with a minus before f<c, f> within {corrected:.0e}"
    return judge(by, printed=printed < SMALL, corrected=corrected < SMALL)


def _curvatures() -> Outcome:
    worst = 0.0
    for p, x in _problems():
        parts = ((p.u_slope, p.u_curvature), (p.alpha_slope, p.alpha_curvature))
        worst = max(worst, *(_apart(curvature(x), _differences(slope, x)) for slope, curvature in parts))
    return judge(f"within {worst:.0e} of differences", printed=worst < SMALL)


def _form() -> Outcome:
    worst = uneven = 0.0
    for problem, x in _problems():
        worst = max(worst, _apart(problem.hessian(x), _differences(problem.gradient, x)))
        inner = problem.inner(x)
        uneven = max(uneven, float((inner - inner.T).abs().max()))
    by = f"within {worst:.0e} of differences of the gradient, B symmetric to {uneven:.0e}"
    return judge(by, printed=max(worst, uneven) < SMALL)


# -- bounds ------------------------------------------------------------------------------------------------------------


def _part_1() -> Outcome:
    least, heavy = math.inf, math.inf
    for seed in range(20):
        problem, x = draw(6, 3, radius=2.0, least=20.0, seed=seed), point(3, seed, norm=2.0)
        least = min(least, _lowest(problem.hessian(x)))
        heavy = min(heavy, _lowest(_heavier(problem, 1e4).hessian(x)))
    by = f"asked for 1, smallest eigenvalue {least:.1f} with ‖b‖_1 = 1, {heavy:.0f} with 10000, which the lemma allows"
    return judge(by, printed=heavy >= 1.0, corrected=least >= 1.0)


def _part_2() -> Outcome:
    def share(problem: SoftmaxRegression, x: Tensor) -> float:
        """How far W² is from the inner matrix, as a share of the latter."""
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
    """The largest share of a bound that a change between two points has taken."""
    worst = 0.0
    for seed in range(40):
        radius = (0.3, 1.0, 2.0)[seed % 3]
        problem = draw(6, 3, radius=radius, least=20.0, seed=seed)
        x, y = point(3, seed, norm=radius), point(3, seed + 77, norm=radius * (seed % 5) / 5)
        moved = torch.linalg.matrix_norm(change(problem, x) - change(problem, y), ord=2)
        worst = max(worst, float(moved / (x - y).norm()) / bound(radius))
    return worst


def _u_lipschitz() -> Outcome:
    bound = lambda R: 2.0 * math.sqrt(6.0) * R * math.exp(R * R)  # noqa: E731
    worst = _lipschitz(lambda problem, x: problem.u(x)[:, None], bound)
    return judge(f"at most {worst:.1%} of the bound for 40 pairs of points, R up to 2", printed=worst <= 1.0)


def _hessian_lipschitz() -> Outcome:
    worst = _lipschitz(lambda problem, x: problem.hessian(x), lambda R: 36.0 * math.exp(40.0 * R * R))
    return judge(f"at most {worst:.0e} of the bound for 40 pairs of points, R up to 2", printed=worst <= 1.0)


_LOSS = "tests/research/test_regression.py::"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "h2o-definition-d38",
        "H2O, Definition D.38",
        "c = f - b with the f of Definition D.38.",
        f"{_LOSS}test_definition_d38_means_f_of_d37",
        _self_reference,
    ),
    Claim(
        "h2o-lemma-d44",
        "H2O, Lemma D.44, Parts 1 to 4",
        "The slopes of u, α, 1/α and f.",
        f"{_LOSS}test_slopes",
        _slopes,
    ),
    Claim(
        "h2o-lemma-d44-part-5",
        "H2O, Lemma D.44, Part 5",
        "The gradient of L_exp is A^T(f<c, f> + f∘c).",
        f"{_LOSS}test_part_5_has_the_wrong_sign",
        _part_5,
    ),
    Claim(
        "h2o-lemmas-d45-d46",
        "H2O, Lemmas D.45 and D.46",
        "The second derivatives of u and α.",
        f"{_LOSS}test_curvatures",
        _curvatures,
    ),
    Claim(
        "h2o-hessian",
        "H2O, App. D.20",
        "The Hessian of the whole loss is A^T(B(x) + W²)A.",
        f"{_LOSS}test_the_inner_matrix",
        _form,
    ),
    Claim(
        "h2o-lemma-d47-part-1",
        "H2O, Lemma D.47, Part 1",
        "If w_i² ≥ 20 + l/σ_min(A)², the Hessian is at least l.",
        f"{_LOSS}test_part_1_needs_a_bound_on_b",
        _part_1,
    ),
    Claim(
        "h2o-lemma-d47-part-2",
        "H2O, Lemma D.47, Part 2",
        "If w_i² ≥ 200 exp(R²) + l/σ_min(A)², W² is the inner matrix to a tenth.",
        f"{_LOSS}test_part_2_needs_a_bound_on_b",
        _part_2,
    ),
    Claim(
        "h2o-lemma-d48-u",
        "H2O, proof of Lemma D.48",
        "u changes by at most 2√n R exp(R²) times the distance.",
        f"{_LOSS}test_lemma_d48",
        _u_lipschitz,
    ),
    Claim(
        "h2o-lemma-d48",
        "H2O, Lemma D.48",
        "The Hessian changes by at most n² exp(40R²) times the distance.",
        f"{_LOSS}test_lemma_d48",
        _hessian_lipschitz,
    ),
)
