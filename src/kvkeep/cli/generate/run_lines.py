"""A batch job's lines on their way through the engine, with a progress bar, and a summary at the end."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import typer

from kvkeep.cli import console
from kvkeep.cli.generate.bar import Bar, progress
from kvkeep.engine import Engine, Result
from kvkeep.errors import KVKeepError
from kvkeep.jobs.lines import Line, reason_of
from kvkeep.jobs.output import Output
from kvkeep.jobs.pace import Work

STANDARD_OUTPUT = "standard output"
INCOMPLETE = 1
"""Exit code of a job that ended without completions for all of its lines."""


def run(
    engine: Engine,
    lines: Iterator[Line],
    output: Output,
    *,
    todo: Mapping[int, str],
    work: Work,
    total: int,
    as_json: bool,
) -> None:
    """Run lines, write their completions, and print a summary.

    Args:
        engine: runs the lines.
        lines: the lines that are not done yet, while they are read.
        output: takes the completions.
        todo: the numbers of these lines.
        work: the tokens of these lines.
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
    with interruptible() as stopped, progress(engine, work, total, before) as bar:
        new = _work(engine, lines, output, failed, bar, stopped)
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
    bar: Bar,
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
                    number = engine.add(line.request)
                except KVKeepError as error:
                    failed[line.number] = reason_of(error)
                    bar.refuse(line.request)
                else:
                    running[number] = line
                    bar.begin(number, line.request)
        events = engine.step()
        written = [event.id for event in events if event.token_id is not None]
        bar.step(written)
        new += len(written)
        for event in events:
            if event.result is not None:
                bar.end(event.id, event.result)
                _finish(running.pop(event.id), event.result, output, failed, bar)
    return new


def _finish(line: Line, result: Result, output: Output, failed: dict[int, str], bar: Bar) -> None:
    """Write the completion of a line, or note why it has none."""
    if result.finish_reason == "error":
        failed[line.number] = str(result.error)
    else:
        output.write(line, result)
        bar.line()


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
