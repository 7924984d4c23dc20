"""Rules that read a prompt again."""

from __future__ import annotations

import math

from .loops import Step, dot, evict
from .rules_prompt import PromptRule


class Reread(PromptRule):
    """retention.md §2, "virtual re-read", of keys and queries that have no rotation, so that none is turned.

    Each query of a prefill step but that of position 0 attends once more: to all keys that are held or new, and to what
    it saw the first time. A key's score is the largest probability that it ever gets in this way. The ``sinks`` first
    and the ``recent`` newest tokens (at most half of what the sinks leave of the budget) stay. Under ``decode=score``
    the probabilities of decode steps are added to these scores, with which those of later prefill steps are compared.
    """

    def __init__(self, *row: int, sinks: int = 4, recent: int = 24, **identity: int):
        super().__init__(*row, sinks=sinks, unselected=max(0, min(recent, (row[0] - sinks) // 2)), **identity)

    def prompt_scores(self, step: Step) -> dict[int, float]:
        found = dict.fromkeys(step.rows[-1], 0.0)
        for queries in step.vectors:
            for position, query, row in zip(step.queries, queries, step.rows, strict=True):
                logits = {j: step.scaling * dot(query, step.keys[j]) for j in found}
                total = sum(map(math.exp, logits.values())) + sum(math.exp(logits[j]) for j in row)
                if position:
                    found = {j: max(found[j], math.exp(logit) / total) for j, logit in logits.items()}
        return found

    def look(self, head: int, step: Step) -> None:
        if step.decode and self.decode == "score":
            super().look(head, step)
        elif not step.decode:
            before, now = self.scores[head], self.prompt_scores(step)
            self.scores[head] = {j: max(score, before.get(j, 0.0)) for j, score in now.items()}

    def select(self, head: int, kept: list[int], seen: int) -> list[int]:
        return evict(kept, self.prompt_budget, self.scores[head].__getitem__, self.protected(kept, seen))
