"""How sure results are: an interval for every cell with graded questions, and policies compared on the same questions.

Questions about one text are not independent, so everything is resampled or counted by text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.evals.results import Row, Spread, by_budget, by_policy, case_title, grouped, is_full
from kvkeep.result_files import finite

# 95 % intervals of shares, of means, and of numbers whose parts come in clusters, such as questions about one text.

Interval = tuple[float, float]

UNKNOWN: Interval = (math.nan, math.nan)
_NORMAL = 1.960
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Quantiles of Student's distribution with 1, 2, … degrees of freedom."""


def interval_text(interval: Interval) -> str:
    """Format an interval as it follows a number in a table: `` (87–95)``; empty if it is not known."""
    return "" if math.isnan(interval[0]) else f" ({interval[0]:.0f}–{interval[1]:.0f})"


def of_share(right: int, n: int) -> Interval:
    """Return Wilson's interval of a share of ``n`` answers, in percent; NaN without answers.

    It is not empty at 0 and 100 %.
    """
    return _wilson(right / n, float(n), _NORMAL) if n else UNKNOWN


def of_mean(spread: Spread) -> Interval:
    """Return Student's interval of a mean over seeds; NaN for a single seed or a missing value."""
    if spread.n < 2 or math.isnan(spread.error):
        return UNKNOWN
    half = _quantile(spread.n - 1) * spread.error
    return spread.mean - half, spread.mean + half


def of_clustered_share(clusters: Sequence[tuple[int, int]]) -> Interval:
    """Return the interval of a share of right answers, in percent, for questions that come in clusters.

    It is Wilson's interval for as many independent questions as would have the variance between clusters (Korn and
    Graubard, 1998), but for no more than there are, with Student's quantile for the number of clusters.

    It is NaN for fewer than two clusters, or without a question.

    Args:
        clusters: number of right answers and number of questions of each cluster.
    """
    n, share = sum(size for _, size in clusters), _ratio(clusters)
    if len(clusters) < 2 or not n:
        return UNKNOWN
    variance, alone = _variance(clusters), share * (1 - share) / n
    return _wilson(share, n * (min(1.0, alone / variance) if variance else 1.0), _quantile(len(clusters) - 1))


def of_clusters(right: int, n: int, clusters: int) -> Interval:
    """Return the narrowest interval that `of_clustered_share` gives to ``n`` questions in so many clusters; NaN
    below two clusters.
    """
    return _wilson(right / n, float(n), _quantile(clusters - 1)) if n and clusters > 1 else UNKNOWN


def of_clustered_difference(clusters: Sequence[tuple[int, int]]) -> Interval:
    """Return the interval of a mean difference between paired answers, in percentage points; NaN for fewer than two
    clusters.

    The interval is at least as wide as that of a share of 0 among so many questions, since a difference that no
    question has shown may still exist.

    Args:
        clusters: for each cluster, questions that only one side answers less those that only the other one does, and
            the number of questions.
    """
    n, mean = sum(size for _, size in clusters), 100 * _ratio(clusters)
    if len(clusters) < 2 or not n:
        return UNKNOWN
    quantile = _quantile(len(clusters) - 1)
    half = max(100 * quantile * math.sqrt(_variance(clusters)), _wilson(0.0, float(n), quantile)[1])
    return max(-100.0, mean - half), min(100.0, mean + half)


def _ratio(clusters: Sequence[tuple[int, int]]) -> float:
    """Return the share of right answers over all clusters of questions; NaN if there are none."""
    n = sum(size for _, size in clusters)
    return sum(count for count, _ in clusters) / n if n else math.nan


def _variance(clusters: Sequence[tuple[int, int]]) -> float:
    """Return the linearised variance of a ratio of sums over clusters, of which there have to be two or more."""
    ratio, n, C = _ratio(clusters), sum(size for _, size in clusters), len(clusters)
    return C / (C - 1) * sum((count - ratio * size) ** 2 for count, size in clusters) / n**2


def _wilson(share: float, n: float, quantile: float) -> Interval:
    """Return Wilson's interval for a share of ``n`` questions, in percent."""
    square = quantile**2
    middle = (share + square / (2 * n)) / (1 + square / n)
    half = quantile * math.sqrt(share * (1 - share) / n + square / (4 * n * n)) / (1 + square / n)
    return 100 * max(0.0, middle - half), 100 * min(1.0, middle + half)


def _quantile(freedom: int) -> float:
    """Return Student's quantile of 97.5 % for this many degrees of freedom."""
    # beyond the table: the first term of Student's quantile in 1 / freedom, (z³ + z) / 4
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else _NORMAL + 2.4 / freedom


Question: TypeAlias = tuple[str, int, int, int]
"""Case, seed, text, and number of a question about that text."""

_Question = TypeVar("_Question", bound=tuple[Any, ...])

Grades: TypeAlias = dict[Question, float]
"""The grade of each question, in [0, 1]."""

RESAMPLES = 2000
"""Bootstrap samples of an interval."""

FLIPS = 12
"""Most texts whose signs are flipped in all ways; for more texts, `DRAWS` ways are drawn."""

DRAWS = 10_000
LEVEL = 0.05
_CELL = ("task", "case", "policy", "setup", "budget")  # without the seed: an interval is one of all seeds together
_POWER = (_NORMAL + 0.842) / _NORMAL
"""A difference so many times the half of its interval is found in four of five runs: 0.842 is the normal quantile of
80 %."""


@dataclass(frozen=True)
class PolicyPair:
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
    """Return question → grade of some rows, which may differ by seed and case alone.

    Rows without a record of questions add none.
    """
    grades_of: Grades = {}
    for row in rows:
        place, score = (str(row["case"]), int(row["seed"])), row["score"]
        grades_of |= {(*place, text, number): float(right) for text, number, right in score.get("asked", ())}
        # tasks that do not record their texts ask one question about each
        grades_of |= {(*place, number, 0): float(grade) for number, grade in enumerate(score.get("grades", ()))}
    return grades_of


def of_cell(rows: Sequence[Row]) -> Interval:
    """Return the 95 % interval of the mean grade of rows that differ only by seed and case, in percent.

    It is NaN for a single text, or without a record of questions.

    Answers that are right or wrong have Wilson's interval, for the effective number of questions where a text has
    several. Other grades have the percentiles of a bootstrap over texts.
    """
    grade_of = grades(rows)
    texts = _by_text(grade_of)
    if len(texts) < 2:
        return UNKNOWN
    # wilson's interval is for right or wrong; other grades are resampled
    if any(grade not in (0, 1) for grade in grade_of.values()):
        return _bootstrap([(sum(grade_of[q] for q in own), len(own)) for own in texts])
    counts = [(round(sum(grade_of[q] for q in own)), len(own)) for own in texts]
    if len(texts) == len(grade_of):  # a question for each text: all are independent
        return of_share(sum(right for right, _ in counts), len(grade_of))
    return of_clustered_share(counts)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return ``intervals`` (one per cell with graded questions) and ``pairs`` (see `pairs`) as plain data for JSON.

    NaN becomes ``None``. Rows of a cell that differ by seed have one interval together.
    """
    cells = grouped(rows, lambda row: tuple(str(row.get(key) or "") for key in _CELL))
    intervals = [
        {**dict(zip(_CELL, cell, strict=True)), "n": len(grades(own)), "interval": of_cell(own)}
        for cell, own in cells.items()
        if grades(own)
    ]
    made: dict[str, Any] = finite({"intervals": intervals, "pairs": [vars(pair) for pair in pairs(rows)]})
    return made


def pairs(rows: Sequence[Row]) -> list[PolicyPair]:
    """Return the comparison of every two policies at each budget of each task and protocol, over the task's cases.

    What is clear is corrected for all pairs of a budget. A policy that never evicts takes part at every budget.
    """
    return [
        pair
        for (task, protocol), group in _parts(rows).items()
        for budget, lines in _lines(group).items()
        for pair in _corrected(
            [compare(task, protocol, budget, (a, lines[a]), (b, lines[b])) for a, b in combinations(lines, 2)]
        )
    ]


def compare(task: str, protocol: str, budget: str, first: tuple[str, Grades], second: tuple[str, Grades]) -> PolicyPair:
    """Return the comparison of two policies on the questions that both were asked; `PolicyPair.clear` and
    `PolicyPair.needed` are not set yet.

    Args:
        task, protocol, budget: the part of the results.
        first: name and grades of a policy.
        second: name and grades of the other one. Points are above 0 if the first one is better.
    """
    both = {question: first[1][question] - second[1][question] for question in first[1] if question in second[1]}
    texts = [(sum(both[q] for q in own), len(own)) for own in _by_text(both)]
    n = len(both)
    points = 100 * sum(both.values()) / n if n else math.nan
    interval = _at_least(_bootstrap(texts), points, n) if len(texts) > 1 else UNKNOWN
    names = (first[0], second[0])
    return PolicyPair(task, protocol, budget, *names, points, interval, sign_flip([d for d, _ in texts]), n, len(texts))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the p-value of a sign-flip test with two sides: of all ways to choose the signs of the differences, the
    share under which their sum lies at least as far from 0 as with their own signs; 1 if all are 0.

    Every way is tried for up to `FLIPS` differences that are not 0; for more, `DRAWS` ways are drawn, always the same.
    For differences of ±1 this is McNemar's test.
    """
    # the sign of a 0 changes nothing
    values = torch.tensor([value for value in differences if value], dtype=torch.float64)
    if not len(values):
        return 1.0
    exact = len(values) <= FLIPS
    if exact:
        ways = torch.arange(2 ** len(values))[:, None] >> torch.arange(len(values)) & 1
    else:
        ways = torch.randint(2, (DRAWS, len(values)), generator=torch.Generator().manual_seed(0))
    sums = ((2 * ways - 1).double() @ values).abs()
    reached = int((sums >= values.sum().abs() - 1e-9).sum())  # 1e-9: sums that differ by rounding alone are equal
    # drawn ways may lack the signs as they are, so these count as one more draw, and no p-value is 0
    return reached / len(ways) if exact else (reached + 1) / (DRAWS + 1)


def _corrected(pairs: Sequence[PolicyPair]) -> list[PolicyPair]:
    """Return copies of the pairs of one budget, in their order: `PolicyPair.clear` is set by Holm's rule for all of
    them together, and `PolicyPair.needed` for those that are not clear.
    """
    clear: set[int] = set()
    order = sorted(range(len(pairs)), key=lambda i: pairs[i].p)
    for rank, i in enumerate(order):
        if pairs[i].p > LEVEL / (len(order) - rank):
            break  # by Holm's rule no larger p-value is clear either
        clear.add(i)
    return [
        replace(pair, clear=i in clear, needed=None if i in clear else _needed(pair, len(pairs)))
        for i, pair in enumerate(pairs)
    ]


def _needed(pair: PolicyPair, pairs_of_budget: int) -> int | None:
    """Return how many questions would show the difference in four of five runs; ``None`` without a difference or an
    interval.
    """
    half = (pair.interval[1] - pair.interval[0]) / 2
    if not pair.points or math.isnan(half):
        return None
    # n texts that all differ in one direction have a p-value of 2 / 2**n, and Holm compares it with LEVEL / pairs
    least = math.ceil(math.log2(2 * pairs_of_budget / LEVEL)) * pair.n / pair.texts
    # more than there are, since with these the difference is not clear
    return math.ceil(max(pair.n + 1, least, pair.n * (_POWER * half / pair.points) ** 2))


def _bootstrap(texts: Sequence[tuple[float, int]]) -> Interval:
    """Return the 95 % bootstrap interval of a mean grade, in percent; texts are resampled, not questions.

    Args:
        texts: the sum of the grades and the number of questions of each text.
    """
    sums, sizes = torch.tensor(texts, dtype=torch.float64).T
    # the same samples each time, so that a table does not change when it is made again
    generator = torch.Generator().manual_seed(0)
    means: Float[Tensor, " R"] = torch.cat(
        [
            sums[drawn].sum(dim=1) / sizes[drawn].sum(dim=1)
            # bounds memory
            for drawn in torch.randint(len(texts), (RESAMPLES, len(texts)), generator=generator).split(100)
        ]
    )
    low, high = (100 * means).quantile(torch.tensor([LEVEL / 2, 1 - LEVEL / 2], dtype=torch.float64)).tolist()
    return low, high


def _at_least(interval: Interval, points: float, n: int) -> Interval:
    """Return the interval of a difference of ``points``, widened around them to at least the width of the interval of a
    share of 0 among ``n`` questions, but not beyond ±100: a difference that no question shows may still exist.
    """
    half = of_share(0, n)[1] / 2  # that interval begins at 0
    return max(-100.0, min(interval[0], points - half)), min(100.0, max(interval[1], points + half))


def _parts(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Group the rows with graded questions by task and protocol."""
    graded = [row for row in rows if row["score"].get("grades") or row["score"].get("asked")]
    return grouped(graded, lambda row: (str(row["task"]), case_title(row["task"], row["case"]).rpartition(", ")[2]))


def _lines(rows: Sequence[Row]) -> dict[str, dict[str, Grades]]:
    """Return the grades of each policy at each budget: budget → policy → grades; policies that never evict stand under
    every budget.
    """
    full = {name: grades(own) for name, own in by_policy([row for row in rows if is_full([row])]).items()}
    bounded = by_budget([row for row in rows if not is_full([row])])
    return {
        budget: {**full, **{n: grades(own) for n, own in by_policy(group).items()}} for budget, group in bounded.items()
    }


def _by_text(questions: Iterable[_Question]) -> list[list[_Question]]:
    """Return questions grouped by their text. All entries of a question but the last one, its number, name the text."""
    return list(grouped(questions, lambda question: question[:-1]).values())


# Policies on the same questions: what stays of the full cache's answers, and the difference of two policies.
#
# Questions that the full cache cannot answer say nothing about a policy. They are left out and counted. Questions about
# one text are not independent, so intervals are those of clusters: the texts.

Answers: TypeAlias = dict[tuple[int, int, int], bool]
"""Whether each question was answered right; a question is a seed, a document and a number in it."""


@dataclass(frozen=True)
class KeptShare:
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
        return "–" if math.isnan(self.share) else f"{self.share:.0f}{interval_text(self.interval)}"


@dataclass(frozen=True)
class PolicyDifference:
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
        """Return whether 0 lies outside the interval."""
        return self.interval[0] > 0 or self.interval[1] < 0


def answers(rows: Iterable[Row]) -> Answers:
    """Return (seed, document, number) → whether this question was answered right, of rows that differ only by seed.

    Rows without a record of questions add none.
    """
    return {
        (row["seed"], document, number): bool(right)
        for row in rows
        for document, number, right in row["score"].get("asked", ())
    }


def kept(own: Answers, full: Answers) -> KeptShare:
    """Return which share of the full cache's right answers a policy gives, too, of the questions that both were asked.

    Args:
        own: the policy's answers.
        full: the full cache's.
    """
    both = own.keys() & full.keys()
    questions = [question for question in both if full[question]]
    clusters = [(sum(own[q] for q in group), len(group)) for group in _by_text(questions)]
    share = 100 * sum(right for right, _ in clusters) / len(questions) if questions else math.nan
    return KeptShare(share, of_clustered_share(clusters), len(questions), len(both) - len(questions))


def difference(first: Answers, second: Answers, full: Answers) -> PolicyDifference:
    """Return how much better the first policy is than the second one, in percentage points and in questions.

    Only the questions count that both were asked and that the full cache answers right.
    """
    questions = [question for question in first.keys() & second.keys() & full.keys() if full[question]]
    clusters = [(sum(first[q] - second[q] for q in group), len(group)) for group in _by_text(questions)]
    only = (sum(first[q] > second[q] for q in questions), sum(first[q] < second[q] for q in questions))
    points = 100 * (only[0] - only[1]) / len(questions) if questions else math.nan
    return PolicyDifference(points, of_clustered_difference(clusters), only, len(questions))


def is_reference(row: Row) -> bool:
    """Return whether a row was measured with the full cache in the model's dtype."""
    return row["policy"] == "full" and not row.get("setup")
