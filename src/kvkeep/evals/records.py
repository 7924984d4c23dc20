"""The folder of a run: ``run.json`` says what was run, ``results.jsonl`` holds one line per finished cell.

A line is written, flushed and synced before the next cell starts, so whatever happens, finished cells are safe. A last
line that was torn in the middle is cut off when the run is resumed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError
from kvkeep.evals.curves import PICTURES
from kvkeep.evals.plan import Cell
from kvkeep.evals.rows import fault, key_of
from kvkeep.results import MANIFEST, Results, check_same, read_rows
from kvkeep.runs import Lock, finite, read_object, sync

ROWS = "results.jsonl"
_BEGINNING = b'{"task": "'

_SAME = {"model": "the model", "weights": "the model's weights", "dtype": "the dtype"}
_REMEDY = "Restore it, or choose another --output folder."


class Records(Results):
    """Reads a folder of results, and adds to it.

    Args:
        folder: the folder; need not exist yet.

    Attributes:
        rows: the finished rows in the file's order; of equal cells the last.

    Raises:
        InputError: it is no folder, or its files cannot be read.
    """

    names = (ROWS, *PICTURES)

    def __init__(self, folder: Path):
        self.rows: list[dict[str, Any]] = []
        super().__init__(folder)
        self._read()

    def _read(self) -> None:
        self._end, rows = read_rows(self.path / ROWS, _BEGINNING, fault)
        self.rows = list({key_of(row): row for row in rows}.values())

    @property
    def done(self) -> set[Cell]:
        """The cells that need not be run again."""
        return {key_of(row) for row in self.rows}

    @property
    def safe(self) -> str:
        """How many rows there are."""
        return f"The {len(self.rows)} rows written before are safe." if self.rows else ""

    def manifest(self) -> dict[str, Any] | None:
        """What was run in this folder; ``None`` if nothing was.

        Raises:
            InputError: there are results, or files of the same names, but it does not say of what.
        """
        path = self.path / MANIFEST
        found = read_object(path, _REMEDY)
        if found is None:
            self.check_new()
            return None
        tasks = found.get("tasks")
        if wrong := [key for key in _SAME if not isinstance(found.get(key), str)]:
            raise InputError(f"{path} is of no evaluation: it does not say {_SAME[wrong[0]]} as text. {_REMEDY}")
        if not isinstance(tasks, dict) or not all(isinstance(settings, dict) for settings in tasks.values()):
            raise InputError(f"{path} does not say which tasks were run, under which settings. {_REMEDY}")
        return found

    def check(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Compare a run, or what is known of it, with what the folder already holds.

        Args:
            manifest: as for `open`; ``weights`` and ``dtype`` may be missing.

        Returns:
            The tasks of the folder: name → version and settings.

        Raises:
            InputError: the folder holds results of another run.
        """
        found = self.manifest()
        if found is None or not self.rows:
            return {}
        check_same(self.path, found, manifest, _SAME)
        before: dict[str, dict[str, Any]] = found["tasks"]
        for task in manifest["tasks"].keys() & before.keys():
            then, now = before[task], manifest["tasks"][task]
            keys = sorted(then.keys() | now.keys())
            check_same(
                self.path, then, {key: now.get(key) for key in keys}, {key: f"{key!r} of {task}" for key in keys}
            )
        return before

    def open(self, manifest: dict[str, Any]) -> None:
        """Prepare the folder for more rows of a run; it has to be `locked`, and its rows are read again.

        Args:
            manifest: ``model``, ``weights``, ``dtype``, and ``tasks``: name → version and settings.

        Raises:
            InputError: the folder holds results of another run, or cannot be written.
        """
        self._read()
        tasks = {**self.check(manifest), **manifest["tasks"]}
        self.write_bytes(MANIFEST, (json.dumps({**manifest, "tasks": tasks}, indent=2) + "\n").encode())
        with self.writing():
            file = self._held.enter_context((self.path / ROWS).open("ab"))
            Lock(file, str(self.path / ROWS))  # a batch job locks its output, but not the folder
            self._read()
            file.truncate(self._end)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and wait until it is on the disk.

        Raises:
            InputError: it cannot be written; all earlier rows are safe.
        """
        line = (json.dumps(finite(row), allow_nan=False, ensure_ascii=False) + "\n").encode()
        with self.writing(), (self.path / ROWS).open("ab") as file:
            file.write(line)
            sync(file)
        self._end += len(line)
        self.rows.append(json.loads(line))
