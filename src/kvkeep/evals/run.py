"""Fill the grid: load tasks and model, skip what is done, run the rest and write each row at once."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

from kvkeep.errors import CapacityError
from kvkeep.evals import plan, texts
from kvkeep.evals.plan import Planned, Wanted
from kvkeep.evals.records import Records
from kvkeep.evals.task import Options, Task
from kvkeep.models import load
from kvkeep.models.device import enough_memory
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import Writer
from kvkeep.version import __version__

TEXT_TASKS = {"perplexity", "agreement", "mass"}


@dataclass(frozen=True)
class Part:
    """A task with its data of one seed.

    Attributes:
        task: the task.
        planned: its cells.
    """

    task: Task
    planned: list[Planned]


@dataclass(frozen=True)
class Grid:
    """What is to be measured, after all checks that need no weights.

    Attributes:
        name: the model's name in results.
        checkpoint: configuration and tokenizer.
        parts: the tasks with their data and cells; seed by seed.
        about_text: what a reader should know about the text.
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
        """What the user should know about the results."""
        about_tasks = [note for part in self.parts for note in part.task.notes]
        return list(dict.fromkeys([*self.about_text, *about_tasks, *plan.notes(self.planned)]))


def lay_out(
    checkpoint: Checkpoint, name: str, tasks: Sequence[type[Task]], wanted: Wanted, options: Sequence[Options]
) -> Grid:
    """Make the tasks' data and plan all cells; needs no weights.

    Args:
        checkpoint: configuration and tokenizer.
        name: the model's name in results.
        tasks: the tasks.
        wanted: policies and budgets.
        options: the user's choices about tasks, once for each seed.

    Raises:
        InputError: a task cannot be made with these options.
        BudgetError: a budget is smaller than what a policy protects.
        UnsupportedModelError: slot positions were asked for, and the model cannot have them.
    """
    parts = []
    for own in options:
        for kind in tasks:
            task = kind.load(checkpoint, own)
            parts.append(Part(task, plan.grid(checkpoint, task, wanted, own.seed)))
    reads_text = any(kind.name in TEXT_TASKS for kind in tasks)
    return Grid(name, checkpoint, parts, texts.notes(options[0]) if reads_text else [])


def run(grid: Grid, writer: Writer, records: Records, on_cell: Callable[[Planned], object] = lambda cell: None) -> None:
    """Run every cell that has no row yet, and write its row at once.

    Args:
        grid: what is to be measured.
        writer: the model, loaded.
        records: where rows are written.
        on_cell: called before each cell that is run; also before the full cache is run for its task.

    Raises:
        InputError: the folder holds results of another run, another run is writing there, a row cannot be written, or
            memory does not suffice.
    """
    with records.locked():
        records.open({**manifest(grid), "weights": fingerprint(writer), "dtype": writer.dtype})
        common = {"model": grid.name, "dtype": writer.dtype, "device": writer.device, **versions()}
        for part in grid.parts:
            todo = [planned for planned in part.planned if planned.cell not in records.done]
            if not todo:
                continue
            on_cell(todo[0])
            task = copy.copy(part.task)  # what it prepares is large and goes with it
            with enough_memory(writer.model.device):
                task.prepare(writer)
                for planned in todo:
                    on_cell(planned)
                    records.append({**_measure(task, writer, planned), **common})


def _measure(task: Task, writer: Writer, planned: Planned) -> dict[str, Any]:
    """One row, without what all rows share."""
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


def manifest(grid: Grid) -> dict[str, Any]:
    """What results must share to stand in one folder, as far as it is known without weights."""
    return {
        "model": grid.name,
        "tasks": {part.task.name: {"version": part.task.VERSION, **part.task.settings()} for part in grid.parts},
    }


def versions() -> dict[str, str]:
    """Versions of what computes."""
    packages = {package: version(package) for package in ("torch", "transformers")}
    return {"kvkeep": __version__, **packages, "python": platform.python_version()}


def fingerprint(writer: Writer) -> str:
    """Tells other weights under the same name."""
    return load.fingerprint(writer.model)
