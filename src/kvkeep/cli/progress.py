"""A progress bar that counts what is done, beside the name of one piece of the work."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from kvkeep.batch.progress import Pace, TokenCounts
from kvkeep.cli import console
from kvkeep.engine import Engine
from kvkeep.engine.request import Request, Result
from kvkeep.evals.grid import Cell, Planned
from kvkeep.models.load import watched

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


# The progress bar of an evaluation, which moves with cells.


class EvalBar:
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
def eval_progress(cells: int) -> Iterator[EvalBar]:
    """A bar with the time left; after Ctrl-C, a note on how to resume."""
    with counted(cells) as show:
        yield EvalBar(show)


def _name(cell: Cell) -> str:
    return f"{cell.task} {cell.budget} {cell.policy}"


# The progress bar of a batch job, which moves with tokens.


class BatchBar:
    """Shows how far a job is: lines, the share of tokens, tokens per second, and the time left.

    Args:
        work: tokens of all requests that are to run.
        total: number of all lines.
        done: number of lines that were done before.
        show: draws the bar; gets the tokens that are done, the tokens of the whole job, the lines and the speed.
    """

    def __init__(
        self, work: TokenCounts, total: int, done: int, show: Callable[[float, float, str, str], object]
    ) -> None:
        self._pace = Pace(work, time.perf_counter())
        self._total, self._done, self._show = total, done, show
        self._running: dict[int, TokenCounts] = {}
        self._read: set[int] = set()
        self._draw()

    def begin(self, number: int, request: Request) -> None:
        """Note that the engine has taken a request, with this number."""
        self._running[number] = _work(request)
        self._pace.begin(_work(request))

    def refuse(self, request: Request) -> None:
        """Note that the engine has not taken a request."""
        self._pace.begin(_work(request))
        self._pace.end(_work(request), 0, 0)

    def read_in_part(self, tokens: float) -> None:
        """Show that a decoder layer has read tokens of a prompt."""
        self._pace.read_in_part(tokens, time.perf_counter())
        self._draw()

    def step(self, numbers: Collection[int]) -> None:
        """Show that these requests have a new token each."""
        first = set(numbers) - self._read
        self._read |= first
        self._pace.step(sum(self._running[n].prompt for n in first), len(numbers), time.perf_counter())
        self._draw()

    def end(self, number: int, result: Result) -> None:
        """Note that a request has ended."""
        work = self._running.pop(number)
        read = work.prompt if number in self._read else 0
        self._read.discard(number)
        self._pace.end(work, read, len(result.token_ids))

    def whole(self, work: TokenCounts, new: int | None) -> None:
        """Show that a line has been run elsewhere.

        Args:
            work: the tokens of its requests.
            new: the tokens that were written; ``None`` if it failed.
        """
        self._pace.begin(work)
        if new is None:
            self._pace.end(work, 0, 0)
            return
        self._pace.step(work.prompt, new, time.perf_counter())
        self._pace.end(work, work.prompt, new)
        self.line()

    def line(self) -> None:
        """Show that a line is done."""
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        pace, speed = self._pace, "reading"
        if (left := pace.seconds_left()) is not None:
            speed = f"{console.show_rate(pace.writing_rate)} tokens/s, {_show_time(left)} left"
        elif pace.done:  # nobody knows yet how long writing takes
            speed = f"{console.show_rate(pace.reading_rate)} tokens/s read, > {_show_time(pace.seconds_to_read)} left"
        lines = f"{self._done} of {console.count(self._total, 'line')}"
        self._show(pace.done, pace.total, lines, speed)


def _work(request: Request) -> TokenCounts:
    return TokenCounts(len(request.prompt or ()), request.sampling.max_new_tokens)


def _show_time(seconds: float) -> str:
    """Hours, minutes and seconds: ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def batch_progress(engine: Engine | None, work: TokenCounts, total: int, done: int) -> Iterator[BatchBar]:
    """A bar on standard error. Nothing is drawn, and no layer is watched, where standard error is no terminal.

    Args:
        engine: runs the requests; ``None`` if they run elsewhere.
        work: tokens of all requests that are to run.
        total: number of all lines.
        done: number of lines that were done before.
    """
    screen = console.err()
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TaskProgressColumn(),
        TextColumn("{task.fields[speed]}"),
    )
    is_shown = screen.is_terminal and sum(work) > 0
    drawn = Progress(*columns, console=screen, disable=not is_shown, transient=True, expand=True)
    task = drawn.add_task("", total=None, speed="")

    def show(tokens: float, of: float, lines: str, speed: str) -> None:
        drawn.update(task, completed=tokens, total=of, description=lines, speed=speed)

    bar = BatchBar(work, total, done, show)
    with drawn, watched(engine.model, bar.read_in_part) if is_shown and engine is not None else nullcontext():
        yield bar
