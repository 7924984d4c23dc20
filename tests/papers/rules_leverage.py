"""Rules that go by the leverage of keys: how far a key stands out from all keys of the prompt."""

from __future__ import annotations

from kvkeep_lab.theory.loops import Vector, dot

from .loops import Step, evict, mean, total
from .rules_prompt import SnapKV


class Leverage(SnapKV):
    """retention.md §2: x_jᵀ (XᵀX + ridge·I)⁻¹ x_j, where X are the centred keys of all prompt tokens so far.

    The ``sinks`` first tokens do not count. Keys that were evicted do. The ``recent`` newest tokens (at most half of
    what the sinks leave of the budget) and the sinks stay; the smallest leverage goes. Generated tokens are not
    counted: they and the recent ones of the prompt are a queue beside the chosen tokens.
    """

    def __init__(
        self,
        *row: int,
        sinks: int = 4,
        recent: int = 24,
        ridge: float = 0.01,
        rotated: bool = False,
        window: int = 8,
        kernel: int = 13,
        **identity: int,
    ):
        super().__init__(*row, sinks=sinks, window=window, kernel=kernel, **identity)
        self.unselected = max(0, min(recent, (self.budget - sinks) // 2))
        self.ridge = ridge
        self.counted: list[list[int]] = [[] for _ in range(self.heads)]
        self.keys: list[list[Vector]] = [[] for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        self.keys[head] = step.keys
        if not step.decode:
            self.counted[head] += [j for j in step.queries if j >= self.sinks]
            super().look(head, step)

    def select(self, head: int, kept: list[int], seen: int) -> list[int]:
        return evict(kept, self.budget, self.leverage(head, kept).__getitem__, self.protected(kept, seen))

    def leverage(self, head: int, kept: list[int]) -> dict[int, float]:
        """The leverage of the tokens held."""
        counted = [self.keys[head][j] for j in self.counted[head]]
        dims = range(len(self.keys[head][0]))
        middle = mean(counted) if counted else [0.0 for _ in dims]
        apart = [[x - m for x, m in zip(key, middle, strict=True)] for key in counted]
        scatter = [[sum(x[a] * x[b] for x in apart) + self.ridge * (a == b) for b in dims] for a in dims]
        found = {}
        for j in kept:
            x = [value - m for value, m in zip(self.keys[head][j], middle, strict=True)]
            found[j] = dot(x, solved(scatter, x))
        return found


class Blend(Leverage):
    """retention.md §1, "both cases in one rule".

    Of the slots that sinks and recent tokens leave, ``int(share * slots)`` go to the largest mass of the last
    ``window`` rows, pooled by the maximum over ``kernel`` neighbours. Protected tokens are left out. The
    others go by leverage.
    """

    def __init__(self, *row: int, share: float = 0.5, **options: int):
        super().__init__(*row, **options)
        self.share = share
        self.mass: list[dict[int, float]] = [{} for _ in range(self.heads)]

    def look(self, head: int, step: Step) -> None:
        super().look(head, step)
        if not step.decode:
            self.mass[head] = total(step.rows[-self.window :])

    def select(self, head: int, kept: list[int], seen: int) -> list[int]:
        protected = self.protected(kept, seen)
        free = [j for j in kept if j not in protected]
        half, slots = self.kernel // 2, self.budget - len(protected)
        pooled = {
            j: max(self.mass[head].get(i, 0.0) for i in free[max(0, n - half) : n + half + 1])
            for n, j in enumerate(free)
        }
        attended = evict(free, int(self.share * slots), pooled.__getitem__, [])
        others = [j for j in free if j not in attended]
        outstanding = evict(others, slots - len(attended), self.leverage(head, kept).__getitem__, [])
        return sorted([*protected, *attended, *outstanding])


def solved(matrix: list[Vector], right: Vector) -> Vector:
    """The solution of a linear system, by elimination with pivots."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for column in range(len(rows)):
        pivot = max(range(column, len(rows)), key=lambda i: abs(rows[i][column]))
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(len(rows)):
            if i != column:
                factor = rows[i][column] / rows[column][column]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[column], strict=True)]
    return [row[-1] / row[i] for i, row in enumerate(rows)]
