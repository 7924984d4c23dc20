"""Algorithm 1 of AhaKV (Gu et al.) as plain loops, one attention head.

In the paper's letters: budget ``B``, of which ``B_r`` are recent tokens, eviction scores ``F``, squared norms ``ν`` of
the values ``V`` and their mean-filtered ``γ``. Where the printed algorithm contradicts the text, the text is followed:
the gain multiplies logits that are scaled once, and the value prior counts when the prompt's tokens are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kvkeep.research.theory.loops import Vector, dot
from kvkeep.research.theory.rows import Row, attend, total


def gain(i: int, k: int, *, clamp: bool = True) -> float:
    """``λ √d`` of Equation 12: what multiplies logits that are already divided by ``√d``, for ``i`` tokens.

    With ``clamp`` at least 1: a smaller gain would flatten. Without it 0 up to ``i = k``, where the formula ends.
    """
    found = math.sqrt(2.0 * math.log(max(i / k, 1.0)))
    return max(1.0, found) if clamp else found


def sg_softmax(row: Row, gain: float) -> dict[int, float]:
    """Equation 9 with its lost exponential, from a row of ordinary softmax: ``p^gain``, normalised."""
    raised = {j: p**gain for j, p in row.items()}
    whole = sum(raised.values())
    return {j: p / whole for j, p in raised.items()}


def value_prior(V: Sequence[Vector], kernel: int = 5) -> list[float]:
    """``γ̄`` of Equations 13 and 14: squared norms, a mean filter of odd width, divided by the largest.

    At the ends the mean is over what is there.
    """
    nu = [dot(value, value) for value in V]
    half = kernel // 2
    around = [nu[max(0, n - half) : n + half + 1] for n in range(len(nu))]
    gamma = [sum(part) / len(part) for part in around]
    return [x / max(gamma) for x in gamma]


def refine(F: Row, V: Sequence[Vector], kernel: int = 5) -> dict[int, float]:
    """``F̂`` of Equation 15: the scores times the prior of their tokens' values ``V``, in order of position."""
    return {j: F[j] * weight for j, weight in zip(sorted(F), value_prior(V, kernel), strict=True)}


def top_k(F: Mapping[int, float], S: Sequence[int], *, B: int, B_r: int) -> list[int]:
    """The ``B_r`` newest of the kept tokens ``S`` and, of the others, the ``B - B_r`` with the largest scores.

    Of equal scores the older token goes.
    """
    recent, others = S[max(0, len(S) - B_r) :], S[: max(0, len(S) - B_r)]
    best = sorted(others, key=lambda j: (F[j], j), reverse=True)[: B - B_r]
    return sorted([*best, *recent])


def prefill_scores(rows: Sequence[Row], V: Sequence[Vector], *, B: int, B_r: int, kernel: int = 5) -> dict[int, float]:
    """``F̂_s`` of a prompt (lines 5 to 10): SG-softmax of its last ``B_r`` rows, summed, times the value prior."""
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
    """Prefill, then generation. Yields ``S`` after the prompt of so many tokens, and after each later one."""
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
