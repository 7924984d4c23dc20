"""The folder of a run: ``run.json`` says what was run, ``results.jsonl`` holds one line per finished cell.

A line is written, flushed and synced before the next cell starts, so whatever happens, finished cells are safe. A last
line that was torn in the middle is cut off when the run is resumed.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kvkeep.errors import InputError
from kvkeep.evals.plan import Cell

ROWS = "results.jsonl"
MANIFEST = "run.json"

_SAME = {"model": "the model", "weights": "the model's weights", "dtype": "the dtype"}


class Records:
    """Reads a folder of results, and adds to it.

    Args:
        folder: the folder; need not exist yet.

    Attributes:
        rows: the finished rows in the file's order; of equal cells the last.

    Raises:
        InputError: it is no folder, or its files cannot be read.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise InputError(f"{folder} is a file; --output needs a folder for {ROWS} and plots.")
        self._end, rows = _read(folder / ROWS)
        self.rows = list({key_of(row): row for row in rows}.values())

    @property
    def done(self) -> set[Cell]:
        """The cells that need not be run again."""
        return {key_of(row) for row in self.rows}

    def manifest(self) -> dict[str, Any] | None:
        """What was run in this folder; ``None`` if nothing was.

        Raises:
            InputError: there are results, but it does not say of what.
        """
        path = self.folder / MANIFEST
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            if self.rows:
                raise InputError(
                    f"{self.folder} has {ROWS} but no {MANIFEST}, so it is unknown what was run. Choose another folder."
                ) from None
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read: {error}. Choose another folder.") from error
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
        found = self.manifest() if self.rows else None
        if found is None:
            return {}
        _check_same(self.folder, found, manifest)
        return dict(found["tasks"])

    def open(self, manifest: dict[str, Any]) -> None:
        """Prepare the folder for more rows of a run.

        Args:
            manifest: ``model``, ``weights``, ``dtype``, and ``tasks``: name → version and settings.

        Raises:
            InputError: the folder holds results of another run, or cannot be written.
        """
        tasks = {**self.check(manifest), **manifest["tasks"]}
        with _writing(self.folder, len(self.rows)):
            self.folder.mkdir(parents=True, exist_ok=True)
            _write_whole(self.folder / MANIFEST, json.dumps({**manifest, "tasks": tasks}, indent=2) + "\n")
            with (self.folder / ROWS).open("ab") as file:
                file.truncate(self._end)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row and wait until it is on the disk.

        Raises:
            InputError: it cannot be written; all earlier rows are safe.
        """
        line = (json.dumps(_finite(row), allow_nan=False, ensure_ascii=False) + "\n").encode()
        path = self.folder / ROWS
        with _writing(self.folder, len(self.rows)), path.open("ab") as file:
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._end += len(line)
        self.rows.append(json.loads(line))


def _finite(value: Any) -> Any:
    """The same without numbers that JSON cannot hold: NaN and infinity, as of a model that overflows, become null."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def key_of(row: dict[str, Any]) -> Cell:
    """The cell that a row belongs to."""
    return Cell(row["task"], row["case"], row["policy"], row["budget"], row["seed"], row.get("setup", ""))


def _read(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """The whole lines of a file and where the last of them ends.

    Raises:
        InputError: the file cannot be read, or a line other than the last is damaged.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0, []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    rows: list[dict[str, Any]] = []
    end = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        row = _parse(line)
        if row is None:
            if end + len(line) < len(data):
                _damaged(path, number)
            break
        rows.append(row)
        end += len(line)
    return end, rows


def _parse(line: bytes) -> dict[str, Any] | None:
    """A row; ``None`` if the line is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
        key_of(row)
    except (ValueError, TypeError, KeyError):
        return None
    return dict(row)


def _damaged(path: Path, number: int) -> NoReturn:
    raise InputError(
        f"Line {number} of {path} is no row of results, and others follow: the file was changed or damaged. Remove "
        "that line to run its cell again, or choose another folder."
    )


def _check_same(folder: Path, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for key, name in _SAME.items():
        if key in wanted and found.get(key) != wanted[key]:
            _foreign(folder, name, found.get(key), wanted[key])
    for task in wanted["tasks"].keys() & found["tasks"].keys():
        then, now = found["tasks"][task], wanted["tasks"][task]
        for key in sorted(then.keys() | now.keys()):
            if then.get(key) != now.get(key):
                _foreign(folder, f"{key!r} of {task}", then.get(key), now.get(key))


def _foreign(folder: Path, what: str, then: object, now: object) -> NoReturn:
    raise InputError(
        f"{folder} holds results of another run: {what} was {then} and is {now} now. Mixed results cannot be compared: "
        "choose another --output folder, or the same settings to resume."
    )


def _write_whole(path: Path, text: str) -> None:
    """Replace a file at once, so that it is never half written."""
    beside = path.with_name(f".{path.name}.new")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


@contextmanager
def _writing(folder: Path, rows: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        safe = f"The {rows} rows written before are safe. " if rows else ""
        raise InputError(
            f"Results cannot be written to {folder}: {error.strerror}. {safe}Make room or choose another folder, and "
            "run the same command again: it goes on from there."
        ) from error
