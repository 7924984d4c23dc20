"""Pictures as PNG files; the only room that imports matplotlib, which comes with ``kvkeep[plots]``."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError
from kvkeep.plots.panel import Panel, Series
from kvkeep.runs import write_whole

__all__ = ["MISSING", "Panel", "Series", "available", "draw", "picture"]

MISSING = "matplotlib is not installed: pip install 'kvkeep[plots]'"
"""What to do without it."""

MOST_PANELS = 300
"""Panels of a picture; more would take minutes, and then more pixels than a picture may have."""


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def draw(path: Path, panels: Sequence[Panel]) -> Path:
    """Draw panels side by side with one legend, and write them as PNG. A name has the same colour in all panels.

    Returns:
        The path.

    Raises:
        InputError: matplotlib is missing, or the file cannot be written.
    """
    if not available():
        raise InputError(f"There are no plots: {MISSING}.")
    if len(panels) > MOST_PANELS:
        raise InputError(
            f"The plot {path} would have {len(panels)} panels, and {MOST_PANELS} are the most. Leave the plots out "
            "with --no-plots."
        )
    from kvkeep.plots.lines import picture  # matplotlib: only now

    drawn = io.BytesIO()
    try:
        picture(panels).savefig(drawn, format="png")
    except (ValueError, ArithmeticError) as error:  # so many panels, or such numbers, that no picture holds them
        raise InputError(
            f"The plot {path} cannot be drawn: {str(error)[:200]}. Leave the plots out with --no-plots."
        ) from error
    try:
        write_whole(path, drawn.getvalue())
    except OSError as error:
        raise InputError(f"The plot {path} cannot be written: {error.strerror}.") from error
    return path


def picture(fill: Callable[[Any], object], panels: int = 1) -> bytes:
    """The PNG file of a picture that its owner draws on matplotlib's axes, see `kvkeep.plots.sheet`.

    Raises:
        InputError: matplotlib is missing.
    """
    if not available():
        raise InputError(f"There are no plots: {MISSING}.")
    from kvkeep.plots import sheet  # matplotlib: only now

    return sheet.picture(fill, panels)
