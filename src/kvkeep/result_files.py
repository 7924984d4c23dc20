"""Files of results that survive crashes: one writer at a time, written whole or not at all, synced to the disk.

Batch jobs, evaluations and analyses write their results through these functions.
"""

from __future__ import annotations

import abc
import errno
import json
import math
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NoReturn

from kvkeep.errors import InputError

if sys.platform != "win32":  # Windows has no POSIX locks, so a second writer is not kept out there
    import fcntl

_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
"""Errors of a lock that somebody else holds, which differ by system."""
_LEFTOVER = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.new")
"""Names of the temporary files of `write_whole`."""
_LONGEST = 200
"""Bytes of a name that a temporary file's name repeats; file systems take 255 in all."""
_MOST_SHOWN = 200  # characters of a setting in a message
_DEEPEST = 60
"""Levels of nested lists and objects; values are walked by recursive functions."""
_LARGEST = 2**64
"""The largest whole number: sums with floats have to be possible."""


class Lock:
    """The right to write to a file or folder, held until it is released or the process ends in any way.

    The lock belongs to the file or folder itself, so no lock file is left behind. On file systems without locks it
    keeps nobody out.

    Args:
        target: an open file, or a folder that exists.
        name: name of the target in messages.
        shared: whether others may hold it as well that share it.

    Raises:
        InputError: another process, or another part of this one, is writing there.
    """

    def __init__(self, target: IO[bytes] | Path, name: str, *, shared: bool = False):
        """Take the lock on a file or folder, without waiting for it."""
        self._own: int | None = None
        if sys.platform == "win32":  # nor can a folder be opened there
            return
        if isinstance(target, Path):
            descriptor = self._own = os.open(target, os.O_RDONLY)
        else:
            descriptor = target.fileno()
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            # other errors come from file systems without locks, and are passed over
            if error.errno in _TAKEN:
                self.release()
                raise InputError(
                    f"Another run is writing to {name}. Two writers would mix up or lose results: wait for the other "
                    "one to end, or give another output."
                ) from error

    def release(self) -> None:
        """Release the lock on a folder. That of a file is released when the file is closed."""
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def write_whole(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Replace a file's content: after a crash or a power cut the file holds the old or the new one, never a part.

    The new content is written to a file of a random name first, so that no link that somebody made is followed.

    Args:
        path: the file.
        data: the content, whole or in pieces.

    Raises:
        OSError: the file cannot be written; the old content stays.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{_short(path.name)}.", suffix=".new", dir=path.parent)
    beside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([data] if isinstance(data, bytes) else data)
            sync(file)
        os.chmod(beside, 0o666 & ~_umask())  # mkstemp's files can be read by their owner only
        beside.replace(path)
    except BaseException:
        with suppress(OSError):  # a full disk needs the room
            beside.unlink()
        raise
    sync_folder(path.parent)


def _short(name: str) -> str:
    """Return as much of the beginning of a file's name as fits into the name of its temporary file: 200 bytes."""
    return os.fsdecode(os.fsencode(name)[:_LONGEST])


def remove_leftovers(folder: Path, names: Collection[str], before: float | None = None) -> None:
    """Remove temporary files that `write_whole` left behind when its process was killed.

    Args:
        folder: the folder; the caller holds the lock on its files.
        names: names of the files that were written.
        before: time at which the lock was taken, as of `time.time`; younger files stay. Default: now.
    """
    limit, names = time.time() if before is None else before, {*map(_short, names)}
    with suppress(OSError):  # leftovers do no harm
        for path in folder.iterdir():
            found = _LEFTOVER.fullmatch(path.name)
            if found and found[1] in names and path.is_file() and path.lstat().st_mtime < limit:
                path.unlink()


def is_address(name: str) -> bool:
    """Return whether a name has a scheme, such as ``s3://``, and so is no path on this machine."""
    return "://" in name


def in_full(name: str | os.PathLike[str]) -> Path:
    """Return a path with the home folder in place of ``~`` or ``~name``. ``~name`` stays if there is no such user."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def as_text(name: str) -> str:
    """Return a file's name as text that UTF-8 can hold. What stands in it for other bytes becomes escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def sync(file: IO[bytes]) -> None:
    """Wait until everything that was written to a file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def read_whole(path: Path) -> bytes | None:
    """Return the content of a file, or ``None`` if nothing has that name.

    Raises:
        InputError: the path is no file or a broken link, or the file cannot be read.
    """
    try:
        if not path.is_file() and os.path.lexists(path):  # a pipe would never end
            kind = "is a folder" if path.is_dir() else "is a link to nothing" if path.is_symlink() else "is no file"
            raise InputError(f"{path} {kind}, where results should be. Remove it, or choose another folder.")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}. Make it readable, or choose another folder.") from (
            error
        )


def parse(data: bytes) -> Any:
    """Parse a JSON text into a value that can be computed with, shown and written again.

    Raises:
        ValueError: the text is not JSON in UTF-8, is nested too deeply, or holds a number or string that kvkeep never
            writes.
    """
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_plain(found, _DEEPEST)
    return found


def _check_plain(value: object, room: int) -> None:
    """Refuse a value with parts that JSON, a float or UTF-8 cannot hold, or nested too deep for recursive functions.

    Args:
        value: a value as `json` reads it.
        room: the levels that it may still have, itself included.

    Raises:
        ValueError: there is such a value.
    """
    if room == 0:
        raise ValueError("it is nested too deeply")
    if isinstance(value, dict):
        for key, part in value.items():
            _check_plain(key, room - 1)
            _check_plain(part, room - 1)
    elif isinstance(value, list):
        for part in value:
            _check_plain(part, room - 1)
    elif isinstance(value, str):
        value.encode()  # half of a character raises
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > _LARGEST):
        raise ValueError("a number in it is not finite, or too large")


def read_object(path: Path, remedy: str = "Remove it, or choose another `output` folder.") -> dict[str, Any] | None:
    """Return the JSON object that a file holds; ``None`` if there is no file.

    Args:
        path: the file.
        remedy: a sentence on what to do about a file that cannot be used.

    Raises:
        InputError: the file cannot be read, or does not hold a JSON object.
    """
    data = read_whole(path)
    if data is None:
        return None
    try:
        found = parse(data)
    except ValueError as error:
        raise InputError(f"{path} cannot be read: {error}. {remedy}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} holds no JSON object. {remedy}")
    return found


def finite(value: Any) -> Any:
    """Return a copy of a value as JSON holds it: ``None`` in place of NaN and infinity, lists for tuples, texts as
    keys.
    """
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _umask() -> int:
    """Return the process's umask, the permissions that new files do not get; it can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk, if the system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# A folder of results of an evaluation or an analysis.
#
# One run at a time writes to it. Results of another run are refused, and old rows are checked when they are read.

MANIFEST = "run.json"
"""The file that says which run a folder belongs to; without it, files in the folder may be anybody's."""


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
        """Look at the path; nothing is made or locked yet."""
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
        if self.path.is_dir():  # `locked` would make it, and nobody writes to a folder that does not exist
            with self.locked():
                pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and keep other runs out while the context lasts; a nested call does nothing.

        Temporary files that a killed run left there are removed.

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
        """Refuse a folder that has a file which a run would overwrite. Call this where `MANIFEST` is missing: it is not
        looked for.

        Raises:
            InputError: there is such a file.
        """
        if found := sorted(name for name in self.names if os.path.lexists(self.path / name)):
            raise InputError(
                f"{self.path} has {found[0]} but no {MANIFEST}, so it is unknown what was run there, and the file "
                "would be overwritten. Choose another `output` folder."
            )

    def write_bytes(self, name: str, data: bytes) -> Path:
        """Write a file of the folder with `write_whole` and return its path.

        Raises:
            InputError: the file cannot be written; earlier results stay.
        """
        with self.writing():
            write_whole(self.path / name, data)
        return self.path / name

    @property
    def safe(self) -> str:
        """Return a sentence on the results that are safely on the disk, for an error; empty if there is none to say."""
        return ""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Raise an `InputError` in place of an ``OSError`` in the context; it says what is safe and how to go on.

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
    """Return the number of bytes of a file's whole lines, and its rows: one JSON object per line.

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
        # only the last line can have been cut off; any other is damage
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
    """Return whether the last line of a file, which is no row, may be one that was cut off: what is there of it begins
    as rows begin. Zero bytes stand for what never reached the disk.

    Args:
        line: the line.
        beginning: the first bytes of every row.
    """
    written = line.rstrip(b"\0\n")
    # a run never writes an empty line, so one shows that the file was changed
    return line != b"\n" and beginning.startswith(written[: len(beginning)])


def _row(line: bytes, fault: Callable[[dict[str, Any]], str | None]) -> tuple[Any, str | None]:
    """Return the JSON value of a line, and what is wrong with it (``None`` if nothing is).

    The value is ``None`` for a line that was cut off or is no JSON, and the line itself if `parse` refuses something in
    it.

    Args:
        line: the line, with its line break.
        fault: returns what is wrong with an object that should be a row; ``None`` if nothing is.
    """
    try:
        row = parse(line) if line.endswith(b"\n") else None
    except (json.JSONDecodeError, UnicodeDecodeError):
        row = None
    except ValueError as error:
        return line, str(error)
    return row, fault(row) if isinstance(row, dict) else "it is no JSON object"


class RowFile:
    """A file of one JSON object per line. What one call wrote is on the disk before the next one writes.

    Args:
        path: the file; it need not exist yet.
        beginning: see `read_rows`.
        fault: see `read_rows`.
    """

    def __init__(self, path: Path, beginning: bytes, fault: Callable[[dict[str, Any]], str | None]):
        self.path, self._beginning, self._fault = path, beginning, fault

    def read(self) -> list[dict[str, Any]]:
        """Return the rows of all whole lines.

        Raises:
            InputError: see `read_rows`.
        """
        return read_rows(self.path, self._beginning, self._fault)[1]

    @contextmanager
    def locked(self) -> Iterator[IO[bytes]]:
        """Yield the file, opened for appending, and keep other writers out while the context lasts. First remove a last
        line that was cut off.

        Raises:
            InputError: another run is writing there, or see `read_rows`.
            OSError: the file cannot be written.
        """
        with self.path.open("ab") as file, Lock(file, str(self.path)):
            end, _ = read_rows(self.path, self._beginning, self._fault)
            file.truncate(end)
            yield file

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Append rows to the file, wait until they are on the disk, and return them as they will be read.

        Raises:
            OSError: the rows cannot be written; all earlier ones are safe.
            ValueError: a number is not finite; see `finite`.
        """
        lines = [as_line(row) for row in rows]
        with self.path.open("ab") as file:
            file.writelines(lines)
            sync(file)
        return [json.loads(line) for line in lines]

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write the file anew with these rows in place of all others.

        Raises:
            OSError: the rows cannot be written; the old ones stay.
            ValueError: a number is not finite; see `finite`.
        """
        write_whole(self.path, map(as_line, rows))


def as_line(row: Mapping[str, Any]) -> bytes:
    """Return a row as a line of JSON, with a line break at its end.

    Raises:
        ValueError: a number is not finite; see `finite`.
    """
    return (json.dumps(row, allow_nan=False, ensure_ascii=False) + "\n").encode()


ROWS = "results.jsonl"
"""The file of a `RowFolder` with its rows."""


class RowFolder(Results, abc.ABC):
    """A folder whose run is described by `MANIFEST`, and which has a row for each finished part of it.

    Args:
        path: the folder; it need not exist yet.

    Attributes:
        beginning: the first bytes of every row, see `read_rows`.

    Raises:
        InputError: the path is no folder, or its files cannot be read.
    """

    names: Collection[str] = (ROWS,)
    beginning: bytes

    def __init__(self, path: Path):
        """Read the rows that are there."""
        self.forget()  # before the folder is looked at, since `safe` counts the rows
        super().__init__(path)
        self._file = RowFile(path / ROWS, self.beginning, self.fault)
        self._read()

    @abc.abstractmethod
    def forget(self) -> None:
        """Forget the rows in memory, which are about to be read from the file again."""

    @abc.abstractmethod
    def keep(self, row: dict[str, Any]) -> None:
        """Remember a row that was read from the file, or was just written to it."""

    @abc.abstractmethod
    def fault(self, row: dict[str, Any]) -> str | None:
        """Return what is wrong with an object that was read as a row, as part of a sentence; ``None`` if nothing is."""

    @abc.abstractmethod
    def check(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Compare a run with the run that the folder already holds, and return the description of both together, which
        is then written to the folder.

        Args:
            manifest: the description of the new run.

        Raises:
            InputError: the folder holds results of another run.
        """

    def open(self, manifest: dict[str, Any]) -> None:
        """Prepare the folder for more rows of a run: write its description, lock the file of rows, read these again.

        The folder has to be `locked`, whose end releases the file as well.

        Args:
            manifest: the description of the run.

        Raises:
            InputError: the folder holds results of another run, or cannot be written.
        """
        self._read()  # another run may have written since the folder was first read
        self.write_bytes(MANIFEST, (json.dumps(self.check(manifest), indent=2) + "\n").encode())
        with self.writing():
            self._held.enter_context(self._file.locked())  # a batch job locks its output file, not the folder
            self._read()

    def extend(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to the file, wait until they are on the disk, and `keep` them.

        Raises:
            InputError: the rows cannot be written; all earlier ones are safe.
        """
        with self.writing():
            written = self._file.extend(rows)
        for row in written:
            self.keep(row)

    def _read(self) -> None:
        """Forget the rows in memory, and remember those that the file has now."""
        self.forget()
        for row in self._file.read():
            self.keep(row)


def check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Refuse to go on in a folder that holds another run.

    Args:
        folder: the folder.
        found: settings of the run there.
        wanted: settings of the new run, as far as they are known; others are not compared.
        names: settings that have to be the same: key → name in messages.

    Raises:
        InputError: a setting differs.
    """
    for key, name in names.items():
        if key in wanted and found.get(key) != wanted[key]:
            _refuse(folder, name, found.get(key, "unknown"), wanted[key])


def _refuse(folder: Path, what: str, then: object, now: object) -> NoReturn:
    """Raise the `InputError` for a folder of another run, with what a setting was then and is now."""
    # with their types where these differ: 1 and "1" would look alike
    show = str if type(then) is type(now) else repr
    was, here = (text if len(text := show(value)) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "…" for value in (then, now))
    raise InputError(
        f"{folder} holds results of another run: {what} was {was} and is {here} now. Mixed results cannot be compared: "
        "choose another `output` folder, or the same settings to go on."
    )


def command(words: str, *arguments: object) -> str:
    """Return a shell command line: the words as they are, then the arguments, quoted."""
    return " ".join([words, *(shlex.quote(str(argument)) for argument in arguments)])


# The values that a row or a description of a run must have, from which follows what is wrong with one.


@dataclass(frozen=True)
class ValueKind:
    """What a value has to be.

    Attributes:
        fits: whether a value is of this kind.
        name: the kind in messages.
    """

    fits: Callable[[object], bool]
    name: str

    def called(self, name: str) -> ValueKind:
        """Return the same kind with another name in messages."""
        return ValueKind(self.fits, name)


Schema = Mapping[str, ValueKind]
"""Entry → its kind. A dot leads to an entry of an entry."""


def whole_number(least: int | None = 0) -> ValueKind:
    """Return the kind of whole numbers of at least ``least``; ``None``: any."""

    def fits(value: object) -> bool:
        # true and false are ints to Python
        return isinstance(value, int) and not isinstance(value, bool) and (least is None or value >= least)

    return ValueKind(fits, "a whole number")


def real_number(least: int | float = -math.inf, most: int | float = math.inf) -> ValueKind:
    """Return the kind of finite numbers from ``least`` to ``most``."""

    def fits(value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return math.isfinite(value) and least <= value <= most

    return ValueKind(fits, "a number")


def text_value(longest: int | None = None) -> ValueKind:
    """Return the kind of texts of at most so many characters; ``None``: any."""
    name = "text" if longest is None else f"text of at most {longest} characters"
    return ValueKind(lambda value: isinstance(value, str) and (longest is None or len(value) <= longest), name)


def optional(kind: ValueKind) -> ValueKind:
    """Return the kind of values of another kind, or null."""
    return ValueKind(lambda value: value is None or kind.fits(value), f"{kind.name} or null")


def list_of(kind: ValueKind, length: int | None = None) -> ValueKind:
    """Return the kind of lists whose entries are all of one kind; ``length``: how many, ``None``: any number. Its name
    in messages does not tell the length; see `ValueKind.called`.
    """

    def fits(value: object) -> bool:
        return isinstance(value, list) and length in (None, len(value)) and all(map(kind.fits, value))

    return ValueKind(fits, f"a list, each entry {kind.name}")


def tuple_of(*kinds: ValueKind) -> ValueKind:
    """Return the kind of lists that have one value of each of these kinds, in order."""

    def fits(value: object) -> bool:
        if not isinstance(value, list) or len(value) != len(kinds):
            return False
        return all(kind.fits(part) for kind, part in zip(kinds, value, strict=True))

    return ValueKind(fits, "a list of " + ", ".join(kind.name for kind in kinds))


def either(*kinds: ValueKind) -> ValueKind:
    """Return the kind of values that are of one of these kinds."""
    return ValueKind(lambda value: any(kind.fits(value) for kind in kinds), " or ".join(kind.name for kind in kinds))


OBJECT = ValueKind(lambda value: isinstance(value, dict), "an object")


def first_fault(found: Mapping[str, Any], schema: Schema, of: str = "") -> str | None:
    """Return what is wrong with the first entry that is missing or of the wrong kind; ``None`` if all are right.
    Entries that the schema does not name may be anything.

    The answer is part of a sentence. A name such as ``a.b`` stands for the entry ``b`` of the mapping ``a``.

    Args:
        found: the entries.
        schema: their kinds.
        of: stands before an entry's name in the message.
    """
    for path, kind in schema.items():
        value: Any = found
        for key in path.split("."):
            if not isinstance(value, Mapping) or key not in value:
                return f"it has no {of + path!r}"
            value = value[key]
        if not kind.fits(value):
            return f"its {of + path!r} is not {kind.name}"
    return None
