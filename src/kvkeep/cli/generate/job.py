"""The work of ``kvkeep generate --input``: check every line, load the model, and run the lines that are not done."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import typer

from kvkeep import budget as budgets
from kvkeep.batch.input import Line, digest, read_lines
from kvkeep.batch.output import LAYOUT, Output
from kvkeep.batch.survey import Judge, Survey, problem, remove_bad
from kvkeep.cli import console, torchrun
from kvkeep.cli.files import STANDARD_INPUT
from kvkeep.cli.generate.aside import beside, set_aside
from kvkeep.cli.generate.build import engine_of, show_with
from kvkeep.cli.generate.completion import sampling_of
from kvkeep.cli.generate.elsewhere import lines_of, published
from kvkeep.cli.generate.encode import Read, reader
from kvkeep.cli.generate.request import Batch, Request
from kvkeep.cli.generate.run_lines import STANDARD_OUTPUT, Near, Workers, run
from kvkeep.cli.generate.settings import settings_of
from kvkeep.cli.generate.together import tell, together
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.memories import Memory, settled
from kvkeep.cli.options import MAX_TOKENS
from kvkeep.cli.workers import ended_with_its_cluster, interruptible
from kvkeep.engine import Engine
from kvkeep.engine.request import checked_guard
from kvkeep.errors import BudgetError, InputError, PolicyError
from kvkeep.models import tensor_parallel, threads
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import Checkpoint, embedded, find, quiet
from kvkeep.models.prepare import chosen
from kvkeep.models.tokenization import Writer
from kvkeep.models.weight_hash import fingerprint
from kvkeep.planning.plan import default_budget
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse as parse_policy
from kvkeep.policies.registry import spec
from kvkeep.scale.cluster import check_ray, joined, own_cpus


@ended_with_its_cluster()
def serve(request: Request, batch: Batch) -> None:
    """Run a batch job.

    Raises:
        KVKeepError: the request, the input, the output or the model cannot be used.
    """
    checked_guard(request.guard)
    check_weights(request)
    if batch.input == STANDARD_INPUT:
        torchrun.refuse_standard_input()
    device = parse_device(request.device)
    if batch.workers is not None:
        check_ray(batch.address)
    with (
        quiet(),
        threads.restored(),
        enough_memory(device),
        tensor_parallel.left(),
        lines_of(batch) as source,
        published(together(batch)) as batch,
    ):
        _serve(request, batch, source)


def _serve(request: Request, batch: Batch, source: Path) -> None:
    """Run a batch job over the lines of a local file, into another one."""
    memory = None if request.memory is None else Memory.read(request.memory)
    request = settled(request, memory)
    policy = parse_policy(request.policy)
    budgets.check(1 if request.budget is None else request.budget)
    defaults = sampling_of(request)
    console.progress(f"reading {batch.input} …")
    checkpoint = find(request.model or embedded(), allow_pickle=request.allow_pickle)
    if memory is not None:
        memory.check_model(checkpoint)
    read_line = reader(checkpoint, request, defaults, memory)
    survey = _survey(source, read_line, batch, memory)
    with _open(batch.output) as output:
        tell(output)
        budget = _budget(request, policy, survey, output)
        settings = settings_of(request, policy, budget, defaults, memory)
        output.agree(settings)
        output.check(survey.digests, survey.batch_lines)
        job = _Job(request, batch, source, read_line, survey, output, settings, checkpoint)
        if batch.workers is None:
            _near(job, budget)
        else:
            _far(job, budget, None if memory is None else memory.digest)


@dataclass(frozen=True)
class _Job:
    """A job whose lines have been read once, and whose output is open."""

    request: Request
    batch: Batch
    source: Path
    read_line: Read
    survey: Survey
    output: Output
    settings: dict[str, object]
    checkpoint: Checkpoint

    def run(self, crew: Workers, todo: Mapping[int, str]) -> None:
        """Run the lines that are not done."""
        run(
            crew,
            self.output,
            todo=todo,
            work=self.survey.work(todo),
            total=len(self.survey.digests),
            as_json=self.request.json,
            set_aside=lambda failed: set_aside(self.source, self.survey, failed, self.batch),
        )

    def announce(self, budget: int, rows: int, row_bytes: int, each: str = "") -> None:
        """Say what holds the lines."""
        console.progress(
            f"{spec(parse_policy(self.request.policy))}, budget {budget}: {each}{console.count(rows, 'row')} of "
            f"{console.show_bytes(row_bytes)}"
        )


def _near(job: _Job, budget: int) -> None:
    """Run a job on one engine in this process."""
    writer = _load(job.request, job.checkpoint, job.output, job.settings)
    job.output.show = show_with(writer)
    engine = _engine(writer, job, budget=budget)
    job.output.agree({**job.output.own, LAYOUT: chosen(writer.model)})
    _remark(job.survey, job.checkpoint, job.request.model or "embedded")
    memory = job.survey.memory
    todo = _todo(job, lambda shapes: [problem(shape, engine, memory) for shape in shapes])
    job.announce(budget, engine.rows, engine.row_bytes)
    lines = (job.read_line(number, raw) for number, raw in _lines(job.source, todo))
    job.run(Near(engine, (line for line in lines if isinstance(line, Line))), todo)


def _far(job: _Job, budget: int, memory: str | None) -> None:
    """Run a job on workers of Ray."""
    from kvkeep.cli.generate.far import Far, crew_of

    batch, survey = job.batch, job.survey
    assert batch.workers is not None
    cpus = own_cpus(batch.workers, job.request.threads)
    console.progress(f"starting {console.count(batch.workers, 'worker')} …")
    with interruptible() as stopped, joined(batch.address, cpus=cpus * batch.workers):
        lengths = {"requests": survey.requests, "longest": survey.longest}
        like = job.output.weight_layout
        crew = crew_of(job.request, batch, **lengths, budget=budget, memory=memory, like=like)
        with closing(crew):
            crew.begin(stopped)
            if stopped():
                raise typer.Exit(console.INTERRUPTED)
            job.output.agree({**job.settings, "weights": crew.facts.weights, LAYOUT: crew.facts.layout})
            _remark(survey, job.checkpoint, job.request.model or "embedded")
            todo = _todo(job, lambda shapes: crew.ask("judge", list(shapes)))
            each = f"{console.count(batch.workers, 'worker')}, each with "
            job.announce(budget, crew.facts.rows, crew.facts.row_bytes, each)
            job.run(Far(crew, _lines(job.source, todo), lambda number: survey.work([number])), todo)


def _remark(survey: Survey, checkpoint: Checkpoint, name: str) -> None:
    """Print notes on lines that are long, or ask for a model that does not run."""
    if checkpoint.trained_length and survey.longest > checkpoint.trained_length:
        console.note(
            f"{survey.longest} tokens in one line are more than the {checkpoint.trained_length} that the model was "
            "trained for."
        )
    if others := sorted(survey.models - {name}):
        named = ", ".join(f"{console.visible(other):.60}" for other in others)
        console.note(f"lines name the model {named}; {name} answers all lines")


def _survey(source: Path, read_line: Read, batch: Batch, memory: Memory | None) -> Survey:
    """Read every line once. A line that cannot be run stops the job, unless such lines are set aside."""
    survey = Survey(None if memory is None else memory.snapshot)
    for number, raw in read_lines(source):
        bad = survey.add(read_line(number, raw))
        if bad and not batch.skip_bad:
            raise _refusal(bad.number, bad.reason)
    if not survey.digests:
        raise _nothing_to_run(survey, batch)
    return survey


def _nothing_to_run(survey: Survey, batch: Batch) -> InputError:
    """The error for an input without a line that can be run."""
    name = "Standard input" if batch.input == STANDARD_INPUT else batch.input
    if not survey.bad:
        return InputError(f'{name} has no lines. Give one JSON object per line, such as {{"prompt": "…"}}.')
    number, reason = min(survey.bad.items())
    return InputError(f"{name} has no line that can be run. Line {number}: {reason}.")


def _open(path: str) -> Output:
    if path == "-":
        return Output(open(sys.stdout.fileno(), "wb", closefd=False), STANDARD_OUTPUT)
    return Output.open(Path(path))


def _budget(request: Request, policy: Policy, survey: Survey, output: Output) -> int:
    """The budget: from the request, from an earlier run of this job, or with room for the longest line."""
    if request.budget:
        return request.budget
    named = []
    for name in survey.policies:
        with suppress(PolicyError):  # the line that names it is refused later, with its number
            named.append(parse_policy(name))
    default = default_budget(policy, survey.longest, named)
    earlier = output.made_by.get("budget")
    if type(earlier) is not int or not 1 <= earlier <= MAX_TOKENS or earlier == default:
        return default  # an output with an impossible number is refused later
    console.note(
        f"budget {earlier}, with which {output.name} was begun; with another output file it would be {default}"
    )
    return earlier


def _load(request: Request, checkpoint: Checkpoint, output: Output, settings: dict[str, object]) -> Writer:
    """The model, after a check that the output was written with the same weights."""
    console.progress(f"loading {checkpoint.name} …")
    writer = writer_of(checkpoint, request)
    output.agree({**settings, "weights": fingerprint(writer.model)})
    return writer


def _engine(writer: Writer, job: _Job, *, budget: int) -> Engine:
    """The engine, with no more rows than lines, on weights that are laid out as by an earlier run."""
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
    """The lines to run now, with their fingerprints. Lines that cannot be run are set aside.

    What an earlier run has set aside is removed if all of it can be run now.
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
    return {number: found for number, found in survey.digests.items() if number not in output.done}


def _refusal(number: int, reason: str) -> InputError:
    return InputError(
        f"Line {number} cannot be run: {reason}. Nothing was generated. Mend it, or set such lines aside with "
        "--skip-bad."
    )


def _lines(source: Path, todo: Mapping[int, str]) -> Iterator[tuple[int, bytes]]:
    """Read the lines to run once more. A line whose text has changed since the survey is left out."""
    return ((number, raw) for number, raw in read_lines(source) if number in todo and digest(raw) == todo[number])
