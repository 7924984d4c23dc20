"""The folder of a search: ``run.json`` describes the run, ``results.jsonl`` has one line per measured block of units.

A line is written and synced before the next block starts, so a search that was stopped goes on where it was.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvkeep.config import NAME
from kvkeep.errors import InputError
from kvkeep.evals.tune.candidates import Arm
from kvkeep.evals.tune.measure import Outcome
from kvkeep.result_files import MANIFEST, Lock, Results, check_same, read_object, read_rows, sync

ROWS = "results.jsonl"
CURVE = "curve.png"
_BEGINNING = b'{"tune": "'

SETTINGS = {
    "model": "the model",
    "weights": "the model's weights",
    "dtype": "the dtype",
    "case": "the case",
    "text": "the text",
    "questions": "the file of questions",
    "context": "the context",
    "facts": "the number of facts",
    "seed": "the seed",
    "version": "the version of the measurement",
}
"""Settings that have to be the same for results to be compared."""

VERSION = 1
"""Incremented by every change that changes results."""

_REMEDY = "Restore it, or choose another `output` folder."


class Records(Results):
    """Reads a folder of measurements, and adds to it.

    Args:
        folder: the folder; it need not exist yet.

    Attributes:
        outcomes: (arm's name, budget, unit) → what was measured.

    Raises:
        InputError: the path is no folder, or its files cannot be read.
    """

    names = (ROWS, CURVE, NAME)

    def __init__(self, folder: Path):
        self.outcomes: dict[tuple[str, int, int], Outcome] = {}
        self._end = 0
        super().__init__(folder)
        self._read()

    def _read(self) -> None:
        self._end, rows = read_rows(self.path / ROWS, _BEGINNING, fault)
        self.outcomes = {}
        for row in rows:
            self._keep(row)

    def _keep(self, row: dict[str, Any]) -> None:
        for unit, outcome in enumerate(row["found"], start=row["first"]):
            self.outcomes[row["tune"], row["budget"], unit] = outcome

    @property
    def safe(self) -> str:
        """A sentence with the number of measured units."""
        return f"The measurements of {len(self.outcomes)} documents written before are safe." if self.outcomes else ""

    def check(self, manifest: dict[str, Any]) -> None:
        """Compare a run with the run that the folder already holds.

        Args:
            manifest: values of `SETTINGS`; some may be missing.

        Raises:
            InputError: the folder holds results of another run, or a damaged ``run.json``.
        """
        path = self.path / MANIFEST
        found = read_object(path, _REMEDY)
        if found is None:
            self.check_new()
            return
        if "case" not in found:
            raise InputError(f"{path} is of no search: it does not name a case. Choose another `output` folder.")
        if self.outcomes:
            check_same(self.path, found, manifest, SETTINGS)

    def open(self, manifest: dict[str, Any]) -> None:
        """Prepare the folder for more rows. The folder has to be `locked`; its rows are read again.

        Raises:
            InputError: the folder holds results of another run, or cannot be written.
        """
        self._read()
        self.check(manifest)
        self.write_bytes(MANIFEST, (json.dumps(manifest, indent=2) + "\n").encode())
        with self.writing():
            file = self._held.enter_context((self.path / ROWS).open("ab"))
            Lock(file, str(self.path / ROWS))
            self._read()
            file.truncate(self._end)

    def add(self, arm: Arm, budget: int, first: int, found: list[Outcome]) -> None:
        """Write a block of units and wait until it is on the disk.

        Raises:
            InputError: it cannot be written; all earlier rows are safe.
        """
        row = {"tune": arm.name, "budget": budget, "first": first, "found": found}
        line = (json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n").encode()
        with self.writing(), (self.path / ROWS).open("ab") as file:
            file.write(line)
            sync(file)
        self._keep(row)


def fault(row: dict[str, Any]) -> str | None:
    """The defect of a row, as part of a sentence; ``None`` if it can be used."""
    if not isinstance(row.get("tune"), str):
        return "it has no 'tune', the name of what was measured"
    for name in ("budget", "first"):
        if not isinstance(row.get(name), int) or isinstance(row[name], bool) or row[name] < 0:
            return f"its {name!r} is not a whole number"
    found = row.get("found")
    if not isinstance(found, list) or not all(map(_is_outcome, found)):
        return "its 'found' is not a list of marks or of losses"
    return None


def _is_outcome(value: object) -> bool:
    if isinstance(value, str):
        return set(value) <= {"0", "1"}
    return isinstance(value, list) and all(isinstance(n, int | float) and not isinstance(n, bool) for n in value)
