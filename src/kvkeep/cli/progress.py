"""The progress bar of all commands; above it, those of evaluations and batch jobs, which know what moves them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from kvkeep.batch.survey import Pace, TokenCounts
from kvkeep.cli import console
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request, Result
from kvkeep.evals.grid import Cell, Planned
from kvkeep.models.load import watched

_SHORT = 20
"""Columns of a short bar."""


class ProgressBar:
    """Shows in one line on standard error how far work is; nothing where standard error is no terminal.

    Args:
        parts: what stands in the line, from left to right: ``spinner``, ``text``, ``short bar``, ``bar``, ``wide bar``,
            ``percent``, ``count``, ``note``, ``elapsed``, ``left``, ``bare left``.
        text: the text at the beginning; without one the line is empty until there is something to show.
        note: the note at the beginning.
        total: what is done at the end; ``None`` while nobody knows.
        is_shown: whether there is something to show.
        room: columns of the text, where a longer one is cut; ``None`` to show it whole.
        speed_over_s: seconds over which the time left is averaged.
    """

    def __init__(
        self,
        *parts: str,
        text: str = "",
        note: str = "",
        total: int | float | None = 1.0,
        is_shown: bool = True,
        room: int | None = None,
        speed_over_s: int | float = 30.0,
    ) -> None:
        screen = console.err()
        cut = Column(no_wrap=True, overflow="ellipsis", max_width=room) if room is not None else None
        columns: dict[str, tuple[ProgressColumn, ...]] = {
            "spinner": (SpinnerColumn(),),
            "text": (TextColumn("{task.description}", table_column=cut),),
            "bar": (BarColumn(),),
            "short bar": (BarColumn(bar_width=_SHORT),),
            "wide bar": (BarColumn(bar_width=None),),
            "percent": (TaskProgressColumn(),),
            "count": (MofNCompleteColumn(),),
            "note": (TextColumn("{task.fields[note]}"),),
            "elapsed": (TimeElapsedColumn(),),
            "left": (TextColumn("time left", style="dim"), TimeRemainingColumn()),
            "bare left": (TimeRemainingColumn(),),
        }
        self._drawn = Progress(
            *(column for part in parts for column in columns[part]),
            console=screen,
            disable=not screen.is_terminal or not is_shown,
            transient=True,
            expand="wide bar" in parts,
            speed_estimate_period=speed_over_s,
        )
        self._line = self._drawn.add_task(text, total=total, visible=text != "", note=note)

    def __enter__(self) -> ProgressBar:
        """Draw the bar."""
        self._drawn.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._drawn.stop()

    def begin(self, text: str, total: int | float = 1.0) -> None:
        """Show another piece of work in the place of the last one, with a time of its own."""
        self._drawn.update(self._line, visible=False)
        self._line = self._drawn.add_task(text, total=total, note="")

    def show(
        self,
        done: int | float | None = None,
        *,
        text: str | None = None,
        note: str | None = None,
        total: int | float | None = None,
        at_once: bool = False,
    ) -> None:
        """Show what is done, with the texts and the total that have changed.

        Args:
            done: how much is done.
            text, note, total: see `ProgressBar`.
            at_once: whether the line is drawn now; otherwise some moments later.
        """
        fields: dict[str, Any] = {} if note is None else {"note": note}
        self._drawn.update(
            self._line, completed=done, description=text, total=total, visible=True, refresh=at_once, **fields
        )

    def advance(self, done: int | float) -> None:
        """Show that so much more is done."""
        self._drawn.advance(self._line, done)


@contextmanager
def counted(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show how many pieces are done, and the name of one; after Ctrl-C, a note on how to resume.

    Args:
        total: the number of pieces.

    Yields:
        A function that shows the name of a piece, and how many are done.
    """
    others = _SHORT + 2 * len(str(total)) + len("  /  0:00:00  time left  0:00:00")
    room = max(12, console.err().width - others)
    with (
        resumable(),
        ProgressBar(
            *("text", "short bar", "count", "elapsed", "left"),
            text="starting",
            total=total,
            is_shown=total > 0,
            room=room,
        ) as bar,
    ):
        yield lambda name, done: bar.show(done, text=name, at_once=True)


@contextmanager
def staged() -> Iterator[Callable[[str, float], None]]:
    """Show how much of a stage is done, and the time that it has left.

    Yields:
        A function that shows the name of a stage, and the share of it that is done.
    """
    with ProgressBar("text", "bar", "percent", "elapsed", "left") as bar:
        shown = ""

        def show(stage: str, share: float) -> None:
            nonlocal shown
            if stage != shown:
                bar.begin(stage)
            shown = stage
            bar.show(share, at_once=True)

        yield show


def _on_the_disk() -> str:
    return "stopped. What is finished is on the disk; run the same command again to go on."


@contextmanager
def resumable(said: Callable[[], str] = _on_the_disk) -> Iterator[None]:
    """Say after Ctrl-C how to resume.

    Args:
        said: returns the note.
    """
    try:
        yield
    except KeyboardInterrupt:
        console.note(said())
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
    """Show a progress bar with the time left. After Ctrl-C, show a note on how to resume."""
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
    """Format a time as hours, minutes and seconds: ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def batch_progress(engine: Engine | None, work: TokenCounts, total: int, done: int) -> Iterator[BatchBar]:
    """Show a progress bar on standard error. If it is no terminal, draw nothing and watch no layer.

    Args:
        engine: runs the requests; ``None`` if they run elsewhere.
        work: tokens of all requests that are to run.
        total: number of all lines.
        done: number of lines that were done before.
    """
    is_shown = console.err().is_terminal and sum(work) > 0
    drawn = ProgressBar("spinner", "text", "wide bar", "percent", "note", total=None, is_shown=is_shown)

    def show(tokens: float, of: float, lines: str, speed: str) -> None:
        drawn.show(tokens, text=lines, note=speed, total=of)

    bar = BatchBar(work, total, done, show)
    with drawn, watched(engine.model, bar.read_in_part) if is_shown and engine is not None else nullcontext():
        yield bar
