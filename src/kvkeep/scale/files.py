"""Inputs of jobs that are not a local JSONL file: Parquet, folders, and the remote paths that pyarrow knows.

They are copied to a local JSONL file first, so that everything after that is the same for all jobs. Ray Data reads the
same paths through the same package.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote

from kvkeep.errors import InputError, one_line, pip_install
from kvkeep.scale import EXTRA

_PARQUET = (".parquet", ".pq")
_LINES = (".jsonl", ".ndjson", ".json")
_LOCAL = "file://"


def is_foreign(source: str) -> bool:
    """Whether an input is no local JSONL file or pipe: an address with a scheme, a Parquet file, or a folder."""
    return is_address(source) or is_parquet(source) or os.path.isdir(source)


def is_address(name: str) -> bool:
    """Whether a name has a scheme, such as ``s3://``."""
    return "://" in name


def is_parquet(name: str) -> bool:
    """Whether a name is that of a Parquet file."""
    return name.lower().endswith(_PARQUET)


def is_within(name: str, source: str) -> bool:
    """Whether a file would be a part of an input, which is a folder."""
    return name.lower().endswith((*_PARQUET, *_LINES)) and _plain(name).startswith(f"{_plain(source).rstrip('/')}/")


def _plain(name: str) -> str:
    """A path without links; an address as it is, unless it is that of a local path."""
    local = unquote(name.removeprefix(_LOCAL)) if name.startswith(_LOCAL) else name
    return name if is_address(local) else Path(os.path.realpath(local)).as_posix()


@contextmanager
def as_lines(source: str) -> Iterator[Path]:
    """A local JSONL file with the lines of an input, for the time of this block.

    A row of Parquet becomes a line: its columns in their order, without those that are null. The files of a folder
    are read in the order of their names.

    Args:
        source: ``s3://…``, ``gs://…``, ``hdfs://…``, ``file://…``, a Parquet file, or a folder.

    Raises:
        InputError: pyarrow is not installed, the input cannot be read, or a row cannot be written as JSON.
    """
    try:
        from pyarrow import fs
    except ImportError as error:
        raise InputError(f"{source} is read by pyarrow, which is not installed: {pip_install(EXTRA)}.") from error
    try:
        with tempfile.TemporaryDirectory(prefix="kvkeep-") as folder:
            copy = Path(folder) / "lines.jsonl"
            try:
                system, path = fs.FileSystem.from_uri(source if is_address(source) else str(Path(source).resolve()))
                with copy.open("wb") as target:
                    for name in _files(system, path, source):
                        _copy(system, name, target)
            except InputError:
                raise
            except Exception as error:  # whatever a file system raises: no such file, no rights, no network
                raise InputError(f"The input {source} cannot be read: {one_line(error):.300}") from error
            yield copy
    except OSError as error:
        raise InputError(f"There is no folder for a copy of {source}: {error.strerror}. Set TMPDIR.") from error


def _files(system: Any, path: str, source: str) -> list[str]:
    """The file, or the files of a folder in the order of their names."""
    from pyarrow import fs

    found = system.get_file_info(path)
    if found.type == fs.FileType.NotFound:
        raise InputError(f"The input {source} does not exist.")
    if found.type != fs.FileType.Directory:
        return [path]
    inside = system.get_file_info(fs.FileSelector(path, recursive=True))
    names = sorted(one.path for one in inside if one.is_file and one.path.lower().endswith((*_PARQUET, *_LINES)))
    if not names:
        raise InputError(f"The folder {source} has no file that ends with {', '.join((*_LINES, *_PARQUET))}.")
    return names


def _copy(system: Any, name: str, target: IO[bytes]) -> None:
    """Append the lines of a file."""
    if not is_parquet(name):
        with system.open_input_stream(name) as stream:
            shutil.copyfileobj(stream, target)
        target.write(b"\n")  # a file may end without a line break; an empty line is no line
        return
    from pyarrow import parquet

    with system.open_input_file(name) as file:
        for batch in parquet.ParquetFile(file).iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                target.write(line_of(row, name))


def line_of(row: dict[str, Any], name: str) -> bytes:
    """A row as a line of JSON, without what is null.

    Raises:
        InputError: JSON has no form for a value.
    """
    try:
        return json.dumps(bare(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"A row of {name} cannot be written as JSON: {one_line(error)}") from error


def bare(value: Any) -> Any:
    """A value without the fields of its objects that are null: a column of structures has every field in every row."""
    if isinstance(value, dict):
        return {key: bare(one) for key, one in value.items() if one is not None}
    return [bare(one) for one in value] if isinstance(value, list) else value
