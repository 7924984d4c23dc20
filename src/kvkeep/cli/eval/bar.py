"""The progress bar of an evaluation, which moves with cells."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvkeep.cli.counted import counted
from kvkeep.evals.grid import Cell, Planned


class Bar:
    """Shows how many cells are done, and one of them.

    Args:
        show: shows the name of a cell, and how many are done.
    """

    def __init__(self, show: Callable[[str, int], None]) -> None:
        self._show = show
        self._begun: dict[Cell, None] = {}
        self._ended = 0

    def begin(self, planned: Planned) -> None:
        """Show that a cell is run here; those that were begun before it are done."""
        self._begun[planned.cell] = None
        self._show(_name(planned.cell), len(self._begun) - 1)

    def end(self, planned: Planned) -> None:
        """Show that a cell was run elsewhere, beside others."""
        self._ended += 1
        self._show(_name(planned.cell), self._ended)


@contextmanager
def progress(cells: int) -> Iterator[Bar]:
    """A bar with the time left; after Ctrl-C, a note on how to resume."""
    with counted(cells) as show:
        yield Bar(show)


def _name(cell: Cell) -> str:
    return f"{cell.task} {cell.budget} {cell.policy}"
