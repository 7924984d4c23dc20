"""The memories of idle sessions: in main memory, and beyond a number of bytes in a folder."""

from __future__ import annotations

import itertools
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvkeep.engine.past import Past
from kvkeep.engine.sampling import whole_within
from kvkeep.errors import InputError
from kvkeep.pins import Spans
from kvkeep.runs import Lock, in_full
from kvkeep.snapshot import Snapshot

SUFFIX = ".kvkeep"
_UNNAMED = ".unnamed-{}" + SUFFIX
_LONGEST = 200
"""Bytes of a name; file systems take 255 with what is added."""


@dataclass(eq=False)
class Kept:
    """A memory at rest. It never changes, but moves between main memory and the disk.

    Attributes:
        name: of the session whose file it is written to; ``None``: a file of its own, which goes with it.
        nbytes: its bytes in main memory.
        held: the memory, while it is in main memory.
        path: its file, once it is written.
    """

    name: str | None
    nbytes: int
    held: Snapshot | None = None
    path: Path | None = None

    def snapshot(self) -> Snapshot:
        """Return the memory.

        Raises:
            SnapshotError: its file cannot be read any more.
        """
        if self.held is not None:
            return self.held
        assert self.path is not None
        return Snapshot.load(self.path)


@dataclass(frozen=True)
class State:
    """A session after its last finished turn.

    Attributes:
        past: the tokens and messages so far.
        kept: the memory of these tokens; ``None`` before the first turn.
        pins: spans of positions that may not be evicted, besides those of the memory: the next turn's.
    """

    past: Past
    kept: Kept | None = None
    pins: Spans = ()


class Shelf:
    """Keeps memories, least recently used first on the disk.

    Args:
        most_bytes: bytes of main memory for all of them; ``None``: no limit.
        folder: takes the others, and the memories of named sessions; one engine at a time uses it.

    Raises:
        InputError: there is a limit and no folder, the folder cannot be made, or another engine uses it.
    """

    def __init__(self, most_bytes: int | None = None, folder: str | os.PathLike[str] | None = None) -> None:
        if most_bytes is not None:
            most_bytes = whole_within("session_memory", most_bytes, 0, 2**63 - 1)
        if most_bytes is not None and folder is None:
            raise InputError(
                f"session_memory={most_bytes} leaves sessions beyond it no place: give a `session_dir` for them, too."
            )
        self._most_bytes = most_bytes
        self.folder = None if folder is None else _Folder(in_full(folder))
        self._used: dict[int, weakref.ref[Kept]] = {}
        self._clock = itertools.count()

    @property
    def held_bytes(self) -> int:
        """Bytes of all memories in main memory."""
        return sum(kept.nbytes for kept in self._in_memory())

    def keep(self, snapshot: Snapshot, name: str | None = None, *, instead: Kept | None = None) -> Kept:
        """Keep a memory in main memory, and write others to the disk if there is not room for all.

        Args:
            snapshot: the memory.
            name: of its session.
            instead: a memory that is given up for it.

        Raises:
            SnapshotError: the disk is full. Nothing is lost, but the memory is not kept.
        """
        kept = Kept(name, snapshot.nbytes, snapshot)
        self._touch(kept)
        self._make_room(spared=instead)
        return kept

    def open(self, name: str) -> Kept | None:
        """Return the memory that was written under a name; ``None`` if there is none."""
        path = None if self.folder is None else self.folder.path_of(name)
        if path is None or not path.exists():
            return None
        return Kept(name, Snapshot.load(path).nbytes, path=path)

    def load(self, kept: Kept) -> Snapshot:
        """Return a memory, which counts as a use of it.

        Raises:
            SnapshotError: its file cannot be read any more.
        """
        if kept.held is not None:
            self._touch(kept)
        return kept.snapshot()

    def write(self, kept: Kept) -> None:
        """Write a memory to the disk, unless it is there. It stays in main memory as well.

        Raises:
            SnapshotError: the file cannot be written; an older file of that name stays as it was.
        """
        if kept.path is None and kept.held is not None and self.folder is not None:
            kept.path = self.folder.write(kept)

    def remove(self, name: str) -> None:
        """Remove the file of a name, if there is one."""
        if self.folder is not None:
            _remove(self.folder.path_of(name))

    def close(self) -> None:
        """Let others use the folder."""
        if self.folder is not None:
            self.folder.close()

    def _touch(self, kept: Kept) -> None:
        """Note that a memory was used."""
        self._used = {key: ref for key, ref in self._used.items() if ref() not in (None, kept)}
        self._used[next(self._clock)] = weakref.ref(kept)

    def _in_memory(self) -> list[Kept]:
        """The memories in main memory, least recently used first."""
        found = (ref() for ref in list(self._used.values()))
        return [kept for kept in found if kept is not None and kept.held is not None]

    def _make_room(self, spared: Kept | None) -> None:
        """Move memories to the disk until the others fit."""
        if self._most_bytes is None:
            return
        waiting = [kept for kept in self._in_memory() if kept is not spared]
        held = sum(kept.nbytes for kept in waiting)
        for kept in waiting:
            if held <= self._most_bytes:
                return
            self.write(kept)
            kept.held = None
            held -= kept.nbytes


class _Folder:
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

    def write(self, kept: Kept) -> Path:
        """Write a memory and return its file. A file of a memory without a name is removed together with it."""
        assert kept.held is not None
        own = kept.name is None
        path = self.path / _UNNAMED.format(next(self._numbers)) if own else self.path_of(str(kept.name))
        kept.held.save(path)
        if own:
            weakref.finalize(kept, _remove, path)
        return path

    def close(self) -> None:
        """Let others use the folder."""
        self._remove_leftovers()
        self._end()

    def _remove_leftovers(self) -> None:
        """Remove the files of sessions without a name, and parts of files of a process that was killed."""
        for pattern in (_UNNAMED.format("*"), f".*{SUFFIX}.*.new"):
            for path in self.path.glob(pattern):
                _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def check_name(name: object) -> str:
    """Return the name of a session.

    Raises:
        InputError: it cannot be the name of a file.
    """
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"name={name!r:.80} is no name of a session; give some letters or digits.")
    if any(character in '/\\<>:"|?*' or not character.isprintable() for character in name) or name.startswith("."):
        raise InputError(
            f"name={name!r:.80} cannot be the name of a session's file: give letters, digits, spaces, - and _, no path "
            "separators and no dot in front."
        )
    if len(os.fsencode(name)) > _LONGEST:
        raise InputError(f"name={name!r:.40}… is longer than {_LONGEST} bytes; give a shorter name.")
    return name
