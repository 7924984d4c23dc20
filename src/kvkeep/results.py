"""A folder of results of an evaluation or an analysis.

One run at a time writes to it. Results of another run are refused, and old rows are checked when they are read.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NoReturn

from kvkeep.errors import InputError
from kvkeep.runs import Lock, parse, read_whole, remove_leftovers, write_whole

MANIFEST = "run.json"
"""The file that says which run a folder belongs to; without it, files in the folder may be anybody's."""

_LONGEST = 200


class Results:
    """A folder of results, to which one run at a time writes.

    Args:
        path: the folder; it need not exist yet.

    Attributes:
        path: the folder.
        names: files that a run writes there, beside `MANIFEST`.

    Raises:
        InputError: the path is not a folder.
    """

    names: Collection[str] = ()

    def __init__(self, path: Path):
        self.path = path
        self._locked = False
        self._held = ExitStack()
        """Further locks, held as long as the folder's."""
        with self.writing():
            if not path.is_dir() and os.path.lexists(path):
                raise InputError(f"{path} is a file, or a link to nothing; `output` needs a folder for results.")

    def check_free(self) -> None:
        """Refuse a folder that another run is writing to, before expensive work begins.

        Raises:
            InputError: another run is writing there.
        """
        if self.path.is_dir():
            with self.locked():
                pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder and keep other runs out; a nested call does nothing.

        Raises:
            InputError: another run is writing there, or the folder cannot be made.
        """
        if self._locked:
            yield
            return
        with self.writing():
            self.path.mkdir(parents=True, exist_ok=True)
            lock = Lock(self.path, str(self.path))
        with lock, self._held:
            self._locked = True
            remove_leftovers(self.path, {MANIFEST, *self.names})
            try:
                yield
            finally:
                self._locked = False

    def check_new(self) -> None:
        """Refuse a folder without `MANIFEST` if it has a file that a run would overwrite.

        Raises:
            InputError: there is such a file.
        """
        if found := sorted(name for name in self.names if os.path.lexists(self.path / name)):
            raise InputError(
                f"{self.path} has {found[0]} but no {MANIFEST}, so it is unknown what was run there, and the file "
                "would be overwritten. Choose another `output` folder."
            )

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Write a file with `write_whole` and return its path.

        Raises:
            InputError: the file cannot be written; earlier results stay.
        """
        with self.writing():
            write_whole(self.path / name, data)
        return self.path / name

    @property
    def safe(self) -> str:
        """A sentence on the results that are safely on the disk; may be empty."""
        return ""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Turn a failed write into an `InputError` that says what is safe and how to go on.

        Raises:
            InputError: something cannot be written.
        """
        try:
            yield
        except OSError as error:
            safe = f"{self.safe} " if self.safe else ""
            raise InputError(
                f"Results cannot be written to {self.path}: {error.strerror}. {safe}Make room or choose another "
                "folder, and run the same command again: it goes on from there."
            ) from error


def read_rows(
    path: Path, beginning: bytes, fault: Callable[[dict[str, Any]], str | None]
) -> tuple[int, list[dict[str, Any]]]:
    """Read a file of one JSON object per line: the number of bytes of its whole lines, and the rows.

    A last line that was cut off, as by a power cut, is left out.

    Args:
        path: the file; a missing file has no rows.
        beginning: the first bytes of every row; a last line without them was not begun by a run.
        fault: returns what is wrong with an object that should be a row; ``None`` if nothing is.

    Raises:
        InputError: the file cannot be read, or a line is not a row.
    """
    data = read_whole(path) or b""
    rows: list[dict[str, Any]] = []
    end = 0
    for number, line in enumerate(data.splitlines(keepends=True), start=1):
        row, what = _row(line, fault)
        if row is None and end + len(line) == len(data) and _is_torn(line, beginning):
            break
        if what is not None:
            raise InputError(
                f"Line {number} of {path} is no row of results: {what}. The file was changed or damaged: remove that "
                "line and run the same command again, or choose another folder."
            )
        rows.append(row)
        end += len(line)
    return end, rows


def _is_torn(line: bytes, beginning: bytes) -> bool:
    """Whether a line was cut off, or never reached the disk, which then has zero bytes in its place."""
    written = line.rstrip(b"\0\n")
    return line != b"\n" and beginning.startswith(written[: len(beginning)])


def _row(line: bytes, fault: Callable[[dict[str, Any]], str | None]) -> tuple[Any, str | None]:
    """The value of a line, ``None`` if it was cut off; and what is wrong with it, ``None`` if nothing is."""
    try:
        row = parse(line) if line.endswith(b"\n") else None
    except (json.JSONDecodeError, UnicodeDecodeError):
        row = None
    except ValueError as error:
        return line, str(error)
    return row, fault(row) if isinstance(row, dict) else "it is no JSON object"


def check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse to go on in a folder that holds another run.

    Args:
        folder: the folder.
        found: settings of the run there.
        wanted: settings of the new run, as far as they are known.
        names: settings that have to be the same: key → name in messages.

    Raises:
        InputError: a setting differs.
    """
    for key, name in names.items():
        if key in wanted and found.get(key) != wanted[key]:
            _refuse(folder, name, found.get(key, "unknown"), wanted[key])


def _refuse(folder: Path, what: str, then: object, now: object) -> NoReturn:
    show = str if type(then) is type(now) else repr
    was, here = (text if len(text := show(value)) <= _LONGEST else text[:_LONGEST] + "…" for value in (then, now))
    raise InputError(
        f"{folder} holds results of another run: {what} was {was} and is {here} now. Mixed results cannot be compared: "
        "choose another `output` folder, or the same settings to go on."
    )


def command(words: str, *arguments: object) -> str:
    """A command line for a shell: the words as they are, then the arguments, quoted."""
    return " ".join([words, *(shlex.quote(str(argument)) for argument in arguments)])
