"""The folder of an engine's idle sessions: a file for each memory, whole or not there at all."""

from __future__ import annotations

import itertools
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.errors import InputError
from kvkeep.result_files import Lock, sync_folder
from kvkeep.snapshot.file_io import check_target, not_saved

if TYPE_CHECKING:
    from kvkeep.engine.shelf import Kept

SUFFIX = ".kvkeep"
_UNNAMED = ".unnamed-{}" + SUFFIX
_NEW = ".{}" + SUFFIX + ".{}.new"


class Folder:
    """A folder of memories, one file for each, used by one engine at a time."""

    def __init__(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(path, str(path))
        except OSError as error:
            why = error.strerror or str(error)
            raise InputError(f"The session folder {path} cannot be used: {why}. Give another `session_dir`.") from error
        except InputError as error:
            raise InputError(
                f"Another engine uses the session folder {path}, and two would overwrite each other's sessions. Close "
                "it first, or give each a `session_dir` of its own."
            ) from error
        self.path, self._numbers = path, itertools.count()
        self._end = weakref.finalize(self, self._lock.release)
        self._remove_leftovers()

    def path_of(self, name: str) -> Path:
        """The file of a session with a name."""
        return self.path / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """The names of the sessions that have a file, in order."""
        found = (path.name.removesuffix(SUFFIX) for path in self.path.glob(f"*{SUFFIX}"))
        return sorted(name for name in found if not name.startswith("."))

    @property
    def nbytes(self) -> int:
        """Bytes of all files of memories."""
        total = 0
        for path in self.path.glob(f"*{SUFFIX}*"):
            with suppress(OSError):  # removed meanwhile
                total += path.stat().st_size
        return total

    def write(self, kept: Kept) -> None:
        """Write a memory to a file that is removed together with it, unless `publish` gives it a name.

        Raises:
            SnapshotError: it cannot be written.
        """
        held, number = kept.held, next(self._numbers)
        if held is None or kept.path is not None or kept.spare is not None:
            return
        path = self.path / (_UNNAMED.format(number) if kept.name is None else _NEW.format(kept.name, number))
        held.save(path)
        weakref.finalize(kept, remove, path)
        kept.spare = path

    def publish(self, file: Path, name: str) -> Path:
        """Put a file in the place of the older one of a session, and return its path.

        Raises:
            SnapshotError: there is something else.
        """
        target = self.path_of(name)
        check_target(target)
        try:
            file.replace(target)
        except OSError as error:
            raise not_saved(target, error) from error
        return target

    def sync(self) -> None:
        """Wait until the names of the files are on the disk."""
        sync_folder(self.path)

    def close(self) -> None:
        """Let others use the folder."""
        self._remove_leftovers()
        self._end()

    def _remove_leftovers(self) -> None:
        """Remove the files of sessions without a name, and parts of files of a process that was killed."""
        for pattern in (_UNNAMED.format("*"), f".*{SUFFIX}.*.new"):
            for path in self.path.glob(pattern):
                remove(path)


def remove(path: Path) -> None:
    """Remove a file, if it is there."""
    with suppress(OSError):
        path.unlink()
