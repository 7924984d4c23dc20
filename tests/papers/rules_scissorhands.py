"""Scissorhands (Liu et al., arXiv:2305.17118): tokens that attention has passed over in the last rows are dropped."""

from __future__ import annotations

from kvkeep.theory.scissorhands import Reading, algorithm_2, importance_record, leaving_order

from .loops import Rule, Step, require_clear, require_margin, total


class Scissorhands(Rule):
    """policies.md §5.3, Algorithms 1 and 2 with the counters maintained during generation.

    When more than ``budget`` tokens are held, a multiple of ``drop`` of them goes at once, the smallest that brings
    their number to the budget or below. Which ones, is counted over the rows of the history window: a row says
    "low" of a key that it sees if its probability is below ``1 / (theta * (position of the row + 1))``, with
    ``threshold="live"`` below ``1 / (theta * keys that the row sees)``. The most often low go first; among equals the
    smallest sum of probabilities in the window, then the oldest (§5.5); with ``literal_ties`` the newest.

    The window of a step that ends over budget is the step's last ``window`` rows. If the step has fewer, it is all of
    them and those earlier rows since the last compression after which more than ``budget + 1 - window`` tokens were
    held: in decode exactly ``window`` rows. A compression forgets all rows.

    Defaults: ``drop`` is half of the budget (at least 1), ``window`` the smaller of both, at most 100 (at least 1),
    ``recent`` a quarter of the budget, at most 10. The ``recent`` newest never go.
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
        self.reading = Reading(theta=theta, live=threshold == "live", newest_first=literal_ties)
        self.rows: list[list[tuple[int, dict[int, float]]]] = [[] for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        pairs = list(zip(step.queries, step.rows, strict=True))
        if len(step.rows[-1]) <= self.budget:
            window = [(i, row) for i, row in pairs if len(row) > self.budget + 1 - self.window]
        else:
            window = pairs[-self.window :]
            if len(pairs) >= self.window:
                self.rows[head].clear()
        for i, row in window:
            for p in row.values():
                require_clear(p, self.reading.threshold(i, row))
        self.rows[head] += window

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        over = len(kept) - self.budget
        if over <= 0:
            return kept
        bursts = -(-over // self.drop)
        m = min(self.drop * bursts, len(kept) - max(self.recent, 1))
        self.require_clear_cut(head, leaving_order(kept, self.rows[head], r=self.recent, reading=self.reading), m)
        stay = algorithm_2(kept, self.rows[head], r=self.recent, m=m, reading=self.reading)
        self.rows[head].clear()
        return stay

    def require_clear_cut(self, head: int, order: list[int], m: int) -> None:
        """Refuse inputs under which the last that goes and the first that stays have equal counts and close sums."""
        if m == len(order) or self.reading.newest_first:
            return
        low = importance_record(self.rows[head], self.reading)
        mass = total(row for _, row in self.rows[head])
        goes, stays = order[m - 1], order[m]
        if low[goes] == low[stays]:
            require_margin(mass[goes], mass[stays])


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
