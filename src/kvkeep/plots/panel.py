"""The content of a picture: panels with lines, as plain data."""

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
        band: lowest and highest value at each place, drawn as a shade; empty for none.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    reference: bool = False
    band: Sequence[tuple[float, float]] = ()


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
