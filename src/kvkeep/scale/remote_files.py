"""Inputs of jobs that are not a local JSONL file: Parquet, folders, and the remote paths that pyarrow knows.

They are copied to a local JSONL file first, so that everything after that is the same for all jobs. Ray Data reads the
same paths through the same package.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote, urlsplit

from kvkeep.batch.input import COMPLETION
from kvkeep.errors import InputError, one_line, pip_install
from kvkeep.result_files import Lock, is_address, sync, sync_folder
from kvkeep.scale import EXTRA

_PARQUET = (".parquet", ".pq")
_LINES = (".jsonl", ".ndjson", ".json")
_LOCAL = "file://"


def is_foreign(source: str) -> bool:
    """Return whether an input is no local JSONL file or pipe: an address with a scheme, a Parquet file, or a folder."""
    return is_address(source) or is_parquet(source) or os.path.isdir(source)


def is_parquet(name: str) -> bool:
    """Return whether a name has the ending of a Parquet file; the file is not looked at."""
    return name.lower().endswith(_PARQUET)


def is_within(name: str, source: str) -> bool:
    """Return whether a file, such as an output, would be read as a part of the folder ``source``, which is an input: it
    lies in it, however deep, and has an ending of Parquet or JSON lines.
    """
    return name.lower().endswith((*_PARQUET, *_LINES)) and _plain(name).startswith(f"{_plain(source).rstrip('/')}/")


def _plain(name: str) -> str:
    """Return a local path with its links resolved. An address with another scheme is returned unchanged."""
    local = unquote(name.removeprefix(_LOCAL)) if name.startswith(_LOCAL) else name
    return name if is_address(local) else Path(os.path.realpath(local)).as_posix()


@contextmanager
def as_lines(source: str) -> Iterator[Path]:
    """Copy the lines of an input to a local JSONL file, and yield its path; the file is removed with the context.

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
        made = tempfile.TemporaryDirectory(prefix="kvkeep-")
    except OSError as error:
        raise InputError(f"There is no folder for a copy of {source}: {error.strerror}. Set TMPDIR.") from error
    with made as folder:
        copy = Path(folder) / "lines.jsonl"
        try:
            # pyarrow takes no relative path
            system, path = fs.FileSystem.from_uri(source if is_address(source) else str(Path(source).resolve()))
            with copy.open("wb") as target:
                for name in _files(system, path, source):
                    _copy(system, name, target)
        except InputError:  # says already what happened
            raise
        except Exception as error:  # whatever a file system raises: no such file, no rights, no network
            raise InputError(f"The input {source} cannot be read: {one_line(error):.300}") from error
        yield copy


def _files(system: Any, path: str, source: str) -> list[str]:
    """Return the path of the file at a path, or those of the files of Parquet or JSON lines in a folder and the folders
    within, in the order of their paths.

    Args:
        system: pyarrow's file system.
        path: the path there.
        source: the input as the user named it, for messages.

    Raises:
        InputError: there is no such file, or the folder has none that can be read.
    """
    from pyarrow import fs

    info = system.get_file_info(path)
    if info.type == fs.FileType.NotFound:
        raise InputError(f"The input {source} does not exist.")
    if info.type != fs.FileType.Directory:
        return [path]
    inside = system.get_file_info(fs.FileSelector(path, recursive=True))
    names = sorted(file.path for file in inside if file.is_file and file.path.lower().endswith((*_PARQUET, *_LINES)))
    if not names:
        raise InputError(f"The folder {source} has no file that ends with {', '.join((*_LINES, *_PARQUET))}.")
    return names


def _copy(system: Any, name: str, target: IO[bytes]) -> None:
    """Append the lines of a file of pyarrow's file system to ``target``; rows of Parquet become lines of JSON."""
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
    """Return a row of a table as a line of JSON, with a line break, without fields that are null at any depth.

    Args:
        row: column → value.
        name: the file of the table, for messages.

    Raises:
        InputError: JSON has no form for a value.
    """
    try:
        return json.dumps(bare(row), ensure_ascii=False, allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"A row of {name} cannot be written as JSON: {one_line(error)}") from error


def bare(value: Any) -> Any:
    """Return a copy of a value whose objects have no null fields, at any depth: a column of structures has every field
    in every row.
    """
    if isinstance(value, dict):
        return {key: bare(part) for key, part in value.items() if part is not None}
    return [bare(part) for part in value] if isinstance(value, list) else value


# Outputs of jobs that are not a local JSONL file: Parquet, and the remote paths that pyarrow knows.
#
# A job writes to a local file, from which it can go on, and the whole file is published when its lines have run. What
# stands at the destination is therefore always a whole: the one before, or the new one.

_PART = ".part"
"""The ending of a file that is being written, here or at the destination."""


def is_foreign_output(target: str) -> bool:
    """Return whether an output is no local JSONL file or pipe: an address with a scheme, or a Parquet file."""
    return is_address(target) or is_parquet(target)


class Destination:
    """Where the completions of a job go, and the local folder in which they are collected.

    Args:
        target: ``s3://…``, ``gs://…``, ``hdfs://…``, ``file://…``, or a Parquet file.
        home: the folder for the local folders of targets that are addresses; that of a Parquet file lies beside it.

    Attributes:
        path: the local file of completions.

    Raises:
        InputError: pyarrow is not installed, or it does not know the address.
    """

    def __init__(self, target: str, home: Path) -> None:
        """Find the file system and the names; nothing is written yet.

        Raises:
            InputError: see the class.
        """
        try:
            from pyarrow import fs
        except ImportError as error:
            raise InputError(
                f"The output {target} is written by pyarrow, which is not installed: {pip_install(EXTRA)}."
            ) from error
        self.target, self._published = target, 0
        with self._explained("cannot be written"):
            self._system, self._at = fs.FileSystem.from_uri(
                target if is_address(target) else str(Path(target).resolve())
            )
        if not self._at.strip("/"):
            raise InputError(f"The output {target} names no file.")
        self._folder = home / self._name() if is_address(target) else Path(f"{target}.collected")
        self.path = self._folder / "completions.jsonl"
        own = hashlib.sha256(f"{platform.node()}:{self.path.absolute()}".encode()).hexdigest()[:8]
        self._part = (
            f"{self._at}.{own}{_PART}"  # that of a job on another machine, or of another user, has another name
        )

    @property
    def collected(self) -> bool:
        """Return whether the local file has any completion."""
        return self._size() > 0

    @contextmanager
    def held(self) -> Iterator[None]:
        """Lock the local folder while the context lasts. If nothing is collected there, copy an output that is at the
        destination already, so that the job goes on from it.

        At the end the local file is removed, unless it holds more than what is published, and so is an empty folder.

        Raises:
            InputError: another job writes to the destination, it cannot be written or read, or it is a Parquet file
                that is finished.
        """
        with self._locked():
            try:
                self._check()
                if not self._size() and self._exists():
                    self._take_up()
                    self._published = self._size()
                yield
            finally:
                self._copy.unlink(missing_ok=True)  # of a download that was cut off
                if self._size() == self._published:
                    self.path.unlink(missing_ok=True)
                with suppress(OSError):  # lines that were set aside are in there
                    self._folder.rmdir()

    def publish(self, *, complete: bool) -> None:
        """Write everything collected so far to the destination, in place of what is there.

        Args:
            complete: whether all lines have their completions, so that the local file is not needed any more.

        Raises:
            InputError: the destination cannot be written, or the lines are no table. The local file stays.
        """
        lines: io.BufferedIOBase
        with self._explained("is no table", f"All completions are in {self.path}, as JSONL."):
            lines = io.BytesIO(as_parquet(self.path)) if is_parquet(self.target) else self.path.open("rb")
        kept = f"All completions are in {self.path}; the same command writes them again."
        with lines, self._explained("cannot be written", kept):
            self._put(lines)
            self._system.move(self._part, self._at)
            if self._is_local:
                sync_folder(Path(self._at).parent)
        if complete:  # otherwise the file stays, and the same command goes on from it
            self._published = self._size()

    def _check(self) -> None:
        """Check that the destination can be written, by an empty file beside it that is removed again.

        Raises:
            InputError: the destination cannot be written.
        """
        with self._explained("cannot be written"):
            self._put(io.BytesIO())
            self._system.delete_file(self._part)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Make the local folder, and lock it while the context lasts.

        Another job may remove the folder at its end, just before it is locked here; then try again.
        """
        while True:
            with self._explained(f"needs the folder {self._folder}, which cannot be written"):
                # beside a Parquet file, a folder that is missing is a mistake of the user
                self._folder.mkdir(parents=is_address(self.target), exist_ok=True)
                try:
                    before, lock = self._folder.stat(), Lock(self._folder, self.target)
                except FileNotFoundError:  # removed since it was made
                    continue
            with lock:
                # the lock may be on a folder that was removed, and perhaps made again, before it was taken
                if self._folder.is_dir() and os.path.samestat(before, self._folder.stat()):
                    yield
                    return

    def _size(self) -> int:
        """Return the bytes of the local file; 0 if there is none."""
        return self.path.stat().st_size if self.path.exists() else 0

    def _exists(self) -> bool:
        """Return whether there is an output at the destination already; refuse a folder in its place.

        Raises:
            InputError: it is a folder, or cannot be looked up.
        """

        from pyarrow import fs

        with self._explained("cannot be read"):
            kind = self._system.get_file_info(self._at).type
        if kind == fs.FileType.Directory:
            raise InputError(f"The output {self.target} is a folder. Give the name of a file in that folder.")
        return bool(kind != fs.FileType.NotFound)

    def _take_up(self) -> None:
        """Copy an output that is there already to the local file, so that the job goes on from it.

        Raises:
            InputError: the output is a Parquet file, or cannot be read or copied.
        """
        if is_parquet(self.target):
            raise InputError(f"The output {self.target} exists. Remove it, or give another name.")
        what = f"cannot be read, or copied to {self._folder}"
        with self._explained(what), self._system.open_input_stream(self._at) as stream:
            with self._copy.open("wb") as file:
                shutil.copyfileobj(stream, file)
            # a copy that was cut off must not look like a whole output
            self._copy.replace(self.path)

    def _name(self) -> str:
        """Return a hash as the name of the local folder, the same however the destination's address is spelled."""
        # an address's query may name another server, such as the endpoint of S3
        place = str(Path(self._at).resolve()) if self._is_local else f"{self._at}?{urlsplit(self.target).query}"
        return hashlib.sha256(f"{self._system.type_name}:{place}".encode()).hexdigest()[:16]

    @property
    def _copy(self) -> Path:
        """Return the path to which an output is copied from the destination, before it becomes the local file."""
        return Path(f"{self.path}{_PART}")

    @property
    def _is_local(self) -> bool:
        """Return whether the output lies in a local file system."""

        from pyarrow import fs

        return isinstance(self._system, fs.LocalFileSystem)

    def _put(self, lines: io.BufferedIOBase) -> None:
        """Write lines to a file beside the destination, and on a local disk sync it. The caller then moves it there."""
        with self._system.open_output_stream(self._part) as stream:
            shutil.copyfileobj(lines, stream)
        if self._is_local:
            with open(self._part, "rb+") as file:  # pyarrow's stream has no way to sync
                sync(file)

    @contextmanager
    def _explained(self, what: str, kept: str = "") -> Iterator[None]:
        """Raise an `InputError` in place of any other error in the context: no rights, no network, no such bucket.

        Args:
            what: what is wrong with the output, as the end of a sentence.
            kept: a sentence on what is safe.
        """
        try:
            yield
        except InputError:
            raise
        except Exception as error:  # whatever a file system of pyarrow raises
            reason = one_line(error).rstrip(".")
            raise InputError(f"The output {self.target} {what}: {reason:.300}. {kept}".rstrip()) from error


def as_parquet(path: Path) -> bytes:
    """Return the bytes of a Parquet file with a job's output lines as rows and their fields as columns. Texts that look
    like dates stay texts.

    Args:
        path: the output lines, as JSONL.

    Raises:
        ValueError: a field has values that are no column.
    """
    import pyarrow
    from pyarrow import parquet

    with path.open("rb") as lines:
        rows = [_row(json.loads(line)) for line in lines]
    # in the order in which lines first have them; lines may lack some
    columns = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        try:
            columns[name] = pyarrow.array([row.get(name) for row in rows])
        except (pyarrow.ArrowException, OverflowError, UnicodeError) as error:
            raise ValueError(f"one column cannot hold all values of the field {name!r:.80} ({error})") from error
    sink = pyarrow.BufferOutputStream()
    parquet.write_table(pyarrow.table(columns), sink)
    return bytes(sink.getvalue().to_pybytes())


def _row(fields: dict[str, Any]) -> dict[str, Any]:
    """Return an output line as a row of a table, without empty objects. The completion's options become JSON text,
    since lines may give them in several types.
    """
    completion = fields.get(COMPLETION)
    if isinstance(completion, dict) and "options" in completion:
        fields = {**fields, COMPLETION: {**completion, "options": json.dumps(completion["options"])}}
    filled: dict[str, Any] = _filled(fields)
    return filled


def _filled(value: Any) -> Any:
    """Return a copy of a value without empty objects, for which Parquet has no form, at any depth. In a list they
    become ``None``.
    """
    if isinstance(value, dict):
        return {key: filled for key, part in value.items() if (filled := _filled(part)) != {}}
    if isinstance(value, list):
        return [None if (filled := _filled(part)) == {} else filled for part in value]
    return value
