"""Algorithm 4 of H2O (App. D.22): Newton steps with a Hessian whose inner matrix is diagonal and sampled by rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float64
from torch import Tensor

from kvkeep.research.theory.regression import Point, Rows, SoftmaxRegression

Curvature: TypeAlias = Callable[[SoftmaxRegression, Tensor], Tensor]
"""``D`` of line 5: a problem and a point to the diagonal of the inner matrix."""


def diagonal(problem: SoftmaxRegression, x: Point) -> Rows:
    """Line 5: ``B_diag(x) + w ∘ w``."""
    return problem.inner_diagonal(x) + problem.w.square()


def weights_alone(problem: SoftmaxRegression, x: Point) -> Rows:
    """``w ∘ w``, which Lemma D.47, Part 2 compares with the whole inner matrix."""
    return problem.w.square()


def subsample(D: Rows, A: Float64[Tensor, "n d"], epsilon: float, delta: float, noise: torch.Generator) -> Rows:
    """Line 6: weights of which most are 0, with ``A^T D̃ A`` within ``1 ± epsilon`` of ``A^T D A``.

    The paper leaves the method open; here each row stays by chance in proportion to its leverage and is divided by its
    chance, with the constant of the matrix Chernoff bound.

    Args:
        D: the diagonal, positive.
        A: the rows.
        epsilon: relative error.
        delta: probability with which it may be larger.
        noise: source of randomness.
    """
    orthonormal, _ = torch.linalg.qr(D.sqrt()[:, None] * A)
    leverage = orthonormal.square().sum(dim=1)
    chance = (3.0 * math.log(2.0 * A.shape[1] / delta) / epsilon**2 * leverage).clamp(max=1.0)
    stays = torch.rand(len(D), generator=noise, dtype=torch.float64) < chance
    return torch.where(stays, D / chance, 0.0)


def algorithm_4(
    problem: SoftmaxRegression,
    x: Point,
    *,
    curvature: Curvature = diagonal,
    sample: Callable[[Rows], Rows] | None = None,
    sign: Literal[-1, 1] = -1,
) -> Iterator[Point]:
    """Algorithm 4 from ``x_0 = x`` on, without an end; yields ``x_1, x_2, …``.

    Args:
        problem: what is minimised.
        x: the first point.
        curvature: line 5.
        sample: line 6; all rows if not given.
        sign: of the step in line 9. The paper prints ``+``, which climbs.
    """
    while True:
        D = curvature(problem, x)
        if sample:
            D = sample(D)
        H = problem.A.T @ (D[:, None] * problem.A)
        x = x + sign * torch.linalg.solve(H, problem.gradient(x))
        yield x


def newton(problem: SoftmaxRegression, x: Point) -> Iterator[Point]:
    """The same with the whole Hessian."""
    while True:
        x = x - torch.linalg.solve(problem.hessian(x), problem.gradient(x))
        yield x


def minimum(problem: SoftmaxRegression) -> Point:
    """``x*``: where the gradient is 0 to rounding, from 0 by `newton`."""
    x = torch.zeros(problem.A.shape[1], dtype=torch.float64)
    for step, x in enumerate(newton(problem, x)):  # noqa: B020 (the points follow each other)
        if step == 50 or float(problem.gradient(x).norm()) < 1e-13 * float(problem.w.square().max()):
            break
    return x


def errors(points: Iterator[Point], best: Point, steps: int) -> list[float]:
    """Distances from ``best`` after each of some steps."""
    return [float((x - best).norm()) for x, _ in zip(points, range(steps), strict=False)]
