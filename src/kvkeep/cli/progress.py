"""The progress bar of all commands; above it, those of evaluations and batch jobs, which know what moves them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
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
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request, Result
from kvkeep.evals.grid import Cell, Planned
from kvkeep.models.checkpoint import Model
from kvkeep.models.load import watched

_SHORT = 20
"""Columns of a short bar."""

READING_AFTER_S = 1.0
"""Seconds until the bar of a prompt is drawn; most prompts are read by then."""


class ProgressBar:
    """Shows in one line on standard error how far work is. Where that is no terminal, a `Heartbeat` prints it.

    Args:
        parts: what stands in the line, from left to right: ``spinner``, ``text``, ``short bar``, ``bar``, ``wide bar``,
            ``percent``, ``count``, ``note``, ``elapsed``, ``left``, ``bare left``.
        text: the text at the beginning; without one the line is empty until there is something to show.
        note: the note at the beginning.
        total: what is done at the end; ``None`` while nobody knows.
        is_shown: whether there is something to show.
        room: columns of the text, where a longer one is cut; ``None`` to show it whole.
        speed_over_s: seconds over which the time left is averaged.
        after_s: seconds until the line is drawn on a terminal, so that short work draws none.
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
        after_s: int | float = 0.0,
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
        self._parts, self._begun_s = parts, time.monotonic()
        self._held = ExitStack()
        self._first = threading.Timer(after_s, self._drawn.start) if after_s else None

    def __enter__(self) -> ProgressBar:
        """Draw the bar, at once or after the seconds that its constructor was given (``after_s``), and return it."""
        self._begun_s = time.monotonic()
        if self._first is None:
            self._drawn.start()
        else:
            self._first.daemon = True  # a process that ends does not wait for it
            self._first.start()
        self._held.enter_context(console.Heartbeat.working(self.describe))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the bar."""
        self._held.close()
        try:
            if self._first is not None:
                self._first.cancel()
                self._first.join()  # it may be drawing the bar
        finally:
            self._drawn.stop()

    def describe(self) -> str:
        """Return how far the work is, as one line of text: what it is, how much is done, and the time left."""
        task = next(task for task in self._drawn.tasks if task.id == self._line)
        said, spent_s = [task.fields["note"]] if task.fields["note"] else [], time.monotonic() - self._begun_s
        if task.total and task.completed:
            if "count" in self._parts:
                said.append(f"{task.completed:g} of {task.total:g}")
            elif "percent" in self._parts:
                said.append(f"{min(1.0, task.completed / task.total):.0%}")
            if task.completed < task.total and {"left", "bare left"} & {*self._parts}:
                said.append(console.show_time_left(spent_s * (task.total - task.completed) / task.completed))
        if not said:
            said = ["just begun" if spent_s < 1 else f"{spent_s:.0f} s so far"]
        return f"{task.description or 'working'}: {', '.join(said)}"

    def begin(self, text: str, total: int | float = 1.0) -> None:
        """Show a new piece of work in place of the last one: nothing of it is done, and its time begins now."""
        self._begun_s = time.monotonic()
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
        """Update what is done, the texts and the total; ``None`` leaves each as it is.

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
        """Add ``done`` to what is done, in the unit of the total."""
        self._drawn.advance(self._line, done)


@contextmanager
def reading(model: Model, tokens: int) -> Iterator[None]:
    """Show how much of a prompt a model has read, while the context lasts; nothing if that takes a moment.

    Ctrl-C interrupts between two layers: the step that reads a long prompt can take a minute, and ends without a use.

    Args:
        model: reads the prompt.
        tokens: the prompt's length, or about that; 0 if it is not known.
    """
    parts = ("spinner", "text", "wide bar", "percent", "note", "bare left") if tokens else ("spinner", "text")
    note, total = (console.count(tokens, "token"), tokens) if tokens else ("", None)
    bar = ProgressBar(*parts, text="reading", note=note, total=total, after_s=READING_AFTER_S)

    def advance(tokens_read: float) -> None:
        bar.advance(tokens_read)
        Uninterrupted.interrupt_here()

    with bar, watched(model, advance):
        yield


@contextmanager
def counted(total: int) -> Iterator[Callable[[str, int], None]]:
    """Show how many pieces are done and the name of one, while the context lasts.

    After Ctrl-C print a note on how to resume, and raise the interrupt again.

    Args:
        total: the number of pieces.

    Yields:
        A function of a piece's name and the total number of pieces done so far, which redraws the bar.
    """
    # the rest of the line; the beginning of a name is shown on the narrowest terminal, too
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
    """Show the name of a stage, how much of it is done, and the time left, while the context lasts.

    A name that is too long for the line is cut at its end: what matters most stands first.

    Yields:
        A function of a stage's name and the share of that stage that is done. A new name begins a new stage.
    """
    # what the rest of the line leaves; the beginning of a name is shown on the narrowest terminal, too
    room = max(12, console.err().width - _SHORT - len("  100%  0:00:00 "))
    with ProgressBar("text", "short bar", "percent", "bare left", room=room) as bar:
        shown = ""

        def show(stage: str, share: float) -> None:
            nonlocal shown
            if stage != shown:
                bar.begin(stage)
            shown = stage
            bar.show(share, at_once=True)

        yield show


def _on_the_disk() -> str:
    """Return the note for work that was stopped and whose finished parts are on the disk."""
    return "stopped. What is finished is on the disk; run the same command again to go on."


@contextmanager
def resumable(said: Callable[[], str] = _on_the_disk) -> Iterator[None]:
    """Print a note on how to resume after Ctrl-C, and raise the interrupt again.

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
        self._begun: dict[Cell, None] = {}  # a set in order: a cell may be told twice, see `kvkeep.evals.run.run`
        self._ended = 0

    def begin(self, planned: Planned) -> None:
        """Show that a cell begins in this process; all other cells begun before count as done."""
        self._begun[planned.cell] = None
        self._show(_name(planned.cell), len(self._begun) - 1)

    def end(self, planned: Planned) -> None:
        """Count a cell that was run elsewhere as done, and show its name."""
        self._ended += 1
        self._show(_name(planned.cell), self._ended)


@contextmanager
def eval_progress(cells: int) -> Iterator[EvalBar]:
    """Yield a progress bar of ``cells`` cells with the time left. After Ctrl-C print a note on how to resume."""
    with counted(cells) as show:
        yield EvalBar(show)


def _name(cell: Cell) -> str:
    """Return the text that a bar shows for a cell of an evaluation: its task, budget and policy."""

    from kvkeep.policies.registry import label  # imports torch

    return f"{cell.task} {cell.budget} {label(cell.policy)}"


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
        """Count a request as taken by the engine, under its number. Nothing is drawn."""
        self._running[number] = _work(request)
        self._pace.begin(_work(request))

    def refuse(self, request: Request) -> None:
        """Subtract from the total the tokens of a request that the engine has refused."""
        self._pace.begin(_work(request))
        self._pace.end(_work(request), 0, 0)

    def read_in_part(self, tokens: float) -> None:
        """Add what one decoder layer has read of prompts, a fraction of their tokens, and redraw."""
        self._pace.read_in_part(tokens, time.perf_counter())
        self._draw()

    def step(self, numbers: Collection[int]) -> None:
        """Count a new token for each of these requests, and with its first token its prompt as read; redraw.

        Args:
            numbers: of the requests, as given to `begin`.
        """
        first = set(numbers) - self._read
        self._read |= first
        self._pace.step(sum(self._running[n].prompt for n in first), len(numbers), time.perf_counter())
        self._draw()

    def end(self, number: int, result: Result) -> None:
        """Count a request as ended, and correct the total by the tokens that it did not need."""
        work = self._running.pop(number)
        read = work.prompt if number in self._read else 0
        self._read.discard(number)
        self._pace.end(work, read, len(result.token_ids))

    def whole(self, work: TokenCounts, new: int | None) -> None:
        """Count a line that was run elsewhere: take its tokens as done, or off the total if it failed.

        A line that did not fail counts as done.

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
        """Count a line as done, and redraw."""
        self._done += 1
        self._draw()

    def _draw(self) -> None:
        """Redraw the bar: how many lines are done, at what speed in tokens, and how long the rest takes."""
        pace, speed = self._pace, "reading"
        if (left := pace.seconds_left()) is not None:
            speed = f"{console.show_rate(pace.writing_rate)} tokens/s, {_show_time(left)} left"
        elif pace.done:  # nobody knows yet how long writing takes
            speed = f"{console.show_rate(pace.reading_rate)} tokens/s read, > {_show_time(pace.seconds_to_read)} left"
        lines = f"{self._done} of {console.count(self._total, 'line')}"
        self._show(pace.done, pace.total, lines, speed)


def _work(request: Request) -> TokenCounts:
    """Return the number of prompt tokens that a request reads, and the most tokens that it may write."""
    return TokenCounts(len(request.prompt or ()), request.sampling.max_new_tokens)


def _show_time(seconds: float) -> str:
    """Return a time as hours, minutes and seconds: ``1:02:03``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


@contextmanager
def batch_progress(engine: Engine | None, work: TokenCounts, total: int, done: int) -> Iterator[BatchBar]:
    """Yield a progress bar on standard error. If that is no terminal, nothing is drawn and no layer is watched.

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
