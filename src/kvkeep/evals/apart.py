"""Cells that are run in other processes than the one that has planned the grid and writes the rows.

The planning process sends a `Piece` of a few hundred bytes for each cell. The others make a task's data themselves, as
a resumed run does, and both compare what they have.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvkeep.errors import InputError
from kvkeep.evals.drive import Setup
from kvkeep.evals.plan import Cell, Planned
from kvkeep.evals.report import Row
from kvkeep.evals.run import about, fingerprint, measure
from kvkeep.evals.task import Options, Task
from kvkeep.models.device import enough_memory
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse


@dataclass(frozen=True)
class Source:
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
class Piece:
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


class Bench:
    """Runs cells one after the other, and holds the data of one part at a time.

    Args:
        writer: the model.
        name: its name in results.
        sources: what the parts are made from, by their numbers.
    """

    def __init__(self, writer: Writer, name: str, sources: Sequence[Source]) -> None:
        self.writer, self._name, self._sources = writer, name, sources
        self._part = -1
        self._task: Task | None = None

    def about(self) -> dict[str, str]:
        """The model, as the description of a run has it."""
        return {"weights": fingerprint(self.writer), "dtype": self.writer.dtype}

    def run(self, piece: Piece) -> Row:
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
