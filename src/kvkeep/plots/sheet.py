"""A picture that its owner draws: axes one below the other, for pages that are read on any width of screen."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

COLOURS = 96
"""A chart needs no more; the file is a third of what it would be."""

DPI = 150
INCHES = (4.8, 3.2)
"""Of one pair of axes: small, so that the letters can be read on a telephone."""

_LOOK: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.fontsize": 9,
    "legend.frameon": False,
}


def picture(fill: Callable[[Any], object], panels: int = 1) -> bytes:
    """The PNG file of a picture.

    Args:
        fill: draws on the axes: one pair, or a tuple of ``panels`` pairs from top to bottom.
        panels: how many.
    """
    width, height = INCHES
    with rc_context(_LOOK):
        figure = Figure(figsize=(width, panels * height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(figure)
        axes = tuple(figure.add_subplot(panels, 1, number + 1) for number in range(panels))
        fill(axes if panels > 1 else axes[0])
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    file = io.BytesIO()
    image.save(file, format="PNG", optimize=True)
    return file.getvalue()
