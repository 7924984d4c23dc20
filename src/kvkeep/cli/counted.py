"""A progress bar that counts what is done, beside the name of one piece of the work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from kvkeep.cli import console

_BAR = 20
"""Width of the bar in columns."""


@contextmanager
def counted(total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar in one line with the time left, on a terminal only; after Ctrl-C, a note on how to resume.

    Args:
        total: the number of pieces.

    Yields:
        A function that shows the name of a piece, and how many are done.
    """
    screen = console.err()
    room = max(12, screen.width - _BAR - 2 * len(str(total)) - len("  /  0:00:00  time left  0:00:00"))
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", max_width=room)),
        BarColumn(bar_width=_BAR),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("time left", style="dim"),
        TimeRemainingColumn(),
    )
    drawn = Progress(*columns, console=screen, disable=not screen.is_terminal or not total, transient=True)
    line = drawn.add_task("starting", total=total)
    with resumable(), drawn:
        yield lambda name, done: drawn.update(line, completed=done, description=name, refresh=True)


@contextmanager
def resumable() -> Iterator[None]:
    """Say after Ctrl-C how to resume."""
    try:
        yield
    except KeyboardInterrupt:
        console.note("stopped. What is finished is on the disk; run the same command again to go on.")
        raise
