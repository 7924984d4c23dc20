"""Fills a grid: loads tasks and model, skips finished cells, runs the others and writes each row at once."""

from __future__ import annotations

import copy
import itertools
import platform
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from kvkeep.errors import CapacityError, InputError
from kvkeep.evals import grid, texts
from kvkeep.evals.forward import Setup
from kvkeep.evals.grid import Cell, GridArguments, Planned
from kvkeep.evals.records import Records
from kvkeep.evals.report import Row
from kvkeep.evals.task import Options, Task
from kvkeep.models import weight_hash
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse
from kvkeep.version import __version__

TEXT_TASKS = {"perplexity", "continuation", "agreement", "mass"}


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
        """All cells."""
        return [planned for part in self.parts for planned in part.planned]

    @property
    def notes(self) -> list[str]:
        """Notes about the results for the user."""
        about_tasks = [note for part in self.parts for note in part.task.notes]
        return list(dict.fromkeys([*self.about_text, *about_tasks, *grid.notes(self.planned)]))

    def shard(self, number: int, count: int) -> Grid:
        """The same grid with every ``count``-th cell only, beginning with the ``number``-th."""
        places = itertools.count()
        parts = [
            replace(part, planned=[planned for planned in part.planned if next(places) % count == number - 1])
            for part in self.parts
        ]
        return replace(self, parts=parts)


def lay_out(
    checkpoint: Checkpoint, name: str, tasks: Sequence[type[Task]], wanted: GridArguments, options: Sequence[Options]
) -> Grid:
    """Make the tasks' data and plan all cells; needs no weights.

    Args:
        checkpoint: configuration and tokenizer.
        name: the model's name in results.
        tasks: the tasks.
        wanted: policies and budgets.
        options: the user's choices about tasks, one for each seed.

    Raises:
        InputError: a task cannot be made with these options.
        BudgetError: a budget is smaller than the tokens that a policy protects.
        UnsupportedModelError: slot positions were requested, and the model cannot have them.
    """
    parts = []
    for own in options:
        for kind in tasks:
            task = kind.load(checkpoint, own)
            parts.append(TaskPart(task, grid.grid(checkpoint, task, wanted, own.seed), own))
    reads_text = any(kind.name in TEXT_TASKS for kind in tasks)
    return Grid(name, checkpoint, parts, texts.notes(options[0]) if reads_text else [])


def run(grid: Grid, writer: Writer, records: Records, on_cell: Callable[[Planned], object] = lambda cell: None) -> None:
    """Run every cell without a row, and write its row at once.

    Args:
        grid: the grid to measure.
        writer: the model, loaded.
        records: the folder for the rows.
        on_cell: called before each cell that is run, and before a task runs the full cache.

    Raises:
        InputError: the folder holds results of another run, another run is writing there, a row cannot be written, or
            memory does not suffice.
    """
    with records.locked():
        records.open({**manifest(grid), "weights": fingerprint(writer), "dtype": writer.dtype})
        common = about(grid.name, writer)
        for part in grid.parts:
            todo = [planned for planned in part.planned if planned.cell not in records.done]
            if not todo:
                continue
            on_cell(todo[0])
            task = copy.copy(part.task)  # the data that it prepares is large and is freed with the copy
            with enough_memory(writer.model.device):
                task.prepare(writer)
                for planned in todo:
                    on_cell(planned)
                    records.append({**measure(task, writer, planned), **common})


def measure(task: Task, writer: Writer, planned: Planned) -> dict[str, Any]:
    """Run a cell; the part of its row that is not the same for all rows.

    Raises:
        KVKeepError: the cell cannot be run.
    """
    start = time.perf_counter()
    cell = planned.cell
    try:
        outcome = task.run(writer, cell.case, planned.policy, planned.budgets, setup=planned.setup)
    except CapacityError as error:
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
    """The part of a row that is the same for all cells that a process runs.

    Args:
        name: the model's name in results.
        writer: the model.
    """
    return {"model": name, "dtype": writer.dtype, "device": writer.device, **versions()}


def manifest(grid: Grid) -> dict[str, Any]:
    """The properties that all results in one folder share, as far as they are known without weights."""
    return {
        "model": grid.name,
        "tasks": {part.task.name: {"version": part.task.VERSION, **part.task.settings()} for part in grid.parts},
    }


def versions() -> dict[str, str]:
    """Versions of the packages that compute, and of Python."""
    packages = {package: version(package) for package in ("torch", "transformers")}
    return {"kvkeep": __version__, **packages, "python": platform.python_version()}


def fingerprint(writer: Writer) -> str:
    """A hash that tells other weights of the same name apart."""
    return weight_hash.fingerprint(writer.model)


# Cells that are run in other processes than the one that has planned the grid and writes the rows.
#
# The planning process sends a `Piece` of a few hundred bytes for each cell. The others make a task's data themselves,
# as a resumed run does, and both compare what they have.


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


@dataclass(frozen=True)
class CellPiece:
    """A cell on its way to the process that runs it.

    Attributes:
        part: the number of its part.
        cell: the cell; its policy is read from there.
        setup: how its caches are made.
        budgets: tokens per layer and head, one number per row.
        lengths: tokens of the rows.
    """

    part: int
    cell: Cell
    setup: Setup
    budgets: tuple[int, ...]
    lengths: tuple[int, ...]


class CellRunner:
    """Runs cells one after the other, and holds the data of one part at a time.

    Args:
        writer: the model.
        name: its name in results.
        sources: what the parts are made from, by their numbers.
    """

    def __init__(self, writer: Writer, name: str, sources: Sequence[PartSource]) -> None:
        self.writer, self._name, self._sources = writer, name, sources
        self._part = -1
        self._task: Task | None = None

    def about(self) -> dict[str, str]:
        """The model, as the description of a run has it."""
        return {"weights": fingerprint(self.writer), "dtype": self.writer.dtype}

    def run(self, piece: CellPiece) -> Row:
        """The row of a cell.

        Raises:
            KVKeepError: the cell cannot be run, or this process has other data.
        """
        task = self._prepared(piece.part)
        if tuple(task.cases().get(piece.cell.case, ())) != piece.lengths:
            raise _other(task, "rows of another number or length")
        policy = parse(piece.cell.policy)
        planned = Planned(piece.cell, policy, piece.setup, piece.budgets, piece.lengths)
        with enough_memory(self.writer.model.device):
            return {**measure(task, self.writer, planned), **about(self._name, self.writer)}

    def _prepared(self, part: int) -> Task:
        """The task of a part, with what it has made with the full cache."""
        if self._task is None or self._part != part:
            self._task = None  # its data are large
            source = self._sources[part]
            task = source.kind.load(self.writer.checkpoint, source.options)
            if task.settings() != source.settings:
                raise _other(task, f"{task.settings()} instead of {source.settings}")
            with enough_memory(self.writer.model.device):
                task.prepare(self.writer)
            self._part, self._task = part, task
        return self._task


def _other(task: Task, what: str) -> InputError:
    return InputError(f"The data of {task.name} are not those of the command: {what}. Give every node the same files.")


class Queue:
    """The cells that wait to be run, by part.

    A process goes on with the part that it has prepared. Once nothing is left of it, it takes a part that nobody works
    at, and otherwise helps where most cells are left for each.

    Args:
        parts: the numbers of cells that are to be run, part by part.
    """

    def __init__(self, parts: Sequence[Sequence[int]]) -> None:
        self._left = [deque(numbers) for numbers in parts]
        self._at: dict[int, int] = {}

    def take(self, process: int) -> int | None:
        """The number of the next cell for a process, by its own number; ``None`` if none is left."""
        part = self._at.get(process)
        if part is None or not self._left[part]:
            part = self._at.pop(process, None)
            busy, waiting = Counter(self._at.values()), [part for part, left in enumerate(self._left) if left]
            if not waiting:
                return None
            part = self._at[process] = min(
                waiting, key=lambda one: (busy[one] > 0, -len(self._left[one]) / (busy[one] + 1) if busy[one] else 0)
            )
        return self._left[part].popleft()


def as_planned(row: Row, planned: Planned) -> Row:
    """A row that was made elsewhere, with the names that this process has for its files."""
    return {**row, **asdict(planned.cell), "options": asdict(planned.setup)}
