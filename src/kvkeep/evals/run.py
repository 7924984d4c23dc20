"""Fills a grid: loads tasks and model, skips finished cells, runs the others and writes each row at once."""

from __future__ import annotations

import copy
import functools
import itertools
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any, Protocol, runtime_checkable

from kvkeep.errors import CapacityError, InputError
from kvkeep.evals import grid
from kvkeep.evals.grid import GridArguments, Planned
from kvkeep.evals.records import Records
from kvkeep.evals.results import Row
from kvkeep.evals.task import Options, Task, notes
from kvkeep.evals.task_names import TEXT_TASKS
from kvkeep.models import weight_hash
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory
from kvkeep.models.tokenization import Writer
from kvkeep.version import __version__


@dataclass(frozen=True)
class TaskPart:
    """A task with its data of one seed.

    Attributes:
        task: the task.
        planned: its cells.
        options: the user's choices, from which the data are made.
    """

    task: Task
    planned: list[Planned]
    options: Options

    def load(self, checkpoint: Checkpoint) -> Task:
        """Return a copy of the task: the data that the copy prepares are large, and are freed with it.

        The checkpoint is not looked at: the task was made for it.
        """
        return copy.copy(self.task)


@dataclass(frozen=True)
class Grid:
    """The grid to measure, after all checks that need no weights.

    Attributes:
        name: the model's name in results.
        checkpoint: configuration and tokenizer.
        parts: the tasks with their data and cells, seed by seed.
        about_text: notes about the text.
    """

    name: str
    checkpoint: Checkpoint
    parts: list[TaskPart]
    about_text: list[str]

    @property
    def planned(self) -> list[Planned]:
        """Return all planned cells."""
        return [planned for part in self.parts for planned in part.planned]

    @property
    def notes(self) -> list[str]:
        """Return notes about the results for the user."""
        about_tasks = [note for part in self.parts for note in part.task.notes]
        return list(dict.fromkeys([*self.about_text, *about_tasks, *grid.notes(self.planned)]))

    def shard(self, number: int, count: int) -> Grid:
        """Return the same grid with every ``count``-th cell only, beginning with the ``number``-th, counted from 1."""
        places = itertools.count()
        parts = [
            replace(part, planned=[planned for planned in part.planned if next(places) % count == number - 1])
            for part in self.parts
        ]
        return replace(self, parts=parts)


def lay_out(
    checkpoint: Checkpoint, name: str, tasks: Sequence[type[Task]], wanted: GridArguments, options: Sequence[Options]
) -> Grid:
    """Make the tasks' data, and return the grid with all cells planned. No weights are needed.

    Args:
        checkpoint: configuration and tokenizer.
        name: the model's name in results.
        tasks: the tasks.
        wanted: policies and budgets.
        options: the user's choices about tasks, one for each seed and way to ask. A task whose cells are the same
            under a further way to ask is planned once. All have the same text.

    Raises:
        InputError: a task cannot be made with these options.
        BudgetError: a cache of this model would refuse a budget, see `grid.grid`.
        UnsupportedModelError: slot positions were requested, and the model cannot have them.
    """
    parts, cells = [], set[grid.Cell]()
    for own in options:
        for kind in tasks:
            task = kind.load(checkpoint, own)
            part = TaskPart(task, grid.grid(checkpoint, task, wanted, own.seed), own)
            # a task that ignores the way to ask would be planned once for each way
            if cells.isdisjoint(mine := {planned.cell for planned in part.planned}):
                cells |= mine
                parts.append(part)
    reads_text = any(kind.name in TEXT_TASKS for kind in tasks)
    return Grid(name, checkpoint, parts, notes(options[0]) if reads_text else [])


def run(grid: Grid, writer: Writer, records: Records, on_cell: Callable[[Planned], object] = lambda cell: None) -> None:
    """Run every cell that has no row, and write its row at once.

    Another process must not write to the folder meanwhile.

    Args:
        grid: the grid to measure.
        writer: the model, loaded.
        records: the folder for the rows.
        on_cell: called before each cell that is run, and before a task runs the full cache.

    Raises:
        InputError: the folder holds results of another run, another run is writing there, a row cannot be written, or
            memory does not suffice.
        KVKeepError: a cell cannot be run; the rows before it are written.
    """
    runner = CellRunner(writer, grid.name, grid.parts)
    with cells_to_run(grid, records, runner.about()) as queue:
        while (item := queue.take(0)) is not None:  # this is the only process
            number, piece = item
            if not runner.has_prepared(piece.part):
                on_cell(piece.planned)
                runner.prepare(piece.part)
            on_cell(piece.planned)
            queue.write(number, runner.run(piece))


def measure(task: Task, writer: Writer, planned: Planned) -> dict[str, Any]:
    """Run a cell, and return the part of its row that is not the same for all cells of a process.

    Raises:
        KVKeepError: the cell cannot be run.
    """
    start = time.perf_counter()
    cell = planned.cell
    try:
        outcome = task.run(writer, cell.case, planned.policy, planned.budgets, setup=planned.setup)
    except CapacityError as error:  # it does not say of which cell
        raise CapacityError(f"{cell}: {error}") from error
    return {
        **asdict(cell),
        "options": asdict(planned.setup),
        "version": task.VERSION,
        "score": outcome.score,
        "budget_tokens": sum(planned.budgets) / len(planned.budgets),
        "text_tokens": sum(planned.lengths) / len(planned.lengths),
        "rows": len(planned.budgets),
        "memory": {**asdict(outcome.memory), "compression": outcome.memory.compression},
        "wall_s": round(time.perf_counter() - start, 3),
    }


def about(name: str, writer: Writer) -> dict[str, str]:
    """Return the part of a row that is the same for all cells that a process runs.

    Args:
        name: the model's name in results.
        writer: the model.
    """
    return {"model": name, "dtype": writer.dtype, "device": writer.device, **versions()}


def manifest(grid: Grid) -> dict[str, Any]:
    """Return what ``run.json`` says about a grid, as far as it is known without weights: the model's name, and each
    task's version and settings. All results in one folder have it in common.
    """
    return {
        "model": grid.name,
        "tasks": {part.task.name: {"version": part.task.VERSION, **part.task.settings()} for part in grid.parts},
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that compute, and of Python."""
    packages = {package: _version(package) for package in ("torch", "transformers")}
    return {"kvkeep": __version__, **packages, "python": platform.python_version()}


@functools.cache
def _version(package: str) -> str:
    """Return a package's version, whose file is read once: every cell of a grid is marked with it."""
    return version(package)


def fingerprint(writer: Writer) -> str:
    """Return a hash that tells other weights of the same name apart."""
    return weight_hash.fingerprint(writer.model)


# Cells one by one, in this process or in others than the one that has planned the grid and writes the rows.
#
# A `CellPiece` says what is to be run. Other processes make a task's data themselves, as a resumed run does, and
# compare them with the piece: the data are too large to be sent, and files may differ between machines.


@runtime_checkable  # for beartype, by which tests check annotations
class TaskSource(Protocol):
    """Something that a task comes from: a `TaskPart` in the process that has planned it, else a `PartSource`."""

    def load(self, checkpoint: Checkpoint) -> Task:
        """Return the task, without what `Task.prepare` adds."""


@dataclass(frozen=True)
class PartSource:
    """What the data of a part are made from.

    Attributes:
        kind: the task.
        options: the user's choices.
        settings: of the task in the process that has planned it.
    """

    kind: type[Task]
    options: Options
    settings: Mapping[str, Any]

    def load(self, checkpoint: Checkpoint) -> Task:
        """Make the task's data anew, and return the task.

        Raises:
            InputError: its settings differ from those in the process that has planned the cells.
        """
        task = self.kind.load(checkpoint, self.options)
        if task.settings() != self.settings:
            raise _other(task, f"{task.settings()} instead of {self.settings}")
        return task


@dataclass(frozen=True)
class CellPiece:
    """A cell on its way to the process that runs it.

    Attributes:
        part: the number of its part.
        planned: the cell, with what its run needs.
    """

    part: int
    planned: Planned


class CellRunner:
    """Runs cells one after the other, and holds the data of one part at a time.

    Args:
        writer: the model.
        name: its name in results.
        sources: where the tasks of the parts come from, by their numbers.
    """

    def __init__(self, writer: Writer, name: str, sources: Sequence[TaskSource]) -> None:
        self.writer, self._name, self._sources = writer, name, sources
        self._part = -1  # of no part
        self._task: Task | None = None

    def about(self) -> dict[str, str]:
        """Return the model's weights hash and dtype, as ``run.json`` records them."""
        return {"weights": fingerprint(self.writer), "dtype": self.writer.dtype}

    def run(self, piece: CellPiece) -> Row:
        """Run a cell, and return its row.

        Raises:
            KVKeepError: the cell cannot be run, or this process has other data than the one that has planned it.
        """
        task, planned = self.prepare(piece.part), piece.planned
        if tuple(task.cases().get(planned.cell.case, ())) != planned.lengths:
            raise _other(task, "rows of another number or length")
        with enough_memory(self.writer.model.device):
            return {**measure(task, self.writer, planned), **about(self._name, self.writer)}

    def has_prepared(self, part: int) -> bool:
        """Return whether the task of a part has already run the full cache."""
        return self._task is not None and self._part == part

    def prepare(self, part: int) -> Task:
        """Return the task of a part, after it has run the full cache as its reference.

        That is done once while calls ask for the same part: only the task of the last part is held.
        """
        if self._task is None or self._part != part:
            self._task = None  # its data are large, and would stay in memory beside the next one's
            task = self._sources[part].load(self.writer.checkpoint)
            with enough_memory(self.writer.model.device):
                task.prepare(self.writer)
            self._part, self._task = part, task
        return self._task


def _other(task: Task, what: str) -> InputError:
    """Return the error that a worker's data differ from the command's."""
    return InputError(f"The data of {task.name} are not those of the command: {what}. Give every node the same files.")


class PartQueue:
    """The numbers of the cells that wait to be run, by part.

    A process goes on with the part that it has prepared. Once nothing is left of it, it takes a part that nobody works
    at, and otherwise helps where most cells are left for each.

    Args:
        parts: the numbers of cells that are to be run, part by part.
    """

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._left = [deque(numbers) for numbers in parts]
        self._at: dict[int, int] = {}

    def take(self, process: int) -> int | None:
        """Take a cell's number out of the queue for a process, and return it; ``None`` if none is left.

        Cells come in parts: a task with its data of one seed. The process goes on with its part, then with a part that
        nobody works at, then with the one that has most cells left for each process.
        """
        part = self._at.get(process)
        if part is None or not self._left[part]:
            part = self._at.pop(process, None)
            busy, waiting = Counter(self._at.values()), [part for part, left in enumerate(self._left) if left]
            if not waiting:
                return None

            def crowded(part: int) -> tuple[bool, float]:
                """Return a sort key: parts without a process first, then those with the most cells left per process."""
                # + 1: this process would be one more
                return busy[part] > 0, -len(self._left[part]) / (busy[part] + 1) if busy[part] else 0.0

            part = self._at[process] = min(waiting, key=crowded)
        return self._left[part].popleft()


class CellQueue:
    """The cells of a grid that have no row yet, for one or more processes, and the folder for their rows.

    Args:
        grid: the grid.
        records: the folder.

    Attributes:
        cells: number → cell, of all cells of the grid, from 1 on.
    """

    def __init__(self, grid: Grid, records: Records) -> None:
        """Number all cells, and queue those without a row."""
        self._records, done = records, records.done
        self.cells = dict(enumerate(grid.planned, start=1))
        self._pieces: dict[int, CellPiece] = {}
        numbers, left = iter(self.cells), list[list[int]]()
        for index, part in enumerate(grid.parts):
            own = {
                number: CellPiece(index, planned)
                # the next part goes on with `numbers`; as the first of the two, it would lose one at each part's end
                for planned, number in zip(part.planned, numbers, strict=False)
                if planned.cell not in done
            }
            self._pieces |= own
            left.append(list(own))
        self._queue = PartQueue(left)

    def take(self, process: int) -> tuple[int, CellPiece] | None:
        """Return the next cell for a process with its number, see `PartQueue.take`; ``None`` if none is left."""
        number = self._queue.take(process)
        return None if number is None else (number, self._pieces[number])

    def write(self, number: int, row: Row) -> Planned:
        """Write the row of the cell of this number, and return the cell.

        The row gets the cell's names and options as this process has them: a worker's names of files may be others.

        Raises:
            InputError: the row cannot be written; all earlier rows are safe.
        """
        planned = self.cells[number]
        self._records.append({**row, **asdict(planned.cell), "options": asdict(planned.setup)})
        return planned


@contextmanager
def cells_to_run(grid: Grid, records: Records, about: Mapping[str, str]) -> Iterator[CellQueue]:
    """Yield the cells without a row while the folder is locked; at the end, put the rows into the grid's order.

    After an error in the context they stay in the order in which they were written.

    Args:
        grid: the grid, or a shard of it.
        records: the folder for the rows.
        about: the model as ``run.json`` records it, see `CellRunner.about`.

    Raises:
        InputError: the folder holds results of another run, another run is writing there, or it cannot be written.
    """
    with records.locked():
        records.open({**manifest(grid), **about})
        yield CellQueue(grid, records)
        records.arrange([planned.cell for planned in grid.planned])
