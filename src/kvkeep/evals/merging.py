"""Folders of results taken together: shards of a run, or several runs. Folders of other protocols are refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NoReturn

from kvkeep.errors import InputError
from kvkeep.evals.records import Records, key_of
from kvkeep.evals.report import ASKED, Row, grouped, shown

_RUN = {"model": "the model", "weights": "the model's weights", "dtype": "the dtype"}
_FEW = ("shots=",)


@dataclass(frozen=True)
class Folder:
    """A folder of results, read.

    Attributes:
        path: the folder.
        manifest: its ``run.json``.
        rows: its finished rows.
    """

    path: Path
    manifest: dict[str, Any]
    rows: list[Row]


def read(paths: Sequence[Path]) -> list[Folder]:
    """Folders of results whose tasks can stand in one table.

    Raises:
        InputError: a folder has no results, or cannot be read; tasks were run under other settings or protocols.
    """
    found = [_folder(path) for path in dict.fromkeys(paths)]
    for one, other in combinations(found, 2):
        _same_tasks(one, other)
        _same_protocols(one, other)
    return found


def merge(paths: Sequence[Path], output: Path) -> tuple[Records, int]:
    """Write the rows of several folders into one; cells that it already has are left as they are.

    Returns:
        The folder, and the number of cells that two folders have with different scores; the first one's stays.

    Raises:
        InputError: the folders are of different runs or protocols, or the output cannot be written.
    """
    folders = read(paths)
    for one, other in combinations(folders, 2):
        _same(one, other, one.manifest, other.manifest, _RUN)
    target = Records(output)
    if target.rows:
        before = _folder(output)
        for folder in folders:
            _same_protocols(before, folder)
    with target.locked():
        tasks = {task: found for folder in folders for task, found in folder.manifest["tasks"].items()}
        target.open({**folders[0].manifest, "tasks": tasks})
        there = {key_of(row): row for row in target.rows}
        known, doubled = len(there), 0
        for row in (row for folder in folders for row in folder.rows):
            doubled += there.setdefault(key_of(row), row)["score"] != row["score"]
        target.extend(list(there.values())[known:])
        return target, doubled


def protocol(row: Row) -> str:
    """How a task's questions were asked: ``inside`` or ``later``, and the solved examples; empty for other tasks."""
    if row["task"] not in ASKED:
        return ""
    *rest, when = shown(row["task"], row["case"]).split(",")
    return ",".join([*(part for part in rest if part.startswith(_FEW)), when.strip()])


def _folder(path: Path) -> Folder:
    if path.exists() and not path.is_dir():
        raise InputError(f"{path} is no folder; give the folders that hold results of kvkeep eval.")
    records = Records(path)
    manifest = records.manifest()
    if manifest is None:
        raise InputError(f"{path} has no results of kvkeep eval: it holds no run.json.")
    return Folder(path, manifest, records.rows)


def _same_tasks(one: Folder, other: Folder) -> None:
    for task in one.manifest["tasks"].keys() & other.manifest["tasks"].keys():
        first, second = one.manifest["tasks"][task], other.manifest["tasks"][task]
        _same(one, other, first, second, {key: f"{key!r} of {task}" for key in sorted({*first, *second})})


def _same(one: Folder, other: Folder, a: Mapping[str, Any], b: Mapping[str, Any], names: Mapping[str, str]) -> None:
    for key, name in names.items():
        if a.get(key) != b.get(key):
            _refuse(one, other, f"{name} is {a.get(key)!r:.80} in the first and {b.get(key)!r:.80} in the second")


def _same_protocols(one: Folder, other: Folder) -> None:
    first, second = (_protocols(folder.rows) for folder in (one, other))
    for task in first.keys() & second.keys():
        if first[task] != second[task]:
            was, here = (" and ".join(sorted(found[task])) for found in (first, second))
            _refuse(one, other, f"questions of {task} were asked {was} in the first and {here} in the second")


def _protocols(rows: Sequence[Row]) -> dict[str, set[str]]:
    asked = [row for row in rows if protocol(row)]
    return {task: {protocol(row) for row in own} for task, own in grouped(asked, lambda row: str(row["task"])).items()}


def _refuse(one: Folder, other: Folder, what: str) -> NoReturn:
    raise InputError(f"{one.path} and {other.path} cannot be in one table: {what}. Take such folders apart.")
