"""An evaluation on workers of Ray: this process hands out the cells, and writes the rows as they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace

from kvkeep.cli import console
from kvkeep.cli.eval.bar import Bar, progress
from kvkeep.cli.eval.expected import expect
from kvkeep.cli.eval.request import Request
from kvkeep.cli.workers import PROCESS_BYTES, interruptible, room_for, whole
from kvkeep.errors import InputError, KVKeepError
from kvkeep.evals.attention_probe import Setup
from kvkeep.evals.datasets import HUB
from kvkeep.evals.grid import Planned
from kvkeep.evals.records import Records
from kvkeep.evals.run import Bench, Grid, Piece, Queue, Source, as_planned, manifest
from kvkeep.models import threads
from kvkeep.models.load import embedded, find, quiet, read_weights
from kvkeep.models.tokenization import Writer
from kvkeep.scale.cluster import joined, own_cpus
from kvkeep.scale.worker import CELLS, ModelFacts, Refusal
from kvkeep.scale.worker_pool import Answer, Crew, Item


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a worker needs to run cells; see `kvkeep.scale.worker.MakeModelWorker`.

    Attributes:
        request: the options of the command, with the model's whole path.
        name: the model's name in results.
        sources: what the parts of the grid are made from.
    """

    request: Request
    name: str
    sources: tuple[Source, ...]

    def __call__(self) -> Bench:
        """Load the model.

        Raises:
            KVKeepError: it cannot be used here.
        """
        asked = self.request
        with quiet():
            checkpoint = find(asked.model or embedded(), allow_pickle=asked.allow_pickle)
            writer = Writer(checkpoint, read_weights(checkpoint, asked.dtype, asked.device, load_in=asked.load_in))
        threads.use(writer.model, asked.threads)
        return Bench(writer, self.name, self.sources)


def run(grid: Grid, request: Request, records: Records) -> int:
    """Run every cell without a row on workers; return their number.

    Raises:
        KeyboardInterrupt: the user ended it; what is finished is written.
        InputError: there is no cluster, the workers do not fit or cannot begin, the folder cannot be used, or a cell
            cannot be run.
    """
    assert request.workers is not None
    todo = sum(planned.cell not in records.done for planned in grid.planned)
    size = min(request.workers, max(1, todo))
    if size < request.workers:
        console.note(f"{console.count(size, 'worker')} for {console.count(todo, 'cell')} that {_are(todo)} not done")
    console.progress(f"starting {console.count(size, 'worker')} …")
    cpus = own_cpus(size, request.threads)
    with (
        interruptible() as stopped,
        joined(request.ray_address, cpus=cpus * size),
        closing(_crew(grid, request, size)) as crew,
        progress(todo) as bar,
    ):
        crew.begin(stopped)
        if not stopped():
            _fill(grid, records, crew, bar, stopped)
        if stopped():
            raise KeyboardInterrupt
    return size


def _crew(grid: Grid, request: Request, size: int) -> Crew[ModelFacts]:
    """The workers, which have not been started yet. The cluster has been joined."""
    need, device = room_for(
        size, _bytes(grid, request), device=request.device, threads=request.threads, address=request.ray_address
    )
    asked = replace(request, model=whole(request.model), device=device)
    sources = tuple(
        Source(type(part.task), replace(part.options, data=_folder(part.options.data)), part.task.settings())
        for part in grid.parts
    )
    return Crew(CELLS, Recipe(request=asked, name=grid.name, sources=sources), size, need, tell=console.note)


def _bytes(grid: Grid, request: Request) -> int:
    """Main memory of a worker, as ``--dry-run`` counts it; 0 for a model that cannot be planned."""
    with suppress(KVKeepError):
        less = request.load_in is not None  # nobody knows how many bytes these weights have
        found = [one.peak_bytes - less * one.weight_bytes for one in expect(grid, request.dtype)]
        return PROCESS_BYTES + max(found, default=0)
    return 0


def _folder(data: str | None) -> str | None:
    return data if data == HUB else whole(data)


def _fill(grid: Grid, records: Records, crew: Crew[ModelFacts], bar: Bar, stopped: Callable[[], bool]) -> None:
    """Run the cells without a row, write the rows as they come, and put them into the grid's order at the end."""
    about = crew.facts.about
    with records.locked():
        records.open({**manifest(grid), **about})
        cells = dict(enumerate(grid.planned, start=1))
        desk = _Desk(records, cells, about["dtype"], bar)
        crew.run(_handing(grid, cells, records), (), desk.take, lambda: stopped() or desk.refusal is not None)
        records.arrange([planned.cell for planned in grid.planned])
    if desk.refusal is not None:
        raise InputError(desk.refusal)
    if desk.failed and not stopped():
        raise InputError(_unfinished(desk.failed, cells))


def _handing(grid: Grid, cells: Mapping[int, Planned], records: Records) -> Callable[[int], Item | None]:
    """A function that returns the next cell for a worker."""
    numbers, parts = iter(cells), dict[int, int]()
    done, todo = records.done, list[Sequence[int]]()
    for at, part in enumerate(grid.parts):
        own = [number for planned, number in zip(part.planned, numbers, strict=False) if planned.cell not in done]
        parts |= dict.fromkeys(own, at)
        todo.append(own)
    queue = Queue(todo)

    def take(worker: int) -> Item | None:
        if (number := queue.take(worker)) is None:
            return None
        planned = cells[number]
        setup = _with_whole_path(planned.setup)
        return number, Piece(parts[number], planned.cell, setup, planned.budgets, planned.lengths)

    return take


def _with_whole_path(setup: Setup) -> Setup:
    """The same with the whole path of a profile's file."""
    rule, colon, file = (setup.head_budget or "").partition(":")
    return replace(setup, head_budget=f"{rule}:{whole(file)}") if rule == "profile" and colon else setup


@dataclass
class _Desk:
    """Takes the answers of workers, and writes each row once.

    Attributes:
        records: the folder.
        cells: number → cell.
        dtype: that of all rows in the folder.
        bar: shows the progress.
        refusal: why no cell can be run any more.
        failed: number of a cell → why it has no row.
    """

    records: Records
    cells: Mapping[int, Planned]
    dtype: str
    bar: Bar
    refusal: str | None = None
    failed: dict[int, str] = field(default_factory=dict)

    def take(self, answer: Answer) -> None:
        """Write a row, or note why there is none. The crew gives one answer for each cell."""
        if isinstance(answer, Refusal):
            self.refusal = self.refusal or str(answer.reason)
        elif answer.whole is None:
            self.failed[answer.number] = str(answer.reason)
        elif answer.whole["dtype"] != self.dtype:
            self.refusal = f"A worker computes in {answer.whole['dtype']}, others in {self.dtype}. Give `dtype`."
        else:
            planned = self.cells[answer.number]
            self.records.append(as_planned(answer.whole, planned))
            self.bar.end(planned)


def _unfinished(failed: Mapping[int, str], cells: Mapping[int, Planned]) -> str:
    """The message for cells whose workers have died."""
    first = min(failed)
    return (
        f"{console.count(len(failed), 'cell')} of {len(cells)} {'has' if len(failed) == 1 else 'have'} no row, first "
        f"{cells[first].cell}: {failed[first]}. Perhaps a node has too little memory for it. All other rows are "
        "written; the same command tries again."
    )


def _are(number: int) -> str:
    return "is" if number == 1 else "are"
