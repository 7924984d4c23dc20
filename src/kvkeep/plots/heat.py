"""Heat maps: a share by place and column, one panel per map."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvkeep.plots.lines import COLUMNS, DPI, plain
from kvkeep.plots.panel import Heat

_PANEL_INCHES = (3.6, 3.0)
_WIDE_INCHES = (3 * 3.6, 2.4)
_LINE_INCHES = (0.02, 0.15)
"""Least height of a line without numbers, and of one with them."""
_MOST_LABELS = 12
_MOST_NUMBERS = 48
"""Lines of a map with numbers in its cells, at most."""
_STEPS = (1, 2, 5)


def chart(maps: Sequence[Heat]) -> Figure:
    """Maps with one scale, side by side, or one below the other if one is wide.

    Numbers stand in the cells of a small map, so colour is not needed; a bar of colours stands beside a large one.
    """
    wide = any(one.wide for one in maps)
    rows = len(maps) if wide else math.ceil(len(maps) / COLUMNS)
    columns = math.ceil(len(maps) / rows)
    width, height = _WIDE_INCHES if wide else _PANEL_INCHES
    height = max(height, *(_LINE_INCHES[_numbered(one)] * len(one.lines) for one in maps))
    figure = Figure(figsize=(columns * width, rows * height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for number, one in enumerate(maps, 1):
        _draw(figure.add_subplot(rows, columns, number), one)
    return figure


def _numbered(one: Heat) -> bool:
    return len(one.columns) <= _MOST_LABELS and len(one.lines) <= _MOST_NUMBERS


def _draw(axes: Axes, one: Heat) -> None:
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
                colour = "black" if value > 55 else "white"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7)


def _labelled(count: int) -> range:
    """The places of labels that do not cover each other: all of a few, otherwise in round steps."""
    least, power = count / _MOST_LABELS, 10 ** max(0, math.floor(math.log10(max(1, count / _MOST_LABELS))))
    step = next(step for step in (*(one * power for one in _STEPS), 10 * power) if step >= least)
    return range(0, count, step)
