"""Rules that look at positions alone."""

from __future__ import annotations

from .loops import OverBudgetError, Rule


class Full(Rule):
    """policies.md §1: no statistic, no eviction, an error when the budget is exceeded."""

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if len(kept) > self.budget:
            raise OverBudgetError(f"{len(kept)} tokens, budget {self.budget}")
        return kept


class Local(Rule):
    """policies.md §2, the baseline "Local" of H2O (arXiv:2306.14048, §5): the last ``budget`` tokens."""

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        return [j for j in kept if j >= seen - self.budget]


class StreamingLLM(Rule):
    """policies.md §3, Xiao et al. (arXiv:2309.17453, §3.2): the first ``sinks`` and the last ``budget - sinks``."""

    def __init__(self, *row: int, sinks: int = 4, **identity: int):
        super().__init__(*row, **identity)
        self.sinks = sinks

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        last = self.budget - self.sinks
        return [j for j in kept if j < self.sinks or j >= seen - last]
