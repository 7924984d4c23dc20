"""Rules that guess at queries that are still to come."""

from __future__ import annotations

import math

from kvkeep_lab.theory.loops import softmax

from .loops import Step, Vector, average, dot, evict, mean
from .rules_prompt import PromptRule


class ExpectedAttention(PromptRule):
    """retention.md §2, of keys and queries that have no rotation.

    The queries of a prefill step (the ``sinks`` first tokens aside) have a mean and a covariance per head. The expected
    attention of a key is the softmax, over all keys but the sinks, of k·μ/√d + kᵀΣk/(2d), averaged over the group. A
    token is worth that plus ``epsilon``, times the length of its value.
    """

    def __init__(
        self, *row: int, sinks: int = 4, recent: int = 24, epsilon: float = 0.01, future: int = 512, **identity: int
    ):
        super().__init__(*row, sinks=sinks, unselected=max(0, min(recent, (row[0] - sinks) // 2)), **identity)
        self.epsilon = epsilon

    def look(self, head: int, step: Step) -> None:
        if not step.decode:
            self.scores[head] = self.prompt_scores(step)

    def prompt_scores(self, step: Step) -> dict[int, float]:
        held = [j for j in step.rows[-1] if j >= self.sinks]
        found = []
        for vectors in step.vectors:
            counted = [q for j, q in zip(step.queries, vectors, strict=True) if j >= self.sinks]
            middle, spread = moments(counted, len(vectors[0]))
            d = len(middle)
            logits = [
                dot(step.keys[j], middle) / math.sqrt(d)
                + dot(step.keys[j], [dot(row, step.keys[j]) for row in spread]) / (2 * d)
                for j in held
            ]
            found.append(dict(zip(held, softmax(logits), strict=True)) if held else {})
        share = average(found)
        size = {j: math.sqrt(dot(step.values[j], step.values[j])) for j in step.rows[-1]}
        return {j: (share.get(j, 0.0) + self.epsilon) * size[j] for j in size}

    def select(self, head: int, kept: list[int], seen: int) -> list[int]:
        return evict(kept, self.prompt_budget, self.scores[head].__getitem__, self.protected(kept, seen))


def moments(vectors: list[Vector], dims: int) -> tuple[Vector, list[Vector]]:
    """Mean and covariance; zeros of nothing."""
    middle = mean(vectors) if vectors else [0.0] * dims
    apart = [[x - m for x, m in zip(vector, middle, strict=True)] for vector in vectors]
    number = max(1, len(vectors))
    return middle, [[sum(x[a] * x[b] for x in apart) / number for b in range(dims)] for a in range(dims)]
