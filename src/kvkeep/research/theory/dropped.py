"""How much attention is lost with the smallest scores, if scores follow a power law: Scissorhands, Theorem B.3.

``q = B / T_max`` is the share of tokens that stay. Scores are ``v / C``, with ``v`` drawn from the density
``∝ (x + b)^{-k}`` on ``[0, u - b]`` and ``C`` their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class PowerLaw:
    """The density ``c (x + b)^{-k}`` on ``[0, u - b]``, ``k > 2``."""

    k: float
    u: float = math.inf
    b: float = 1.0

    @property
    def _mass(self) -> float:
        return math.pow(self.b, 1 - self.k) - math.pow(self.u, 1 - self.k)

    def quantile(self, p: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """The value below which a share ``p`` of all draws lies."""
        return (math.pow(self.b, 1 - self.k) - p * self._mass).pow(1 / (1 - self.k)) - self.b

    def partial_mean(self, x: float) -> float:
        """``∫_0^x v f(v) dv``: what draws below ``x`` add to the mean. The paper's ``g(x) - g(0)``, times ``c``."""
        k, b = self.k, self.b
        if math.isinf(x):
            return math.pow(b, 2 - k) / ((k - 2) * self._mass)
        return (math.pow(b, 2 - k) - math.pow(x + b, 1 - k) * ((k - 1) * x + b)) / ((k - 2) * self._mass)

    @property
    def mean(self) -> float:
        """The mean of a draw, ``Δ / (k - 2)`` in the paper."""
        return self.partial_mean(self.u - self.b)

    @property
    def delta_ratio(self) -> float:
        """``Δ / b``; the paper bounds it from above by 0.98 and uses it as a bound from below."""
        return self.mean * (self.k - 2) / self.b

    @property
    def printed_delta_ratio(self) -> float:
        """``Δ / b`` by the closed form that the proof prints last."""
        k, b, u = self.k, self.b, self.u
        return 1.0 - (k - 1) * math.pow(u / b, 1 - k) * (b - u) / self._mass / b

    def dropped_mass(self, q: float) -> float:
        """The share of all mass in the smallest ``1 - q`` of the draws, for many draws."""
        edge = float(self.quantile(torch.tensor(1.0 - q, dtype=torch.float64)))
        return self.partial_mean(edge) / self.mean

    def sampled_dropped_mass(self, q: float, n: int, runs: int, generator: torch.Generator) -> Float[Tensor, " runs"]:
        """The same for ``n`` draws, measured in each of so many runs."""
        v = self.quantile(torch.rand(runs, n, generator=generator, dtype=torch.float64)).sort(dim=1).values
        return v[:, : n - round(q * n)].sum(dim=1) / v.sum(dim=1)


def dropped_mass(q: float, k: float) -> float:
    """``M(q)``: the dropped mass of many draws without an upper end (``u → ∞``), in closed form."""
    return 1.0 + (k - 2) * q - (k - 1) * math.pow(q, (k - 2) / (k - 1))


def bracket(q: float, k: float, epsilon: float = 0.0) -> float:
    """``k - (k - 1) ((1 - ε) / (q - ε))^{1/(k-1)}``, the last factor of Equations 4 and 11."""
    return k - (k - 1) * math.pow((1 - epsilon) / (q - epsilon), 1 / (k - 1))


def printed_dropped_mass(q: float, k: float, epsilon: float = 0.0) -> float:
    """The right side of Equation 11: the printed bound on the dropped mass."""
    return (1 - q) / (0.98 * (1 - epsilon) ** 2) * bracket(q, k, epsilon)


def printed_error(q: float, k: float, epsilon: float = 0.0) -> float:
    """The right side of Equation 4: the printed bound on ``E‖x_t - x̃_t‖``."""
    return 2.1 * (1 - q) / (1 - epsilon) ** 2 * bracket(q, k, epsilon)


def bracket_root(k: float) -> float:
    """The share ``q`` at which the bracket is 0 without ``ε``; below it the printed bound is negative."""
    return math.pow((k - 1) / k, k - 1)


def line_before(q: float, k: float, *, delta_ratio: float = 1.0, epsilon: float = 0.0) -> float:
    """The proof's last line but one: ``b (1 - q) / Δ(1-ε)² - (k - 1)(q - ε) γ / Δ(1-ε)²`` with its ``γ``.

    The printed end of the proof subtracts ``1 - q`` times the same instead of ``q - ε`` times: that is less, and so
    still a bound, only if half of the tokens or more stay.
    """
    gamma = math.pow((q - epsilon) / (1 - epsilon), 1 / (1 - k)) - 1.0
    return ((1 - q) - (k - 1) * (q - epsilon) * gamma) / (delta_ratio * (1 - epsilon) ** 2)


def printed_failure(q: float, epsilon: float, t: int) -> float:
    """The printed bound on the probability that too few of ``t - 1`` draws fall below ``γ``."""
    return math.exp(-2 * (t - 1) * (1 - q) ** 2 / (1 - epsilon) ** 2)


def hoeffding_failure(q: float, epsilon: float, t: int) -> float:
    """The same by Hoeffding's inequality: with the ``ε²`` that the printed exponent has lost."""
    return math.exp(-2 * (t - 1) * epsilon**2 * (1 - q) ** 2 / (1 - epsilon) ** 2)


def sampled_failure(q: float, epsilon: float, t: int, runs: int, generator: torch.Generator) -> float:
    """How often fewer than ``(1 - q)(t - 1)`` of ``t - 1`` draws fall below a ``γ`` of probability ``(1-q)/(1-ε)``."""
    below = torch.rand(runs, t - 1, generator=generator, dtype=torch.float64) < (1 - q) / (1 - epsilon)
    return float((below.sum(dim=1) < (1 - q) * (t - 1)).double().mean())


def printed_probability(law: PowerLaw, q: float, epsilon: float, *, t_min: int, t_max: int) -> float:
    """The probability with which Theorem 4.1 says that its bound holds; at or below 0 it says nothing."""
    spread = (epsilon * law.b) ** 2 * (t_min - 1) / ((law.k - 2) * (law.u - law.b)) ** 2
    return 1.0 - t_max * math.exp(-spread) - t_max * printed_failure(q, epsilon, t_min)
