"""Plots of rows; needs only ``results.jsonl``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvkeep.evals.metrics import TENTHS
from kvkeep.evals.report import (
    FULL,
    MEASURES,
    Measure,
    Row,
    Spread,
    by_budget,
    by_case,
    by_name,
    by_seed,
    grouped,
    is_full,
    of_task,
    over,
    percent,
    seeds,
)
from kvkeep.plots import Panel, Series, draw

MOST_BANDS = 6
"""Most lines in a panel whose ranges over seeds are drawn."""

_DEPTHS = 5
_SHARES = (-3.0, 103.0)


PICTURES = ("quality.png", "depth.png", "kept.png")
"""The files that `plots` writes."""


def plots(rows: Sequence[Row], folder: Path) -> list[Path]:
    """Draw all pictures for which the rows have numbers.

    Returns:
        The paths of the pictures, some or all of `PICTURES`.

    Raises:
        InputError: matplotlib is missing, or a picture cannot be written.
    """
    panels = zip(PICTURES, (quality(rows), depth(rows), kept(rows)), strict=True)
    return [draw(folder / name, drawn) for name, drawn in panels if drawn]


def quality(rows: Sequence[Row]) -> list[Panel]:
    """Each measure over the budget; a policy that never evicts is a horizontal line."""
    return [
        _over_seeds(
            cases,
            Panel(
                title=f"{measure.title}\n{case}",
                x_label="budget, % of the text",
                series=[_curve(name, group, measure) for name, group in by_name(cases).items()],
                log_x=True,
                log_y=measure.key == "perplexity",
                y_range=_SHARES if measure.key == "accuracy" else (None, None),
            ),
        )
        for measure in MEASURES
        if measure.key not in ("kl", "regret")
        for case, cases in by_case(of_task(rows, measure.task)).items()
    ]


def _curve(name: str, group: Sequence[Row], measure: Measure) -> Series:
    points = [(percent(part[0]), measure.of(part)) for part in by_budget(group).values()]
    return _series(name, sorted(points, key=lambda point: point[0]), reference=is_full(group))


def depth(rows: Sequence[Row]) -> list[Panel]:
    """Recall over the depth of the asked fact, all contexts together; one panel per budget."""
    return [
        _over_seeds(
            group,
            Panel(
                title=f"recall at {name}, % right",
                x_label="depth of the asked fact, % of the text",
                series=[_depth_curve(policy, part) for policy, part in by_name(group).items()],
                y_range=_SHARES,
            ),
        )
        for name, group in _recalls(rows).items()
    ]


def _depth_curve(name: str, group: Sequence[Row]) -> Series:
    width = TENTHS // _DEPTHS
    points = []
    for part in range(_DEPTHS):
        shares = []
        for same in by_seed(group):
            counts = [count for row in same for count in row["score"]["by_depth"][part * width : (part + 1) * width]]
            if n := sum(count[1] for count in counts):
                shares.append(100 * sum(count[0] for count in counts) / n)
        if shares:
            points.append((100 * (part + 0.5) / _DEPTHS, over(shares)))
    return _series(name, points, reference=is_full(group))


def kept(rows: Sequence[Row]) -> list[Panel]:
    """Positions of kept tokens in the prompt; one panel per budget."""
    return [
        _over_seeds(
            group,
            Panel(
                title=f"kept tokens at {name}, %",
                x_label="position in the prompt, %",
                series=[_kept_curve(policy, part) for policy, part in by_name(group).items()],
                y_range=(0.0, None),
            ),
        )
        for name, group in _recalls(rows).items()
    ]


def _kept_curve(name: str, group: Sequence[Row]) -> Series:
    points = [
        (
            100 * (tenth + 0.5) / TENTHS,
            over([over([100 * row["score"]["kept"][tenth] for row in same]).mean for same in by_seed(group)]),
        )
        for tenth in range(TENTHS)
    ]
    return _series(name, points, reference=is_full(group))


def _series(name: str, points: Sequence[tuple[float, Spread]], *, reference: bool) -> Series:
    """A line through the means, with a band from the lowest to the highest value if there are several seeds."""
    several = any(spread.n > 1 for _, spread in points)
    return Series(
        name,
        x=[x for x, _ in points],
        y=[spread.mean for _, spread in points],
        band=[(spread.low, spread.high) for _, spread in points] if several else (),
        reference=reference,
    )


def _over_seeds(group: Sequence[Row], panel: Panel) -> Panel:
    """The panel with the number of seeds in its title, and without bands if it has many lines."""
    if not (several := seeds(group)):
        return panel
    if len(panel.series) <= MOST_BANDS:
        return replace(panel, title=f"{panel.title}\nmean, lowest and highest of {several}")
    plain = [replace(series, band=()) for series in panel.series]
    return replace(panel, title=f"{panel.title}\nmean of {several}", series=plain)


def _recalls(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows of recall by budget, where something is evicted, with the policies that never evict; contexts together."""
    return {
        ", ".join(filter(None, (budget, way))): [row for row in group if row["budget"] in (budget, FULL)]
        for way, group in grouped(of_task(rows, "recall"), _way).items()
        for budget in by_budget(group)
        if budget != FULL
    }


def _way(row: Row) -> str:
    """The parts of a case's name other than the context."""
    return ",".join(part for part in row["case"].split(",") if not part.startswith("context="))
