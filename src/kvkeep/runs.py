"""Files of results that survive whatever happens: one writer at a time, whole or absent, on the disk when it matters.

Batch jobs, evaluations and analyses all write their results through these functions.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from kvkeep.errors import InputError

if sys.platform != "win32":  # Windows has no POSIX locks: nothing keeps a second writer out there
    import fcntl

_TAKEN = {errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES}
_LEFTOVER = re.compile(r"\.(.+)\.[a-z0-9_]{8}\.new")
"""How `write_whole` names what it writes beside a file."""
_DEEPEST = 60
_LARGEST = 2**64
"""Nested values and whole numbers beyond these would stop functions that call themselves, and sums of floats."""


class Lock:
    """The right to write to a file or folder, held until it is released or the process ends, however it ends.

    The lock belongs to the file or folder itself, so nothing is left behind that would have to be removed. On file
    systems that have no locks it keeps nobody out.

    Args:
        target: an open file, or a folder that exists.
        name: what messages call it.

    Raises:
        InputError: another process, or another part of this one, is writing there.
    """

    def __init__(self, target: IO[bytes] | Path, name: str):
        self._own: int | None = None
        if sys.platform == "win32":  # where a folder cannot be opened, either
            return
        if isinstance(target, Path):
            descriptor = self._own = os.open(target, os.O_RDONLY)
        else:
            descriptor = target.fileno()
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                self.release()
                raise InputError(
                    f"Another run is writing to {name}. Two writers would mix up or lose results: wait for the other "
                    "one to end, or give another output."
                ) from error

    def release(self) -> None:
        """Let others write; a file that was given stays open, and locked until it is closed."""
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file at once: after a crash or a power cut it holds the old content or the new one, never a part.

    The new content is written to a file of a random name beside it, so a link that waits there is not followed.

    Raises:
        OSError: it cannot be written; the old content stays.
    """
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".new", dir=path.parent)
    beside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            sync(file)
        os.chmod(beside, 0o666 & ~_umask())  # mkstemp makes files that only their owner can read
        beside.replace(path)
    except BaseException:
        with suppress(OSError):  # a full disk needs the room
            beside.unlink()
        raise
    _sync_folder(path.parent)


def remove_leftovers(folder: Path, names: Collection[str], before: float | None = None) -> None:
    """Remove what `write_whole` left beside files of these names when its process was killed.

    Args:
        folder: where the caller has the lock on these files.
        names: of the files.
        before: when the lock was taken, as of `time.time`; younger files stay. Default: now.
    """
    limit = time.time() if before is None else before
    with suppress(OSError):  # they are only in the way
        for path in folder.iterdir():
            found = _LEFTOVER.fullmatch(path.name)
            if found and found[1] in names and path.is_file() and path.lstat().st_mtime < limit:
                path.unlink()


def in_full(name: str | os.PathLike[str]) -> Path:
    """The path with the home folder for ``~``; that of a user who does not exist is a name like any other."""
    with suppress(RuntimeError):
        return Path(name).expanduser()
    return Path(name)


def as_text(name: str) -> str:
    """A name as UTF-8 can hold it: bytes of a file's name that are no UTF-8 become escapes."""
    return name.encode("utf-8", "backslashreplace").decode()


def sync(file: IO[bytes]) -> None:
    """Wait until what was written is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def read_whole(path: Path) -> bytes | None:
    """The content of a file; ``None`` if there is nothing of that name.

    Raises:
        InputError: it is no file, a link to nothing, or cannot be read.
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
    """The value of a JSON text as this package writes it: what is read here can be computed with, shown and written.

    Raises:
        ValueError: it is no JSON, or a number or string in it is none that this package writes.
    """
    try:
        found = json.loads(data.decode("utf-8-sig"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_plain(found, _DEEPEST)
    return found


def _check_plain(value: object, room: int) -> None:
    """Refuse what JSON, a float or UTF-8 cannot hold, and what is too deep for functions that call themselves."""
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
        value.encode()
    elif (isinstance(value, float) and not math.isfinite(value)) or (isinstance(value, int) and abs(value) > _LARGEST):
        raise ValueError("a number in it is not finite, or too large")


def read_object(path: Path, remedy: str = "Remove it, or choose another --output folder.") -> dict[str, Any] | None:
    """Read a file that holds a JSON object; ``None`` if there is no file.

    Args:
        path: the file.
        remedy: what to do about a file that cannot be used, as a sentence.

    Raises:
        InputError: it cannot be read, or holds something else.
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
    """The same value without numbers that JSON cannot hold: NaN and infinity become null."""
    if isinstance(value, dict):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _umask() -> int:
    """The process's mask of permissions, which can be read only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _sync_folder(folder: Path) -> None:
    """Wait until a folder's entries are on the disk, where the system can say so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
