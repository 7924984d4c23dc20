"""The regression behind H2O's heavy hitters (App. D.17 to D.22): its derivatives in closed form, and Algorithm 4.

The letters are the paper's: ``u = exp(Ax)``, ``α = <u, 1>``, ``f = u / α``, ``c = f - b``. Derivatives are simple in
``z = Ax``, and ``A`` carries them to x. Both signs are here where the printed one is wrong (Lemma D.44, Part 5).
Everything is float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float64
from torch import Tensor

Point: TypeAlias = Float64[Tensor, "d"]
Rows: TypeAlias = Float64[Tensor, "n"]


@dataclass(frozen=True, eq=False)
class SoftmaxRegression:
    """``L = L_exp + L_sparse + L_reg`` of Definition D.43."""

    A: Float64[Tensor, "n d"]
    b: Rows
    w: Rows

    # -- Definitions D.35 to D.38 --------------------------------------------------------------------------------------

    def u(self, x: Point) -> Rows:
        """Return ``exp(Ax)``."""
        return (self.A @ x).exp()

    def alpha(self, x: Point) -> Float64[Tensor, ""]:
        """Return ``<u, 1>``."""
        return self.u(x).sum()

    def f(self, x: Point) -> Rows:
        """Return ``u / α``: the softmax of ``Ax``."""
        return self.u(x) / self.alpha(x)

    def c(self, x: Point) -> Rows:
        """Return ``f - b``, with the ``f`` of Definition D.37 (as printed, D.38 refers to itself)."""
        return self.f(x) - self.b

    # -- Definitions D.39 to D.43 --------------------------------------------------------------------------------------

    def loss_exp(self, x: Point) -> Float64[Tensor, ""]:
        """Return ``½ ‖c‖²``."""
        return 0.5 * self.c(x).square().sum()

    def loss_reg(self, x: Point) -> Float64[Tensor, ""]:
        """Return ``½ ‖diag(w) A x‖²``."""
        return 0.5 * (self.w * (self.A @ x)).square().sum()

    def loss_sparse(self, x: Point) -> Float64[Tensor, ""]:
        """Return ``‖exp(Ax)‖_1``."""
        return (self.A @ x).exp().abs().sum()

    def loss(self, x: Point) -> Float64[Tensor, ""]:
        """Return the sum of the three."""
        return self.loss_exp(x) + self.loss_sparse(x) + self.loss_reg(x)

    # -- Lemma D.44; the first axis is the one that is derived, the last the coordinate of x ---------------------------

    def u_slope(self, x: Point) -> Float64[Tensor, "n d"]:
        """Return Part 1: ``u ∘ A_i``."""
        return self.u(x)[:, None] * self.A

    def alpha_slope(self, x: Point) -> Point:
        """Return Part 2: ``<u, A_i>``."""
        return self.A.T @ self.u(x)

    def inverse_alpha_slope(self, x: Point) -> Point:
        """Return Part 3, of ``1 / α``: ``-α^{-1} <f, A_i>``."""
        return -(self.A.T @ self.f(x)) / self.alpha(x)

    def f_slope(self, x: Point) -> Float64[Tensor, "n d"]:
        """Return Part 4: ``f ∘ A_i - <f, A_i> f``."""
        f = self.f(x)
        return f[:, None] * self.A - torch.outer(f, self.A.T @ f)

    def gradient_exp(self, x: Point) -> Point:
        """Return Part 5, corrected: ``A^T (f ∘ c - <f, c> f)``."""
        f, c = self.f(x), self.c(x)
        return self.A.T @ (f * c - (f @ c) * f)

    def gradient_exp_printed(self, x: Point) -> Point:
        """Return Part 5 as printed, with a plus: ``A^T (f ∘ c + <c, f> f)``."""
        f, c = self.f(x), self.c(x)
        return self.A.T @ (f * c + (f @ c) * f)

    def gradient(self, x: Point) -> Point:
        """Return the gradient of the whole loss."""
        return self.gradient_exp(x) + self.alpha_slope(x) + self.A.T @ (self.w.square() * (self.A @ x))

    # -- Lemmas D.45 to D.47 -------------------------------------------------------------------------------------------

    def u_curvature(self, x: Point) -> Float64[Tensor, "n d d"]:
        """Return Lemma D.45: ``A_j ∘ u ∘ A_i``."""
        return self.u(x)[:, None, None] * self.A[:, :, None] * self.A[:, None, :]

    def alpha_curvature(self, x: Point) -> Float64[Tensor, "d d"]:
        """Return Lemma D.46: ``A^T diag(u) A``."""
        return self.A.T @ (self.u(x)[:, None] * self.A)

    def inner_exp(self, x: Point) -> Float64[Tensor, "n n"]:
        """Return the Hessian of ``L_exp`` in ``z``; ``J = diag(f) - f f^T`` is the derivative of the softmax."""
        f, c = self.f(x), self.c(x)
        J = f.diag() - torch.outer(f, f)
        return c[:, None] * J + f[:, None] * J - (f @ c) * J - torch.outer(f, J @ (c + f))

    def inner(self, x: Point) -> Float64[Tensor, "n n"]:
        """Return ``B(x)``, the inner matrix of the Hessian without ``W²``."""
        return self.inner_exp(x) + self.u(x).diag()

    def inner_diagonal(self, x: Point) -> Rows:
        """Return the diagonal of `inner`, computed without the matrix."""
        f, c, u = self.f(x), self.c(x), self.u(x)
        pull = f * (c + f) - f * (f @ (c + f))
        return (c + f - f @ c) * (f - f.square()) - f * pull + u

    def hessian(self, x: Point) -> Float64[Tensor, "d d"]:
        """Return ``A^T (B + W²) A``."""
        return self.A.T @ (self.inner(x) + self.w.square().diag()) @ self.A


def draw(n: int, d: int, *, radius: float, least: float, seed: int, curvature: float = 1.0) -> SoftmaxRegression:
    """Draw a problem that meets the conditions of Lemma D.47 and Theorem D.49.

    Args:
        n: rows of ``A``.
        d: coordinates of ``x``.
        radius: ``R``, the spectral norm of ``A``.
        least: every ``w_i²`` is this plus ``l / σ_min(A)²``.
        seed: seed of the random numbers.
        curvature: ``l``.
    """
    noise = torch.Generator().manual_seed(seed)
    A = torch.randn(n, d, generator=noise, dtype=torch.float64)
    A *= radius / torch.linalg.matrix_norm(A, ord=2)
    b = torch.rand(n, generator=noise, dtype=torch.float64)
    w = torch.full((n,), math.sqrt(least + curvature / _sigma_min(A) ** 2), dtype=torch.float64)
    return SoftmaxRegression(A, b / b.sum(), w)


def _sigma_min(A: Float64[Tensor, "n d"]) -> float:
    return float(torch.linalg.svdvals(A)[-1])


# -- Algorithm 4 -------------------------------------------------------------------------------------------------------

Curvature: TypeAlias = Callable[[SoftmaxRegression, Tensor], Tensor]
"""Line 5: maps a problem and a point to ``D``, the diagonal of the inner matrix."""


def diagonal(problem: SoftmaxRegression, x: Point) -> Rows:
    """Return line 5: ``B_diag(x) + w ∘ w``."""
    return problem.inner_diagonal(x) + problem.w.square()


def weights_alone(problem: SoftmaxRegression, x: Point) -> Rows:
    """Return ``w ∘ w``, which Lemma D.47, Part 2 compares with the whole inner matrix."""
    return problem.w.square()


def subsample(D: Rows, A: Float64[Tensor, "n d"], epsilon: float, delta: float, noise: torch.Generator) -> Rows:
    """Return line 6: weights, most of them 0, with ``A^T D̃ A`` within ``1 ± epsilon`` of ``A^T D A``.

    The paper does not name a method. Here each row stays with a probability in proportion to its leverage and is
    divided by that probability; the constant is that of the matrix Chernoff bound.

    Args:
        D: the diagonal, positive.
        A: the rows.
        epsilon: relative error.
        delta: probability of a larger error.
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
    """Yield ``x_1, x_2, …`` of Algorithm 4 from ``x_0 = x`` on, without end.

    Args:
        problem: the problem to minimise.
        x: the first point.
        curvature: line 5.
        sample: line 6; by default all rows stay.
        sign: sign of the step in line 9. The paper prints ``+``, which climbs.
    """
    while True:
        D = curvature(problem, x)
        if sample:
            D = sample(D)
        H = problem.A.T @ (D[:, None] * problem.A)
        x = x + sign * torch.linalg.solve(H, problem.gradient(x))
        yield x


def newton(problem: SoftmaxRegression, x: Point) -> Iterator[Point]:
    """Yield the points of Newton's method with the whole Hessian, without end."""
    while True:
        x = x - torch.linalg.solve(problem.hessian(x), problem.gradient(x))
        yield x


def minimum(problem: SoftmaxRegression) -> Point:
    """Return ``x*``, where the gradient is 0 to rounding, reached from 0 by `newton` in 51 steps at most."""
    x = torch.zeros(problem.A.shape[1], dtype=torch.float64)
    for step, x in enumerate(newton(problem, x)):  # noqa: B020 (the points follow each other)
        if step == 50 or float(problem.gradient(x).norm()) < 1e-13 * float(problem.w.square().max()):
            break
    return x


def errors(points: Iterator[Point], best: Point, steps: int) -> list[float]:
    """Return distances from ``best`` after each of the first ``steps`` steps."""
    return [float((x - best).norm()) for x, _ in zip(points, range(steps), strict=False)]
