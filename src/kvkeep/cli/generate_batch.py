"""The work of ``kvkeep generate --input``: check every line, load the model, and run the lines that are not done."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, runtime_checkable

import typer

from kvkeep import budget as budgets
from kvkeep.batch.input import InputLine, digest, read_lines, reason_of
from kvkeep.batch.output import LAYOUT, OutputFile
from kvkeep.batch.survey import Judge, Survey, TokenCounts, foreign, problem, remove_bad, write_bad
from kvkeep.cache.layer_layout import default_budget, rule_for_layers
from kvkeep.cli import console, distributed
from kvkeep.cli.cluster import ended_with_its_cluster, interruptible
from kvkeep.cli.files import STANDARD_INPUT, data_folder, read_again
from kvkeep.cli.generate import BatchOptions, GenerateOptions
from kvkeep.cli.generate_batch_workers import Read, engine_of, reader
from kvkeep.cli.generate_run import (
    SavedMemory,
    find_model,
    sampling_of,
    with_file_settings,
    with_keep_prompt,
    with_memory_settings,
    with_rule_for_layers,
)
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.progress import BatchBar, batch_progress
from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Result, checked_guard
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.errors import BudgetError, InputError, KVKeepError, PolicyError
from kvkeep.kv_bits import check_bits
from kvkeep.models import threads
from kvkeep.models.adapters import check_folders, weights_of_all
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import join_processes, process_group, quiet
from kvkeep.models.prepare import weight_layout
from kvkeep.models.tokenization import Writer
from kvkeep.parameters import MAX_TOKENS
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import label, spec
from kvkeep.policies.registry import parse as parse_policy
from kvkeep.result_files import in_full
from kvkeep.scale import remote_files
from kvkeep.scale.cluster import check_ray
from kvkeep.scale.remote_files import Destination, is_foreign_output

# A batch job's lines on their way through the engine, with a progress bar, and a summary at the end.

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

    def run(self, output: OutputFile, bar: BatchBar, stopped: Callable[[], bool]) -> tuple[int, Mapping[int, str]]:
        """Run the lines and write their answers; return the number of new tokens, and the reasons of failed lines by
        number.
        """


def run(
    workers: Workers,
    output: OutputFile,
    *,
    todo: Mapping[int, str],
    work: TokenCounts,
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
        nothing = "; nothing is left to do" if before == total else ""
        console.note(f"{before} of {console.count(total, 'line')} were done before{nothing}")
    start = time.perf_counter()
    with interruptible() as stopped, batch_progress(workers.engine, work, total, before) as bar:
        new, failed = workers.run(output, bar, stopped)
    seconds = time.perf_counter() - start
    kept = output.finish()
    if failed:
        _report(failed, set_aside)
    found = {"lines": total, "done": len(kept), "failed": len(failed), "new_tokens": new, "seconds": seconds}
    _summarise({**found, **workers.size}, output, as_json=as_json)
    unread = set() if stopped() else todo.keys() - output.done.keys() - failed.keys()
    for complaint in _problems(output, kept, failed, unread, total):
        console.error(complaint)
    if stopped() or len(kept) < total:
        _say_how_to_resume(output, len(kept), total)
        raise typer.Exit(console.INTERRUPTED if stopped() else INCOMPLETE)


def _summarise(found: Mapping[str, int | float], output: OutputFile, *, as_json: bool) -> None:
    """Print the numbers of a job, as JSON or in words; in words only if the job has written new tokens."""
    new, seconds = found["new_tokens"], found["seconds"]
    if as_json:
        stream = sys.stderr if output.name == STANDARD_OUTPUT else sys.stdout  # completions have the other one
        stream.write(json.dumps(found) + "\n")
    elif new:
        speed = f"{console.show_rate(new / seconds)} tokens/s"
        lines = f"{found['done']} of {console.count(int(found['lines']), 'line')}"
        written = f"{lines} in {output.name}; {console.count(int(new), 'new token')}"
        console.note(f"{written} in {console.show_seconds(seconds)}, {speed}")


def _report(failed: Mapping[int, str], set_aside: Callable[[Mapping[int, str]], object]) -> None:
    """Call ``set_aside`` with failed lines (number → reason); print its error, which does not concern completions."""
    try:
        set_aside(failed)
    except InputError as error:
        console.error(str(error))


def _say_how_to_resume(output: OutputFile, done: int, total: int) -> None:
    """Print a note on how many lines are done, and how to go on."""
    to_file = output.name != STANDARD_OUTPUT
    on = "the same command goes on from there" if to_file else "give --output FILE to go on another time"
    console.note(f"stopped after {done} of {console.count(total, 'line')}; {on}")


def _problems(
    output: OutputFile, kept: set[int], failed: Mapping[int, str], unread: set[int], total: int
) -> Iterator[str]:
    """Yield a sentence for each reason why lines have no completion: failed, not read again, or lost in the output.

    Args:
        output: the output.
        kept: numbers of the lines whose completions are in it at the end.
        failed: line number → reason.
        unread: numbers of lines that were not found again in the input.
        total: number of all lines.
    """
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


class Idle:
    """Runs nothing, for a job whose lines are all done."""

    engine: Engine | None = None
    size: Mapping[str, int] = {"rows": 0, "row_bytes": 0}

    def run(self, output: OutputFile, bar: BatchBar, stopped: Callable[[], bool]) -> tuple[int, Mapping[int, str]]:
        """Run nothing, and return no new tokens and no failed lines."""
        return 0, {}


class LocalRunner:
    """The lines of a job on their way through an engine in this process.

    Args:
        engine: runs the lines.
        lines: the lines that are not done yet, while they are read.
    """

    engine: Engine | None

    def __init__(self, engine: Engine, lines: Iterator[InputLine]) -> None:
        self.engine, self._engine, self._lines = engine, engine, lines
        self.size: Mapping[str, int] = {"rows": engine.rows, "row_bytes": engine.row_bytes}

    def run(self, output: OutputFile, bar: BatchBar, stopped: Callable[[], bool]) -> tuple[int, Mapping[int, str]]:
        """Run the lines and write their answers; return the number of new tokens, and the reasons of failed lines by
        number.
        """
        engine, answers = self._engine, AnswerWriter(output, bar)
        source = ((line, place) for line in self._lines for place in range(len(line.requests)))
        new, more = 0, True
        while (more or answers.running) and not stopped():
            # no line is read ahead of a free place, so a file of any size takes little memory
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


class AnswerWriter:
    """Writes the answer of each line as soon as all its requests have ended.

    A line that fails is noted with its reason, and the other lines go on.

    Args:
        output: takes the answers.
        bar: shows the progress.

    Attributes:
        running: the engine's number of a request → its line and its place among the line's requests.
        failed: line number → reason.
    """

    def __init__(self, output: OutputFile, bar: BatchBar) -> None:
        self._output, self._bar = output, bar
        self._results: dict[int, dict[int, Result]] = {}
        self.running: dict[int, tuple[InputLine, int]] = {}
        self.failed: dict[int, str] = {}

    def begin(self, engine: Engine, line: InputLine, place: int) -> None:
        """Hand the request at ``place`` of a line to the engine. If the engine refuses it, the line fails.

        A request whose line has failed already is not run.
        """
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
        """Store the result of a request; with a line's last one, write the line. A failed request fails its line."""
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

    def _fail(self, line: InputLine, reason: str) -> None:
        """Note why a line failed (the first reason stays), and forget the results of its other requests."""
        self.failed.setdefault(line.number, reason)
        self._results.pop(line.number, None)


# The settings of a job.


def settings_of(
    request: GenerateOptions, policy: Policy, budget: int, defaults: SamplingParams, memory: SavedMemory | None
) -> dict[str, object]:
    """Return the settings that completions depend on: name → value, without lines and weights.

    Options at their defaults are left out, except model, policy and budget.

    The embedded model is named "embedded", wherever it is installed.
    """
    options: dict[str, object] = {
        "raw": request.raw,
        "dtype": None if request.dtype == "auto" else request.dtype,
        "load_in": request.load_in,
        "layer_budget": request.layer_budget,
        "head_budget": request.head_budget,
        "kv_bits": check_bits(request.kv_bits),
        "positions": request.positions,
        "prefill_chunk": request.prefill_chunk,
        "pin_system": request.pin_system,
        "guard": request.guard,
        "memory": None if memory is None else memory.digest,
    }
    options |= {name: value for name, value in asdict(defaults).items() if value != getattr(SamplingParams(), name)}
    always = {"model": request.model or "embedded", "policy": spec(policy), "budget": budget}
    return {**always, **{name: value for name, value in options.items() if value is not None and value is not False}}


# Lines of a batch job without an answer: they are set aside beside the output, with the reasons.


def set_aside(source: Path, survey: Survey, failed: Mapping[int, str], batch: BatchOptions) -> None:
    """Write lines without an answer to a file beside the output, or to standard error if the output is a stream.

    Args:
        source: the input.
        survey: knows the lines that cannot be run.
        failed: line number → reason, of lines that have failed now.
        batch: the options of the job.

    Raises:
        InputError: all lines could be run, and yet such a file is there already.
    """
    to_file = batch.output != "-"
    # a file is written anew, with all lines; a stream has got those that cannot be run before the job began
    entries = survey.entries(read_lines(source), failed, bad=to_file or not failed)
    if to_file:
        if not survey.bad and os.path.lexists(beside(batch)):  # lines of an earlier run that are nowhere else
            raise foreign(beside(batch))
        write_bad(beside(batch), entries)
    count = console.count(len(failed or survey.bad), "line")
    are = "is" if len(failed or survey.bad) == 1 else "are"
    problem = f"{count} failed" if failed else f"{count} cannot be run"
    console.note(f"{problem} and {are} set aside {f'in {beside(batch)}' if to_file else 'below'}")
    if not to_file:
        sys.stderr.writelines(json.dumps(entry) + "\n" for entry in entries)


def beside(batch: BatchOptions) -> Path:
    """Return the path of the file for lines without an answer."""
    return Path(f"{batch.output}.bad")


# Inputs and outputs of batch jobs that are no local JSONL files: they are copied here, and collected here.


def lines_of(batch: BatchOptions) -> AbstractContextManager[Path]:
    """Return a context with the lines of a job's input, as a JSONL file that can be read several times.

    Raises:
        InputError: the input is a folder in which the output lies.
    """
    if not remote_files.is_foreign(batch.input):
        return read_again(batch.input, kind="input")
    if remote_files.is_within(batch.output, batch.input):
        raise InputError(
            f"The output {batch.output} lies in the folder {batch.input}, whose files are the input. If the job "
            "stops, the next run would take its completions for lines. Give an output elsewhere."
        )
    return remote_files.as_lines(batch.input)


@contextmanager
def published(batch: BatchOptions) -> Iterator[BatchOptions]:
    """Yield the options of a job that writes to a local file, and publish its lines at the end.

    A local output is used as it is. If an error is raised or the user ends the job, nothing is published; a job that
    ends without some lines' answers publishes the others. The local file stays until every line has its completion at
    the destination, so the same command goes on from there.

    Raises:
        InputError: the destination cannot be written.
    """
    if not is_foreign_output(batch.output):
        yield batch
        return
    destination = Destination(batch.output, data_folder() / "kvkeep" / "jobs")
    with destination.held():
        console.progress(f"collecting completions in {destination.path} …")
        try:
            yield replace(batch, output=str(destination.path))
        except typer.Exit as end:
            # lines that failed do not hold the others back
            if end.exit_code == INCOMPLETE and destination.collected:
                _publish(destination, complete=False)
            raise
        _publish(destination, complete=True)


def _publish(destination: Destination, *, complete: bool) -> None:
    """Write the completions to where the user wants them, and print a note on it.

    Args:
        destination: the place.
        complete: whether every line has its completion, so that the local copy can go.
    """
    destination.publish(complete=complete)
    console.note(f"completions are in {destination.target}")


# A batch job of several processes, which torchrun has started for one model.


def together(batch: BatchOptions) -> BatchOptions:
    """Return the options of a job that several processes run together: the first one writes, the others write
    nowhere.

    Raises:
        InputError: the processes cannot read the input, cannot compile, or shall start workers of Ray.
    """
    if distributed.processes() == 1:
        return batch
    if batch.compile:
        raise InputError("--compile does not go together with a model that is split over processes.")
    if batch.workers is not None:
        raise InputError("--ray-workers does not go together with torchrun. Start the command without torchrun.")
    join_processes()
    return batch if distributed.leads() else replace(batch, output="-")  # which leads nowhere there


def tell(output: OutputFile) -> None:
    """Give ``output`` in all processes the lines that are done, and what made them, as the first process has read them
    in the file.
    """
    done, output.made_by = distributed.told([list(output.done.items()), output.made_by])
    output.done = dict(done)


@ended_with_its_cluster()
def serve(request: GenerateOptions) -> None:
    """Run a batch job, which may be the rest of an earlier one.

    Raises:
        KVKeepError: the request, the input, the output or the model cannot be used.
    """
    request, batch = with_file_settings(request), request.batch
    assert batch is not None
    checked_guard(request.guard)
    check_weights(request)
    check_folders(request.adapter)
    if batch.input == STANDARD_INPUT:
        distributed.refuse_standard_input()
    device = parse_device(request.device)
    if batch.workers is not None:
        check_ray(batch.address)
    with (
        quiet(),
        threads.restored(),
        enough_memory(device),
        process_group(),
        lines_of(batch) as source,
        published(together(batch)) as batch,
    ):
        _serve(request, batch, source)


def _serve(request: GenerateOptions, batch: BatchOptions, source: Path) -> None:
    """Run a batch job over the lines of a local file, writing to another local file or a stream."""
    memory = None if request.memory is None else SavedMemory.read(request.memory)
    request = with_keep_prompt(with_memory_settings(request, memory))
    policy = parse_policy(request.policy)
    budgets.check(1 if request.budget is None else request.budget)  # 1 passes: the default comes later
    defaults = sampling_of(request)
    console.progress(f"reading {batch.input} …")
    checkpoint = find_model(request, memory)
    read_line = reader(checkpoint, request, defaults, memory)
    survey = _survey(source, read_line, batch, memory)
    with _open(batch.output) as output:
        tell(output)
        budget = _budget(request, policy, survey, output)
        if memory is None:
            request = with_rule_for_layers(request, _rule_for_layers(budget, survey, output))
        settings = settings_of(request, policy, budget, defaults, memory)
        output.agree(settings)
        output.check(survey.digests, survey.batch_lines)
        job = _Job(request, batch, source, read_line, survey, output, settings, checkpoint)
        if survey.digests.keys() <= output.done.keys() and job.has_old_weights:
            job.end()
        elif batch.workers is None:
            _near(job, budget)
        else:
            _far(job, budget, None if memory is None else memory.digest)


@dataclass(frozen=True)
class _Job:
    """A job whose lines have been read once, and whose output is open."""

    request: GenerateOptions
    batch: BatchOptions
    source: Path
    read_line: Read
    survey: Survey
    output: OutputFile
    settings: dict[str, object]
    checkpoint: Checkpoint

    def run(self, crew: Workers, todo: Mapping[int, str]) -> None:
        """Run the lines that are not done, and print the summary."""
        run(
            crew,
            self.output,
            todo=todo,
            work=self.survey.work(todo),
            total=len(self.survey.digests),
            as_json=self.request.json,
            set_aside=lambda failed: set_aside(self.source, self.survey, failed, self.batch),
        )

    @property
    def has_old_weights(self) -> bool:
        """Return whether the model's files have certainly not changed since the output was written.

        ``False`` for hub names and with adapters: an output does not name their folders. The time of a change is
        the system's own, which no copy brings along.
        """
        place = Path(self.checkpoint.name)
        if self.request.adapter:
            return False
        try:
            files = [*place.iterdir()] if place.is_dir() else [place]
            newest = max(max(file.stat().st_mtime, file.stat().st_ctime) for file in files)
            return newest < os.stat(in_full(self.batch.output)).st_mtime
        except (OSError, ValueError):  # no such path
            return False

    def end(self) -> None:
        """Print the summary of a job whose lines were all done before. The model is not loaded."""
        _remark(self.survey, self.checkpoint, self.request)
        # no engine judges the lines: each was fit to run when it was run
        self.run(Idle(), _todo(self, lambda shapes: [None] * len(shapes)))

    def announce(self, budget: int, rows: int, row_bytes: int, each: str = "") -> None:
        """Print, on a terminal only, the policy, the budget, and how many rows of how many bytes run the lines.

        Args:
            budget: tokens kept per layer and head.
            rows, row_bytes: sequences at once, and the bytes of each.
            each: words before the number of rows.
        """
        console.progress(
            f"{label(self.request.policy)}, budget {budget}: {each}{console.count(rows, 'row')} of "
            f"{console.show_bytes(row_bytes)}; a line without a temperature gets {self.request.temperature:g}"
        )


def _near(job: _Job, budget: int) -> None:
    """Load the model, and run a job on one engine in this process."""
    writer = _load(job.request, job.checkpoint, job.output, job.settings)
    job.output.texts = TokenTexts(job.checkpoint.tokenizer)
    engine = _engine(writer, job, budget=budget)
    # anew, since the engine has chosen the layout only now
    job.output.agree({**job.output.own, LAYOUT: weight_layout(writer.model)})
    _remark(job.survey, job.checkpoint, job.request)
    memory = job.survey.memory
    todo = _todo(job, lambda shapes: [problem(shape, engine, memory) for shape in shapes])
    job.announce(budget, engine.rows, engine.row_bytes)
    lines = (job.read_line(number, raw) for number, raw in _lines(job.source, todo))
    # each could be read at the first look; one that cannot any more is left out here, and reported as unread
    job.run(LocalRunner(engine, (line for line in lines if isinstance(line, InputLine))), todo)


def _far(job: _Job, budget: int, memory: str | None) -> None:
    """Start workers of Ray, and run a job on them.

    Raises:
        typer.Exit: the user has stopped the job before it began.
    """
    from kvkeep.cli.generate_batch_workers import RayRunner, pool_of
    from kvkeep.scale.driver import running

    batch, survey = job.batch, job.survey
    assert batch.workers is not None
    console.progress(f"starting {console.count(batch.workers, 'worker')} …")
    make = partial(
        pool_of,
        job.request,
        batch,
        requests=survey.requests,
        longest=survey.longest,
        budget=budget,
        memory=memory,
        like=job.output.weight_layout,
    )
    with (
        interruptible() as stopped,
        running(make, batch.workers, threads=job.request.threads, address=batch.address, stopped=stopped) as pool,
    ):
        if stopped():
            raise typer.Exit(console.INTERRUPTED)
        # once more, now that the workers have told their weights
        job.output.agree({**job.settings, "weights": pool.facts.weights, LAYOUT: pool.facts.layout})
        _remark(survey, job.checkpoint, job.request)
        todo = _todo(job, lambda shapes: pool.ask("judge", list(shapes)))
        each = f"{console.count(batch.workers, 'worker')}, each with "
        job.announce(budget, pool.facts.rows, pool.facts.row_bytes, each)
        job.run(RayRunner(pool, _lines(job.source, todo), lambda number: survey.work([number])), todo)


def _remark(survey: Survey, checkpoint: Checkpoint, request: GenerateOptions) -> None:
    """Print notes on lines that are longer than the model was trained for, name another model, or have odd fields."""
    if checkpoint.trained_length and survey.longest > checkpoint.trained_length:
        console.note(
            f"{survey.longest} tokens in one line are more than the {checkpoint.trained_length} that the model was "
            "trained for."
        )
    # without a name the embedded model runs, and lines may call it that
    name = request.model or "embedded"
    own = {name, *(other for other in survey.models if other.rpartition(":")[2] in request.adapter)}  # MODEL:ADAPTER
    if others := sorted(survey.models - own):
        named = ", ".join(f"{console.visible(other):.60}" for other in others)
        only = f":{next(iter(request.adapter))}" if len(request.adapter) == 1 else ""
        console.note(f"lines name the model {named}; {name}{only} answers {'those' if own - {name} else 'all'} lines")
    if survey.ignored:
        named = ", ".join(f"{console.visible(field):.60}" for field in sorted(survey.ignored))
        console.note(f"lines have fields that are unknown and ignored: {named}")


def _survey(source: Path, read_line: Read, batch: BatchOptions, memory: SavedMemory | None) -> Survey:
    """Read every line once, and return the survey.

    A line that cannot be run stops the job unless such lines are set aside.

    Raises:
        InputError: a line cannot be run, or none can.
    """
    survey = Survey(None if memory is None else memory.snapshot)
    for number, raw in read_lines(source):
        bad = survey.add(read_line(number, raw))
        if bad and not batch.skip_bad:
            raise _refusal(bad.number, bad.reason)
    if not survey.digests:
        raise _nothing_to_run(survey, batch)
    return survey


def _nothing_to_run(survey: Survey, batch: BatchOptions) -> InputError:
    """Return the error for an input without a line that can be run. It is not raised."""
    name = "Standard input" if batch.input == STANDARD_INPUT else batch.input
    if not survey.bad:
        return InputError(f'{name} has no lines. Give one JSON object per line, such as {{"prompt": "…"}}.')
    number, reason = min(survey.bad.items())
    return InputError(f"{name} has no line that can be run. Line {number}: {reason}.")


def _open(path: str) -> OutputFile:
    """Return the output file; ``-`` is standard output."""
    if path == "-":
        return OutputFile(open(sys.stdout.fileno(), "wb", closefd=False), STANDARD_OUTPUT)
    return OutputFile.open(Path(path))


def _budget(request: GenerateOptions, policy: Policy, survey: Survey, output: OutputFile) -> int:
    """Return the budget in tokens: the request's, else that of an earlier run of this job, else the policies' default.

    The default has regard to the longest line.
    """
    if request.budget:
        return request.budget
    named = []
    for name in survey.policies:
        with suppress(PolicyError):  # the line that names it is refused later, with its number
            named.append(parse_policy(name))
    default = default_budget(policy, survey.longest, named)
    earlier = output.made_by.get("budget")
    # `isinstance` would take `true` of a file for the number 1
    if type(earlier) is not int or not 1 <= earlier <= MAX_TOKENS or earlier == default:
        return default  # an output with an impossible number is refused later
    console.note(
        f"budget {earlier}, with which {output.name} was begun; with another output file it would be {default}"
    )
    return earlier


def _rule_for_layers(budget: int, survey: Survey, output: OutputFile) -> str | None:
    """Return the rule by which layers share the budget: ``uniform`` if it holds the longest line, else ``None``.

    ``None`` is the policy's own rule. That of an earlier run of this job stays, though its input may have got longer
    lines since.
    """
    if output.made_by:  # another rule that it names is refused later
        return "uniform" if output.made_by.get("layer_budget") == "uniform" else None
    return rule_for_layers(budget, survey.longest)


def _load(request: GenerateOptions, checkpoint: Checkpoint, output: OutputFile, settings: dict[str, object]) -> Writer:
    """Load the model and return it, after a check that the output was written with the same weights."""
    console.progress(f"loading {checkpoint.name} …")
    writer = writer_of(checkpoint, request, request.adapter)
    output.agree({**settings, "weights": weights_of_all(writer.model)})
    return writer


def _engine(writer: Writer, job: _Job, *, budget: int) -> Engine:
    """Return the engine, with no more rows than requests. Its weights are laid out as in an earlier run.

    Raises:
        InputError: the policy keeps all tokens, and the longest line has no room.
    """
    request, survey = job.request, job.survey
    try:
        like = job.output.weight_layout
        return engine_of(writer, request, job.batch, most=survey.requests, budget=budget, like=like)
    except BudgetError as error:
        if request.budget or parse_policy(request.policy).evicts:
            raise
        raise InputError(
            f"Line {survey.longest_line} cannot be run: {request.policy} keeps all of its {survey.longest} tokens. "
            f"{error} Nothing was generated. Ask for fewer new tokens in that line, or give --budget."
        ) from error


def _todo(job: _Job, judge: Judge) -> dict[int, str]:
    """Return the numbers of the lines to run now, with their fingerprints.

    Lines that ``judge`` refuses are written to the file of lines without an answer, or stop the job.

    Raises:
        InputError: a line cannot be run, and such lines are not to be set aside.
    """
    source, survey, output, batch = job.source, job.survey, job.output, job.batch
    new = [number for number in survey.digests if number not in output.done]
    survey.set_aside(survey.check(judge, new))
    if survey.bad and not batch.skip_bad:
        raise _refusal(*min(survey.bad.items()))
    if survey.bad:
        set_aside(source, survey, {}, batch)
    elif batch.output != "-":
        remove_bad(beside(batch), survey)
    return {number: fingerprint for number, fingerprint in survey.digests.items() if number not in output.done}


def _refusal(number: int, reason: str) -> InputError:
    """Return the error about a line that cannot be run. It is not raised."""
    return InputError(
        f"Line {number} cannot be run: {reason}. Nothing was generated. Mend it, or set such lines aside with "
        "--skip-bad."
    )


def _lines(source: Path, todo: Mapping[int, str]) -> Iterator[tuple[int, bytes]]:
    """Yield number and bytes of the lines to run, read once more. A line that has changed since is left out."""
    return ((number, raw) for number, raw in read_lines(source) if number in todo and digest(raw) == todo[number])
