"""Rows of results in groups, and the measures in them.

Rows that differ by the seed alone are one number with a spread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from kvkeep.policies.registry import available, label, split

Row = dict[str, Any]
_Key = TypeVar("_Key", bound=Hashable)
_Item = TypeVar("_Item")

FULL = "100%"
"""The budget of policies that never evict, as rows have it."""


@dataclass(frozen=True)
class Spread:
    """A number over seeds.

    Attributes:
        mean: the mean; NaN if a value is missing.
        low: the lowest value.
        high: the highest value.
        n: number of values.
        error: the standard error of the mean; NaN for a single value.
    """

    mean: float
    low: float
    high: float
    n: int
    error: float = math.nan

    @property
    def half(self) -> float:
        """Return half of the distance between the lowest and the highest value."""
        return (self.high - self.low) / 2

    def times(self, factor: float) -> Spread:
        """Return the spread multiplied by a factor."""
        return Spread(factor * self.mean, factor * self.low, factor * self.high, self.n, factor * self.error)


def over(values: Sequence[float]) -> Spread:
    """Compute the spread of some numbers, at least one."""
    n, mean = len(values), sum(values) / len(values)
    error = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1) / n) if n > 1 else math.nan
    return Spread(mean, min(values), max(values), n, error)


@dataclass(frozen=True)
class ScoreMeasure:
    """A number in a task's score, and how to show it.

    Attributes:
        task: the task.
        key: the number's name in the score.
        title: its name for people.
        decimals: decimals of a share in percent; ``None`` for a plain number, which is shown with three digits.
    """

    task: str
    key: str
    title: str
    decimals: int | None = None

    @property
    def graded(self) -> bool:
        """Return whether the measure is the mean of the grades of a task's questions."""
        return self.task in ASKED and self.key in ("score", "accuracy")

    def of(self, rows: Sequence[Row]) -> Spread:
        """Compute the measure of rows that differ only by seed; shares in percent, NaN if a row lacks the number."""
        values = [row["score"][self.key] for row in rows]
        spread = over([math.nan if value is None else value for value in values])
        return spread if self.decimals is None else spread.times(100.0)

    def show(self, rows: Sequence[Row]) -> str:
        """Format the measure of rows that differ only by seed: ``62%``, or ``62±3%`` with half of the range over seeds.

        A plain number has no percent sign; a dash stands for a number that a row lacks.
        """
        spread = self.of(rows)
        if math.isnan(spread.mean):
            return "–"
        if self.decimals is None:
            return _digits(spread.mean) + (f"±{spread.half:.2g}" if spread.n > 1 else "")
        return f"{spread.mean:.{self.decimals}f}" + (f"±{spread.half:.{self.decimals}f}%" if spread.n > 1 else "%")


def _digits(value: float) -> str:
    """Format three significant digits, but all digits before the point: ``57.0``, ``0.0665``, ``1234``."""
    # from 99.95 on three digits have no decimals; 0 has no first digit
    return f"{value:.0f}" if abs(value) >= 99.95 or value == 0 else f"{value:#.3g}"


MEASURES = (
    ScoreMeasure("recall", "accuracy", "recall, % right", 0),
    ScoreMeasure("perplexity", "perplexity", "perplexity"),
    ScoreMeasure("continuation", "perplexity", "perplexity of the next tokens"),
    ScoreMeasure("agreement", "agreement", "agreement with the full cache, %", 0),
    ScoreMeasure("agreement", "kl", "KL(full ‖ bounded), nats"),
    ScoreMeasure("mass", "mass", "retained attention mass, %", 1),
    ScoreMeasure("mass", "regret", "regret against the best set of each row, %", 1),
    ScoreMeasure("ruler", "score", "RULER, % of the asked strings", 1),
    ScoreMeasure("choice", "score", "multiple choice, % right", 1),
    ScoreMeasure("longbench", "score", "LongBench, %", 1),
    ScoreMeasure("needle", "score", "needle, % found", 0),
    ScoreMeasure("passkey", "score", "passkey, % found", 0),
    ScoreMeasure("kv_retrieval", "score", "key-value retrieval, % found", 0),
    ScoreMeasure("conversation", "score", "conversation, % of facts found", 0),
    ScoreMeasure("summary", "score", "summaries, ROUGE-L", 1),
    ScoreMeasure("summary", "rouge2", "summaries, ROUGE-2", 1),
    ScoreMeasure("diversity", "score", "different pairs of words in a text, %", 1),
    ScoreMeasure("diversity", "self_bleu", "Self-BLEU among texts"),
    ScoreMeasure("long_generation", "score", "long generation, ROUGE-L with the full cache's text", 1),
    ScoreMeasure("long_generation", "before_difference", "long generation, % before the first difference", 1),
    ScoreMeasure("long_generation", "length_ratio", "long generation, length relative to the full cache's"),
)

# in groups, since the formatter would give each name of a long tuple a line
ASKED = (
    *("recall", "ruler", "choice", "longbench", "needle", "passkey", "kv_retrieval"),
    *("conversation", "summary", "diversity", "long_generation"),
)
"""Tasks with graded replies: questions are asked inside the text or later."""


RIGHT = ("recall", "ruler", "choice", "needle", "passkey", "kv_retrieval", "conversation")
"""Tasks whose graded measure is a share of right answers."""

ABLE_PERCENT = 70.0
"""Right answers under the full cache, in percent, below which a model is too weak to show what eviction costs."""


def of_task(rows: Sequence[Row], task: str) -> list[Row]:
    """Return the rows of one task."""
    return [row for row in rows if row["task"] == task]


def grouped(rows: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Group rows, or other items, by a key, in the order in which the groups first appear."""
    groups: dict[_Key, list[_Item]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return groups


def by_case(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by their case, which is a part of a task."""
    return grouped(rows, lambda row: str(row["case"]))


def case_title(task: str, case: str) -> str:
    """Return a case's name for a title. If the task has questions, it ends with the protocol: ``context=512, later``.

    ``inside``: the question stands in the text when the text is cut. ``later``: the text is cut first.
    """
    if task not in ASKED:
        return case
    context, later, rest = case.partition(",ask=later")
    return f"{context}{rest}, {'later' if later else 'inside'}"


def by_policy(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by policy, and by setup where it differs from the policy's own."""
    return grouped(rows, policy_label)


def policy_label(row: Row) -> str:
    """Return the policy of a row as tables name it, with the setup where it differs from the policy's own."""
    setup = row.get("setup")
    return f"{label(row['policy'])} ({setup})" if setup else label(row["policy"])


def by_budget(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group rows by budget, from the smallest to the largest."""
    groups = grouped(rows, lambda row: str(row["budget"]))
    return dict(sorted(groups.items(), key=lambda item: _share(item[1][0])))


def percent(row: Row) -> float:
    """Return the budget in percent of the text; a budget given in percent is not rounded to whole tokens."""
    asked = str(row["budget"])
    return float(asked[:-1]) if asked.endswith("%") else 100 * _share(row)


def held(row: Row) -> float:
    """Return the allocated bytes relative to a full cache."""
    # a row in a file may say 0 bytes, see `records.fault`
    return float(row["memory"]["allocated_bytes"] / max(1, row["memory"]["full_bytes"]))


def is_full(rows: Sequence[Row]) -> bool:
    """Return whether all rows are of a policy that never evicts.

    Files may name modules, which are not imported for this: a policy without a registered name counts as one that
    evicts.
    """
    # others may have this budget, too
    return all(row["budget"] == FULL and _never_evicts(row["policy"]) for row in rows)


def _never_evicts(policy: str) -> bool:
    """Return whether a policy's string has the registered name of one that never evicts."""
    cls = available().get(split(policy)[0])
    return cls is not None and not cls.evicts


def by_seed(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows by seed."""
    return list(grouped(rows, lambda row: row["seed"]).values())


def seeds(rows: Sequence[Row]) -> str:
    """Return how many seeds each cell has, for a title: ``3 seeds`` or ``1 to 3 seeds``; empty if none has several."""
    cells = grouped(rows, lambda row: (row["case"], row["policy"], row.get("setup"), row["budget"]))
    sizes = {len(by_seed(group)) for group in cells.values()}
    low, high = min(sizes, default=1), max(sizes, default=1)
    if high == 1:
        return ""
    return f"{high} seeds" if low == high else f"{low} to {high} seeds"


def _share(row: Row) -> float:
    """Return the budget as a share of the text, at most 1."""
    return float(min(1.0, row["budget_tokens"] / row["text_tokens"]))
