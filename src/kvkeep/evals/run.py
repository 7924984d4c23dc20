"""Fills a grid: loads tasks and model, skips finished cells, runs the others and writes each row at once."""

from __future__ import annotations

import copy
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

from kvkeep.errors import CapacityError
from kvkeep.evals import plan, texts
from kvkeep.evals.plan import Planned, Wanted
from kvkeep.evals.records import Records
from kvkeep.evals.task import Options, Task
from kvkeep.models import weight_hash
from kvkeep.models.device import enough_memory
from kvkeep.models.load import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.version import __version__

TEXT_TASKS = {"perplexity", "continuation", "agreement", "mass"}


@dataclass(frozen=True)
class Part:
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
    parts: list[Part]
    about_text: list[str]

    @property
    def planned(self) -> list[Planned]:
        """All cells."""
        return [planned for part in self.parts for planned in part.planned]

    @property
    def notes(self) -> list[str]:
        """Notes about the results for the user."""
        about_tasks = [note for part in self.parts for note in part.task.notes]
        return list(dict.fromkeys([*self.about_text, *about_tasks, *plan.notes(self.planned)]))

    def shard(self, number: int, count: int) -> Grid:
        """The same grid with every ``count``-th cell only, beginning with the ``number``-th."""
        places = itertools.count()
        parts = [
            replace(part, planned=[planned for planned in part.planned if next(places) % count == number - 1])
            for part in self.parts
        ]
        return replace(self, parts=parts)


def lay_out(
    checkpoint: Checkpoint, name: str, tasks: Sequence[type[Task]], wanted: Wanted, options: Sequence[Options]
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
            parts.append(Part(task, plan.grid(checkpoint, task, wanted, own.seed), own))
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
