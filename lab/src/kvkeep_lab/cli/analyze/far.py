"""An analysis on workers of Ray: this process hands out the measurements, and writes each result as it comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace

from jaxtyping import Int
from torch import Tensor

from kvkeep.cli import console
from kvkeep.cli.cluster import PROCESS_BYTES, interruptible, room_for, whole
from kvkeep.cli.progress import counted
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models import threads
from kvkeep.models.load import embedded, find, quiet, read_weights
from kvkeep.models.tokenization import Writer
from kvkeep.planning.plan import plan
from kvkeep.scale.cluster import joined, own_cpus
from kvkeep.scale.worker import MEASUREMENTS, ModelFacts, Refusal
from kvkeep.scale.worker_pool import WorkerPool, WorkResult
from kvkeep_lab.analysis.apart import Bench, Piece, cut
from kvkeep_lab.analysis.job import AnalysisJob, left, words
from kvkeep_lab.analysis.measure import Measurement
from kvkeep_lab.analysis.report import AnalysisFolder
from kvkeep_lab.analysis.run import Record
from kvkeep_lab.analysis.walk import BLOCK, walk_bytes
from kvkeep_lab.cli.analyze.options import AnalyzeOptions

_LESS = "`max_tokens` or `threads`"
_MEASURING_BYTES = 400 * 10**6
"""Main memory of measurements beside what `_bytes` counts; with it the embedded model's 1.0 GB were foreseen."""
_RUN_BYTES = 20 * 128 * 768 * 4
"""Bytes per layer and query head of `ScoreChange`, which keeps the most of all runs: 203 MB with the embedded model."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a worker needs to make measurements; see `kvkeep.scale.worker.MakeModelWorker`.

    Attributes:
        request: the options of the command, with the model's whole path.
        tokens: the text.
        words: of the tokens, by the command's tokenizer.
    """

    request: AnalyzeOptions
    tokens: Int[Tensor, " n"]
    words: tuple[str, ...]

    def __call__(self) -> Bench:
        """Load the model.

        Raises:
            KVKeepError: it cannot be used here, or has another tokenizer.
        """
        asked = self.request
        with quiet():
            checkpoint = find(asked.model or embedded(), allow_pickle=asked.allow_pickle)
            if words(checkpoint, self.tokens) != self.words:
                raise InputError(
                    "A worker has another tokenizer under the model's name than the command: it writes the text's "
                    "tokens differently. Give every node the same files."
                )
            writer = Writer(checkpoint, read_weights(checkpoint, asked.dtype, asked.device, load_in=asked.load_in))
        threads.use(writer.model, asked.threads)
        return Bench(writer, self.tokens, asked.seed)


def run(job: AnalysisJob, request: AnalyzeOptions, folder: AnalysisFolder, held: ExitStack) -> int:
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
    size = min(request.workers, max(1, len(todo)))
    if size < request.workers:
        are = "is" if len(todo) == 1 else "are"
        console.note(
            f"{console.count(size, 'worker')} for {console.count(len(todo), 'measurement')} that {are} not done"
        )
    console.progress(f"starting {console.count(size, 'worker')} …")
    cpus = own_cpus(size, request.threads)
    with (
        interruptible() as stopped,
        joined(request.ray_address, cpus=cpus * size),
        closing(_crew(job, request, todo, size)) as crew,
        counted(len(todo)) as show,
    ):
        crew.begin(stopped)
        if not stopped():
            held.enter_context(folder.locked())
            _fill(job, folder, crew, show, stopped)
        if stopped():
            raise KeyboardInterrupt
    return size


def _crew(
    job: AnalysisJob, request: AnalyzeOptions, todo: Sequence[type[Measurement]], size: int
) -> WorkerPool[ModelFacts]:
    """The workers, which have not been started yet. The cluster has been joined."""
    need, device = room_for(
        size,
        _bytes(job, request, todo),
        device=request.device,
        threads=request.threads,
        address=request.ray_address,
        less=_LESS,
    )
    asked = replace(request, model=whole(request.model), device=device)
    tokens = job.text.tokens
    recipe = Recipe(request=asked, tokens=tokens, words=words(job.checkpoint, tokens))
    return WorkerPool(MEASUREMENTS, recipe, size, need, tell=console.note)


def _bytes(job: AnalysisJob, request: AnalyzeOptions, todo: Sequence[type[Measurement]]) -> int:
    """Main memory of a worker: weights, those of a control, a full cache, a walk or runs; 0 if it cannot be planned."""
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
    crew: WorkerPool[ModelFacts],
    show: Callable[[str, int], None],
    stopped: Callable[[], bool],
) -> None:
    """Make the measurements that the folder lacks, and write them as they come. The folder is locked."""
    about = crew.facts.about
    folder.open({**job.manifest(), **about})
    groups = enumerate(cut(left(job, folder), len(job.text.tokens), crew.size), start=1)
    pieces = {number: Piece(tuple(kind.name for kind in group), about["dtype"]) for number, group in groups}
    desk, waiting = _Desk(folder, pieces, show), iter(pieces.items())
    crew.run(lambda worker: next(waiting, None), (), desk.take, lambda: stopped() or desk.refusal is not None)
    if desk.refusal is not None:
        raise InputError(desk.refusal)
    if desk.failed and not stopped():
        raise InputError(_unfinished(desk.failed, pieces))


@dataclass
class _Desk:
    """Takes the answers of workers, and writes each result once.

    Attributes:
        folder: gets the results.
        pieces: number → measurements.
        show: shows the progress.
        refusal: why nothing can be measured any more.
        failed: number of a piece → why it has no result.
        done: number of measurements that have been written.
    """

    folder: AnalysisFolder
    pieces: Mapping[int, Piece]
    show: Callable[[str, int], None]
    refusal: str | None = None
    failed: dict[int, str] = field(default_factory=dict)
    done: int = 0

    def take(self, answer: WorkResult) -> None:
        """Write the results of a piece, or note why there are none. The crew gives one answer for each piece."""
        if isinstance(answer, Refusal):
            self.refusal = self.refusal or str(answer.reason)
        elif answer.whole is None:
            self.failed[answer.number] = str(answer.reason)
        else:
            for record in answer.whole:
                self._write(record)

    def _write(self, record: Record) -> None:
        self.folder.write(f"{record['name']}.json", record)
        self.done += 1
        self.show(record["title"], self.done)


def _unfinished(failed: Mapping[int, str], pieces: Mapping[int, Piece]) -> str:
    """The message for measurements whose workers have died."""
    names = [name for number in sorted(failed) for name in pieces[number].names]
    return (
        f"{console.count(len(names), 'measurement')} {'has' if len(names) == 1 else 'have'} no result "
        f"({', '.join(names)}): {failed[min(failed)]}. Perhaps a node has too little memory for it. All other results "
        "are written; the same command tries again, and `only` chooses."
    )
