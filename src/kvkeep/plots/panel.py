"""The content of a picture: panels with lines, and heat maps, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Series:
    """One line.

    Attributes:
        name: its name in the legend.
        x: places.
        y: values.
        reference: whether other lines are compared with it; it is dashed, and crosses the panel if it is one point.
        interval: lower and upper limit at each place, drawn as an error bar, or as a shade around a line that crosses
            the panel; NaN where there is none, and empty if there is none at all.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    reference: bool = False
    interval: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One pair of axes with its lines.

    Attributes:
        title: the measured quantity and its unit.
        x_label: the quantity of the horizontal axis and its unit.
        series: the lines.
        log_x: whether the horizontal axis is logarithmic.
        log_y: whether the vertical axis is logarithmic if its values differ by more than a factor of 5.
        y_range: limits of the vertical axis; ``None`` fits the lines.
    """

    title: str
    x_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    y_range: tuple[float | None, float | None] = (None, None)

    def equal(self) -> list[list[str]]:
        """The names of lines that lie on each other, in groups."""
        groups: dict[tuple[object, ...], list[str]] = {}
        for series in self.series:
            values = [f"{y:.6g}" for y in series.y]
            groups.setdefault((series.reference, *series.x, *values), []).append(series.name)
        return [names for names in groups.values() if len(names) > 1]


@dataclass(frozen=True)
class Heat:
    """A map of numbers from 0 to 100.

    Attributes:
        title: the quantity and the policy.
        x_label, y_label: the quantities of the axes.
        columns, lines: names of the columns from left to right, and of the lines from top to bottom.
        values: line by line; NaN where nothing was measured, which stays white.
        wide: whether the map takes the whole width of the picture.
    """

    title: str
    x_label: str
    y_label: str
    columns: Sequence[str]
    lines: Sequence[str]
    values: Sequence[Sequence[float]]
    wide: bool = False
