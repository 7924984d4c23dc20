"""The work of ``kvkeep analyze``: check everything, load the model, measure, and write the page.

Bad input is refused before weights are read. Importing this module imports torch and transformers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor

from kvkeep import plots
from kvkeep.cli import console
from kvkeep.cli.cluster import PROCESS_BYTES, ended_with_its_cluster, interruptible, model_recipe, room_for
from kvkeep.cli.files import STANDARD_INPUT, read_text
from kvkeep.cli.progress import counted, resumable, staged
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models import load, threads
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import parse_device, parse_dtype
from kvkeep.models.load import quiet
from kvkeep.models.quantized_weights import check_format
from kvkeep.models.tiny import embedded
from kvkeep.models.tokenization import Writer
from kvkeep.planning.plan import plan
from kvkeep.scale.cluster import check_ray
from kvkeep.scale.driver import ModelRecipe, pool_size, run_pieces, running
from kvkeep.scale.worker import MEASUREMENTS, ModelFacts
from kvkeep.scale.worker_pool import WorkerPool, WorkResult
from kvkeep_lab.analysis import page, report
from kvkeep_lab.analysis.job import AnalysisJob, find, left, read, words
from kvkeep_lab.analysis.measure import Measurement
from kvkeep_lab.analysis.report import AnalysisFolder
from kvkeep_lab.analysis.run import MeasurementPiece, MeasurementRunner, cut, run
from kvkeep_lab.analysis.walk import BLOCK, walk_bytes
from kvkeep_lab.cli.analyze.options import AnalyzeOptions

_PURPOSE = "Give some text to analyse with --text FILE."


@ended_with_its_cluster()
def serve(request: AnalyzeOptions) -> None:
    """Measure, write the page and print a summary.

    Raises:
        KVKeepError: the request, the model or the folder cannot be used.
    """
    if request.workers is not None:
        check_ray(request.ray_address)
    with quiet(), threads.restored():
        folder = AnalysisFolder(request.output)
        job = prepare(request)
        folder.check_free()
        folder.check(job.manifest())
        report.read(folder)
        for note in job.text.notes:
            console.note(note)
        with ExitStack() as held:
            workers = _measure(job, request, folder, held)
            written, everything = report.write(folder)
    _show(request, written, everything, **({} if workers is None else {"workers": workers}))


def _measure(job: AnalysisJob, request: AnalyzeOptions, folder: AnalysisFolder, held: ExitStack) -> int | None:
    """Make the measurements that the folder lacks; return the number of workers of Ray.

    Args:
        job: the analysis.
        request: the options of the command.
        folder: gets the results.
        held: holds the folder's lock from here on.
    """
    if request.workers is not None:
        return run_on_ray(job, request, folder, held)
    with console.Heartbeat.working(lambda: f"loading the weights of {job.checkpoint.name} …"):
        writer = Writer(
            job.checkpoint, load.read_weights(job.checkpoint, request.dtype, request.device, load_in=request.load_in)
        )
    threads.use(writer.model, request.threads)
    held.enter_context(folder.locked())
    drawn: dict[str, page.Section] = {}
    rest = f"{console.count(len(left(job, folder)), 'measurement')} to make"

    def on_record(waiting: Sequence[type[Measurement]], seconds: float | None) -> None:
        nonlocal rest
        if not waiting:
            return  # the caller writes the whole page
        time_left = "" if seconds is None else f", {console.show_time_left(seconds)}"
        rest = f"{console.count(len(waiting), 'measurement')} to make{time_left}"
        report.write(folder, drawn=drawn, note=f"This page is not finished: {rest}.")

    with resumable(), staged() as on_stage:
        run(job, writer, folder, lambda what, share: on_stage(f"{rest}: {what}", share), on_record)
    return None


def prepare(request: AnalyzeOptions) -> AnalysisJob:
    """Check a request, cheap tests first, without reading weights.

    Raises:
        KVKeepError: the request or the model cannot be used.
    """
    kinds = find(request.only)
    text = read_text(request.text, kind="text file", purpose=_PURPOSE)
    parse_dtype(request.dtype)
    check_format(request.load_in, parse_device(request.device))
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = load.find(name, allow_pickle=request.allow_pickle)
    file = "standard input" if request.text == STANDARD_INPUT else Path(request.text).name
    tokens = read(checkpoint, file, text, request.max_tokens)
    return AnalysisJob(request.model or page.EMBEDDED, checkpoint, tokens, kinds, request.seed)


def _show(request: AnalyzeOptions, written: Path, everything: dict[str, Any], **more: Any) -> None:
    """Print the verdicts, the next step and the path of the page.

    Args:
        request: the options of the command.
        written: the page.
        everything: the results as an object of JSON.
        more: further entries of that object.
    """
    if not plots.available():
        console.note(f"no pictures: {plots.MISSING}, then run the same command again.")
    if request.json:
        console.write_json({"output": str(request.output), "page": str(written), **everything, **more})
        return
    screen = console.out()
    filled = console.table("measurement", "verdict", "this model shows")
    for name, record in everything["measurements"].items():
        said = record.get("reading")
        verdict, here = ("skipped", record["skipped"]) if said is None else (said["verdict"], said["here"])
        filled.add_row(name, verdict, console.visible(here))
    screen.print(filled)
    screen.print()
    screen.print(console.visible(everything["recommendation"]["short"]))
    console.err().print(console.facts({"page": str(written)}))


# An analysis on workers of Ray: this process hands out the measurements, and writes the records as they come.

_LESS = "`max_tokens` or `threads`"
_MEASURING_BYTES = 400 * 10**6
"""Main memory of measurements beside what `_bytes` counts; with it the embedded model's 1.0 GB were foreseen."""
_RUN_BYTES = 20 * 128 * 768 * 4
"""Bytes per layer and query head of `ScoreChange`, which keeps the most of all runs: 203 MB with the embedded model."""


@dataclass(frozen=True, kw_only=True)
class MeasurementRecipe:
    """What a worker needs to make measurements; see `kvkeep.scale.worker.MakeModelWorker`.

    Attributes:
        model: the model.
        seed: seed of random choices.
        tokens: the text.
        words: of the tokens, by the command's tokenizer.
    """

    model: ModelRecipe
    seed: int
    tokens: Int[Tensor, " n"]
    words: tuple[str, ...]

    def __call__(self) -> MeasurementRunner:
        """Load the model.

        Raises:
            KVKeepError: it cannot be used here, or has another tokenizer.
        """
        return MeasurementRunner(self.model.load(self._check_words), self.tokens, self.seed)

    def _check_words(self, checkpoint: Checkpoint) -> None:
        if words(checkpoint, self.tokens) != self.words:
            raise InputError(
                "A worker has another tokenizer under the model's name than the command: it writes the text's "
                "tokens differently. Give every node the same files."
            )


def run_on_ray(job: AnalysisJob, request: AnalyzeOptions, folder: AnalysisFolder, held: ExitStack) -> int:
    """Make every measurement that the folder does not hold yet on workers; return their number.

    Args:
        job: the analysis.
        request: the options of the command.
        folder: gets the results.
        held: holds the folder's lock from here on, once the workers have begun.

    Raises:
        KeyboardInterrupt: the user ended it; what is finished is written.
        InputError: there is no cluster, the workers do not fit or cannot begin, the folder cannot be used, or a
            measurement cannot be made.
    """
    assert request.workers is not None
    todo = left(job, folder)
    size = pool_size(request.workers, len(todo), piece="measurement", tell=console.note)
    console.progress(f"starting {console.count(size, 'worker')} …")
    with (
        interruptible() as stopped,
        running(
            lambda: _pool(job, request, todo, size),
            size,
            threads=request.threads,
            address=request.ray_address,
            stopped=stopped,
        ) as pool,
        counted(len(todo)) as show,
    ):
        if not stopped():
            held.enter_context(folder.locked())
            _fill(job, folder, pool, show, stopped)
        if stopped():
            raise KeyboardInterrupt
    return size


def _pool(
    job: AnalysisJob, request: AnalyzeOptions, todo: Sequence[type[Measurement]], size: int
) -> WorkerPool[ModelFacts]:
    """Make the workers, which have not been started yet. The cluster has been joined."""
    need, device = room_for(
        size,
        _bytes(job, request, todo),
        device=request.device,
        threads=request.threads,
        address=request.ray_address,
        less=_LESS,
    )
    tokens = job.text.tokens
    recipe = MeasurementRecipe(
        model=model_recipe(request, device), seed=request.seed, tokens=tokens, words=words(job.checkpoint, tokens)
    )
    return WorkerPool(MEASUREMENTS, recipe, size, need, tell=console.note)


def _bytes(job: AnalysisJob, request: AnalyzeOptions, todo: Sequence[type[Measurement]]) -> int:
    """Return a worker's main memory: weights, also of a control, a full cache, a walk or runs; 0 without a plan."""
    n = len(job.text.tokens)
    with suppress(KVKeepError):
        made = plan(job.checkpoint.name, "full", context=n, prefill_chunk=BLOCK, dtype=request.dtype).full
        models = (request.load_in is None) + any(kind.control for kind in todo)
        shape, cache = made.model, made.row_bytes + made.prompt_bytes
        walk = walk_bytes(shape.query_heads, max(layer.token_bytes(4) for layer in shape.layers), n)
        runs = _RUN_BYTES * len(shape.layers) * shape.query_heads if any(kind.effort for kind in todo) else 0
        return PROCESS_BYTES + _MEASURING_BYTES + models * made.weight_bytes + cache + max(walk, runs)
    return 0


def _fill(
    job: AnalysisJob,
    folder: AnalysisFolder,
    pool: WorkerPool[ModelFacts],
    show: Callable[[str, int], None],
    stopped: Callable[[], bool],
) -> None:
    """Make the measurements that the folder lacks, and write them as they come. The folder is locked."""
    about = pool.facts.about
    folder.open({**job.manifest(), **about})
    groups = enumerate(cut(left(job, folder), len(job.text.tokens), pool.size), start=1)
    pieces = {number: MeasurementPiece(tuple(kind.name for kind in group), about["dtype"]) for number, group in groups}
    waiting, numbers = iter(pieces.items()), itertools.count(1)

    def write(answer: WorkResult) -> None:
        for record in answer.whole:
            folder.write(f"{record['name']}.json", record)
            show(record["title"], next(numbers))

    outcome = run_pieces(pool, lambda worker: next(waiting, None), write, stopped)
    outcome.check(lambda failed: _unfinished(failed, pieces))


def _unfinished(failed: Mapping[int, str], pieces: Mapping[int, MeasurementPiece]) -> str:
    """Return the message for measurements whose workers have died."""
    names = [name for number in sorted(failed) for name in pieces[number].names]
    return (
        f"{console.count(len(names), 'measurement')} {'has' if len(names) == 1 else 'have'} no result "
        f"({', '.join(names)}): {failed[min(failed)]}. Perhaps a node has too little memory for it. All other results "
        "are written; the same command tries again, and `only` chooses."
    )
