"""The folder of a run: ``run.json`` describes the run, ``results.jsonl`` has one line per finished cell.

A line is written, flushed and synced before the next cell starts, so finished cells are safe. When a run is resumed, an
incomplete last line is cut off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

from kvkeep.errors import InputError
from kvkeep.evals.curves import PICTURES
from kvkeep.evals.grid import Cell
from kvkeep.evals.results import ASKED, MEASURES, Row, case_title, grouped
from kvkeep.evals.task import TENTHS
from kvkeep.result_files import (
    MANIFEST,
    OBJECT,
    ROWS,
    RowFolder,
    Schema,
    ValueKind,
    check_same,
    finite,
    first_fault,
    list_of,
    optional,
    read_object,
    real_number,
    text_value,
    tuple_of,
    whole_number,
)

_SAME = {"model": "the model", "weights": "the model's weights", "dtype": "the dtype"}
_REMEDY = "Restore it, or choose another `output` folder."


class Records(RowFolder):
    """Reads a folder of results, and adds to it.

    Args:
        folder: the folder; it need not exist yet.

    Raises:
        InputError: the path is no folder, or its files cannot be read.
    """

    names = (ROWS, *PICTURES)
    beginning = b'{"task": "'  # a row begins with its cell, and a cell with its task

    def forget(self) -> None:
        """Forget all rows, which are about to be read again."""
        self._rows: dict[Cell, Row] = {}

    def keep(self, row: Row) -> None:
        """Add a row that is in the file, in place of an earlier one of the same cell."""
        self._rows[key_of(row)] = row

    def fault(self, row: Row) -> str | None:
        """Return the defect of a row as part of a sentence, see `fault`; ``None`` if it can be used."""
        return fault(row)

    @property
    def rows(self) -> list[Row]:
        """Return the finished rows in the file's order."""
        return list(self._rows.values())

    @property
    def done(self) -> set[Cell]:
        """Return the finished cells."""
        return set(self._rows)

    @property
    def safe(self) -> str:
        """Return a sentence on how many finished rows are safe; empty if there is none, or their file is gone."""
        there = len(self._rows) if (self.path / ROWS).is_file() else 0
        # in the second case `there` is 1 or 0, and 0 times a sentence is an empty one
        return f"The {there} rows written before are safe." if there > 1 else "The row written before is safe." * there

    def manifest(self) -> dict[str, Any] | None:
        """Return the content of ``run.json``; ``None`` if the folder has no run yet.

        Raises:
            InputError: the file is damaged, or it is missing although there are results or files of the same names.
        """
        path = self.path / MANIFEST
        described = read_object(path, _REMEDY)
        if described is None:
            self.check_new()
            return None
        tasks = described.get("tasks")
        if wrong := [key for key in _SAME if not isinstance(described.get(key), str)]:
            raise InputError(f"{path} is of no evaluation: it does not say {_SAME[wrong[0]]} as text. {_REMEDY}")
        if not isinstance(tasks, dict) or not all(isinstance(settings, dict) for settings in tasks.values()):
            raise InputError(f"{path} does not say which tasks were run, under which settings. {_REMEDY}")
        return described

    def check(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Compare a run with the run that the folder already holds, if it holds rows.

        Args:
            manifest: ``model``, ``weights``, ``dtype``, and ``tasks``: name → version and settings. ``weights`` and
                ``dtype`` may be missing, and are not compared then.

        Returns:
            The manifest, also with those tasks that only the folder has. Nothing is written.

        Raises:
            InputError: the rows in the folder are of another model, other weights or another dtype, or of one of these
                tasks under another version or other settings; or ``run.json`` cannot be used.
        """
        described = self.manifest()
        if described is None or not self._rows:  # without rows there is nothing to mix with
            return manifest
        check_same(self.path, described, manifest, _SAME)
        before: dict[str, dict[str, Any]] = described["tasks"]
        for task in manifest["tasks"].keys() & before.keys():
            then, now = before[task], manifest["tasks"][task]
            keys = sorted(then.keys() | now.keys())
            check_same(
                self.path, then, {key: now.get(key) for key in keys}, {key: f"{key!r} of {task}" for key in keys}
            )
        return {**manifest, "tasks": {**before, **manifest["tasks"]}}

    def append(self, row: Row) -> None:
        """Write one row and wait until it is on the disk.

        Raises:
            InputError: the row cannot be written; all earlier rows are safe.
        """
        self.extend([row])

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rows, with null in place of numbers that JSON cannot hold, and wait until they are on the disk.

        Raises:
            InputError: the rows cannot be written; all earlier ones are safe.
        """
        super().extend(map(finite, rows))

    def arrange(self, cells: Sequence[Cell]) -> None:
        """Sort the rows of some cells by the order of ``cells``. Other rows keep their places in the file.

        The folder has to be `locked`.

        Raises:
            InputError: the rows cannot be written; they stay in the order that they have.
        """
        order = {cell: number for number, cell in enumerate(cells)}
        own = iter(sorted(self._rows.keys() & order.keys(), key=order.__getitem__))
        arranged = [next(own) if cell in order else cell for cell in self._rows]
        if arranged != list(self._rows):
            rows = {cell: self._rows[cell] for cell in arranged}
            with self.writing():
                self._file.replace(rows.values())
            self._rows = rows


# -- rows --------------------------------------------------------------------------------------------------------------

LONGEST = 1000
"""Most characters of a name."""


def key_of(row: Row) -> Cell:
    """Return the cell that a row of results belongs to."""
    return Cell(row["task"], row["case"], row["policy"], row["budget"], row["seed"], row.get("setup", ""))


def fault(row: Row) -> str | None:
    """Return the defect of a row as part of a sentence; ``None`` if tables, plots and resuming can use it."""
    whole_row: Row = {"setup": "", **row}  # older rows have no setup
    if (found := first_fault(whole_row, _ROW)) is not None:
        return found
    return first_fault({**_RECORDED, **whole_row["score"]}, _SCORES.get(whole_row["task"], {}), "score.")


def _is_budget(value: object) -> bool:
    """Return whether a value is a text that names a budget as rows do: ``512`` tokens, or ``20%`` of the prompt.

    A share is above 0 and at most 100 %.
    """
    # other scripts have decimal digits, too
    if not isinstance(value, str) or not value.isascii() or len(value) > LONGEST:
        return False
    if not value.endswith("%"):
        return value.isdecimal()
    try:
        return 0 < float(value[:-1]) <= 100
    except ValueError:
        return False


_LENGTH = real_number(least=math.nextafter(0, 1)).called("a number above 0")  # tables divide by it
_BYTES = real_number(least=0).called("a number of bytes")

_ROW: Schema = {
    **dict.fromkeys(("task", "case", "policy", "setup"), text_value(LONGEST)),
    "budget": ValueKind(_is_budget, "a number of tokens or a share of the text"),
    "seed": whole_number(),
    **dict.fromkeys(("budget_tokens", "text_tokens"), _LENGTH),
    **dict.fromkeys(("memory.allocated_bytes", "memory.full_bytes"), _BYTES),
    "score": OBJECT,
}

_SCORES: dict[str, dict[str, ValueKind]] = {
    task: {measure.key: optional(real_number()) for measure in MEASURES if measure.task == task}
    for task in dict.fromkeys(measure.task for measure in MEASURES)
}
_RECORDED: dict[str, Any] = {"asked": [], "grades": [], "by_depth": None}
"""Entries of a score that a row may lack."""

_SUMS = list_of(tuple_of(real_number(), whole_number()), TENTHS).called(f"{TENTHS} pairs of a sum and a whole number")
_ASKED = list_of(tuple_of(whole_number(), whole_number(), whole_number()))

for _task in ASKED:
    _SCORES[_task] |= {
        "grades": list_of(real_number(0, 1)).called("a list of numbers from 0 to 1"),
        "by_depth": optional(_SUMS).called(_SUMS.name),
        "asked": _ASKED.called("a list of document, number and 1 or 0 for each question"),
    }
# recall counts right answers by depth, where other tasks add up grades
_SCORES["recall"] |= {
    "by_depth": list_of(tuple_of(whole_number(), whole_number()), TENTHS).called(f"{TENTHS} pairs of whole numbers"),
    "kept": list_of(real_number(), TENTHS).called(f"{TENTHS} numbers"),
}


# Folders of results taken together: shards of a run, or several runs. Folders of other protocols are refused.

_FEW = ("shots=",)
"""Beginnings of the parts of a case's name that belong to its protocol."""


@dataclass(frozen=True)
class ResultFolder:
    """A folder of results, read.

    Attributes:
        path: the folder.
        manifest: its ``run.json``.
        rows: its finished rows.
    """

    path: Path
    manifest: dict[str, Any]
    rows: list[Row]


def read(paths: Sequence[Path]) -> list[ResultFolder]:
    """Return folders of results whose tasks can stand in one table.

    Raises:
        InputError: a folder has no ``run.json``, or cannot be read; or two folders ran the same task under other
            settings or protocols.
    """
    folders = [_folder(path) for path in dict.fromkeys(paths)]
    for first, second in combinations(folders, 2):
        _same_tasks(first, second)
        _same_protocols(first, second)
    return folders


def merge(paths: Sequence[Path], output: Path) -> tuple[Records, int]:
    """Write the rows of several folders into one; cells that it already has are left as they are.

    Returns:
        The folder ``output``, and the number of rows that were left out although their score is another than that of
        the row that stays for the same cell: the one of ``output``, or else of the first folder that has it.

    Raises:
        InputError: the folders are of different runs or protocols, or the output cannot be written.
    """
    folders = read(paths)
    for first, second in combinations(folders, 2):
        _same(first, second, first.manifest, second.manifest, _SAME)
    target = Records(output)
    if target.rows:
        before = _folder(output)
        for folder in folders:
            _same_protocols(before, folder)
    with target.locked():
        tasks = {task: settings for folder in folders for task, settings in folder.manifest["tasks"].items()}
        target.open({**folders[0].manifest, "tasks": tasks})
        there = {key_of(row): row for row in target.rows}
        known, doubled = len(there), 0  # a dict keeps its order, so the new rows will follow the known ones
        for row in (row for folder in folders for row in folder.rows):
            # the row that was there first stays, and equal scores are no conflict
            doubled += there.setdefault(key_of(row), row)["score"] != row["score"]
        target.extend(list(there.values())[known:])
        return target, doubled


def protocol(row: Row) -> str:
    """Return how the questions of a row were asked, such as ``later`` or ``shots=5,inside``; empty for a task without
    questions.
    """
    if row["task"] not in ASKED:
        return ""
    # the title ends with the protocol, also where the case does not name it
    *rest, when = case_title(row["task"], row["case"]).split(",")
    return ",".join([*(part for part in rest if part.startswith(_FEW)), when.strip()])


def _folder(path: Path) -> ResultFolder:
    """Return the results of a folder of ``kvkeep eval``.

    Raises:
        InputError: the path is no such folder.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is no folder; give the folders that hold results of kvkeep eval.")
    records = Records(path)
    manifest = records.manifest()
    if manifest is None:
        raise InputError(f"{path} has no results of kvkeep eval: it holds no run.json.")
    return ResultFolder(path, manifest, records.rows)


def _same_tasks(one: ResultFolder, other: ResultFolder) -> None:
    """Refuse folders whose common tasks have different settings."""
    for task in one.manifest["tasks"].keys() & other.manifest["tasks"].keys():
        first, second = one.manifest["tasks"][task], other.manifest["tasks"][task]
        _same(one, other, first, second, {key: f"{key!r} of {task}" for key in sorted({*first, *second})})


def _same(
    first: ResultFolder, second: ResultFolder, a: Mapping[str, Any], b: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Refuse folders in which one of the named entries differs."""
    for key, name in names.items():
        if a.get(key) != b.get(key):
            _refuse(first, second, f"{name} is {a.get(key)!r:.80} in the first and {b.get(key)!r:.80} in the second")


def _same_protocols(one: ResultFolder, other: ResultFolder) -> None:
    """Refuse two folders if the questions of a task that both ran were not asked by the same protocols.

    Raises:
        InputError: they were not, see `protocol`.
    """
    first, second = (_protocols(folder.rows) for folder in (one, other))
    for task in first.keys() & second.keys():
        if first[task] != second[task]:
            was, here = (" and ".join(sorted(protocols[task])) for protocols in (first, second))
            _refuse(one, other, f"questions of {task} were asked {was} in the first and {here} in the second")


def _protocols(rows: Sequence[Row]) -> dict[str, set[str]]:
    """Return the protocols by which each task was asked."""
    asked = [row for row in rows if protocol(row)]
    return {task: {protocol(row) for row in own} for task, own in grouped(asked, lambda row: str(row["task"])).items()}


def _refuse(first: ResultFolder, second: ResultFolder, what: str) -> NoReturn:
    """Raise the error that two folders cannot be in one table."""
    raise InputError(f"{first.path} and {second.path} cannot be in one table: {what}. Take such folders apart.")
