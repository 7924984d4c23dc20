"""The one-layer, one-head transformer of Scissorhands' theorems (its Equations 1 and 2), and Theorem 3.1 on it.

Theorem 3.1: if the MLP turns ``a_t`` little, and token ``ℓ`` meets itself more than other tokens through ``A``, then
the next token's score on ``ℓ`` is ``α_{t,ℓ}`` times ``x_ℓ A x_ℓ^T / ‖a_t‖``, to within ``3ε`` of that factor.
Everything is float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Transformer:
    """The weights by the paper's names; tokens are row vectors.

    Attributes:
        one: ``W_1`` of the MLP.
        two: ``W_2`` of the MLP.
    """

    Q: Float[Tensor, "D D"]
    K: Float[Tensor, "D D"]
    V: Float[Tensor, "D D"]
    O: Float[Tensor, "D D"]  # noqa: E741 (the paper's letter)
    one: Float[Tensor, "U D"]
    two: Float[Tensor, "D U"]

    @property
    def A(self) -> Float[Tensor, "D D"]:  # noqa: N802
        """Return ``W_V W_O W_Q W_K^T``."""
        return self.V @ self.O @ self.Q @ self.K.T

    def mlp(self, x: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """Return ``F(x) = x + W_2 relu(W_1 x)``."""
        return x + (x @ self.one.T).relu() @ self.two.T

    def scores(self, x: Float[Tensor, " D"], X: Float[Tensor, "P D"]) -> Float[Tensor, " P"]:
        """Return ``x W_Q W_K^T X^T``, not yet divided by ``t``."""
        return x @ self.Q @ self.K.T @ X.T

    def weights(
        self, x: Float[Tensor, " D"], X: Float[Tensor, "P D"], kept: Bool[Tensor, " P"] | None = None
    ) -> Float[Tensor, " P"]:
        """Return the attention of token ``t`` on the ``t - 1`` before it: ``softmax(x_t W_Q W_K^T X^T / t)``.

        It is 0 where not kept, and NaN if none is.
        """
        logits = self.scores(x, X) / (X.shape[0] + 1)
        return (logits if kept is None else logits.masked_fill(~kept, -torch.inf)).softmax(dim=0)

    def attend(self, weights: Float[Tensor, " P"], X: Float[Tensor, "P D"]) -> Float[Tensor, " D"]:
        """Return ``a_t``: the attention-weighted tokens, through the value and output matrices."""
        return weights @ X @ self.V @ self.O


def largest(W: Float[Tensor, "A B"]) -> float:
    """Return the largest singular value, the paper's ``λ``."""
    return float(torch.linalg.matrix_norm(W, 2))


def random_unit(n: int, d: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Return vectors of length 1 in random directions."""
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x)


def random_matrix(rows: int, columns: int, norm: float, generator: torch.Generator) -> Float[Tensor, "rows columns"]:
    """Return a Gaussian matrix with the largest singular value ``norm``."""
    W = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return W * (norm / largest(W))


# -- Theorem 3.1 -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class TokenStep:
    """The quantities of Theorem 3.1, for all tokens ``ℓ`` at once.

    Attributes:
        alpha: ``α_t``.
        own: ``x_ℓ A x_ℓ^T``.
        others: the largest ``x_j A x_ℓ^T`` of another token ``j``, as the theorem is printed.
        others_abs: the largest ``|x_j A x_ℓ^T|``, as the proof uses it.
        norm: ``‖a_t‖``.
        delta: 1 minus the cosine of ``a_t`` and ``x_{t+1}``.
        gain: ``λ_Q λ_K λ_V λ_O``.
        following: ``x_{t+1} W_Q W_K^T x_ℓ^T``.
        before: ``a_t W_Q W_K^T x_ℓ^T``.
    """

    alpha: Float[Tensor, " P"]
    own: Float[Tensor, " P"]
    others: Float[Tensor, " P"]
    others_abs: Float[Tensor, " P"]
    norm: float
    delta: float
    gain: float
    following: Float[Tensor, " P"]
    before: Float[Tensor, " P"]

    def epsilon(self, *, printed: bool = False) -> Float[Tensor, " P"]:
        """Return the smallest ``ε`` that the premises allow with ``c = x_ℓ A x_ℓ^T``.

        It is infinite where ``c`` is not positive.
        """
        others = self.others.clamp(min=0.0) if printed else self.others_abs
        epsilon = torch.maximum(
            others / self.own, torch.full_like(self.own, math.sqrt(self.delta) * self.gain) / self.own
        )
        return epsilon.masked_fill(self.own <= 0, torch.inf)

    def error(self) -> Float[Tensor, " P"]:
        """Return the distance of the next score on ``ℓ`` from ``α_{t,ℓ}``, in units of the factor.

        The theorem allows ``3ε``.
        """
        factor = self.own / self.norm
        return (self.following / factor - self.alpha).abs()

    def error_of_another(self) -> Float[Tensor, "P P"]:
        """Return the same with the printed middle term.

        Entry ``(ℓ, j)`` has the next score on ``j`` in place of ``ℓ``.
        """
        factor = self.own / self.norm
        return (self.following / factor[:, None] - self.alpha[:, None]).abs()

    def lemma_b2(self) -> tuple[Float[Tensor, " P"], Float[Tensor, " P"]]:
        """Return both sides of Lemma B.2: ``|a_t W_Q W_K^T x_ℓ^T - α_ℓ x_ℓ A x_ℓ^T| ≤ ε x_ℓ A x_ℓ^T``."""
        return (self.before - self.alpha * self.own).abs(), self.others_abs


def take_step(model: Transformer, X: Float[Tensor, "P D"], x: Float[Tensor, " D"]) -> TokenStep:
    """Feed token ``x`` after the tokens ``X`` (rows of length 1) and measure; ``x_{t+1}`` is scaled to length 1."""
    alpha = model.weights(x, X)
    a = model.attend(alpha, X)
    following = model.mlp(a)
    following = following / following.norm()
    met = X @ model.A @ X.T  # entry (j, ℓ)
    away = met.clone().fill_diagonal_(-torch.inf)
    cosine = float(a @ following / a.norm())
    return TokenStep(
        alpha=alpha,
        own=met.diagonal(),
        others=away.amax(dim=0),
        others_abs=away.abs().masked_fill(away.isinf(), 0.0).amax(dim=0),
        norm=float(a.norm()),
        delta=max(0.0, 1.0 - cosine),
        gain=math.prod(map(largest, (model.Q, model.K, model.V, model.O))),
        following=model.scores(following, X),
        before=model.scores(a, X),
    )


def lemma_b1(x: Float[Tensor, " D"], z: Float[Tensor, " D"], y: Float[Tensor, " D"]) -> tuple[float, float]:
    """Return both sides of ``|x y^T - z y^T| ≤ √(2δ) ‖y‖`` for ``x`` and ``z`` of length 1 with ``x z^T = 1 - δ``."""
    delta = max(0.0, 1.0 - float(x @ z))
    return abs(float(x @ y - z @ y)), math.sqrt(2.0 * delta) * float(y.norm())
