"""Scissorhands (Liu et al., arXiv:2305.17118): tokens that attention has passed over in the last rows are dropped."""

from __future__ import annotations

from .loops import Rule, Step, require_clear, require_margin


class Scissorhands(Rule):
    """Algorithms 1 and 2, and policies.md §5.3 where the paper leaves something open.

    Algorithm 1: new tokens enter the cache; if it then holds more than ``budget``, Algorithm 2 drops ``drop`` of them,
    and again, until it holds no more than that. No rows come in between, so it is the same as one larger drop.

    Algorithm 2: over the last ``window`` rows of the sequence, wherever they came from, count for each token the rows
    that gave it less than the average: below ``1 / (theta * n)``, where n is the number of the row, from 1, or with
    ``threshold="live"`` the number of keys that the row sees. A row older than a token says nothing of it. The
    ``recent`` newest never go; of the others the highest counts go.

    Among equal counts (§5.5) the smallest sum of probabilities in the window goes, then the oldest token; with
    ``literal_ties`` the newest. The sum has its own window after a piece of a prompt of fewer than ``window`` rows: it
    begins ``window`` rows before the token that was the first one too many, as if that had been generated.

    Defaults: ``drop`` is half of the budget (at least 1), ``window`` the smaller of both, at most 100 (at least 1),
    ``recent`` a quarter of the budget, at most 10.
    """

    def __init__(
        self,
        *row: int,
        window: int | None = None,
        recent: int | None = None,
        drop: int | None = None,
        theta: float = 1.0,
        threshold: str = "row",
        literal_ties: bool = False,
        **identity: int,
    ):
        super().__init__(*row, **identity)
        self.drop = max(1, self.budget // 2) if drop is None else drop
        self.window = max(1, min(100, self.budget // 2, self.drop)) if window is None else window
        self.recent = min(10, self.budget // 4) if recent is None else recent
        self.theta = theta
        self.threshold = threshold
        self.literal_ties = literal_ties
        self.rows: list[dict[int, dict[int, float]]] = [{} for _ in range(self.heads)]
        self.ends = [0] * self.heads
        """For each head, the row with which the window of the sums ends, if it is not to hold too many rows."""

    def look(self, head: int, step: Step) -> None:
        self.rows[head].update(zip(step.queries, step.rows, strict=True))
        too_many = [i for i, row in zip(step.queries, step.rows, strict=True) if len(row) > self.budget]
        short = len(step.rows) < self.window
        self.ends[head] = too_many[0] if short and too_many else step.queries[-1]

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        n = len(kept)
        while n > self.budget:
            n -= self.drop
        m = len(kept) - max(n, self.recent, 1)
        return self.compress(head, kept, seen, m) if m > 0 else kept

    def compress(self, head: int, kept: list[int], seen: int, m: int) -> list[int]:
        rows = self.rows[head]
        I = dict.fromkeys(kept, 0)  # noqa: E741 (the paper's letter)
        for i in range(seen - self.window, seen):
            for j in kept:
                if j in rows.get(i, {}):
                    n = len(rows[i]) if self.threshold == "live" else i + 1
                    require_clear(rows[i][j], 1.0 / (self.theta * n))
                    I[j] += rows[i][j] < 1.0 / (self.theta * n)
        mass = dict.fromkeys(kept, 0.0)
        for i in range(self.ends[head] - self.window + 1, seen):
            for j in kept:
                mass[j] += rows.get(i, {}).get(j, 0.0)
        candidates = [j for j in kept if j < seen - self.recent]
        if self.literal_ties:
            return sorted(set(kept) - set(sorted(candidates, key=lambda j: (-I[j], -j))[:m]))
        order = sorted(candidates, key=lambda j: (-I[j], mass[j], j))
        if m < len(order) and I[order[m - 1]] == I[order[m]]:
            require_margin(mass[order[m - 1]], mass[order[m]])
        return sorted(set(kept) - set(order[:m]))


class ScissorhandsRelease(Rule):
    """policies.md §5.4, the rule of the released code: a token needs one high score in the last rows to stay.

    A row's threshold is its own quantile: its probabilities over all positions so far, 0 for those that are gone,
    ascending, the element at ``int(quantile * their number)``. A hit is a probability above it. A token stays if one
    of the last ``window`` rows of the sequence hit it or if it is among the ``recent`` newest, so the number held
    floats, with or without room; but nothing goes before the sequence is longer than the budget. If more than
    ``budget`` would stay, those that are not recent go, the one whose last hit is the oldest first, then by position.
    """

    def __init__(self, *row: int, quantile: float = 0.9, window: int = 100, recent: int | None = None, **identity: int):
        super().__init__(*row, **identity)
        self.quantile = quantile
        self.window = window
        self.recent = min(10, self.budget // 4) if recent is None else recent
        self.last_hit: list[dict[int, int]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        for i, row in zip(step.queries, step.rows, strict=True):
            gone = [0.0] * (i + 1 - len(row))
            threshold = sorted([*gone, *row.values()])[int(self.quantile * (i + 1))]
            for j, p in row.items():
                require_clear(p, threshold)
                if p > threshold:
                    self.last_hit[head][j] = i

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        if seen <= self.budget:
            return kept
        recent = [j for j in kept if j >= seen - self.recent]
        last_hit = {j: self.last_hit[head].get(j, -1) for j in kept if j not in recent}
        hit = sorted((i, j) for j, i in last_hit.items() if i >= max(0, seen - self.window))
        over = max(0, len(hit) + len(recent) - self.budget)
        return sorted([j for _, j in hit[over:]] + recent)
