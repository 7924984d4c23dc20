"""The work of ``kvkeep generate --input``: check every line, load the model, run, and say what was done."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kvkeep import budget as budgets
from kvkeep.cli import console
from kvkeep.cli.completion import sampling_of
from kvkeep.cli.files import read_again
from kvkeep.cli.request import DEFAULT_BUDGET, Batch, Request
from kvkeep.engine import Engine
from kvkeep.engine.admission import DEFAULT_ROWS
from kvkeep.engine.jobs import BadLine, Line, read
from kvkeep.engine.output import Output, as_line
from kvkeep.errors import InputError, KVKeepError, PolicyError
from kvkeep.models import text
from kvkeep.models.compiled import compile_layers
from kvkeep.models.device import enough_memory, parse_device, parse_dtype
from kvkeep.models.load import Checkpoint, Model, embedded, find, read_weights
from kvkeep.models.packed import pack_weights
from kvkeep.models.quiet import quiet
from kvkeep.models.text import Sampling
from kvkeep.policies.base import Policy
from kvkeep.registry import parse, spec

DEFAULT_CHUNK = 512
STANDARD_OUTPUT = "standard output"
INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it."""


def serve(request: Request, batch: Batch) -> None:
    """Do what ``kvkeep generate --input`` was asked for.

    Raises:
        KVKeepError: something in the request, the file or the model cannot be used.
    """
    with quiet(), read_again(batch.input, kind="input") as source:
        parse_dtype(request.dtype)
        parse_device(request.device)
        policy = parse(request.policy)
        budgets.check(1 if request.budget is None else request.budget)
        defaults = sampling_of(request)
        name = request.model or embedded()
        console.progress(f"reading {batch.input} …")
        checkpoint = find(name, allow_pickle=request.allow_pickle)

        def lines() -> Iterator[Line | BadLine]:
            return read(source, lambda prompt: _encode(checkpoint, prompt, raw=request.raw), defaults)

        count, longest, others = _survey(lines(), batch)
        budget = request.budget or _default_budget(policy, others, longest)
        with _open(batch.output, _settings(request, policy, budget, defaults)) as output:
            console.progress(f"loading {name} …")
            model = read_weights(checkpoint, request.dtype, request.device)
            rows = min(count, batch.max_rows or (count if batch.kv_memory else DEFAULT_ROWS))
            with enough_memory(model.device):
                engine = _engine(model, checkpoint, request, kv_memory=batch.kv_memory, rows=rows, budget=budget)
            pack_weights(model, engine.rows, if_faster=True)
            if batch.compile:
                console.progress("compiling …")
                console.note(f"{console.count(compile_layers(model), 'layer')} compiled")
            trained = checkpoint.trained_length
            if trained and longest > trained:
                console.note(
                    f"{longest} tokens in one line are more than the {trained} that the model was trained for."
                )
            bad = _set_aside(lines(), engine, batch)
            good = (line for line in lines() if isinstance(line, Line) and line.number not in bad)
            total = output.check(good)
            console.progress(
                f"{spec(policy)}, budget {budget}: {console.count(engine.rows, 'row')} of "
                f"{console.show_bytes(engine.row_bytes)}"
            )
            todo = (line for line in lines() if isinstance(line, Line) and line.number not in bad)
            _run(engine, todo, output, total=total, as_json=request.json)


def _engine(
    model: Model, checkpoint: Checkpoint, request: Request, *, kv_memory: int | None, rows: int, budget: int
) -> Engine:
    return Engine(
        model,
        checkpoint.tokenizer,
        policy=request.policy,
        budget=budget,
        rows=rows,
        kv_memory=kv_memory,
        prefill_chunk=request.prefill_chunk or DEFAULT_CHUNK,
        layer_budget=request.layer_budget,
        positions=request.positions,
    )


def _encode(checkpoint: Checkpoint, prompt: str | Sequence[Mapping[str, str]], *, raw: bool) -> list[int]:
    ids = text.encode(checkpoint, prompt, raw=raw) if isinstance(prompt, str) else text.encode_chat(checkpoint, prompt)
    found: list[int] = ids[0].tolist()
    return found


def _survey(lines: Iterator[Line | BadLine], batch: Batch) -> tuple[int, int, set[str]]:
    """How many lines can be run, tokens of the longest, and policies that lines name.

    A bad line stops the job unless such lines are set aside.
    """
    count = longest = 0
    others: set[str] = set()
    for line in lines:
        if isinstance(line, Line):
            count += 1
            longest = max(longest, len(line.request.prompt) + line.request.sampling.max_new_tokens)
            others |= {line.request.policy} if isinstance(line.request.policy, str) else set()
        elif not batch.skip_bad:
            raise _refusal(line)
    if not longest:
        raise InputError(f"{batch.input} has no line that can be run.")
    return count, longest, others


def _settings(request: Request, policy: Policy, budget: int, defaults: Sampling) -> dict[str, object]:
    """Everything that completions depend on beside the lines: what is not at its default."""
    options: dict[str, object] = {
        "raw": request.raw,
        "dtype": None if request.dtype == "auto" else request.dtype,
        "layer_budget": request.layer_budget,
        "positions": request.positions,
        "prefill_chunk": request.prefill_chunk,
    }
    options |= {name: value for name, value in asdict(defaults).items() if value != getattr(Sampling(), name)}
    always = {"model": request.model or "embedded", "policy": spec(policy), "budget": budget}
    return {**always, **{name: value for name, value in options.items() if value is not None and value is not False}}


def _default_budget(policy: Policy, others: Iterable[str], longest: int) -> int:
    """Room for the longest line, and for what the policies protect; at most `DEFAULT_BUDGET`."""
    if not policy.evicts:
        return longest
    known = [policy]
    for name in others:
        with suppress(PolicyError):  # the line that names it is refused later, with its number
            known.append(parse(name))
    return min(DEFAULT_BUDGET, max(longest, *(sum(map(int, one.protected(longest))) for one in known)))


def _refusal(line: BadLine) -> InputError:
    return InputError(
        f"Line {line.number} cannot be run: {line.reason}. Nothing was generated. Mend it, or set such lines aside "
        "with --skip-bad."
    )


def _set_aside(lines: Iterator[Line | BadLine], engine: Engine, batch: Batch) -> set[int]:
    """Numbers of the lines that cannot be run; they stop the job unless they are to be written to a file."""
    bad = [found for line in lines if (found := _problem(line, engine))]
    if bad and not batch.skip_bad:
        raise _refusal(bad[0])
    if bad:
        target = Path("stdout.bad" if batch.output == "-" else f"{batch.output}.bad")
        entries = ({"line": b.number, "reason": b.reason, "text": b.text} for b in bad)
        try:
            target.write_bytes(b"".join(map(as_line, entries)))
        except OSError as error:
            raise InputError(f"{target}, for lines that cannot be run, cannot be written: {error.strerror}.") from error
        console.note(f"{console.count(len(bad), 'line')} cannot be run; see {target}")
    return {line.number for line in bad}


def _problem(line: Line | BadLine, engine: Engine) -> BadLine | None:
    """Why a line cannot be run, if it cannot."""
    if isinstance(line, BadLine):
        return line
    try:
        engine.check(line.request)
    except KVKeepError as error:
        return BadLine(line.number, line.text, str(error).rstrip("."))
    return None


def _open(path: str, made_by: Mapping[str, object]) -> Output:
    if path == "-":
        return Output(open(sys.stdout.fileno(), "wb", closefd=False), STANDARD_OUTPUT, made_by)
    return Output.open(Path(path), made_by)


def _run(engine: Engine, lines: Iterator[Line], output: Output, *, total: int, as_json: bool) -> None:
    """Run what is not done yet, and say how it went."""
    before = len(output.done)
    if before:
        console.note(f"{before} of {console.count(total, 'line')} were done before")
    todo = (line for line in lines if not output.has(line))
    start = time.perf_counter()
    with _interruptible() as stopped, _progress(total, before) as on_tokens:
        new = _work(engine, todo, output, on_tokens, stopped)
    seconds = time.perf_counter() - start
    done = len(output.done)
    if as_json:
        found = {"lines": total, "done": done, "new_tokens": new, "seconds": seconds, "rows": engine.rows}
        stream = sys.stderr if output.name == STANDARD_OUTPUT else sys.stdout
        stream.write(json.dumps({**found, "row_bytes": engine.row_bytes}) + "\n")
    elif new:
        console.note(
            f"{console.count(new, 'token')} in {console.show_seconds(seconds)}: "
            f"{console.show_rate(new / seconds)} tokens/s"
        )
    if stopped():
        on = (
            "give --output FILE to go on another time"
            if output.name == STANDARD_OUTPUT
            else "the same command goes on from there"
        )
        console.note(f"stopped after {done} of {console.count(total, 'line')}; {on}")
        raise typer.Exit(INTERRUPTED)


def _work(
    engine: Engine,
    lines: Iterator[Line],
    output: Output,
    on_tokens: Callable[[int, int], None],
    stopped: Callable[[], bool],
) -> int:
    """Feed the engine until all lines are written or the user has had enough; returns the number of new tokens."""
    running: dict[int, Line] = {}
    new, more = 0, True
    while (more or running) and not stopped():
        while more and engine.has_room:
            line = next(lines, None)
            if more := line is not None:
                running[engine.add(line.request)] = line
        events = engine.step()
        finished = [event for event in events if event.result]
        for event in finished:
            assert event.result is not None
            output.write(running.pop(event.id), event.result)
        new += len(events)
        on_tokens(len(events), len(finished))
    return new


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end the work after the line that is being written; the second ends it at once."""
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
def _progress(total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with tokens per second and the time left, for a person who watches."""
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
