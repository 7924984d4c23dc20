"""Plots of rows; needs only ``results.jsonl``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from kvkeep.evals.confidence import Interval, of_mean, of_share
from kvkeep.evals.results import (
    MEASURES,
    Row,
    ScoreMeasure,
    Spread,
    by_budget,
    by_case,
    by_policy,
    by_seed,
    case_title,
    grouped,
    is_full,
    of_task,
    over,
    percent,
    seeds,
)
from kvkeep.evals.task import TENTHS
from kvkeep.plots import Heat, Panel, Series, draw

MOST_INTERVALS = 8
"""Most lines in a panel whose intervals are drawn."""

HIDDEN = ("needle", "passkey", "kv_retrieval", "conversation")
"""Tasks that hide something at a depth of a text."""

_DEPTHS = 5
"""Points of a curve over the depth; each joins two of the tenths that rows count by."""
_SHARES = (-3.0, 103.0)
"""Range of an axis in percent, with room for markers at 0 and 100."""


Point: TypeAlias = tuple[float, float, Interval]
"""Place, value and 95 % interval."""

PICTURES = ("quality.png", "depth.png", "kept.png", "heat.png")
"""The files that `plots` writes."""


def plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw all pictures for which the rows have numbers.

    Returns:
        The paths of the pictures, some or all of `PICTURES`.

    Raises:
        InputError: matplotlib is missing, or a picture cannot be written.
    """
    panels = dict(zip(PICTURES, (quality(rows), depth(rows), kept(rows)), strict=False))  # the last one is no panel
    drawn = [draw(folder / name, figures) for name, figures in panels.items() if figures]
    return [*drawn, *([draw(folder / PICTURES[-1], maps)] if (maps := heat(rows)) else [])]


def heat(rows: Sequence[Row]) -> list[Heat]:
    """Return maps of what policies find of hidden facts, by depth and context, from the rows of the tasks in `HIDDEN`.

    There is one for each task, protocol, policy and budget; seeds are taken together.
    """
    # the context, with which a case's name begins, is an axis of the map
    groups = grouped(
        [row for row in rows if row["task"] in HIDDEN and row["score"].get("by_depth")],
        lambda row: (row["task"], row["case"].partition(",")[2], next(iter(by_policy([row]))), str(row["budget"])),
    )
    # the task's name takes the place of the context, which `case_title` expects first
    return [
        _map(f"{name} at {budget}\n{case_title(task, ','.join(filter(None, (task, how))))}", own)
        for (task, how, name, budget), own in groups.items()
    ]


def _map(title: str, rows: Sequence[Row]) -> Heat:
    """Return a heat map of what was found, in percent: a line for each tenth of the depth, a column for each length of
    the text. A cell without a question is NaN.
    """
    by = grouped(rows, lambda row: row["case"].partition(",")[0].partition("=")[2])
    lengths = sorted(by, key=lambda text: (len(text), text))  # numbers as texts, in the order of numbers
    values = [
        [_share([row["score"]["by_depth"][tenth] for row in by[length]]) for length in lengths]
        for tenth in range(TENTHS)
    ]
    lines = [f"{10 * tenth}–{10 * tenth + 10}" for tenth in range(TENTHS)]
    return Heat(title, "context, tokens", "depth, % of the text", lengths, lines, values)


def _share(counts: Sequence[Sequence[float | int]]) -> float:
    """Return the share of right answers in percent of counts ``(right, asked)``; NaN if nothing was asked."""
    n = sum(count[1] for count in counts)
    return 100 * sum(count[0] for count in counts) / n if n else math.nan


def quality(rows: Sequence[Row]) -> list[Panel]:
    """Return a panel for each case of each measure but KL divergence and regret: the measure over the budget in percent
    of the text, with a line for each policy. One that never evicts is a horizontal line.
    """
    return [
        _titled(
            cases,
            Panel(
                title=f"{measure.title}\n{case_title(measure.task, case)}",
                x_label="budget, % of the text",
                series=[_curve(name, group, measure) for name, group in by_policy(cases).items()],
                log_x=True,
                log_y=measure.key == "perplexity",
                y_range=_SHARES if measure.key == "accuracy" else (None, None),
            ),
        )
        for measure in MEASURES
        if measure.key not in ("kl", "regret")  # they rank policies much as agreement and mass do, which are drawn
        for case, cases in by_case(of_task(rows, measure.task)).items()
    ]


def _curve(name: str, group: Sequence[Row], measure: ScoreMeasure) -> Series:
    """Return a policy's measure over its budgets, with intervals."""
    points = [_point(percent(part[0]), measure.of(part), part, measure) for part in by_budget(group).values()]
    return _series(name, sorted(points), reference=is_full(group))


def _point(x: float, spread: Spread, part: Sequence[Row], measure: ScoreMeasure) -> Point:
    """Return a point of a curve: ``x``, the measure's mean over seeds, and its 95 % interval.

    Recall's right answers are counted over all seeds. Other measures have the interval of a mean over seeds, which is
    NaN for a single one.
    """
    # of the measures only recall's accuracy has its right answers counted
    counts = [(row["score"].get("right"), row["score"].get("n")) for row in part]
    if measure.key != "accuracy" or any(None in pair for pair in counts):
        return x, spread.mean, of_mean(spread)
    return x, spread.mean, of_share(sum(right for right, _ in counts), sum(n for _, n in counts))


def depth(rows: Sequence[Row]) -> list[Panel]:
    """Return plots of recall over the depth of the asked fact, all contexts together.

    There is a panel for each budget and way to ask, with a line for each policy.
    """
    return [
        _titled(
            group,
            Panel(
                title=f"recall at {name}, % right",
                x_label="depth of the asked fact, % of the text",
                series=[_depth_curve(policy, part) for policy, part in by_policy(group).items()],
                y_range=_SHARES,
            ),
        )
        for name, group in _recalls(rows).items()
    ]


def _depth_curve(name: str, group: Sequence[Row]) -> Series:
    """Return the share of right answers over the depth of the asked fact, in percent, with intervals.

    It has a point for each fifth of the text in which a fact was asked for.
    """
    width = TENTHS // _DEPTHS
    points: list[Point] = []
    for part in range(_DEPTHS):
        counts = [count for row in group for count in row["score"]["by_depth"][part * width : (part + 1) * width]]
        right, n = sum(count[0] for count in counts), sum(count[1] for count in counts)
        if n:
            # + 0.5: the middle of the part
            points.append((100 * (part + 0.5) / _DEPTHS, 100 * right / n, of_share(right, n)))
    return _series(name, points, reference=is_full(group))


def kept(rows: Sequence[Row]) -> list[Panel]:
    """Return plots of where in recall's prompts the tokens stand that policies keep, by tenths of the prompt.

    There is a panel for each budget and way to ask, with a line for each policy.
    """
    return [
        _titled(
            group,
            Panel(
                title=f"kept tokens at {name}, %",
                x_label="position in the prompt, %",
                series=[_kept_curve(policy, part) for policy, part in by_policy(group).items()],
                y_range=(0.0, None),
            ),
        )
        for name, group in _recalls(rows).items()
    ]


def _kept_curve(name: str, group: Sequence[Row]) -> Series:
    """Return which share of the tokens that a policy keeps stands in each tenth of the text, in percent, with intervals
    over seeds. The ten shares add up to 100.
    """
    points: list[Point] = []
    for tenth in range(TENTHS):
        # first over the contexts of a seed, then over seeds: only seeds are independent
        spread = over([over([100 * row["score"]["kept"][tenth] for row in same]).mean for same in by_seed(group)])
        points.append((100 * (tenth + 0.5) / TENTHS, spread.mean, of_mean(spread)))
    return _series(name, points, reference=is_full(group))


def _series(name: str, points: Sequence[Point], *, reference: bool) -> Series:
    """Return a line through the points, with intervals if any are known."""
    known = any(not math.isnan(low) for _, _, (low, _) in points)
    return Series(
        name,
        x=[x for x, _, _ in points],
        y=[y for _, y, _ in points],
        interval=[interval for _, _, interval in points] if known else (),
        reference=reference,
    )


def _titled(group: Sequence[Row], panel: Panel) -> Panel:
    """Return the panel with the number of seeds in its title, and a note if it has intervals.

    A panel with more than `MOST_INTERVALS` lines loses its intervals.
    """
    if several := seeds(group):
        panel = replace(panel, title=f"{panel.title}\nmean of {several}")
    if not any(series.interval for series in panel.series):
        return panel
    if len(panel.series) > MOST_INTERVALS:
        return replace(panel, series=[replace(series, interval=()) for series in panel.series])
    # chr(10), since Python 3.11 takes no backslash within the braces
    return replace(panel, title=f"{panel.title}{', ' if several else chr(10)}with 95 % intervals")


def _recalls(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group the rows of recall by budget and way to ask, such as ``20%`` or ``20%, ask=later``; contexts are together.

    Each group also has the rows of the policies that never evict, which form no group of their own.
    """
    return {
        ", ".join(filter(None, (budget, way))): [row for row in group if row["budget"] == budget or is_full([row])]
        for way, group in grouped(of_task(rows, "recall"), _way).items()
        for budget in by_budget([row for row in group if not is_full([row])])
    }


def _way(row: Row) -> str:
    """Return the parts of a case's name other than the context, such as ``ask=later``; empty if there are none."""
    return ",".join(part for part in row["case"].split(",") if not part.startswith("context="))
