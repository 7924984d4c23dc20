"""A batch job's lines on their way through the engine, with a progress bar, and a summary at the end."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvkeep.cli import console
from kvkeep.engine import Engine
from kvkeep.errors import KVKeepError
from kvkeep.jobs.lines import Line, reason_of
from kvkeep.jobs.output import Output

STANDARD_OUTPUT = "standard output"
INCOMPLETE = 1
"""Exit code of a job that ended without completions for all of its lines."""


def run(
    engine: Engine, lines: Iterator[Line], output: Output, *, todo: Mapping[int, str], total: int, as_json: bool
) -> None:
    """Run lines, write their completions, and print a summary.

    Args:
        engine: runs the lines.
        lines: the lines that are not done yet, while they are read.
        output: takes the completions.
        todo: the numbers of these lines.
        total: number of all lines, with the lines that were done before.
        as_json: whether the summary is a JSON object.

    Raises:
        Exit: the user ended the job, or lines have no completion.
    """
    before = len(output.done)
    if before:
        console.note(f"{before} of {console.count(total, 'line')} were done before")
    failed: dict[int, str] = {}
    start = time.perf_counter()
    with interruptible() as stopped, progress(total, before) as on_tokens:
        new = _work(engine, lines, output, failed, on_tokens, stopped)
    seconds = time.perf_counter() - start
    kept = output.finish()
    if as_json:
        found = {"lines": total, "done": len(kept), "failed": len(failed), "new_tokens": new, "seconds": seconds}
        stream = sys.stderr if output.name == STANDARD_OUTPUT else sys.stdout
        stream.write(json.dumps({**found, "rows": engine.rows, "row_bytes": engine.row_bytes}) + "\n")
    elif new:
        speed = f"{console.show_rate(new / seconds)} tokens/s"
        console.note(f"{console.count(new, 'token')} in {console.show_seconds(seconds)}: {speed}")
    unread = set() if stopped() else todo.keys() - output.done.keys() - failed.keys()
    for problem in _problems(output, kept, failed, unread, total):
        console.error(problem)
    if stopped() or len(kept) < total:
        _say_how_to_resume(output, len(kept), total)
        raise typer.Exit(console.INTERRUPTED if stopped() else INCOMPLETE)


def _say_how_to_resume(output: Output, done: int, total: int) -> None:
    to_file = output.name != STANDARD_OUTPUT
    on = "the same command goes on from there" if to_file else "give --output FILE to go on another time"
    console.note(f"stopped after {done} of {console.count(total, 'line')}; {on}")


def _problems(output: Output, kept: set[int], failed: Mapping[int, str], unread: set[int], total: int) -> Iterator[str]:
    """Why lines have no completion."""
    if failed:
        first = min(failed)
        yield f"{len(failed)} of {console.count(total, 'line')} failed, first line {first}: {failed[first].rstrip('.')}"
    if unread:
        yield (
            f"{len(unread)} of {console.count(total, 'line')} of the input changed or went away while the job ran, "
            f"first line {min(unread)}, and were not run"
        )
    if lost := output.done.keys() - kept:
        yield (
            f"{output.name} was removed, replaced or changed while the job ran: {len(lost)} of "
            f"{console.count(len(output.done), 'completion')} are missing there, first that of line {min(lost)}"
        )


def _work(
    engine: Engine,
    lines: Iterator[Line],
    output: Output,
    failed: dict[int, str],
    on_tokens: Callable[[int, int], None],
    stopped: Callable[[], bool],
) -> int:
    """Feed the engine until all lines are written or the user stops the job; return the number of new tokens.

    A line that fails is noted with its reason, and the other lines go on.
    """
    running: dict[int, Line] = {}
    new, more = 0, True
    while (more or running) and not stopped():
        while more and engine.has_room:
            line = next(lines, None)
            if more := line is not None:
                try:
                    running[engine.add(line.request)] = line
                except KVKeepError as error:
                    failed[line.number] = reason_of(error)
        events = engine.step()
        finished = [event for event in events if event.result]
        for event in finished:
            assert event.result is not None
            line = running.pop(event.id)
            if event.result.finish_reason == "error":
                failed[line.number] = str(event.result.error)
            else:
                output.write(line, event.result)
        new += sum(event.token_id is not None for event in events)
        on_tokens(len(events), len(finished))
    return new


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Delay the first Ctrl-C: the function that this yields returns True after it. The second one ends the process."""
    pressed = False

    def press(*args: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def progress(total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with tokens per second and the time left; nothing is drawn where standard error is no terminal."""
    screen = console.err()
    columns = (
        TextColumn("lines"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("time left", style="dim"),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=screen, disable=not screen.is_terminal, transient=True)
    task = bar.add_task("lines", total=total, completed=done, rate="")
    start, tokens = time.perf_counter(), 0

    def on_tokens(new: int, finished: int) -> None:
        nonlocal tokens
        tokens += new
        rate = tokens / max(1e-9, time.perf_counter() - start)
        bar.update(task, advance=finished, rate=f"{console.show_rate(rate)} tokens/s")

    with bar:
        yield on_tokens
