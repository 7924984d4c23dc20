"""Rules that rank by plain attention: the sum of a key's probabilities, their average, or the last one."""

from __future__ import annotations

import math

from kvkeep_lab.theory.h2o import CONCAVE

from .loops import Rule, Step, evict, require_margin


class Accumulating(Rule):
    """Keeps ``mass``: per head and key, the sum of its probabilities over all rows (policies.md §4.3).

    With a ``decay`` below 1 every mass shrinks by that factor before a row is added, in a prompt row by row.
    """

    def __init__(self, *row: int, decay: float = 1.0, **identity: int):
        super().__init__(*row, **identity)
        self.decay = decay
        self.mass: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        mass = self.mass[head]
        for row in step.rows:
            for j in mass:
                mass[j] *= self.decay
            for j, p in row.items():
                mass[j] = mass.get(j, 0.0) + p


class H2O(Accumulating):
    """policies.md §4.3, Zhang et al. (arXiv:2306.14048, Algorithm 1 and §5.1): accumulated attention.

    ``recent`` newest and ``sinks`` first tokens are no candidates; half of the budget is recent by default. With
    ``graduate="replace"`` (§4.6) the token that leaves the recent window in a decode step is no candidate either.
    With an ``objective`` (§4.2, Algorithm 2) the token goes whose absence leaves the largest F(T) = h(Σ mass).
    """

    def __init__(
        self,
        *row: int,
        recent: int | None = None,
        sinks: int = 0,
        graduate: str = "compete",
        objective: str | None = None,
        **options: float,
    ):
        super().__init__(*row, **options)
        self.recent = self.budget // 2 if recent is None else recent
        self.sinks = sinks
        self.graduate = graduate
        self.objective = objective

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = {j for j in kept if j < self.sinks or j >= seen - self.recent}
        others = set(kept) - protected
        graduate = seen - 1 - self.recent
        if decode and self.graduate == "replace" and others != {graduate}:
            protected.add(graduate)
        if self.objective:
            return self._by_objective(head, kept, protected)
        return evict(kept, self.budget, self.mass[head].__getitem__, protected)

    def value(self, head: int, tokens: list[int]) -> float:
        """F of a set of tokens."""
        return CONCAVE[self.objective or "sum"](math.fsum(self.mass[head][j] for j in tokens))

    def _by_objective(self, head: int, kept: list[int], protected: set[int]) -> list[int]:
        """Drop ``argmax_v F(G without v)`` until the rest fits; of equals the oldest, which ``max`` finds first."""
        G, mass = list(kept), self.mass[head]
        while len(G) > self.budget:
            candidates = [j for j in G if j not in protected]
            G.remove(max(candidates, key=lambda v, G=G: self.value(head, [j for j in G if j != v])))
        gone, candidates = set(kept) - set(G), set(G) - protected
        if gone and candidates:
            require_margin(max(mass[j] for j in gone), min(mass[j] for j in candidates))
        return G


class H2OAvg(Rule):
    """policies.md §4.8, H2O Appendix B.2: the sum divided by the number of query rows that could see the key.

    Two explicit buffers: ``total`` and ``count``.
    """

    def __init__(self, *row: int, recent: int | None = None, sinks: int = 0, **identity: int):
        super().__init__(*row, **identity)
        self.recent = self.budget // 2 if recent is None else recent
        self.sinks = sinks
        self.total: list[dict[int, float]] = [{} for _ in range(self.heads)]
        self.count: list[dict[int, int]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        for row in step.rows:
            for j, p in row.items():
                self.total[head][j] = self.total[head].get(j, 0.0) + p
                self.count[head][j] = self.count[head].get(j, 0) + 1

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = [j for j in kept if j < self.sinks or j >= seen - self.recent]
        return evict(kept, self.budget, lambda j: self.total[head][j] / self.count[head][j], protected)


class TOVA(Rule):
    """policies.md §11, Oren et al. (arXiv:2401.06104, §3): attention of the last query row, averaged over all heads.

    ``per_head`` ranks in each KV head on its own; ``protect_last`` spares the newest token.
    """

    def __init__(self, *row: int, per_head: bool = False, protect_last: bool = False, **identity: int):
        super().__init__(*row, **identity)
        self.per_head = per_head
        self.protect_last = protect_last
        self.last: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        self.last[head] = step.rows[-1]

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        voters = [self.last[head]] if self.per_head else self.last
        protected = [seen - 1] if self.protect_last else []
        return evict(kept, self.budget, lambda j: sum(last[j] for last in voters) / len(voters), protected)


class TopK(Accumulating):
    """policies.md §15, the second reading of "Top-K" in H2O's Table 8: attention of the current row, for each head.

    The newest token is no candidate. With a share ``h2`` of the budget for heavy hitters there are two top sets over
    all held tokens, the newest included: ``budget - int(h2 * budget)`` by the current row and ``int(h2 * budget)`` by
    mass. The smallest current scores outside of both go; if that is not enough (the newest token may be the only
    one outside), the smallest current scores go, wherever they are.
    """

    def __init__(self, *row: int, h2: float = 0.0, **identity: int):
        super().__init__(*row, **identity)
        self.heavy = int(h2 * self.budget)
        self.last: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        super().look(head, step)
        self.last[head] = step.rows[-1]

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if len(kept) <= self.budget:
            return kept
        current, newest = self.last[head].__getitem__, seen - 1
        inside = {*evict(kept, self.budget - self.heavy, current, []), newest}
        inside.update(evict(kept, self.heavy, self.mass[head].__getitem__, []))
        stay = evict(kept, max(self.budget, len(inside)), current, inside)
        return evict(stay, self.budget, current, [newest])
