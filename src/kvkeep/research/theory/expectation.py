"""What AhaKV expects of random attention: accumulated mass by position, the entropy of a row, and the gain.

Positions ``j`` and rows ``i`` count from 1, as in the paper.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def harmonic(n: int) -> Float[Tensor, " m"]:
    """``H_0, H_1, …, H_n``."""
    terms = 1.0 / torch.arange(1, n + 1, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), terms.cumsum(dim=0)])


def expected_mass(n: int, *, rows: int | None = None) -> Float[Tensor, " n"]:
    """``E[S_j]`` of exchangeable attention, summed over the last ``rows`` of ``n`` rows (all if not given).

    Over all rows it is ``H_n - H_{j-1}``, falling by ``1 / j``; over the last ones it is the same for all older tokens.
    """
    H = harmonic(n)
    before = torch.arange(n).clamp(min=0 if rows is None else n - rows)
    return H[n] - H[before]


def expected_average(n: int) -> Float[Tensor, " n"]:
    """``E[S_j]`` divided by the number of rows that see ``j``: flatter, but still falling."""
    return expected_mass(n) / torch.arange(n, 0, -1)


def random_attention(n: int, d: int, runs: int, generator: torch.Generator) -> Float[Tensor, "runs n n"]:
    """Causal attention of queries and keys with independent standard normal components."""
    q = torch.randn(runs, n, d, generator=generator, dtype=torch.float64)
    k = torch.randn(runs, n, d, generator=generator, dtype=torch.float64)
    logits = (q @ k.mT) / math.sqrt(d)
    above = torch.ones(n, n, dtype=torch.bool).triu(diagonal=1)
    return logits.masked_fill(above, -torch.inf).softmax(dim=-1)


def random_logits(i: int, d: int, rows: int, generator: torch.Generator) -> Float[Tensor, "rows i"]:
    """Scaled logits ``Q K^T / √d`` of so many queries on ``i`` keys of standard normal components."""
    q = torch.randn(rows, d, generator=generator, dtype=torch.float64)
    k = torch.randn(i, d, generator=generator, dtype=torch.float64)
    return (q @ k.T) / math.sqrt(d)


def entropy(logits: Float[Tensor, "*rows i"]) -> Float[Tensor, "*rows"]:
    """``H_i`` of softmax by Equation 7 with both sums over the whole row: ``log Σ e^w - Σ w e^w / Σ e^w``."""
    return logits.logsumexp(dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)


def mean_entropy(i: int, variance: float, rows: int, generator: torch.Generator) -> float:
    """The mean entropy of rows with ``i`` independent normal logits."""
    logits = math.sqrt(variance) * torch.randn(rows, i, generator=generator, dtype=torch.float64)
    return float(entropy(logits).mean())


def expected_entropy(i: int, variance: float) -> float:
    """Equation 8 with the variance of the logits: ``log i - σ²/2``; printed with ``d``, their variance unscaled."""
    return math.log(i) - variance / 2


def entropy_correction(i: int, variance: float) -> float:
    """The next term of the expansion in ``1 / i`` that `expected_entropy` begins: of use while ``e^{σ²}`` is far below
    ``i``, and as large as 1 where the approximation has ended.
    """
    e = math.exp(variance)
    return (variance * e - (e - 1) / 2) / i


def printed_scale(i: int, k: int, d: int) -> float:
    """``λ`` of Equation 12, which multiplies logits that were not divided by ``√d``."""
    return math.sqrt(2 * math.log(i / k) / d)
