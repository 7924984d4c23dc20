"""The file beside a job's output for lines that cannot be run: made and replaced by jobs, and nothing else's."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvkeep import runs
from kvkeep.engine.output import as_line
from kvkeep.errors import InputError

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
        InputError: there is a file that no job can have written, or the file cannot be written.
    """
    try:
        if os.path.lexists(path) and not _is_one(path):
            raise InputError(
                f"{path}, where lines that cannot be run are set aside, exists and holds something else. Rename it, "
                "or give another output file."
            )
        runs.write_whole(path, b"".join(map(as_line, found)))
    except OSError as error:
        raise InputError(f"{path}, for lines that cannot be run, cannot be written: {error.strerror}.") from error


def _is_one(path: Path) -> bool:
    """Whether every line of a file has the fields of a bad line, and no others."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return all(_is_entry(raw) for raw in file)


def _is_entry(raw: bytes) -> bool:
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return False
    return isinstance(found, dict) and found.keys() == _FIELDS
