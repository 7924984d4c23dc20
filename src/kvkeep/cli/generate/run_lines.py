"""The lines of a batch job on their way through the engine, and what is said of them at the end."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping

import typer

from kvkeep.cli import console
from kvkeep.cli.generate.watch import interruptible, progress
from kvkeep.engine import Engine
from kvkeep.errors import KVKeepError
from kvkeep.jobs.lines import Line, reason_of
from kvkeep.jobs.output import Output

STANDARD_OUTPUT = "standard output"
INCOMPLETE = 1
"""Exit code of a job that has come to its end without all of its lines."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def run(
    engine: Engine, lines: Iterator[Line], output: Output, *, todo: Mapping[int, str], total: int, as_json: bool
) -> None:
    """Run lines, write their completions, and say how it went.

    Args:
        engine: what runs them.
        lines: the lines that are not done yet, as they are read.
        output: where completions go.
        todo: the numbers of these lines.
        total: how many lines there are with those that were done before.
        as_json: whether the summary is a JSON object.

    Raises:
        Exit: the user ended the job, or lines have no completion.
    """
    before = len(output.done)
    _tell_of_earlier(output, total)
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
        console.note(
            f"{console.count(new, 'token')} in {console.show_seconds(seconds)}: "
            f"{console.show_rate(new / seconds)} tokens/s"
        )
    unread = set() if stopped() else todo.keys() - output.done.keys() - failed.keys()
    for problem in _problems(output, kept, failed, unread, total):
        console.error(problem)
    if stopped() or len(kept) < total:
        to_file = output.name != STANDARD_OUTPUT
        on = "the same command goes on from there" if to_file else "give --output FILE to go on another time"
        console.note(f"stopped after {len(kept)} of {console.count(total, 'line')}; {on}")
        raise typer.Exit(INTERRUPTED if stopped() else INCOMPLETE)


def _tell_of_earlier(output: Output, total: int) -> None:
    """Say what earlier runs have done."""
    if output.done:
        console.note(f"{len(output.done)} of {console.count(total, 'line')} were done before")


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
    """Feed the engine until all lines are written or the user has had enough; returns the number of new tokens.

    Lines that fail are noted with their reasons, and the others go on.
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
