"""From rows to tables and plots; needs nothing but the JSONL file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.evals.metrics import TENTHS
from kvkeep.plots import Panel, Series, draw

Row = dict[str, Any]

FULL = "100%"
"""The column of policies that never evict."""

_PERCENT = "{:.0%}".format
_THREE = "{:.3g}".format
_DEPTHS = 5


@dataclass(frozen=True)
class Measure:
    """How a number of a task's score is shown.

    Attributes:
        task: the task.
        key: the number's name in the score.
        title: what it is, in words.
        show: how it is written in a table.
        factor: from the number to a plot's unit.
    """

    task: str
    key: str
    title: str
    show: Callable[[float], str]
    factor: float = 1.0

    def shown(self, row: Row) -> str:
        """The number of a row as a table shows it."""
        value = row["score"][self.key]
        return "–" if value is None else self.show(value)

    def drawn(self, row: Row) -> float:
        """The number of a row in a plot's unit."""
        value = row["score"][self.key]
        return math.nan if value is None else float(self.factor * value)


MEASURES = (
    Measure("recall", "accuracy", "recall, % right", _PERCENT, 100.0),
    Measure("perplexity", "perplexity", "perplexity", _THREE),
    Measure("agreement", "agreement", "agreement with the full cache, %", _PERCENT, 100.0),
    Measure("agreement", "kl", "KL(full ‖ bounded), nats", _THREE),
    Measure("mass", "mass", "retained attention mass, %", "{:.1%}".format, 100.0),
    Measure("mass", "regret", "regret against the best set of each row, %", "{:.1%}".format, 100.0),
)


@dataclass(frozen=True)
class Table:
    """One measure of one case: policies down, budgets across; an empty cell was not run."""

    title: str
    columns: list[str]
    rows: dict[str, list[str]]


def tables(rows: Sequence[Row]) -> list[Table]:
    """A table for every measure of every case, and one of the bytes that caches held."""
    found = [
        _table(f"{measure.title} ({case})", group, measure.shown)
        for measure in MEASURES
        for case, group in _by(_of(rows, measure.task), "case").items()
    ]
    first = next(iter(_by(rows, "task").values()), [])
    for case, group in list(_by(first, "case").items())[-1:]:
        title = f"KV memory held, % of a full cache ({group[0]['task']}, {case})"
        found.append(_table(title, group, lambda row: _PERCENT(_held(row))))
    return found


def _table(title: str, group: Sequence[Row], show: Callable[[Row], str]) -> Table:
    columns = _budgets(group)
    cells = {(row["policy"], row["budget"]): show(row) for row in group}
    policies = list(_by(group, "policy"))
    return Table(title, columns, {name: [cells.get((name, budget), "") for budget in columns] for name in policies})


def _held(row: Row) -> float:
    """Bytes allocated per byte of a full cache."""
    return float(row["memory"]["allocated_bytes"] / max(1, row["memory"]["full_bytes"]))


def _budgets(rows: Sequence[Row]) -> list[str]:
    """Budgets from the smallest to everything."""
    return sorted(_by(rows, "budget"), key=lambda budget: _share(_of(rows, budget, "budget")[0]))


def _share(row: Row) -> float:
    """The budget as a share of the text, at most 1."""
    return float(min(1.0, row["budget_tokens"] / row["text_tokens"]))


def _percent(row: Row) -> float:
    """The budget in percent of the text: as it was asked for, if it was so, without the rounding to whole tokens."""
    asked = str(row["budget"])
    return float(asked[:-1]) if asked.endswith("%") else 100 * _share(row)


def _is_full(group: Sequence[Row]) -> bool:
    return all(row["budget"] == FULL for row in group)


def _of(rows: Sequence[Row], value: str, key: str = "task") -> list[Row]:
    return [row for row in rows if row[key] == value]


def _by(rows: Sequence[Row], key: str) -> dict[str, list[Row]]:
    """Rows in groups, in the order in which the groups first come."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups


def plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw everything that the rows have numbers for.

    Returns:
        The pictures: ``quality.png``, ``depth.png`` and ``kept.png``, or fewer.

    Raises:
        InputError: matplotlib is missing, or a picture cannot be written.
    """
    pictures = {"quality.png": _quality(rows), "depth.png": _depth(rows), "kept.png": _kept(rows)}
    return [draw(folder / name, panels) for name, panels in pictures.items() if panels]


def _quality(rows: Sequence[Row]) -> list[Panel]:
    """Each measure over the budget; a policy that never evicts is a line across."""
    return [
        Panel(
            title=f"{measure.title}\n{case}",
            x_label="budget, % of the text",
            series=[_curve(policy, group, measure) for policy, group in _by(cases, "policy").items()],
            log_x=True,
            log_y=measure.key == "perplexity",
            y_range=(-3.0, 103.0) if measure.key == "accuracy" else (None, None),
        )
        for measure in MEASURES
        if measure.key not in ("kl", "regret")
        for case, cases in _by(_of(rows, measure.task), "case").items()
    ]


def _curve(policy: str, group: Sequence[Row], measure: Measure) -> Series:
    points = sorted((_percent(row), measure.drawn(row)) for row in group)
    return Series(policy, [x for x, _ in points], [y for _, y in points], reference=_is_full(group))


def _depth(rows: Sequence[Row]) -> list[Panel]:
    """Recall over the depth of the asked fact, all contexts together; a panel for each budget."""
    return [
        Panel(
            title=f"recall at {budget}, % right",
            x_label="depth of the asked fact, % of the text",
            series=[_depth_curve(policy, group) for policy, group in _with_full(rows, budget).items()],
            y_range=(-3.0, 103.0),
        )
        for budget in _evicting_budgets(rows)
    ]


def _depth_curve(policy: str, group: Sequence[Row]) -> Series:
    width = TENTHS // _DEPTHS
    points = []
    for part in range(_DEPTHS):
        counts = [count for row in group for count in row["score"]["by_depth"][part * width : (part + 1) * width]]
        if n := sum(count[1] for count in counts):
            points.append((100 * (part + 0.5) / _DEPTHS, 100 * sum(count[0] for count in counts) / n))
    return Series(policy, [x for x, _ in points], [y for _, y in points], reference=_is_full(group))


def _kept(rows: Sequence[Row]) -> list[Panel]:
    """Where the kept tokens stand in the prompt; a panel for each budget."""
    return [
        Panel(
            title=f"kept tokens at {budget}, %",
            x_label="position in the prompt, %",
            series=[_kept_curve(policy, group) for policy, group in _with_full(rows, budget).items()],
            y_range=(0.0, None),
        )
        for budget in _evicting_budgets(rows)
    ]


def _kept_curve(policy: str, group: Sequence[Row]) -> Series:
    shares = [[row["score"]["kept"][tenth] for row in group] for tenth in range(TENTHS)]
    middles = [100 * (tenth + 0.5) / TENTHS for tenth in range(TENTHS)]
    heights = [100 * sum(values) / len(values) for values in shares]
    return Series(policy, middles, heights, reference=_is_full(group))


def _evicting_budgets(rows: Sequence[Row]) -> list[str]:
    return [budget for budget in _budgets(_of(rows, "recall")) if budget != FULL]


def _with_full(rows: Sequence[Row], budget: str) -> dict[str, list[Row]]:
    """Recall at a budget, policy by policy, with the policies that never evict."""
    return _by([row for row in _of(rows, "recall") if row["budget"] in (budget, FULL)], "policy")
