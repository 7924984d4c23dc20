"""Pictures as PNG files. Only this room imports matplotlib, which comes with ``kvkeep[plots]``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from kvkeep.errors import InputError, pip_install
from kvkeep.result_files import write_whole

# The content of a picture: panels with lines, and heat maps, as plain data.


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
        """Return the names of lines that lie on each other, in groups of two or more: all places are equal, and all
        values in six digits.
        """
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


__all__ = ["MISSING", "Heat", "Panel", "Series", "available", "check", "draw", "picture"]

MISSING = f"matplotlib is not installed: {pip_install('plots')}"
"""How to install matplotlib, for messages."""

_BROKEN = (
    "Pictures cannot be drawn, because matplotlib does not work here: {error}. Mend its installation or its settings "
    "(matplotlibrc, MPLCONFIGDIR), or remove it: everything else works without."
)

MOST_PANELS = 300
"""Largest number of panels; more would take minutes, and exceed the number of pixels that a picture may have."""


def available() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check() -> None:
    """Draw an empty picture, to tell a broken installation from numbers that cannot be drawn. Nothing is written.

    Raises:
        InputError: the installation is broken.
    """
    try:
        _charts().sheet(lambda axes: axes.set_title("1"))
    except InputError:  # `_charts` has said what is wrong
        raise
    except Exception as error:  # whatever matplotlib raises for its settings or fonts
        raise InputError(_BROKEN.format(error=f"{error!s:.200}")) from error


def draw(path: Path, panels: Sequence[Panel] | Sequence[Heat]) -> Path:
    """Draw panels side by side with one legend, or heat maps with one scale, and write them as PNG.

    There is at least one, and all are of one kind. A name has the same colour in all panels.

    Returns:
        The path.

    Raises:
        InputError: matplotlib is missing or broken, there are too many panels, the numbers cannot be drawn, or the file
            cannot be written.
    """
    if not available():
        raise InputError(f"There are no plots: {MISSING}.")
    if len(panels) > MOST_PANELS:
        raise InputError(f"The plot {path} would have {len(panels)} panels, and {MOST_PANELS} are the most.")
    charts = _charts()
    drawn = io.BytesIO()
    try:
        draw = charts.heat_map if isinstance(panels[0], Heat) else charts.line_charts
        draw(panels).savefig(drawn, format="png")
    except (ValueError, ArithmeticError) as error:  # for too many panels, or numbers out of range
        raise InputError(f"The plot {path} cannot be drawn: {str(error)[:200]}.") from error
    try:
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise InputError(f"The plot {path} cannot be written: {error.strerror}.") from error
    return path


def picture(fill: Callable[[Any], object], panels: int = 1) -> bytes:
    """Return the bytes of a PNG file of a picture that the caller draws on matplotlib's axes.

    Args:
        fill: draws on the axes: one pair, or a tuple of ``panels`` pairs from top to bottom.
        panels: number of pairs.

    Raises:
        InputError: matplotlib is missing or broken.
    """
    if not available():
        raise InputError(f"There are no plots: {MISSING}.")
    found: bytes = _charts().sheet(fill, panels)
    return found


def _charts() -> ModuleType:
    """Import `kvkeep.plots.charts`, and matplotlib with it, whatever ``MPLBACKEND`` says; return the module.

    Pictures are drawn with Agg, but matplotlib cannot be imported if the variable names a backend that does not exist.

    Raises:
        InputError: matplotlib is broken.
    """
    chosen = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    try:
        found = import_module(f"{__name__}.charts")
        if chosen is not None:
            with suppress(ValueError):  # for callers that draw by themselves; matplotlib reads the variable only once
                import_module("matplotlib").rcParams["backend"] = chosen
        return found
    except ValueError as error:
        raise InputError(_BROKEN.format(error=f"{error!s:.200}")) from error
    finally:
        if chosen is not None:
            os.environ["MPLBACKEND"] = chosen
