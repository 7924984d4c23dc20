"""Policies on the same questions: what stays of the full cache's answers, and the difference of two policies.

Questions that the full cache cannot answer say nothing about a policy. They are left out and counted. Questions about
one text are not independent, so intervals are those of clusters: the texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from kvkeep.evals.intervals import Interval, of_clustered_difference, of_clustered_share
from kvkeep.evals.report import Row, Table, by_budget, by_case, by_name, grouped, of_task, shown

Answers: TypeAlias = dict[tuple[int, int, int], bool]
"""Whether each question was answered right; a question is a seed, a document and a number in it."""


@dataclass(frozen=True)
class Kept:
    """The share of the full cache's answers that a policy gives, too.

    Attributes:
        share: in percent; NaN if there is no question to compare.
        interval: its 95 % interval.
        n: questions that the full cache answers.
        left_out: questions that it does not.
    """

    share: float
    interval: Interval
    n: int
    left_out: int

    def __str__(self) -> str:
        return _shown(self.share, self.interval)


@dataclass(frozen=True)
class Difference:
    """The questions that one policy answers more than another, of those that the full cache answers.

    Attributes:
        points: percentage points; NaN if there is no question to compare.
        interval: its 95 % interval.
        only: questions that only the one policy answers, and those that only the other one does.
        n: questions compared.
    """

    points: float
    interval: Interval
    only: tuple[int, int]
    n: int

    @property
    def clear(self) -> bool:
        """Whether 0 lies outside the interval."""
        return self.interval[0] > 0 or self.interval[1] < 0


def answers(rows: Iterable[Row]) -> Answers:
    """The answers in rows that differ by the seed alone; none from rows without a record of questions."""
    return {
        (row["seed"], document, number): bool(right)
        for row in rows
        for document, number, right in row["score"].get("asked", ())
    }


def kept(own: Answers, full: Answers) -> Kept:
    """The share of the full cache's answers that stay, over the questions that both were asked."""
    both = own.keys() & full.keys()
    able = [question for question in both if full[question]]
    clusters = [(sum(own[q] for q in group), len(group)) for group in _by_text(able)]
    share = 100 * sum(right for right, _ in clusters) / len(able) if able else math.nan
    return Kept(share, of_clustered_share(clusters), len(able), len(both) - len(able))


def difference(one: Answers, other: Answers, full: Answers) -> Difference:
    """The difference of two policies over the questions that both were asked and that the full cache answers."""
    able = [question for question in one.keys() & other.keys() & full.keys() if full[question]]
    clusters = [(sum(one[q] - other[q] for q in group), len(group)) for group in _by_text(able)]
    only = (sum(one[q] > other[q] for q in able), sum(one[q] < other[q] for q in able))
    points = 100 * (only[0] - only[1]) / len(able) if able else math.nan
    return Difference(points, of_clustered_difference(clusters), only, len(able))


def tables(rows: Sequence[Row]) -> list[Table]:
    """The share of the full cache's answers that stays, for every case of recall with rows of ``full``."""
    found = []
    for case, group in by_case(of_task(rows, "recall")).items():
        full = answers(row for row in group if _is_full(row))
        others = [row for row in group if not _is_full(row) and "asked" in row["score"]]
        if full and others:
            found.append(_table(case, others, full))
    return found


def _is_full(row: Row) -> bool:
    """Whether a row is that of the full cache in the model's dtype."""
    return row["policy"] == "full" and not row.get("setup")


def _table(case: str, rows: Sequence[Row], full: Answers) -> Table:
    columns = list(by_budget(rows))
    lines = {name: by_budget(part) for name, part in by_name(rows).items()}
    texts = len({question[:2] for question in full})
    title = (
        f"answers of the full cache that stay, % with 95 % interval ({shown('recall', case)}; the full cache answers "
        f"{sum(full.values())} of {len(full)} questions about {texts} text{'s' * (texts != 1)})"
    )
    cells = {
        name: [str(kept(answers(line[column]), full)) if column in line else "" for column in columns]
        for name, line in lines.items()
    }
    return Table(title, columns, cells)


def _by_text(questions: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    return list(grouped(questions, lambda question: question[:2]).values())


def _shown(value: float, interval: Interval) -> str:
    """A number with its interval: ``92 (87–95)``."""
    if math.isnan(value):
        return "–"
    return f"{value:.0f}" if math.isnan(interval[0]) else f"{value:.0f} ({interval[0]:.0f}–{interval[1]:.0f})"
