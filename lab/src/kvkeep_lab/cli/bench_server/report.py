"""The work of ``kvkeep bench-server``: warm up, send, and print a table or JSON."""

from __future__ import annotations

import asyncio
import json as jsons
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from typing import IO, Any

import typer

from kvkeep.cli import console
from kvkeep.errors import InputError, three_digits
from kvkeep.result_files import in_full
from kvkeep_lab.cli.bench_server.options import BenchServerOptions
from kvkeep_lab.loadtest.client import RequestOutcome, Target, base_url, model_of, whole
from kvkeep_lab.loadtest.percentiles import SHARES
from kvkeep_lab.loadtest.plan import Lengths, Load, arrivals, read_lines
from kvkeep_lab.loadtest.running import send, summary

_TIMES = {
    "ttft_s": "first token",
    "tpot_s": "time per token",
    "stall_s": "longest stall of an answer",
    "request_s": "whole answer",
}
_LATE_S = 0.05
"""Seconds from which on a request that was sent late is worth a note."""


def serve(request: BenchServerOptions) -> None:
    """Load a server and print its numbers; see `run`.

    Raises:
        InputError: an option cannot be used; see also `run`.
    """
    load = Load(
        requests=request.requests,
        rate=request.rate,
        prompt_tokens=Lengths.read(request.prompt_tokens, "prompt_tokens"),
        new_tokens=Lengths.read(request.max_new_tokens, "max_new_tokens"),
        prefixes=request.prefixes,
        prefix_tokens=request.prefix_tokens,
        turns=request.turns,
        seed=request.seed,
        lines=() if request.input is None else read_lines(request.input),
    )
    target = Target(
        url=base_url(request.url),
        model=request.model or "",
        key=request.api_key or None,
        chat=request.chat,
        timeout_s=request.timeout,
        extra={"ignore_eos": True} if request.ignore_end else {},
    )
    run(target, load, sessions=request.sessions, warmup=request.warmup, output=request.output, json=request.json)


def run(target: Target, load: Load, *, sessions: bool, warmup: int, output: str | None, json: bool) -> None:
    """Load a server and print its numbers.

    Raises:
        InputError: the server does not answer, or the output cannot be written; the numbers are printed all the same
            if it is full.
        typer.Exit: not one request was answered.
    """
    with ExitStack() as open_ones:
        rows = None if output is None else open_ones.enter_context(RowFile(output))
        found = asyncio.run(_measured(target, load, sessions=sessions, warmup=warmup, rows=rows))
    if json:
        console.write_json(found)
    else:
        _show(found)
    if rows is not None:
        rows.check()
    if not found["completed"]:
        raise typer.Exit(1)


class RowFile:
    """A file with a line of JSON about each request, written as soon as the request has ended.

    An older file at the path keeps its lines until `begin`: a wrong URL does not empty it.

    Args:
        path: the file.

    Raises:
        InputError: it cannot be written.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file = self._opened("a")
        self._error: OSError | None = None

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # the rest of a line that did not fit, which `check` reports
            self._file.close()

    def begin(self) -> None:
        """Empty the file.

        Raises:
            InputError: it cannot be written any more.
        """
        before, self._file = self._file, self._opened("w")
        before.close()  # not earlier: the reader of a pipe would take that for the end

    def add(self, outcome: RequestOutcome) -> None:
        """Write the line of a request. After a failure nothing more is written: the run's numbers are worth more."""
        if self._error is None:
            line = {name: value for name, value in asdict(outcome).items() if name != "text"}
            try:
                self._file.write(jsons.dumps(line) + "\n")
                self._file.flush()
            except OSError as error:
                self._error = error

    def check(self) -> None:
        """Raise what went wrong.

        Raises:
            InputError: not every line could be written.
        """
        if self._error is not None:
            raise InputError(
                f"{self._path} lacks requests: {self._error.strerror}. The printed numbers count all of them."
            ) from self._error

    def _opened(self, mode: str) -> IO[str]:
        try:
            return in_full(self._path).open(mode, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{self._path} cannot be written: {error.strerror}.") from error


async def _measured(target: Target, load: Load, *, sessions: bool, warmup: int, rows: RowFile | None) -> dict[str, Any]:
    """Return the numbers of a run. The file gets its outcomes in the order in which they end."""
    target = replace(target, model=whole(target.model or await model_of(target)))
    if warmup:
        console.progress(f"warming up {target.model} …")
        await send(target, arrivals(load.warmup(warmup)), sessions=sessions)
    planned = arrivals(load)
    console.progress(f"sending {console.count(load.requests, 'request')} within {planned[-1].at:.0f} s …")
    if rows is None:
        outcomes = await send(target, planned, sessions=sessions)
    else:
        rows.begin()
        outcomes = await send(target, planned, sessions=sessions, ended=rows.add)
    start, end = min(outcome.planned for outcome in outcomes), max(outcome.ended for outcome in outcomes)
    settings = {name: value for name, value in asdict(load).items() if name != "lines"}
    settings |= {"rate": str(load.rate)} if load.rate == float("inf") else {}
    asked = {"url": target.url, "model": target.model, "chat": target.chat, "sessions": sessions, "warmup": warmup}
    return {**asked, "load": settings, **summary(outcomes, seconds=end - start)}


def _show(found: dict[str, Any]) -> None:
    """Print the table for people."""
    out = console.out()
    rate = found["load"]["rate"]
    pace = "all at once" if rate == "inf" else f"{rate:g}/s"
    many = console.count(found["requests"], "request")
    model = console.visible(found["model"])  # the server's word: it must not steer the terminal
    out.print(f"{model} at {found['url']}: {many}, {pace}, in {found['seconds']:.1f} s", soft_wrap=True)
    columns = ("mean", *(f"p{share:g}" for share in SHARES), "max")
    table = console.table("", *columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, words in _TIMES.items():
        if found[name] is not None:
            table.add_row(words, *(_time(found[name][column]) for column in columns))
    if table.rows:
        out.print(table)
    out.print(_throughput(found), soft_wrap=True)
    out.print(_failures(found), soft_wrap=True)
    _notes(found)


def _time(seconds: float) -> str:
    return f"{three_digits(1000 * seconds)} ms" if seconds < 1 else console.show_seconds(seconds)


def _throughput(found: dict[str, Any]) -> str:
    speeds = {
        "requests": found["requests_per_s"],
        "prompt tokens": found["prompt_tokens_per_s"],
        "new tokens": found["new_tokens_per_s"],
    }
    return "per second: " + ", ".join(f"{three_digits(speed)} {name}" for name, speed in speeds.items())


def _failures(found: dict[str, Any]) -> str:
    """Return the failures by their kinds, as text."""
    failed = found["requests"] - found["completed"]
    if not failed:
        return "errors: none"
    kinds = ", ".join(f"{count} {kind}" for kind, count in found["errors"].items())
    return f"errors: {failed} of {found['requests']} ({kinds})"


def _notes(found: dict[str, Any]) -> None:
    """Print facts without which the numbers would mislead."""
    if found["first_error"]:
        console.note(f"the first error: {found['first_error']}")
    if found["cached_tokens"]:
        console.note(f"{found['cached_tokens']} of {found['prompt_tokens']} prompt tokens were not read again")
    if found["completed"] and found["tokens_counted_by"] != "server":
        console.note("the server does not count tokens; each piece of its streams counts as one")
    if found["late_s"]["p99"] > _LATE_S:
        late = console.show_seconds(found["late_s"]["p99"])
        console.note(f"1 % of the requests were sent {late} late or more: this machine cannot send that many")
