"""How sure results are: an interval for every cell with graded questions, and policies compared on the same questions.

Questions about one text are not independent, so everything is resampled or counted by text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.evals.intervals import Interval, of_clustered_share, of_share
from kvkeep.evals.report import Row, by_budget, by_name, grouped, is_full, shown
from kvkeep.result_files import finite

Question: TypeAlias = tuple[str, int, int, int]
"""Case, seed, text, and number of a question about that text."""

Grades: TypeAlias = dict[Question, float]

RESAMPLES = 2000
"""Bootstrap samples of an interval."""

FLIPS = 12
"""Most texts whose signs are flipped in all ways; for more texts, `DRAWS` ways are drawn."""

DRAWS = 10_000
LEVEL = 0.05
_CELL = ("task", "case", "policy", "setup", "budget")
_POWER = (1.960 + 0.842) / 1.960
"""A difference so many times the half of its interval is found in four of five runs."""


@dataclass(frozen=True)
class Pair:
    """Two policies on the same questions.

    Attributes:
        task, protocol, budget: the part of the results; a task's cases are taken together.
        one, other: the policies.
        points: percentage points by which the first one is better.
        interval: the 95 % interval of the difference, a bootstrap over texts.
        p: the p-value of a sign-flip test over texts: exact for up to `FLIPS` texts that differ.
        n: questions that both were asked.
        texts: texts of these questions.
        clear: whether p stays below 5 % after Holm's correction for all pairs of the budget.
        needed: about how many questions would make a difference of this size clear; ``None`` if it is clear or 0.
    """

    task: str
    protocol: str
    budget: str
    one: str
    other: str
    points: float
    interval: Interval
    p: float
    n: int
    texts: int
    clear: bool = False
    needed: int | None = None


def grades(rows: Iterable[Row]) -> Grades:
    """The grades in rows that differ by seed and case alone; none from rows without a record of questions."""
    found: Grades = {}
    for row in rows:
        place, score = (str(row["case"]), int(row["seed"])), row["score"]
        found |= {(*place, text, number): float(right) for text, number, right in score.get("asked", ())}
        found |= {(*place, number, 0): float(grade) for number, grade in enumerate(score.get("grades", ()))}
    return found


def of_cell(rows: Sequence[Row]) -> Interval:
    """The 95 % interval of a mean grade, in percent; NaN without a record of questions, or with a single text.

    Answers that are right or wrong have Wilson's interval, for the effective number of questions where a text has
    several. Other grades have the percentiles of a bootstrap over texts.
    """
    found = grades(rows)
    texts = _by_text(found)
    if len(texts) < 2:
        return math.nan, math.nan
    if any(grade not in (0, 1) for grade in found.values()):
        return _bootstrap([(sum(found[q] for q in own), len(own)) for own in texts])
    counts = [(round(sum(found[q] for q in own)), len(own)) for own in texts]
    if len(texts) == len(found):
        return of_share(sum(right for right, _ in counts), len(found))
    return of_clustered_share(counts)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """``intervals``, one for each cell with graded questions, and ``pairs``, as plain data; ``null`` is no number."""
    cells = grouped(rows, lambda row: tuple(str(row.get(key) or "") for key in _CELL))
    intervals = [
        {**dict(zip(_CELL, cell, strict=True)), "n": len(grades(own)), "interval": of_cell(own)}
        for cell, own in cells.items()
        if grades(own)
    ]
    made: dict[str, Any] = finite({"intervals": intervals, "pairs": [vars(pair) for pair in pairs(rows)]})
    return made


def pairs(rows: Sequence[Row]) -> list[Pair]:
    """All pairs of policies of every task, protocol and budget; a policy that never evicts meets all budgets."""
    return [
        pair
        for (task, protocol), group in _parts(rows).items()
        for budget, lines in _lines(group).items()
        for pair in _corrected(
            [compare(task, protocol, budget, (a, lines[a]), (b, lines[b])) for a, b in combinations(lines, 2)]
        )
    ]


def compare(task: str, protocol: str, budget: str, one: tuple[str, Grades], other: tuple[str, Grades]) -> Pair:
    """Two policies, each with its grades, on the questions that both were asked."""
    both = {question: one[1][question] - other[1][question] for question in one[1] if question in other[1]}
    texts = [(sum(both[q] for q in own), len(own)) for own in _by_text(both)]
    n = len(both)
    points = 100 * sum(both.values()) / n if n else math.nan
    interval = _at_least(_bootstrap(texts), points, n) if len(texts) > 1 else (math.nan, math.nan)
    names = (one[0], other[0])
    return Pair(task, protocol, budget, *names, points, interval, sign_flip([d for d, _ in texts]), n, len(texts))


def sign_flip(differences: Sequence[float]) -> float:
    """The share of sign changes under which a sum of differences is at least as far from 0; 1 if all are 0.

    Every way to change signs is tried for up to `FLIPS` differences. For differences of ±1 this is McNemar's test.
    """
    values = torch.tensor([value for value in differences if value], dtype=torch.float64)
    if not len(values):
        return 1.0
    exact = len(values) <= FLIPS
    if exact:
        ways = torch.arange(2 ** len(values))[:, None] >> torch.arange(len(values)) & 1
    else:
        ways = torch.randint(2, (DRAWS, len(values)), generator=torch.Generator().manual_seed(0))
    sums = ((2 * ways - 1).double() @ values).abs()
    reached = int((sums >= values.sum().abs() - 1e-9).sum())
    return reached / len(ways) if exact else (reached + 1) / (DRAWS + 1)


def _corrected(found: Sequence[Pair]) -> list[Pair]:
    """Pairs with `Pair.clear` and `Pair.needed`, by Holm's rule."""
    clear: set[int] = set()
    order = sorted(range(len(found)), key=lambda i: found[i].p)
    for rank, i in enumerate(order):
        if found[i].p > LEVEL / (len(order) - rank):
            break
        clear.add(i)
    return [
        replace(pair, clear=i in clear, needed=None if i in clear else _needed(pair, len(found)))
        for i, pair in enumerate(found)
    ]


def _needed(pair: Pair, pairs_of_budget: int) -> int | None:
    """The questions that show the difference in four of five runs; never fewer than the test needs to be clear."""
    half = (pair.interval[1] - pair.interval[0]) / 2
    if not pair.points or math.isnan(half):
        return None
    least = math.ceil(math.log2(2 * pairs_of_budget / LEVEL)) * pair.n / pair.texts
    return math.ceil(max(pair.n + 1, least, pair.n * (_POWER * half / pair.points) ** 2))


def _bootstrap(texts: Sequence[tuple[float, int]]) -> Interval:
    """Percentiles of a mean, in percent, over samples of texts; each text has a sum and a number of questions."""
    sums, sizes = torch.tensor(texts, dtype=torch.float64).T
    generator = torch.Generator().manual_seed(0)
    means: Float[Tensor, " R"] = torch.cat(
        [
            sums[drawn].sum(dim=1) / sizes[drawn].sum(dim=1)
            for drawn in torch.randint(len(texts), (RESAMPLES, len(texts)), generator=generator).split(100)
        ]
    )
    low, high = (100 * means).quantile(torch.tensor([LEVEL / 2, 1 - LEVEL / 2], dtype=torch.float64)).tolist()
    return low, high


def _at_least(interval: Interval, points: float, n: int) -> Interval:
    """An interval at least as wide as that of a share of 0: a difference that no question has shown may still exist."""
    half = of_share(0, n)[1] / 2
    return max(-100.0, min(interval[0], points - half)), min(100.0, max(interval[1], points + half))


def _parts(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows with graded questions by task and protocol."""
    graded = [row for row in rows if row["score"].get("grades") or row["score"].get("asked")]
    return grouped(graded, lambda row: (str(row["task"]), shown(row["task"], row["case"]).rpartition(", ")[2]))


def _lines(rows: Sequence[Row]) -> dict[str, dict[str, Grades]]:
    """The grades of each policy at each budget."""
    full = {name: grades(own) for name, own in by_name([row for row in rows if is_full([row])]).items()}
    bounded = by_budget([row for row in rows if not is_full([row])])
    return {
        budget: {**full, **{n: grades(own) for n, own in by_name(group).items()}} for budget, group in bounded.items()
    }


def _by_text(questions: Mapping[Question, float]) -> list[list[Question]]:
    return list(grouped(questions, lambda question: question[:3]).values())
