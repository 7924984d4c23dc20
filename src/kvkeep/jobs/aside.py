"""The file beside a job's output for lines that cannot be run: made and replaced by jobs, and nothing else's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvkeep import runs
from kvkeep.errors import InputError
from kvkeep.jobs.output import as_line

_FIELDS = {"line", "reason", "text"}


def entries(lines: Iterable[tuple[int, bytes]], bad: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """What is noted of lines that cannot be run: their number, the reason, and their text."""
    for number, raw in lines:
        if number in bad:
            text = raw.decode("utf-8", errors="replace").rstrip("\r\n")
            yield {"line": number, "reason": bad[number], "text": text}


def write(path: Path, found: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of bad lines; one that an earlier job has written is replaced.

    Raises:
        InputError: there is a file that no job can have written or another one writes to, or it cannot be written.
    """
    try:
        with _free(path):
            runs.remove_leftovers(path.parent, {path.name})
            runs.write_whole(path, b"".join(map(as_line, found)))
    except OSError as error:
        raise InputError(f"{path}, for lines that cannot be run, cannot be written: {error.strerror}.") from error


@contextmanager
def _free(path: Path) -> Iterator[None]:
    """Keep other jobs from a file that is about to be replaced, if there is one.

    Raises:
        InputError: no job can have written it, or another job writes to it.
    """
    if not os.path.lexists(path):
        yield
        return
    foreign = InputError(
        f"{path}, where lines that cannot be run are set aside, exists and holds something else. Rename it, or give "
        "another output file."
    )
    if not path.is_file():
        raise foreign
    with path.open("rb") as file:
        runs.Lock(file, str(path))
        if not _are_entries(file):
            raise foreign
        yield


def _are_entries(file: IO[bytes]) -> bool:
    """Whether there are lines, and every one has the fields of a bad line, and no others."""
    found = [_is_entry(raw) for raw in file]
    return bool(found) and all(found)


def _is_entry(raw: bytes) -> bool:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == _FIELDS
