"""Pictures as PNG files; the only room that imports matplotlib, which comes with ``kvkeep[plots]``."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from kvkeep.errors import InputError
from kvkeep.plots.panel import Panel, Series
from kvkeep.runs import write_whole

__all__ = ["MISSING", "Panel", "Series", "available", "check", "draw", "picture"]

MISSING = "matplotlib is not installed: pip install 'kvkeep[plots]'"
"""What to do without it."""

_BROKEN = (
    "Pictures cannot be drawn, because matplotlib does not work here: {error}. Mend its installation or its settings "
    "(matplotlibrc, MPLCONFIGDIR), or remove it: everything else works without."
)

MOST_PANELS = 300
"""Panels of a picture; more would take minutes, and then more pixels than a picture may have."""


def available() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check() -> None:
    """See that pictures can be drawn at all, so that no numbers are blamed for a broken installation.

    Raises:
        InputError: not even one of nothing can.
    """
    try:
        _load("sheet").picture(lambda axes: axes.set_title("1"))
    except InputError:
        raise
    except Exception as error:  # whatever matplotlib, its settings and its fonts lead to
        raise InputError(_BROKEN.format(error=f"{error!s:.200}")) from error


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
    lines = _load("lines")
    drawn = io.BytesIO()
    try:
        lines.picture(panels).savefig(drawn, format="png")
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
    found: bytes = _load("sheet").picture(fill, panels)
    return found


def _load(name: str) -> ModuleType:
    """A module of this room that imports matplotlib: only now, and whatever ``MPLBACKEND`` says.

    Pictures are drawn with Agg, but matplotlib refuses to be imported where the variable names nothing that it knows.

    Raises:
        InputError: matplotlib is broken.
    """
    chosen = None if "matplotlib" in sys.modules else os.environ.pop("MPLBACKEND", None)
    try:
        found = import_module(f"{__name__}.{name}")
        if chosen is not None:
            with suppress(ValueError):  # for those who draw by themselves; matplotlib does no more with it
                import_module("matplotlib").rcParams["backend"] = chosen
        return found
    except ValueError as error:
        raise InputError(_BROKEN.format(error=f"{error!s:.200}")) from error
    finally:
        if chosen is not None:
            os.environ["MPLBACKEND"] = chosen
