"""Outputs of jobs that are not a local JSONL file: Parquet, and the remote paths that pyarrow knows.

A job writes to a local file, from which it can go on, and the whole file is published when its lines have run. What
stands at the destination is therefore always a whole: the one before, or the new one.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError, one_line
from kvkeep.scale import EXTRA
from kvkeep.scale.files import is_address, is_parquet, line_of

_PART, _CHECK = ".part", ".check"
"""Endings of names at the destination: of what is being published, and of an empty file that comes and goes."""

_MOST = 2**31 - 1
"""Bytes of lines that become one table."""


def is_foreign(target: str) -> bool:
    """Whether an output is no local JSONL file or pipe: an address with a scheme, or a Parquet file."""
    return is_address(target) or is_parquet(target)


class Destination:
    """Where the completions of a job go, and the local file in which they are collected.

    Args:
        target: ``s3://…``, ``gs://…``, ``hdfs://…``, ``file://…``, or a Parquet file.
        folder: for the local file, if the target is an address.

    Attributes:
        path: the local file. Of a Parquet file it lies beside it.

    Raises:
        InputError: pyarrow is not installed, or it does not know the address.
    """

    def __init__(self, target: str, folder: Path) -> None:
        try:
            from pyarrow import fs
        except ImportError as error:
            raise InputError(
                f"The output {target} is written by pyarrow, which is not installed: pip install '{EXTRA}'."
            ) from error
        self.target, self._taken = target, 0
        with self._explained("cannot be written"):
            self._system, self._at = fs.FileSystem.from_uri(
                target if is_address(target) else str(Path(target).resolve())
            )
        if not self._at.strip("/"):
            raise InputError(f"The output {target} names no file.")
        name = hashlib.sha256(target.encode()).hexdigest()[:16]
        self.path = folder / f"{name}.jsonl" if is_address(target) else Path(f"{target}{_PART}.jsonl")

    def begin(self) -> None:
        """Check that the destination can be written, and take up what an earlier run of the job has published.

        Raises:
            InputError: it cannot be written or read, or is a Parquet file that is finished.
        """
        with self._explained("cannot be written"):
            if is_address(self.target):
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self._put(io.BytesIO(), _CHECK)
            self._system.delete_file(self._at + _CHECK)
        if not self._size() and self._exists():
            self._take_up()
            self._taken = self._size()

    def leave(self) -> None:
        """Remove the local file unless it holds more than what is published."""
        if self._size() == self._taken:
            self.path.unlink(missing_ok=True)

    def _size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    def publish(self) -> None:
        """Write what was collected to the destination.

        Raises:
            InputError: that fails. The local file stays.
        """
        lines: io.BufferedIOBase
        with self._explained("is no table", f"All completions are in {self.path}, as JSONL."):
            lines = io.BytesIO(as_parquet(self.path)) if is_parquet(self.target) else self.path.open("rb")
        kept = f"All completions are in {self.path}; the same command writes them again."
        with lines, self._explained("cannot be written", kept):
            self._put(lines, _PART)
            self._system.move(self._at + _PART, self._at)

    def _exists(self) -> bool:
        from pyarrow import fs

        with self._explained("cannot be read"):
            found = self._system.get_file_info(self._at).type
        if found == fs.FileType.Directory:
            raise InputError(f"The output {self.target} is a folder. Give the name of a file in that folder.")
        return bool(found != fs.FileType.NotFound)

    def _take_up(self) -> None:
        if is_parquet(self.target):
            raise InputError(f"The output {self.target} exists. Remove it, or give another name.")
        copy = Path(f"{self.path}{_PART}")
        with self._explained("cannot be read"), self._system.open_input_stream(self._at) as stream:
            with copy.open("wb") as file:
                shutil.copyfileobj(stream, file)
            copy.replace(self.path)

    def _put(self, lines: io.BufferedIOBase, ending: str) -> None:
        with self._system.open_output_stream(self._at + ending) as stream:
            shutil.copyfileobj(lines, stream)

    @contextmanager
    def _explained(self, what: str, kept: str = "") -> Iterator[None]:
        """Turn whatever a file system raises into an `InputError`: no rights, no network, no such bucket."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            reason = one_line(error).rstrip(".")
            raise InputError(f"The output {self.target} {what}: {reason:.300}. {kept}".rstrip()) from error


def as_parquet(path: Path) -> bytes:
    """The lines of a JSONL file as the rows of a Parquet file, fields as columns.

    Raises:
        Exception: of pyarrow, if a field has values of several kinds.
    """
    from pyarrow import BufferOutputStream, parquet
    from pyarrow import json as reader

    with path.open("rb") as lines:
        rows = b"".join(line_of(_filled(json.loads(line)), str(path)) for line in lines)
    whole = reader.ReadOptions(block_size=min(len(rows) + 1, _MOST))
    sink = BufferOutputStream()
    parquet.write_table(reader.read_json(io.BytesIO(rows), read_options=whole), sink)
    return bytes(sink.getvalue().to_pybytes())


def _filled(value: Any) -> Any:
    """A value without empty objects, for which Parquet has no form."""
    if isinstance(value, dict):
        return {key: _filled(one) for key, one in value.items() if one != {}}
    return [_filled(one) for one in value] if isinstance(value, list) else value
