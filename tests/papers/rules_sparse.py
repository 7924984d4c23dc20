"""The patterns of the Sparse Transformer as eviction rules, with and without heavy hitters."""

from __future__ import annotations

import abc

from .loops import evict
from .rules_mass import Accumulating


class Pattern(Accumulating):
    """policies.md §14, Child et al. (arXiv:1904.10509, §4): tokens outside of the pattern go, even with room left.

    Nothing goes before a sequence is longer than the budget, so that a budget of the whole length is the full cache.
    ``int(h2 * budget)`` slots are for the heaviest tokens outside of the pattern, by mass as in H2O (H2O's Table 2);
    the ``share`` that is left takes the budget's place in the pattern.
    """

    def __init__(self, *row: int, h2: float = 0.0, **identity: int):
        super().__init__(*row, **identity)
        self.heavy = int(h2 * self.budget)
        self.share = self.budget - self.heavy
        self.prompt = 0

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if not decode:
            self.prompt = seen
        if seen <= self.budget:
            return kept
        pattern = self.pattern(kept, seen)
        others = [j for j in kept if j not in pattern]
        return sorted(pattern | set(evict(others, self.heavy, self.mass[head].__getitem__, [])))

    @abc.abstractmethod
    def pattern(self, kept: list[int], seen: int) -> set[int]:
        """Those of the kept positions that the pattern wants."""


class SparseStrided(Pattern):
    """The newest ``share // 2`` tokens (at least 1) and a grid: older positions j for which ``stride`` divides j + 1.

    The grid has the rest of the share; of the grid positions that are still held the newest stay. The stride is
    ``max(2, ceil(2 n / share))`` by default, n being the tokens seen at the end of the last prefill step: after a
    second prompt the grid may be a wider one.
    """

    def __init__(self, *row: int, stride: int | None = None, **options: float):
        super().__init__(*row, **options)
        self.stride = stride

    def pattern(self, kept: list[int], seen: int) -> set[int]:
        stride = self.stride or max(2, -(-2 * self.prompt // self.share))
        n_local = max(1, self.share // 2)
        local = [j for j in kept if j >= seen - n_local]
        grid = [j for j in kept if j < seen - n_local and (j + 1) % stride == 0]
        return {*local, *_newest(grid, self.share - n_local)}


class SparseFixed(Pattern):
    """Blocks of ``share // 2`` tokens (at least 1): the newest token's block, and summaries of the blocks before it.

    A block's summary is its last ``summary`` tokens, by default ``round(share / n * block / 2)``, at least 1, where n
    is the tokens seen at the end of the last prefill step, or the share if that is more. The first token of a block
    pushes out all others of the block before it at once. When block and summaries are more than the share, the oldest
    tokens of the summaries go.
    """

    def __init__(self, *row: int, summary: int | None = None, **options: float):
        super().__init__(*row, **options)
        self.block = max(1, self.share // 2)
        self.summary = summary

    def pattern(self, kept: list[int], seen: int) -> set[int]:
        start = (seen - 1) // self.block * self.block
        current = [j for j in kept if j >= start]
        n = max(self.prompt, self.share)
        summary = max(1, round(self.share * self.block / (2 * n))) if self.summary is None else self.summary
        summaries = [j for j in kept if j < start and j % self.block >= self.block - summary]
        return {*current, *_newest(summaries, self.share - len(current))}


def _newest(ascending: list[int], n: int) -> list[int]:
    return ascending[max(0, len(ascending) - n) :]
