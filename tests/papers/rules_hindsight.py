"""Rules that know a whole text before it begins: H2O's global statistic, and attention without chosen keys."""

from __future__ import annotations

from collections.abc import Callable

from .loops import Rule, Vector, average, dot, evict, softmax


def column_sums(queries: list[list[Vector]], keys: list[list[Vector]], scaling: float) -> list[list[float]]:
    """For each KV head and key: its probabilities summed over all rows of full causal attention, mean of the group."""
    group = len(queries) // len(keys)
    totals = []
    for head, mine in enumerate(keys):
        sums = [0.0] * len(mine)
        for i in range(len(mine)):
            rows = []
            for query in queries[head * group : (head + 1) * group]:
                p = softmax([scaling * dot(query[i], mine[j]) for j in range(i + 1)])
                rows.append(dict(enumerate(p)))
            for j, p in average(rows).items():
                sums[j] += p
        totals.append(sums)
    return totals


class H2OGlobal(Rule):
    """policies.md §4.4 and H2O's Figure 2(d): H2O (§4.3) with column sums that include all future rows.

    Args:
        totals: per KV head, the column sum of every position of the text.
    """

    def __init__(
        self, *row: int, totals: list[list[float]], recent: int | None = None, sinks: int = 0, **identity: int
    ):
        super().__init__(*row, **identity)
        self.totals = totals
        self.recent = self.budget // 2 if recent is None else recent
        self.sinks = sinks

    def cut(self, head: int, kept: list[int], seen: int, *, decode: bool) -> list[int]:
        protected = {j for j in kept if j < self.sinks or j >= seen - self.recent}
        return evict(kept, self.budget, self.totals[head].__getitem__, protected)


def static_mask(totals: list[float], n_heavy: int, recent: int, row: int) -> set[int]:
    """Keys that a row sees in the official LLaMA code of lm-eval (policies.md §4.5-D), for one head.

    The ``n_heavy`` columns with the largest sums of the whole text, or ``i - j <= recent``; causal.
    """
    heavy = sorted(range(len(totals)), key=lambda j: (totals[j], j), reverse=True)[:n_heavy]
    return {j for j in range(row + 1) if j in heavy or row - j <= recent}


def attend_where(
    queries: list[list[Vector]],
    keys: list[list[Vector]],
    values: list[list[Vector]],
    sees: Callable[[int, int, int], bool],
    scaling: float,
) -> list[list[Vector]]:
    """Outputs of causal attention in which row ``i`` of KV head ``h`` uses the keys ``j`` with ``sees(h, i, j)``."""
    group = len(queries) // len(keys)
    outputs = []
    for g, query in enumerate(queries):
        head, rows = g // group, []
        for i in range(len(query)):
            visible = [j for j in range(i + 1) if sees(head, i, j)]
            p = softmax([scaling * dot(query[i], keys[head][j]) for j in visible])
            columns = zip(*(values[head][j] for j in visible), strict=True)
            rows.append([dot(p, list(column)) for column in columns])
        outputs.append(rows)
    return outputs
