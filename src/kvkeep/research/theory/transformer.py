"""The one-layer, one-head transformer that Scissorhands' theorems are about (its Equations 1 and 2), in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Transformer:
    """Weights by the paper's names; tokens are row vectors.

    Attributes:
        one: ``W_1`` of the MLP.
        two: ``W_2``.
    """

    Q: Float[Tensor, "D D"]
    K: Float[Tensor, "D D"]
    V: Float[Tensor, "D D"]
    O: Float[Tensor, "D D"]  # noqa: E741 (the paper's letter)
    one: Float[Tensor, "U D"]
    two: Float[Tensor, "D U"]

    @property
    def A(self) -> Float[Tensor, "D D"]:  # noqa: N802
        """``W_V W_O W_Q W_K^T``."""
        return self.V @ self.O @ self.Q @ self.K.T

    def mlp(self, x: Float[Tensor, "*T D"]) -> Float[Tensor, "*T D"]:
        """``F(x) = x + W_2 relu(W_1 x)``."""
        return x + (x @ self.one.T).relu() @ self.two.T

    def scores(self, x: Float[Tensor, " D"], X: Float[Tensor, "P D"]) -> Float[Tensor, " P"]:
        """``x W_Q W_K^T X^T``, not yet divided by ``t``."""
        return x @ self.Q @ self.K.T @ X.T

    def weights(
        self, x: Float[Tensor, " D"], X: Float[Tensor, "P D"], kept: Bool[Tensor, " P"] | None = None
    ) -> Float[Tensor, " P"]:
        """Attention of token ``t`` on the ``t - 1`` before it, ``softmax(x_t W_Q W_K^T X^T / t)``; 0 where not kept."""
        logits = self.scores(x, X) / (X.shape[0] + 1)
        return (logits if kept is None else logits.masked_fill(~kept, -torch.inf)).softmax(dim=0)

    def attend(self, weights: Float[Tensor, " P"], X: Float[Tensor, "P D"]) -> Float[Tensor, " D"]:
        """``a_t``: the tokens under some attention weights, through values and output."""
        return weights @ X @ self.V @ self.O


def largest(W: Float[Tensor, "A B"]) -> float:
    """The largest singular value, the paper's ``λ``."""
    return float(torch.linalg.matrix_norm(W, 2))


def random_unit(n: int, d: int, generator: torch.Generator) -> Float[Tensor, "n d"]:
    """Vectors of length 1 in random directions."""
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return torch.nn.functional.normalize(x)


def random_matrix(rows: int, columns: int, norm: float, generator: torch.Generator) -> Float[Tensor, "rows columns"]:
    """A Gaussian matrix with the largest singular value ``norm``."""
    W = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return W * (norm / largest(W))
