"""Heat maps: a share by place and column, one panel per map."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from kvkeep.plots.lines import COLUMNS, DPI, LONGEST
from kvkeep.plots.panel import Heat

_PANEL_INCHES = (3.6, 3.0)
_MOST_LABELS = 12


def chart(maps: Sequence[Heat]) -> Figure:
    """Maps side by side with one scale; numbers stand in the cells, so colour is not needed."""
    rows = math.ceil(len(maps) / COLUMNS)
    columns = math.ceil(len(maps) / rows)
    width, height = _PANEL_INCHES
    figure = Figure(figsize=(columns * width, rows * height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    for number, one in enumerate(maps, 1):
        _draw(figure.add_subplot(rows, columns, number), one)
    return figure


def _draw(axes: Axes, one: Heat) -> None:
    axes.imshow(one.values, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    axes.set_title(one.title[:LONGEST].replace("$", r"\$"), fontsize=9)
    axes.set_xlabel(one.x_label, fontsize=8)
    axes.set_ylabel(one.y_label, fontsize=8)
    axes.set_xticks(range(len(one.columns)), one.columns, fontsize=7)
    axes.set_yticks(range(len(one.lines)), one.lines, fontsize=7)
    if len(one.columns) > _MOST_LABELS:
        return
    for y, line in enumerate(one.values):
        for x, value in enumerate(line):
            if not math.isnan(value):
                colour = "black" if value > 55 else "white"
                axes.text(x, y, f"{value:.0f}", ha="center", va="center", color=colour, fontsize=7)
