"""The progress bar of an evaluation, which moves with cells."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from kvkeep.cli import console
from kvkeep.evals.plan import Cell, Planned

_BAR = 20
"""Width of the bar in columns."""


class Bar:
    """Shows how many cells are done, and one of them.

    Args:
        drawn: draws it.
        line: its line there.
    """

    def __init__(self, drawn: Progress, line: TaskID) -> None:
        self._drawn, self._line = drawn, line
        self._begun: dict[Cell, None] = {}
        self._ended = 0

    def begin(self, planned: Planned) -> None:
        """Show that a cell is run here; those that were begun before it are done."""
        self._begun[planned.cell] = None
        self._show(planned.cell, len(self._begun) - 1)

    def end(self, planned: Planned) -> None:
        """Show that a cell was run elsewhere, beside others."""
        self._ended += 1
        self._show(planned.cell, self._ended)

    def _show(self, cell: Cell, done: int) -> None:
        words = f"{cell.task} {cell.budget} {cell.policy}"
        self._drawn.update(self._line, completed=done, description=words, refresh=True)


@contextmanager
def progress(cells: int) -> Iterator[Bar]:
    """A bar with the time left; after Ctrl-C, a note on how to resume."""
    screen = console.err()
    room = max(12, screen.width - _BAR - 2 * len(str(cells)) - len("  /  0:00:00  time left  0:00:00"))
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=room)),
        BarColumn(bar_width=_BAR),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("time left", style="dim"),
        TimeRemainingColumn(),
    )
    drawn = Progress(*columns, console=screen, disable=not screen.is_terminal or not cells, transient=True)
    try:
        with drawn:
            yield Bar(drawn, drawn.add_task("starting", total=cells))
    except KeyboardInterrupt:
        console.note("stopped. What is finished is on the disk; run the same command again to go on.")
        raise
