"""Pictures drawn with matplotlib: panels of lines with one legend, and sheets of axes that the caller draws on."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator
from matplotlib.transforms import ScaledTranslation, Transform
from PIL import Image

from kvkeep.plots import Heat, Panel, Series

COLUMNS = 3
DPI = 120
LEGEND_COLUMNS = 4
LONGEST = 160
"""Longest name or title in characters; the rest is cut off."""
LEGEND_INCHES = (0.3, 0.2)
"""Height of the legend's frame, and of each line of its text."""
LETTER_INCHES, HANDLE_INCHES = 0.075, 0.75
"""Width of a letter in the legend, and of a line's sample with the space around it."""
PANEL_INCHES = (4.2, 3.1)
NOTE_LETTERS, NOTE_LINES = 54, 4
"""Size of the note below a panel."""
NUDGE, NUDGES = 0.05, 0.25
"""Distance in inches between the points of two lines at one place, and between those of the first and the last line at
most: points and error bars of equal height stay apart.
"""

SHEET_COLOURS = 96
"""Colours of a sheet; the file is a third of the size that it would have with all."""

SHEET_DPI = 150
SHEET_INCHES = (4.8, 3.2)
"""Size of one pair of axes: small, so that letters can be read on a telephone."""

# colours that stay apart for colour-blind readers (Okabe and Ito); the numbers of colours, marks and dashes have no
# common factor, so neighbours differ in all three, and no two of 360 lines look alike
_COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#CC79A7", "#0072B2", "#D55E00", "#8C8C8C")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", "*")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (9, 2)))


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


def line_charts(panels: Sequence[Panel]) -> Figure:
    """Draw panels side by side, at most `COLUMNS` in a row, with one legend below, and return the figure.

    There is no window and no global state.
    """
    rows = math.ceil(len(panels) / COLUMNS)
    columns = math.ceil(len(panels) / rows)
    width, height = PANEL_INCHES
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    legend = Legend.of(names, columns * width)
    notes = [_note(panel) for panel in panels]
    tall = height + 0.15 * max(note.count("\n") for note in notes)  # inches for each line of a note
    figure = Figure(figsize=(columns * width, rows * tall + legend.height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # attaches itself, so that `figure.canvas` can draw and measure without pyplot
    axes = [figure.add_subplot(rows, columns, number + 1) for number in range(len(panels))]
    drawn: dict[str, Artist] = {}
    for panel, place, note in zip(panels, axes, notes, strict=True):
        drawn |= _fill(place, panel, names)
        place.set_xlabel(panel.x_label + note, fontsize=9)
    figure.legend(
        [drawn[name] for name in names],
        legend.labels,
        loc="outside lower center",
        ncols=legend.columns,
        fontsize=9,
        handlelength=3.2,
    )
    return figure


@dataclass(frozen=True)
class Legend:
    """The text of a legend that is no wider than its picture.

    Attributes:
        labels: the names; long ones have several lines.
        columns: number of columns.
        height: height in inches.
    """

    labels: list[str]
    columns: int
    height: float

    @staticmethod
    def of(names: Sequence[str], width: float) -> Legend:
        """Return the legend with these names for a picture ``width`` inches wide: names broken, columns and height
        chosen.
        """
        letters = int((width - HANDLE_INCHES - 0.3) / LETTER_INCHES)  # 0.3: the legend's margins, here and below
        labels = ["\n".join(_broken(plain(name), letters)) for name in names]
        widest = max(len(line) for label in labels for line in label.split("\n"))
        fit = int((width - 0.3) / (HANDLE_INCHES + LETTER_INCHES * widest))
        columns = max(1, min(LEGEND_COLUMNS, len(names), fit))
        frame, line = LEGEND_INCHES
        per_column = math.ceil(len(labels) / columns)
        parts = [labels[start : start + per_column] for start in range(0, len(labels), per_column)]
        lines = max(sum(label.count("\n") + 1 for label in part) for part in parts)
        return Legend(labels, columns, frame + line * lines)


def plain(text: str) -> str:
    """Return a text as it is drawn: cut to `LONGEST` characters, with ``?`` for what cannot be printed, and with dollar
    signs that start no formula.
    """
    short = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
    return "".join(char if char.isprintable() or char == "\n" else "?" for char in short).replace("$", r"\$")


def _broken(name: str, letters: int) -> list[str]:
    """Return a name as lines of at most ``letters`` letters, broken at spaces and after commas where possible."""
    # `wrap` breaks at spaces only, so each comma gets one for a moment
    return [line.replace(", ", ",") for line in wrap(name.replace(",", ", "), letters)] or [""]


def _note(panel: Panel) -> str:
    """Return lines of text, each after a line break, with the names of a panel's curves that lie on each other.

    The text is empty if there are none.
    """
    text = "; ".join(" = ".join(map(plain, names)) for names in panel.equal())
    lines = wrap(f"equal: {text}", NOTE_LETTERS, max_lines=NOTE_LINES, placeholder=" …") if text else []
    return "".join(f"\n{line}" for line in lines)


def _fill(axes: Axes, panel: Panel, names: Sequence[str]) -> dict[str, Artist]:
    """Draw a panel on its axes, and return what stands for each line in the legend, by name.

    Args:
        axes: where it is drawn.
        panel: the panel.
        names: the names of all panels; the place of a name decides about its style.
    """
    drawn: dict[str, Artist] = {}
    for place, series in enumerate(panel.series):
        style = _style(names.index(series.name), reference=series.reference)
        # a single point is a level, such as the full cache's: it crosses the panel
        if series.reference and len(series.y) == 1:
            drawn[series.name] = axes.axhline(series.y[0], **style)
            if series.interval:
                axes.axhspan(*series.interval[0], color=style["color"], alpha=0.12, linewidth=0, zorder=1)
            continue
        moved = _nudged(axes, panel, place)
        found: list[Artist] = [*axes.plot(series.x, series.y, **style)]
        drawn[series.name] = found[0]
        if series.interval:
            found += _bar(axes, series, style["color"])
        for artist in found:
            artist.set_transform(moved)  # the limits of the axes follow from the places before
    axes.set_title(plain(panel.title), fontsize=10)
    axes.tick_params(labelsize=8)
    axes.grid(visible=True, alpha=0.25)
    _scale(axes, panel)
    return drawn


def _style(number: int, *, reference: bool) -> dict[str, Any]:
    """Return matplotlib's arguments for the style of line ``number``: no two ordinary lines of a picture have the same
    colour, marker and dash. A reference is dashed and has no marker.
    """
    style: dict[str, Any] = {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 1.5}
    if reference:
        # references have no markers, so the number of dots, 0 to 3, tells them apart
        return style | {"linestyle": (0, (4, 2, *(1, 2) * (number % 4))), "zorder": 3}
    hollow = {"markerfacecolor": "white"} if number // len(_MARKS) % 2 else {}
    dash, mark = _DASHES[number % len(_DASHES)], _MARKS[number % len(_MARKS)]
    return style | {"linestyle": dash, "marker": mark, "markersize": 5, **hollow}


def _nudged(axes: Axes, panel: Panel, place: int) -> Transform:
    """Return the coordinates of a line's points, moved sideways by its place among the lines if error bars or equal
    lines would overlap.
    """
    if not (panel.equal() or any(series.interval for series in panel.series)):
        return axes.transData
    count = len(panel.series)
    step = min(NUDGE, NUDGES / count)
    return axes.transData + ScaledTranslation(step * (place - (count - 1) / 2), 0, axes.figure.dpi_scale_trans)


def _bar(axes: Axes, series: Series, colour: str) -> list[Artist]:
    """Draw the interval of a line at each place as an error bar with caps, and return what was drawn."""
    low, high = zip(*series.interval, strict=True)
    found: list[Artist] = [axes.vlines(series.x, low, high, color=colour, linewidth=1.0, zorder=1.5)]
    for ends in (low, high):
        found += axes.plot(series.x, ends, linestyle="none", marker="_", markersize=5, color=colour, zorder=1.5)
    return found


def _scale(axes: Axes, panel: Panel) -> None:
    """Set the scales, ticks and limits of a panel's axes.

    The vertical axis becomes logarithmic only if the values differ by more than a factor of 5.
    """
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
    """Return the bytes of a PNG file, in few colours, with pairs of axes one below the other.

    Args:
        fill: draws on the axes: one pair, or a tuple of ``panels`` pairs from top to bottom.
        panels: number of pairs.
    """
    width, height = SHEET_INCHES
    with rc_context(_SHEET_STYLE):
        figure = Figure(figsize=(width, panels * height), dpi=SHEET_DPI, layout="constrained")
        FigureCanvasAgg(figure)  # attaches itself, so that `figure.canvas` can draw and measure without pyplot
        axes = tuple(figure.add_subplot(panels, 1, number + 1) for number in range(panels))
        fill(axes if panels > 1 else axes[0])
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(SHEET_COLOURS, dither=Image.Dither.NONE)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()


# Heat maps: a share by place and column, one panel per map.

_PANEL_INCHES = (3.6, 3.0)
_WIDE_INCHES = (3 * 3.6, 2.4)
_LINE_INCHES = (0.02, 0.15)
"""Least height of a line without numbers, and of one with them."""
_MOST_LABELS = 12
_MOST_NUMBERS = 48
"""Lines of a map with numbers in its cells, at most."""
_STEPS = (1, 2, 5)  # between labels, times powers of ten


def heat_map(maps: Sequence[Heat]) -> Figure:
    """Draw maps with one scale, side by side, or one below the other if one is wide; return the figure.

    Numbers stand in the cells of a small map, so colour is not needed; a bar of colours stands beside a large one.
    """
    wide = any(one.wide for one in maps)
    rows = len(maps) if wide else math.ceil(len(maps) / COLUMNS)
    columns = math.ceil(len(maps) / rows)
    width, height = _WIDE_INCHES if wide else _PANEL_INCHES
    height = max(height, *(_LINE_INCHES[_numbered(one)] * len(one.lines) for one in maps))
    figure = Figure(figsize=(columns * width, rows * height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)  # attaches itself, so that `figure.canvas` can draw and measure without pyplot
    for number, one in enumerate(maps, 1):
        _draw(figure.add_subplot(rows, columns, number), one)
    return figure


def _numbered(one: Heat) -> bool:
    """Return whether a heat map is small enough for a number in each cell."""
    return len(one.columns) <= _MOST_LABELS and len(one.lines) <= _MOST_NUMBERS


def _draw(axes: Axes, one: Heat) -> None:
    """Draw a heat map, with numbers in its cells if it is small, or with a colour bar."""
    image = axes.imshow(one.values, vmin=0, vmax=100, cmap="cividis", aspect="auto", interpolation="nearest")
    axes.set_title(plain(one.title), fontsize=9)
    axes.set_xlabel(one.x_label, fontsize=8)
    axes.set_ylabel(one.y_label, fontsize=8)
    places = _labelled(len(one.columns))
    axes.set_xticks(places, [one.columns[i] for i in places], fontsize=7)
    places = _labelled(len(one.lines))
    axes.set_yticks(places, [one.lines[i] for i in places], fontsize=7)
    if not _numbered(one):
        axes.figure.colorbar(image, ax=axes, pad=0.01).ax.tick_params(labelsize=7)
        return
    for y, line in enumerate(one.values):
        for x, value in enumerate(line):
            if not math.isnan(value):
                colour = "black" if value > 55 else "white"  # cividis grows lighter with the value
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7)


def _labelled(count: int) -> range:
    """Return the indexes of those of ``count`` labels that are drawn without overlap: all of a few, otherwise those in
    steps of 1, 2 or 5 times a power of ten.
    """
    least, power = count / _MOST_LABELS, 10 ** max(0, math.floor(math.log10(max(1, count / _MOST_LABELS))))
    step = next(step for step in (*(one * power for one in _STEPS), 10 * power) if step >= least)
    return range(0, count, step)
