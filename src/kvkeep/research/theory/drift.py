"""Theorem 4.1 of Scissorhands: how far tokens generated from a compressed cache drift, with Lemmas B.3 to B.5.

The lemmas ask for tokens of length 1; their proofs use only that none is longer. That is what can be had: under the
theorem's condition on the weights every generated token has at most length 1/2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.research.theory.transformer import Transformer, largest


def contraction(model: Transformer) -> float:
    """``λ_V λ_O (1 + λ_1 λ_2)(1 + λ_Q λ_K)``, which the theorem wants to be at most 1/2."""
    return output_gain(model) * (1 + largest(model.Q) * largest(model.K))


def output_gain(model: Transformer) -> float:
    """``λ_V λ_O (1 + λ_1 λ_2)``: how much longer than the tokens behind it a generated token can be."""
    return largest(model.V) * largest(model.O) * (1 + largest(model.one) * largest(model.two))


def lemma_b3(
    model: Transformer, X: Float[Tensor, "t D"], Y: Float[Tensor, "t D"], *, printed: bool = False
) -> tuple[float, float]:
    """Both sides of the lemma on how much attention moves when tokens do: ``x_t`` on ``x_1 … x_{t-1}`` against ``y``.

    ``Δ_t`` is the largest distance of any of the ``t`` tokens; as printed, of the last one alone.
    """
    t = X.shape[0]
    moved = (model.weights(X[-1], X[:-1]) - model.weights(Y[-1], Y[:-1])).norm()
    apart = (X - Y).norm(dim=1)
    delta = apart[-1] if printed else apart.amax()
    return float(moved), 2 * math.sqrt(t - 1) / t * largest(model.Q) * largest(model.K) * float(delta)


@dataclass(frozen=True)
class Drop:
    """What is lost when keys are left out of one step.

    Attributes:
        error: ``‖ã_t - b_t‖``: outputs over the kept keys and over all.
        distance: ``‖α̃ - β‖_1`` of the two rows of attention.
        mass: ``Σ β_{t,j}`` of the keys that are left out.
        gain: ``λ_V λ_O``.
    """

    error: float
    distance: float
    mass: float
    gain: float


def lemma_b4(model: Transformer, x: Float[Tensor, " D"], X: Float[Tensor, "P D"], kept: Bool[Tensor, " P"]) -> Drop:
    """Leave keys out; the lemma bounds ``error`` by ``2 gain * mass``, and prints it without the 2."""
    full, part = model.weights(x, X), model.weights(x, X, kept)
    return Drop(
        error=float((model.attend(part, X) - model.attend(full, X)).norm()),
        distance=float((part - full).abs().sum()),
        mass=float(full[~kept].sum()),
        gain=largest(model.V) * largest(model.O),
    )


def lemma_b5(model: Transformer, x: Float[Tensor, " D"], z: Float[Tensor, " D"]) -> tuple[float, float]:
    """Both sides of ``‖F(x) - F(z)‖ ≤ (1 + λ_1 λ_2) ‖x - z‖``."""
    slope = 1 + largest(model.one) * largest(model.two)
    return float((model.mlp(x) - model.mlp(z)).norm()), slope * float((x - z).norm())


@dataclass(frozen=True, eq=False)
class Drift:
    """Two runs from one prompt, over the generated tokens.

    Attributes:
        apart: ``‖x_{t+1} - x̃_{t+1}‖`` of each generated token.
        bound: the right side of the recursion for the same token, from ``Δ_t`` and the dropped mass of step ``t``.
        dropped: dropped mass of each step.
        lengths: ``‖x_{t+1}‖`` of the full run.
        uneven: the largest over the smallest attention weight of each step.
    """

    apart: Float[Tensor, " n"]
    bound: Float[Tensor, " n"]
    dropped: Float[Tensor, " n"]
    lengths: Float[Tensor, " n"]
    uneven: Float[Tensor, " n"]


def generate(model: Transformer, prompt: Float[Tensor, "P D"], n: int, B: int) -> Drift:
    """Generate ``n`` tokens from all keys and from the ``B`` with the largest ``β_{t,j}``, as Theorem 4.1 has it."""
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
    """One more token, from all keys before the last one or from some."""
    a = model.attend(model.weights(X[-1], X[:-1], kept), X[:-1])
    return torch.cat([X, model.mlp(a)[None]])
