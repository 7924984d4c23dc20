"""Theorem 4.1 of Scissorhands: the drift of tokens that are generated from a compressed cache, and the dropped mass.

The first half has Lemmas B.3 to B.5 and the recursion, on a `Transformer`. The lemmas ask for tokens of length 1; their
proofs use only that no token is longer. A longer token cannot occur: under the theorem's condition on the weights,
every generated token has at most length 1/2.

The second half has Theorem B.3: the attention lost with the smallest scores if scores follow a power law. ``q = B /
T_max`` is the share of tokens that stay. Scores are ``v / C``, with ``v`` drawn from the density ``∝ (x + b)^{-k}`` on
``[0, u - b]`` and ``C`` their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep_lab.theory.transformer import Transformer, largest


def contraction(model: Transformer) -> float:
    """Return ``λ_V λ_O (1 + λ_1 λ_2)(1 + λ_Q λ_K)``, which the theorem requires to be at most 1/2."""
    return output_gain(model) * (1 + largest(model.Q) * largest(model.K))


def output_gain(model: Transformer) -> float:
    """Return ``λ_V λ_O (1 + λ_1 λ_2)``.

    It is the largest factor between a generated token's length and that of earlier tokens.
    """
    return largest(model.V) * largest(model.O) * (1 + largest(model.one) * largest(model.two))


def lemma_b3(
    model: Transformer, X: Float[Tensor, "t D"], Y: Float[Tensor, "t D"], *, printed: bool = False
) -> tuple[float, float]:
    """Return both sides of the bound on the change of attention when tokens move.

    The attention is that of ``x_t`` on ``x_1 … x_{t-1}``, against ``y``.

    ``Δ_t`` is the largest distance of any of the ``t`` tokens; as printed, the distance of the last one alone.
    """
    t = X.shape[0]
    moved = (model.weights(X[-1], X[:-1]) - model.weights(Y[-1], Y[:-1])).norm()
    apart = (X - Y).norm(dim=1)
    delta = apart[-1] if printed else apart.amax()
    return float(moved), 2 * math.sqrt(t - 1) / t * largest(model.Q) * largest(model.K) * float(delta)


@dataclass(frozen=True)
class Drop:
    """The effect of leaving keys out of one step.

    Attributes:
        error: ``‖ã_t - b_t‖``, the distance of the outputs over the kept keys and over all keys.
        distance: ``‖α̃ - β‖_1`` of the two rows of attention.
        mass: ``Σ β_{t,j}`` of the dropped keys.
        gain: ``λ_V λ_O``.
    """

    error: float
    distance: float
    mass: float
    gain: float


def lemma_b4(model: Transformer, x: Float[Tensor, " D"], X: Float[Tensor, "P D"], kept: Bool[Tensor, " P"]) -> Drop:
    """Leave keys out. The lemma bounds ``error`` by ``2 gain * mass``, but prints the bound without the 2."""
    full, part = model.weights(x, X), model.weights(x, X, kept)
    return Drop(
        error=float((model.attend(part, X) - model.attend(full, X)).norm()),
        distance=float((part - full).abs().sum()),
        mass=float(full[~kept].sum()),
        gain=largest(model.V) * largest(model.O),
    )


def lemma_b5(model: Transformer, x: Float[Tensor, " D"], z: Float[Tensor, " D"]) -> tuple[float, float]:
    """Return both sides of ``‖F(x) - F(z)‖ ≤ (1 + λ_1 λ_2) ‖x - z‖``."""
    slope = 1 + largest(model.one) * largest(model.two)
    return float((model.mlp(x) - model.mlp(z)).norm()), slope * float((x - z).norm())


@dataclass(frozen=True, eq=False)
class Drift:
    """Two runs from one prompt, compared over the generated tokens.

    Attributes:
        apart: ``‖x_{t+1} - x̃_{t+1}‖`` of each generated token.
        bound: the right side of the recursion for the same token, from ``Δ_t`` and the dropped mass of step ``t``.
        dropped: dropped mass of each step.
        lengths: ``‖x_{t+1}‖`` of the full run.
        uneven: largest over smallest attention weight of each step.
    """

    apart: Float[Tensor, " n"]
    bound: Float[Tensor, " n"]
    dropped: Float[Tensor, " n"]
    lengths: Float[Tensor, " n"]
    uneven: Float[Tensor, " n"]


def generate(model: Transformer, prompt: Float[Tensor, "P D"], n: int, B: int) -> Drift:
    """Generate ``n`` tokens from all keys, and from the ``B`` keys with the largest ``β_{t,j}`` as in Theorem 4.1."""
    slope, reach = output_gain(model), 2 * largest(model.Q) * largest(model.K) + 1
    X = Y = prompt
    found = []
    for _ in range(n):
        beta = model.weights(Y[-1], Y[:-1])
        kept = torch.zeros_like(beta, dtype=torch.bool)
        kept[beta.topk(min(B, len(beta))).indices] = True
        dropped = beta[~kept].sum()
        bound = slope * (2 * dropped + reach * (X - Y).norm(dim=1).amax())
        X, Y = _grow(model, X), _grow(model, Y, kept)
        found.append(torch.stack([(X[-1] - Y[-1]).norm(), bound, dropped, X[-1].norm(), beta.amax() / beta.amin()]))
    apart, bounds, masses, lengths, uneven = torch.stack(found).T
    return Drift(apart, bounds, masses, lengths, uneven)


def _grow(model: Transformer, X: Float[Tensor, "t D"], kept: Bool[Tensor, " P"] | None = None) -> Float[Tensor, "s D"]:
    """Append one token, generated from all keys before the last one or from the kept ones."""
    a = model.attend(model.weights(X[-1], X[:-1], kept), X[:-1])
    return torch.cat([X, model.mlp(a)[None]])


# -- Theorem B.3 -------------------------------------------------------------------------------------------------------


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
        """Return the value that a share ``p`` of all draws lies below."""
        return (math.pow(self.b, 1 - self.k) - p * self._mass).pow(1 / (1 - self.k)) - self.b

    def partial_mean(self, x: float) -> float:
        """Return ``∫_0^x v f(v) dv``, the part of the mean from draws below ``x``.

        It is ``c`` times the paper's ``g(x) - g(0)``.
        """
        k, b = self.k, self.b
        if math.isinf(x):
            return math.pow(b, 2 - k) / ((k - 2) * self._mass)
        return (math.pow(b, 2 - k) - math.pow(x + b, 1 - k) * ((k - 1) * x + b)) / ((k - 2) * self._mass)

    @property
    def mean(self) -> float:
        """Return the mean of a draw, ``Δ / (k - 2)`` in the paper."""
        return self.partial_mean(self.u - self.b)

    @property
    def delta_ratio(self) -> float:
        """Return ``Δ / b``; the paper shows an upper bound of 0.98 and uses it as a lower bound."""
        return self.mean * (self.k - 2) / self.b

    @property
    def printed_delta_ratio(self) -> float:
        """Return ``Δ / b`` by the closed form at the end of the paper's proof; NaN without an upper end."""
        k, b, u = self.k, self.b, self.u
        return 1.0 - (k - 1) * math.pow(u / b, 1 - k) * (b - u) / self._mass / b

    def dropped_mass(self, q: float) -> float:
        """Return the share of all mass in the smallest ``1 - q`` of the draws, for many draws."""
        edge = float(self.quantile(torch.tensor(1.0 - q, dtype=torch.float64)))
        return self.partial_mean(edge) / self.mean

    def sampled_dropped_mass(self, q: float, n: int, runs: int, generator: torch.Generator) -> Float[Tensor, " runs"]:
        """Return the same share measured over ``n`` draws, in each of ``runs`` runs."""
        v = self.quantile(torch.rand(runs, n, generator=generator, dtype=torch.float64)).sort(dim=1).values
        return v[:, : n - round(q * n)].sum(dim=1) / v.sum(dim=1)


def dropped_mass(q: float, k: float) -> float:
    """Return ``M(q)``: the dropped mass of many draws without an upper end (``u → ∞``), in closed form."""
    return 1.0 + (k - 2) * q - (k - 1) * math.pow(q, (k - 2) / (k - 1))


def bracket(q: float, k: float, epsilon: float = 0.0) -> float:
    """Return ``k - (k - 1) ((1 - ε) / (q - ε))^{1/(k-1)}``, the last factor of Equations 4 and 11.

    ``q`` is above ``ε``.
    """
    return k - (k - 1) * math.pow((1 - epsilon) / (q - epsilon), 1 / (k - 1))


def printed_dropped_mass(q: float, k: float, epsilon: float = 0.0) -> float:
    """Return the right side of Equation 11: the printed bound on the dropped mass."""
    return (1 - q) / (0.98 * (1 - epsilon) ** 2) * bracket(q, k, epsilon)


def printed_error(q: float, k: float, epsilon: float = 0.0) -> float:
    """Return the right side of Equation 4: the printed bound on ``E‖x_t - x̃_t‖``."""
    return 2.1 * (1 - q) / (1 - epsilon) ** 2 * bracket(q, k, epsilon)


def bracket_root(k: float) -> float:
    """Return the share ``q`` at which the bracket is 0 without ``ε``; below it the printed bound is negative."""
    return math.pow((k - 1) / k, k - 1)


def line_before(q: float, k: float, *, delta_ratio: float = 1.0, epsilon: float = 0.0) -> float:
    """Return the proof's last line but one: ``b (1 - q) / Δ(1-ε)² - (k - 1)(q - ε) γ / Δ(1-ε)²`` with its ``γ``.

    The printed last line subtracts ``1 - q`` times the same factor instead of ``q - ε`` times. That is less, and so
    still a bound, only if half of the tokens or more stay.
    """
    gamma = math.pow((q - epsilon) / (1 - epsilon), 1 / (1 - k)) - 1.0
    return ((1 - q) - (k - 1) * (q - epsilon) * gamma) / (delta_ratio * (1 - epsilon) ** 2)


def printed_failure(q: float, epsilon: float, t: int) -> float:
    """Return the printed bound on the probability that too few of ``t - 1`` draws fall below ``γ``."""
    return math.exp(-2 * (t - 1) * (1 - q) ** 2 / (1 - epsilon) ** 2)


def hoeffding_failure(q: float, epsilon: float, t: int) -> float:
    """Return Hoeffding's bound on the same probability; it has the ``ε²`` that the printed exponent has lost."""
    return math.exp(-2 * (t - 1) * epsilon**2 * (1 - q) ** 2 / (1 - epsilon) ** 2)


def sampled_failure(q: float, epsilon: float, t: int, runs: int, generator: torch.Generator) -> float:
    """Return how often fewer than ``(1 - q)(t - 1)`` of ``t - 1`` draws fall below ``γ``.

    Each does so with chance ``(1-q)/(1-ε)``.
    """
    below = torch.rand(runs, t - 1, generator=generator, dtype=torch.float64) < (1 - q) / (1 - epsilon)
    return float((below.sum(dim=1) < (1 - q) * (t - 1)).double().mean())


def printed_probability(law: PowerLaw, q: float, epsilon: float, *, t_min: int, t_max: int) -> float:
    """Return the probability with which Theorem 4.1 claims its bound; a value of 0 or less claims nothing."""
    spread = (epsilon * law.b) ** 2 * (t_min - 1) / ((law.k - 2) * (law.u - law.b)) ** 2
    return 1.0 - t_max * math.exp(-spread) - t_max * printed_failure(q, epsilon, t_min)
