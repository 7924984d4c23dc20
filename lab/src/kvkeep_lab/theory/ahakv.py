"""AhaKV (Gu et al.): Algorithm 1 as plain loops on one head, and the mass and entropy that random attention has.

The letters are the paper's: budget ``B``, of which ``B_r`` are recent tokens; eviction scores ``F``; squared norms
``ν`` of the values ``V``; their mean-filtered ``γ``. Where the printed algorithm contradicts the text, the code follows
the text: the gain multiplies logits that are scaled once, and the value prior counts when the prompt's tokens are
chosen. In the second half positions ``j`` and rows ``i`` count from 1, as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep_lab.theory.loops import Row, Vector, attend, dot, total


def gain(i: int, k: int, *, clamp: bool = True) -> float:
    """Return ``λ √d`` of Equation 12: the factor on logits that are already divided by ``√d``, for ``i`` tokens.

    With ``clamp`` it is at least 1, since a smaller gain would flatten. Without ``clamp`` it is 0 up to ``i = k``,
    where the formula ends.
    """
    found = math.sqrt(2.0 * math.log(max(i / k, 1.0)))
    return max(1.0, found) if clamp else found


def sg_softmax(row: Row, gain: float) -> dict[int, float]:
    """Return Equation 9 with its lost exponential, from a row of ordinary softmax: ``p^gain``, normalised."""
    raised = {j: p**gain for j, p in row.items()}
    whole = sum(raised.values())
    return {j: p / whole for j, p in raised.items()}


def value_prior(V: Sequence[Vector], kernel: int = 5) -> list[float]:
    """Return ``γ̄`` of Equations 13 and 14: squared norms under a mean filter of odd width, divided by the largest.

    At both ends the mean covers the values that exist. Not all values may be 0.
    """
    nu = [dot(value, value) for value in V]
    half = kernel // 2
    around = [nu[max(0, n - half) : n + half + 1] for n in range(len(nu))]
    gamma = [sum(part) / len(part) for part in around]
    return [x / max(gamma) for x in gamma]


def refine(F: Row, V: Sequence[Vector], kernel: int = 5) -> dict[int, float]:
    """Return ``F̂`` of Equation 15: the scores times the prior of their values ``V``, in order of position."""
    return {j: F[j] * weight for j, weight in zip(sorted(F), value_prior(V, kernel), strict=True)}


def top_k(F: Mapping[int, float], S: Sequence[int], *, B: int, B_r: int) -> list[int]:
    """Return the ``B_r`` newest of the kept tokens ``S`` and the ``B - B_r`` others with the largest scores.

    Of equal scores the older token is evicted.
    """
    recent, others = S[max(0, len(S) - B_r) :], S[: max(0, len(S) - B_r)]
    best = sorted(others, key=lambda j: (F[j], j), reverse=True)[: B - B_r]
    return sorted([*best, *recent])


def prefill_scores(rows: Sequence[Row], V: Sequence[Vector], *, B: int, B_r: int, kernel: int = 5) -> dict[int, float]:
    """Return ``F̂_s`` of a prompt (lines 5 to 10): SG-softmax of its last ``B_r`` rows, times the value prior.

    The rows are summed first.
    """
    steep = gain(len(rows), B)
    F = total(sg_softmax(row, steep) for row in rows[max(0, len(rows) - B_r) :])
    return refine(F, V, kernel)


def algorithm_1(
    Q: Sequence[Vector],
    K: Sequence[Vector],
    V: Sequence[Vector],
    *,
    prompt: int,
    B: int,
    B_r: int,
    kernel: int = 5,
    scaling: float,
) -> Iterator[list[int]]:
    """Yield ``S`` of prefill and generation: after the ``prompt`` first tokens, and after each later one."""
    S = list(range(prompt))
    rows = [attend(Q[i], K, S[: i + 1], scaling) for i in S]
    F = prefill_scores(rows, V[:prompt], B=B, B_r=B_r, kernel=kernel)
    S = top_k(F, S, B=B, B_r=B_r)
    yield S
    steep = gain(prompt, B)
    for t in range(prompt, len(Q)):
        S = [*S, t]
        F = total([F, sg_softmax(attend(Q[t], K, S, scaling), steep)])
        S = top_k(F, S, B=B, B_r=B_r)
        yield S


# -- expectations ------------------------------------------------------------------------------------------------------


def harmonic(n: int) -> Float[Tensor, " m"]:
    """Return ``H_0, H_1, …, H_n``."""
    terms = 1.0 / torch.arange(1, n + 1, dtype=torch.float64)
    return torch.cat([torch.zeros(1, dtype=torch.float64), terms.cumsum(dim=0)])


def expected_mass(n: int, *, rows: int | None = None) -> Float[Tensor, " n"]:
    """Return ``E[S_j]`` of exchangeable attention, summed over the last ``rows`` of ``n`` rows (by default all).

    Over all rows it is ``H_n - H_{j-1}``, which falls by ``1 / j``. Over the last rows it is the same for all older
    tokens.
    """
    H = harmonic(n)
    before = torch.arange(n).clamp(min=0 if rows is None else n - rows)
    return H[n] - H[before]


def expected_average(n: int) -> Float[Tensor, " n"]:
    """Return ``E[S_j]`` divided by the number of rows that see ``j``: flatter, but still falling."""
    return expected_mass(n) / torch.arange(n, 0, -1)


def random_attention(n: int, d: int, runs: int, generator: torch.Generator) -> Float[Tensor, "runs n n"]:
    """Return causal attention of queries and keys with independent standard normal components."""
    q = torch.randn(runs, n, d, generator=generator, dtype=torch.float64)
    k = torch.randn(runs, n, d, generator=generator, dtype=torch.float64)
    logits = (q @ k.mT) / math.sqrt(d)
    above = torch.ones(n, n, dtype=torch.bool).triu(diagonal=1)
    return logits.masked_fill(above, -torch.inf).softmax(dim=-1)


def random_logits(i: int, d: int, rows: int, generator: torch.Generator) -> Float[Tensor, "rows i"]:
    """Return scaled logits ``Q K^T / √d`` of ``rows`` queries on ``i`` keys with standard normal components."""
    q = torch.randn(rows, d, generator=generator, dtype=torch.float64)
    k = torch.randn(i, d, generator=generator, dtype=torch.float64)
    return (q @ k.T) / math.sqrt(d)


def entropy(logits: Float[Tensor, "*rows i"]) -> Float[Tensor, "*rows"]:
    """Return ``H_i`` of the softmax by Equation 7, both sums over the whole row: ``log Σ e^w - Σ w e^w / Σ e^w``."""
    return logits.logsumexp(dim=-1) - (logits.softmax(dim=-1) * logits).sum(dim=-1)


def mean_entropy(i: int, variance: float, rows: int, generator: torch.Generator) -> float:
    """Return the mean entropy of rows with ``i`` independent normal logits."""
    logits = math.sqrt(variance) * torch.randn(rows, i, generator=generator, dtype=torch.float64)
    return float(entropy(logits).mean())


def expected_entropy(i: int, variance: float) -> float:
    """Return ``log i - σ²/2``: Equation 8 with the variance of the logits.

    The paper prints ``d``, their variance unscaled.
    """
    return math.log(i) - variance / 2


def entropy_correction(i: int, variance: float) -> float:
    """Return the next term in ``1 / i`` of the expansion that `expected_entropy` starts.

    It is useful while ``e^{σ²}`` is far below ``i``; where it is as large as 1, the approximation has ended.
    """
    e = math.exp(variance)
    return (variance * e - (e - 1) / 2) / i


def printed_scale(i: int, k: int, d: int) -> float:
    """Return ``λ`` of Equation 12, the factor on logits that were not divided by ``√d``.

    It has no value for ``i`` below ``k``.
    """
    return math.sqrt(2 * math.log(i / k) / d)
