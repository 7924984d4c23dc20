"""The file of a calibration that is not finished: what was measured so far, a line for each layer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvkeep.errors import InputError
from kvkeep.result_files import Lock, finite, read_rows, sync

_BEGINNING = b'{"row": "'
_RUN = "run"
_LOSS = (int | float | None, int | float | None, int | float)
"""Types of the numbers of a loss."""


class Part:
    """Lines of one calibration, in a file beside the profile. They are read when the calibration goes on.

    Args:
        file: open for reading and writing, and locked.
        path: its path.
    """

    def __init__(self, file: IO[bytes], path: Path):
        self._file, self.path = file, path
        self._rows: list[dict[str, Any]] = []

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Part]:
        """Open and lock the file, and read its lines. An empty file is removed again.

        Raises:
            InputError: the file cannot be read or written, another run is writing to it, or it holds something else.
        """
        if path.exists() and not path.is_file():
            raise InputError(f"{path} is no file, and the calibration notes its progress there. Remove it.")
        with _writing(path):
            file = path.open("ab+")
        with file, Lock(file, str(path)):
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                raise InputError(f"Another run has just finished and removed {path}. Look at what it wrote first.")
            part = cls(file, path)
            end, part._rows = read_rows(path, _BEGINNING, _fault)
            with _writing(path):
                file.truncate(end)
            try:
                yield part
            finally:
                if not part._rows:
                    path.unlink(missing_ok=True)

    def agree(self, run: Mapping[str, Any]) -> None:
        """Go on with the calibration that is in the file, or begin one.

        Raises:
            InputError: the file holds another calibration.
        """
        wanted = json.loads(json.dumps(finite(dict(run))))
        if not self._rows:
            self.add(_RUN, wanted)
            return
        found = {key: value for key, value in self._rows[0].items() if key != "row"}
        differ = [key for key in {**wanted, **found} if found.get(key) != wanted.get(key)]
        if self._rows[0]["row"] != _RUN or differ:
            what = differ[0] if differ else "its first line"
            raise InputError(
                f"{self.path} holds the progress of another calibration: {what} was {found.get(what)!s:.60} and is "
                f"{wanted.get(what)!s:.60} now. Give the same settings to go on, another `output`, or remove the file."
            )

    def find(self, row: str, **keys: object) -> dict[str, Any] | None:
        """The line of this kind with these values; ``None`` if it was not measured yet."""
        for one in self._rows:
            if one["row"] == row and all(one.get(key) == value for key, value in keys.items()):
                return one
        return None

    def add(self, row: str, values: Mapping[str, Any]) -> None:
        """Write a line at once.

        Raises:
            InputError: it cannot be written; the lines before are safe.
        """
        line = {"row": row, **values}
        with _writing(self.path):
            self._file.write(json.dumps(finite(line), ensure_ascii=False).encode() + b"\n")
            sync(self._file)
        self._rows.append(line)

    def remove(self) -> None:
        """Remove the file: the profile is written."""
        self._rows = []


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(
            f"The progress of the calibration cannot be written to {path}: {error.strerror}. Make room or give another "
            "`output`; the same command goes on from there."
        ) from error


def _fault(row: Mapping[str, Any]) -> str | None:
    if not isinstance(row.get("row"), str):
        return "it is no line of a calibration"
    losses = row.get("losses", [])
    if not isinstance(losses, list) or not all(_is_loss(loss) for loss in losses):
        return "its losses are damaged"
    return None


def _is_loss(loss: object) -> bool:
    return (
        isinstance(loss, list)
        and len(loss) == len(_LOSS)
        and all(isinstance(part, kind) for part, kind in zip(loss, _LOSS, strict=True))
    )
