"""Public data sets from local files: found by name in a folder, and checked line by line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError
from kvkeep.runs import parse, read_whole


@dataclass(frozen=True)
class Source:
    """A public file.

    Attributes:
        names: file names under which it is looked for.
        public: where it comes from, and its format.
    """

    names: tuple[str, ...]
    public: str


def found(folder: str | None, source: Source, task: str) -> Path:
    """The path of a file in the folder of data.

    Raises:
        InputError: there is no folder, or no such file in it.
    """
    wanted = " or ".join(source.names)
    if folder is None:
        raise InputError(f"{task} needs {wanted}: {source.public}. Give the folder that holds it as `data`.")
    if not Path(folder).is_dir():
        raise InputError(f"{folder} is no folder; `data` is the folder that holds {wanted} for {task}.")
    paths = [Path(folder, name) for name in source.names]
    for path in paths:
        if path.is_file():
            return path
    raise InputError(f"{folder} has no {wanted}, which {task} needs: {source.public}.")


def has(folder: str | None, source: Source) -> bool:
    """Whether a file is in the folder of data."""
    return folder is not None and any(Path(folder, name).is_file() for name in source.names)


def fingerprint(folder: str | None, names: Sequence[str]) -> str | None:
    """A hash of all files of these names in a folder, so that results of other data are told apart; ``None`` without
    such a file.
    """
    found, hashed = False, hashlib.sha256()
    for name in sorted(names):
        if folder is not None and (path := Path(folder, name)).is_file():
            found = True
            hashed.update(name.encode() + b"\0" + hashlib.sha256(_bytes(path)).digest())
    return hashed.hexdigest()[:16] if found else None


def whole(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        InputError: it cannot be read, or is no JSON.
    """
    try:
        return parse(_bytes(path))
    except json.JSONDecodeError as error:
        raise InputError(f"{path} is no JSON: {error.msg} in line {error.lineno}.") from error
    except ValueError as error:
        raise InputError(f"{path} is no JSON: {error}.") from error


def lines(path: Path, fields: Mapping[str, type | tuple[type, ...]]) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object per line.

    Args:
        path: the file.
        fields: the fields that every object has to have, and their types.

    Raises:
        InputError: the file cannot be read, a line is no object, or a field is missing or of another type.
    """
    rows = []
    for number, line in enumerate(_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = parse(line)
        except ValueError as error:
            raise InputError(f"Line {number} of {path} is no JSON: {error}.") from error
        if not isinstance(row, dict):
            raise InputError(f"Line {number} of {path} is no JSON object.")
        for name, kind in fields.items():
            if not isinstance(row.get(name), kind):
                what = f"has another {name!r} than expected" if name in row else f"has no {name!r}"
                raise InputError(f"Line {number} of {path} {what}; fields of each line: {', '.join(fields)}.")
        rows.append(row)
    if not rows:
        raise InputError(f"{path} has no lines.")
    return rows


def _bytes(path: Path) -> bytes:
    try:
        return read_whole(path) or b""
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
