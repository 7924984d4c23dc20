"""A batch job's lines on their way through the engine, with a progress bar, and a summary at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import typer

from kvkeep.batch.input import Line, reason_of
from kvkeep.batch.output import Output
from kvkeep.batch.progress import Work
from kvkeep.cli import console
from kvkeep.cli.generate.bar import Bar, progress
from kvkeep.cli.workers import interruptible
from kvkeep.engine import Engine, Result
from kvkeep.errors import InputError, KVKeepError

STANDARD_OUTPUT = "standard output"
INCOMPLETE = 1
"""Exit code of a job that ended without completions for all of its lines."""


@runtime_checkable
class Workers(Protocol):
    """Those who run the lines of a job.

    Attributes:
        engine: the engine in this process whose progress can be watched; ``None`` if there is none.
        size: numbers for the summary.
    """

    engine: Engine | None
    size: Mapping[str, int]

    def run(self, output: Output, bar: Bar, stopped: Callable[[], bool]) -> tuple[int, Mapping[int, str]]:
        """Run the lines and write their answers; return the number of new tokens, and why lines failed."""


def run(
    workers: Workers,
    output: Output,
    *,
    todo: Mapping[int, str],
    work: Work,
    total: int,
    as_json: bool,
    set_aside: Callable[[Mapping[int, str]], object],
) -> None:
    """Run lines, write their completions, and print a summary.

    Args:
        workers: run the lines that are not done yet.
        output: takes the completions.
        todo: the numbers of these lines.
        work: the tokens of these lines.
        total: number of all lines, with the lines that were done before.
        as_json: whether the summary is a JSON object.
        set_aside: writes down lines that failed, with their reasons.

    Raises:
        Exit: the user ended the job, or lines have no completion.
    """
    before = len(output.done)
    if before:
        console.note(f"{before} of {console.count(total, 'line')} were done before")
    start = time.perf_counter()
    with interruptible() as stopped, progress(workers.engine, work, total, before) as bar:
        new, failed = workers.run(output, bar, stopped)
    seconds = time.perf_counter() - start
    kept = output.finish()
    if failed:
        _report(failed, set_aside)
    found = {"lines": total, "done": len(kept), "failed": len(failed), "new_tokens": new, "seconds": seconds}
    _summarise({**found, **workers.size}, output, as_json=as_json)
    unread = set() if stopped() else todo.keys() - output.done.keys() - failed.keys()
    for problem in _problems(output, kept, failed, unread, total):
        console.error(problem)
    if stopped() or len(kept) < total:
        _say_how_to_resume(output, len(kept), total)
        raise typer.Exit(console.INTERRUPTED if stopped() else INCOMPLETE)


def _summarise(found: Mapping[str, int | float], output: Output, *, as_json: bool) -> None:
    """Print the numbers of a job, as JSON or in words."""
    new, seconds = found["new_tokens"], found["seconds"]
    if as_json:
        stream = sys.stderr if output.name == STANDARD_OUTPUT else sys.stdout
        stream.write(json.dumps(found) + "\n")
    elif new:
        speed = f"{console.show_rate(new / seconds)} tokens/s"
        console.note(f"{console.count(int(new), 'token')} in {console.show_seconds(seconds)}: {speed}")


def _report(failed: Mapping[int, str], set_aside: Callable[[Mapping[int, str]], object]) -> None:
    """Write down lines that failed. Their completions are not concerned if that is not possible."""
    try:
        set_aside(failed)
    except InputError as error:
        console.error(str(error))


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


class Near:
    """The lines of a job on their way through an engine in this process.

    Args:
        engine: runs the lines.
        lines: the lines that are not done yet, while they are read.
    """

    engine: Engine | None

    def __init__(self, engine: Engine, lines: Iterator[Line]) -> None:
        self.engine, self._engine, self._lines = engine, engine, lines
        self.size: Mapping[str, int] = {"rows": engine.rows, "row_bytes": engine.row_bytes}

    def run(self, output: Output, bar: Bar, stopped: Callable[[], bool]) -> tuple[int, Mapping[int, str]]:
        """Run the lines and write their answers; return the number of new tokens, and why lines failed."""
        engine, answers = self._engine, Answers(output, bar)
        source = ((line, place) for line in self._lines for place in range(len(line.requests)))
        new, more = 0, True
        while (more or answers.running) and not stopped():
            while more and engine.has_room:
                if more := (found := next(source, None)) is not None:
                    answers.begin(engine, *found)
            events = engine.step()
            written = [event.id for event in events if event.token_id is not None]
            bar.step(written)
            new += len(written)
            for event in events:
                if event.result is not None:
                    answers.end(event.id, event.result)
        return new, answers.failed


class Answers:
    """Writes the answer of each line as soon as all its requests have ended.

    A line that fails is noted with its reason, and the other lines go on.

    Args:
        output: takes the answers.
        bar: shows the progress.

    Attributes:
        running: the engine's number of a request → its line and its place among the line's requests.
        failed: line number → reason.
    """

    def __init__(self, output: Output, bar: Bar) -> None:
        self._output, self._bar = output, bar
        self._results: dict[int, dict[int, Result]] = {}
        self.running: dict[int, tuple[Line, int]] = {}
        self.failed: dict[int, str] = {}

    def begin(self, engine: Engine, line: Line, place: int) -> None:
        """Hand a request to the engine, unless another one of its line has failed."""
        request = line.requests[place]
        try:
            number = None if line.number in self.failed else engine.add(request)
        except KVKeepError as error:
            number = None
            self._fail(line, reason_of(error))
        if number is None:
            self._bar.refuse(request)
        else:
            self.running[number] = line, place
            self._bar.begin(number, request)

    def end(self, number: int, result: Result) -> None:
        """Take a result, and write the line if it is the last one."""
        line, place = self.running.pop(number)
        self._bar.end(number, result)
        if result.finish_reason == "error":
            self._fail(line, str(result.error))
        if line.number in self.failed:
            return
        found = self._results.setdefault(line.number, {})
        found[place] = result
        if len(found) == len(line.requests):
            self._output.write(line, *(found[at] for at in sorted(found)))
            del self._results[line.number]
            self._bar.line()

    def _fail(self, line: Line, reason: str) -> None:
        self.failed.setdefault(line.number, reason)
        self._results.pop(line.number, None)
