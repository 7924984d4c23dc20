"""Lines that are told apart without colour: a marker, a dash and a name at the end of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

from kvkeep.research.analysis.measure import Axes

Line: TypeAlias = tuple[Sequence[float], Sequence[float | None]]
"""Places and values; ``None`` where there is none."""

_MARKS = "osD^vXP*"
_DASHES = ("-", "--", "-.", ":")
_COLOURS = ("#1f5fa8", "#b3400e", "#2f7d32", "#6a3d9a", "#444444", "#8a6d00", "#a0246e", "#007a7a")


def lines(axes: Axes, series: Mapping[str, Line], *, x: str, y: str, labels: str = "legend") -> None:
    """Draw lines.

    Args:
        axes: where.
        series: name → places and values.
        x: what the horizontal axis is, with its unit.
        y: what the vertical axis is, with its unit.
        labels: ``legend``, or ``ends`` to write each name at the right end of its line, where lines end far apart.
    """
    for number, (name, (places, values)) in enumerate(series.items()):
        points = [(place, value) for place, value in zip(places, values, strict=True) if value is not None]
        if not points:
            continue
        axes.plot(
            [place for place, _ in points],
            [value for _, value in points],
            marker=_MARKS[number % len(_MARKS)],
            linestyle=_DASHES[number % len(_DASHES)],
            color=_COLOURS[number % len(_COLOURS)],
            markersize=4,
            markevery=max(1, len(points) // 12),
            linewidth=1.4,
            label=name,
        )
        if labels == "ends":
            axes.annotate(name, points[-1], xytext=(5, 0), textcoords="offset points", fontsize=8, va="center")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(visible=True, alpha=0.25)
    if labels == "legend":
        axes.legend(fontsize=8)


def by_layer(axes: Axes, series: Mapping[str, Sequence[float | None]], *, y: str) -> None:
    """Draw one value per layer and name."""
    drawn: dict[str, Line] = {name: ([float(n) for n in range(len(values))], values) for name, values in series.items()}
    lines(axes, drawn, x="layer", y=y)
    axes.set_xticks(range(max(map(len, series.values()))))
