"""Pictures drawn with matplotlib: panels of lines with one legend, and sheets of axes that the caller draws on."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from PIL import Image

from kvkeep.plots.panel import Panel, Series

COLUMNS = 3
DPI = 120
LEGEND_COLUMNS = 4
LONGEST = 160
"""Longest name or title in characters; the rest is cut off."""
LEGEND_INCHES = (0.3, 0.2)
"""Height of the legend's frame, and of each of its rows."""
PANEL_INCHES = (4.2, 3.1)

SHEET_COLOURS = 96
"""Colours of a sheet; the file is a third of the size that it would have with all."""

SHEET_DPI = 150
SHEET_INCHES = (4.8, 3.2)
"""Size of one pair of axes: small, so that letters can be read on a telephone."""

# colours that stay apart for colour-blind readers (Okabe and Ito), then the same with other marks
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#8C8C8C")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<")


_SHEET_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.fontsize": 9,
    "legend.frameon": False,
}


def chart(panels: Sequence[Panel]) -> Figure:
    """Panels side by side, at most `COLUMNS` in a row; no window, no global state."""
    rows = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / rows)
    width, height = PANEL_INCHES
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    frame, row = LEGEND_INCHES
    legend = frame + row * math.ceil(len(names) / LEGEND_COLUMNS)
    figure = Figure(figsize=(columns * width, rows * height + legend), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(len(panels))]
    drawn: dict[str, Artist] = {}
    for panel, place in zip(panels, axes, strict=True):
        drawn |= _fill(place, panel, names)
    _add_legend(figure, drawn, names)
    return figure


def plain(text: str) -> str:
    """The text as it is drawn: cut to a length that fits, and with dollar signs that start no formula."""
    short = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in short).replace("$", r"\$")


def _add_legend(figure: Figure, drawn: Mapping[str, Artist], names: Sequence[str]) -> None:
    figure.legend(
        [drawn[name] for name in names],
        list(map(plain, names)),
        loc="outside lower center",
        ncols=min(LEGEND_COLUMNS, len(names)),
        fontsize=9,
    )


def _fill(axes: Axes, panel: Panel, names: Sequence[str]) -> dict[str, Artist]:
    """Draw a panel, and return the lines by name."""
    drawn: dict[str, Artist] = {}
    for series in panel.series:
        number = names.index(series.name)
        style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.5}
        if series.reference:
            style |= {"linestyle": "--", "zorder": 3}
        if across := series.reference and len(series.y) == 1:
            drawn[series.name] = axes.axhline(series.y[0], **style)
        else:
            mark = _MARKS[number // len(_COLOURS) % len(_MARKS)]
            (drawn[series.name],) = axes.plot(series.x, series.y, marker=mark, markersize=4, **style)
        if series.band:
            _shade(axes, series, style["color"], across=across)
    axes.set_title(plain(panel.title), fontsize=10)
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25)
    _scale(axes, panel)
    return drawn


def _shade(axes: Axes, series: Series, colour: str, *, across: bool) -> None:
    """Draw the band of a line behind all lines."""
    low, high = zip(*series.band, strict=True)
    look: dict[str, Any] = {"color": colour, "alpha": 0.15, "linewidth": 0, "zorder": 1}
    if across:
        axes.axhspan(low[0], high[0], **look)
    else:
        axes.fill_between(series.x, low, high, **look)


def _scale(axes: Axes, panel: Panel) -> None:
    if panel.log_x:
        axes.set_xscale("log")
        ticks = sorted({x for series in panel.series if not series.reference for x in series.x})
        axes.set_xticks(ticks, [f"{x:.3g}" for x in ticks])
        axes.set_xticks([], minor=True)
    heights = [y for series in panel.series for y in series.y]
    if panel.log_y and max(heights) > 5 * min(heights):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
        axes.set_yticks([], minor=True)
    axes.set_ylim(*panel.y_range)


def sheet(fill: Callable[[Any], object], panels: int = 1) -> bytes:
    """A PNG file with pairs of axes one below the other.

    Args:
        fill: draws on the axes: one pair, or a tuple of ``panels`` pairs from top to bottom.
        panels: number of pairs.
    """
    width, height = SHEET_INCHES
    with rc_context(_SHEET_STYLE):
        figure = Figure(figsize=(width, panels * height), dpi=SHEET_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = tuple(figure.add_subplot(panels, 1, number + 1) for number in range(panels))
        fill(axes if panels > 1 else axes[0])
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(SHEET_COLOURS, dither=Image.Dither.NONE)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()
