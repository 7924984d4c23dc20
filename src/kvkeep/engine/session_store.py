"""The memories of idle sessions: in main memory, and beyond a number of bytes in a folder."""

from __future__ import annotations

import itertools
import math
import os
import weakref
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as GenericSequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from kvkeep.engine.prompt_encoding import ConversationHistory
from kvkeep.engine.request import Event
from kvkeep.engine.sampling_params import whole_within
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import InputError, SnapshotError
from kvkeep.models.device import reason_of
from kvkeep.pins import Spans
from kvkeep.result_files import Lock, in_full, sync_folder
from kvkeep.snapshot.snapshot import Pending, Snapshot, SnapshotAbout, Writing, check_target, not_saved

# The folder of an engine's idle sessions: a file for each memory, whole or not there at all.

SUFFIX = ".kvkeep"
# names of sessions do not begin with a dot
_UNNAMED = ".unnamed-{}" + SUFFIX
_NEW = ".{}" + SUFFIX + ".{}.new"


class SnapshotFolder:
    """A folder of memories, one file for each, used by one engine at a time.

    Args:
        path: the folder; it is made if it is missing.

    Raises:
        InputError: the folder cannot be used, or another engine uses it.
    """

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
        """Return the file of the session with this name."""
        return self.path / f"{name}{SUFFIX}"

    def names(self) -> list[str]:
        """Return the names of the sessions that have a file, in order."""
        found = (path.name.removesuffix(SUFFIX) for path in self.path.glob(f"*{SUFFIX}"))
        return sorted(name for name in found if not name.startswith("."))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all snapshot files in the folder, temporary ones included."""
        total = 0
        for path in self.path.glob(f"*{SUFFIX}*"):
            with suppress(OSError):  # removed meanwhile
                total += path.stat().st_size
        return total

    def write(self, kept: StoredSnapshot) -> None:
        """Write a memory to a temporary file, which is deleted with the memory unless `publish` gives it a session's
        name.

        Do nothing if the memory is in a file already.

        Raises:
            SnapshotError: the file cannot be written.
        """
        held, number = kept.held, next(self._numbers)
        if held is None or kept.path is not None or kept.spare is not None:
            return
        path = self.path / (_UNNAMED.format(number) if kept.name is None else _NEW.format(kept.name, number))
        held.save(path)
        weakref.finalize(kept, remove, path)
        kept.spare = path

    def publish(self, file: Path, name: str) -> Path:
        """Rename a temporary file to the file of a session, replacing an older one. Return the new path.

        Raises:
            SnapshotError: something other than a session's file is in that place, or the move fails.
        """
        target = self.path_of(name)
        check_target(target)
        try:
            file.replace(target)
        except OSError as error:
            raise not_saved(target, error) from error
        return target

    def sync(self) -> None:
        """Flush the folder to the disk, so that the names of its files survive a crash."""
        sync_folder(self.path)

    def close(self) -> None:
        """Remove temporary files, and release the folder for other engines."""
        self._remove_leftovers()
        self._end()

    def _remove_leftovers(self) -> None:
        """Remove all temporary files: of sessions without a name, and those that have not got a session's name yet."""
        for pattern in (_UNNAMED.format("*"), f".*{SUFFIX}.*.new"):
            for path in self.path.glob(pattern):
                remove(path)


def remove(path: Path) -> None:
    """Remove a file. Do nothing if it is missing or cannot be removed."""
    with suppress(OSError):  # also where it cannot be removed: nobody reads it any more
        path.unlink()


@dataclass(eq=False)
class StoredSnapshot:
    """A memory at rest. It never changes, but moves between main memory and the disk.

    Attributes:
        name: of the session whose file it is written to; ``None``: a file of its own, which goes with it.
        nbytes: its bytes in main memory.
        held: the memory, while it is in main memory.
        path: its file, once it is written.
        spare: a file of its own, which goes with it.
        current: whether its session goes on from it; only then does it take the place of the session's older file.
    """

    name: str | None
    nbytes: int
    held: Snapshot | None = None
    path: Path | None = None
    spare: Path | None = None
    current: bool = False

    def snapshot(self) -> Snapshot:
        """Return the memory, read from its file if it is not in main memory.

        Raises:
            SnapshotError: the file cannot be read any more.
        """
        if self.held is not None:
            return self.held
        assert self.path is not None
        return Snapshot.load(self.path)


class Move(NamedTuple):
    """Memories on their way to the disk."""

    memories: GenericSequence[StoredSnapshot]
    writing: Writing[StoredSnapshot]


@dataclass(frozen=True)
class State:
    """A session after its last finished turn.

    Attributes:
        past: the tokens and messages so far.
        kept: the memory of these tokens; ``None`` before the first turn.
        pins: spans of positions that may not be evicted, besides those of the memory: the next turn's.
    """

    past: ConversationHistory
    kept: StoredSnapshot | None = None
    pins: Spans = ()


class SessionStore:
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
        self.folder = None if folder is None else SnapshotFolder(in_full(folder))
        self._used: dict[int, weakref.ref[StoredSnapshot]] = {}
        self._clock = itertools.count()
        self._writing: Writing[StoredSnapshot] | None = None

    @property
    def held_bytes(self) -> int:
        """Return the bytes of all memories in main memory."""
        return sum(kept.nbytes for kept in self._in_memory())

    def keep_now(self, snapshot: Snapshot, name: str | None = None) -> StoredSnapshot:
        """Store a memory, as `keep` does, wait until there is room for it, and make it the present one of its session.

        Raises:
            SnapshotError: a file cannot be written, for example on a full disk. The memory is not kept, and no other
                one is lost.
        """
        kept, move = self.keep(snapshot, name)
        self.settle(move)
        self.adopt(kept)
        return kept

    def keep(
        self, snapshot: Snapshot, name: str | None = None, *, instead: StoredSnapshot | None = None
    ) -> tuple[StoredSnapshot, Move | None]:
        """Store a memory in main memory. If the limit is exceeded, start moving the least recently used memories to the
        disk.

        Args:
            snapshot: the memory.
            name: the name of its session; ``None``: it has none.
            instead: a memory that is given up for the new one, and not moved.

        Returns:
            The memory, and the move that makes room for it, to be passed to `settle`; ``None`` if there is room.
        """
        kept = StoredSnapshot(name, snapshot.nbytes, snapshot)
        self._touch(kept)
        leaving = self._leaving(spared=instead)
        return kept, self._move(leaving) if leaving else None

    def settle(self, move: Move | None) -> None:
        """Wait until a move's memories are on the disk, and free their main memory; do nothing for ``None``.

        Raises:
            SnapshotError: a file cannot be written. Nothing is lost.
        """
        if move is not None:
            self.wrote(move)
            for kept in move.memories:
                kept.held = None

    def open(self, name: str) -> StoredSnapshot | None:
        """Return the memory that was written under a name; ``None`` if there is none."""
        path = None if self.folder is None else self.folder.path_of(name)
        if path is None or not path.exists():
            return None
        return StoredSnapshot(name, Snapshot.load(path).nbytes, path=path, current=True)

    def described(self) -> Iterator[tuple[StoredSnapshot, SnapshotAbout]]:
        """Yield each file of a named session with its description, least recently written first.

        Files that cannot be read are left out.
        """
        found: list[tuple[StoredSnapshot, SnapshotAbout]] = []
        for name in [] if self.folder is None else self.folder.names():
            assert self.folder is not None
            path = self.folder.path_of(name)
            with suppress(SnapshotError):  # whoever opens it is told
                about = SnapshotAbout.read(path)
                found.append((StoredSnapshot(name, about.nbytes, path=path, current=True), about))
        yield from sorted(found, key=lambda pair: pair[1].written)

    def load(self, kept: StoredSnapshot) -> Snapshot:
        """Return the snapshot of a memory, from its file if need be. The memory counts as used.

        Raises:
            SnapshotError: the file cannot be read any more.
        """
        if kept.held is not None:
            self._touch(kept)
        return kept.snapshot()

    def is_written(self, kept: StoredSnapshot) -> bool:
        """Return whether a memory needs no write: it is in a file that still exists, or there is no folder."""
        return self.folder is None or kept.held is None or (kept.path is not None and os.path.exists(kept.path))

    def write(self, kept: StoredSnapshot) -> Move | None:
        """Begin to write a memory to the disk, and return the move for `wrote`; ``None`` if no write is needed."""
        if self.is_written(kept):
            return None
        if kept.path is not None:  # somebody has deleted the file
            kept.path = kept.spare = None
        return self._move([kept])

    def wrote(self, move: Move) -> None:
        """Wait until a move's files are written, and record them. Each that is its session's present memory takes the
        session's name. The memories stay in main memory.

        Raises:
            SnapshotError: a file cannot be written; an older file of that name stays as it was.
        """
        move.writing.join()
        if move.writing.error is not None:
            raise move.writing.error
        for kept in move.memories:
            self._place(kept)

    def adopt(self, kept: StoredSnapshot, instead: StoredSnapshot | None = None) -> None:
        """Make a memory the present one of its session: its file, once written, becomes the session's file.

        ``instead`` is the memory that the session went on from before.

        Raises:
            SnapshotError: the file cannot take the place of the session's file; nothing is changed.
        """
        kept.current = True
        try:
            if kept.path is not None:
                self._place(kept)
        except BaseException:
            kept.current = False
            raise
        if instead is not None:
            instead.current = False

    def give_up(self, kept: StoredSnapshot | None) -> None:
        """Mark a memory as no longer the present one of its session, so that it never takes the session's file; do
        nothing for ``None``.
        """
        if kept is not None:
            kept.current = False

    def remove(self, name: str) -> None:
        """Remove the file of the session with this name, if there is one."""
        if self.folder is not None:
            remove(self.folder.path_of(name))

    def close(self) -> None:
        """Wait until all moves are written, and release the folder for other engines."""
        if self._writing is not None:
            self._writing.join()
        if self.folder is not None:
            self.folder.close()

    def _touch(self, kept: StoredSnapshot) -> None:
        """Mark a memory as the most recently used one."""
        self._used = {key: ref for key, ref in self._used.items() if ref() not in (None, kept)}
        self._used[next(self._clock)] = weakref.ref(kept)

    def _in_memory(self) -> list[StoredSnapshot]:
        """Return the memories in main memory, least recently used first."""
        found = (ref() for ref in list(self._used.values()))
        return [kept for kept in found if kept is not None and kept.held is not None]

    def _leaving(self, spared: StoredSnapshot | None) -> list[StoredSnapshot]:
        """Return the least recently used memories that must leave main memory so that the others fit into the limit;
        ``[]`` without a limit. ``spared`` neither leaves nor counts.
        """
        if self._most_bytes is None:
            return []
        found, leaving = [kept for kept in self._in_memory() if kept is not spared], []
        held = sum(kept.nbytes for kept in found)
        for kept in found:
            if held <= self._most_bytes:
                break
            leaving.append(kept)
            held -= kept.nbytes
        return leaving

    def _move(self, memories: GenericSequence[StoredSnapshot]) -> Move:
        """Start a thread that writes memories, after those that are being written, and return the move."""
        assert self.folder is not None
        self._writing = Writing(memories, self.folder.write, self._writing)
        return Move(memories, self._writing)

    def _place(self, kept: StoredSnapshot) -> None:
        """Record the file of a written memory. If it is its session's present one, rename it to the session's file.

        Raises:
            SnapshotError: the older file cannot be replaced.
        """
        assert self.folder is not None
        path = kept.path or kept.spare
        assert path is not None
        if kept.current and kept.name is not None and path != self.folder.path_of(kept.name):
            path = self.folder.publish(path, kept.name)
        kept.path = path


def joined(pending: Iterable[Pending | None]) -> Pending | None:
    """Return several ends of one turn, each of which waits for a memory's way to the disk, as one; ``None`` if there is
    none to wait for.

    The writes end in the order in which they began, so the last one is waited for. Then every end is finished, also
    where another one raises.
    """
    found = [end for end in pending if end is not None]
    if len(found) < 2:
        return found[0] if found else None

    def finish() -> None:
        """Finish all ends in their order, and raise what one of them raised."""
        with ExitStack() as stack:  # each one ends, also where another one fails
            for end in reversed(found):  # a stack calls the last one first
                stack.callback(end.finish)

    def cancel() -> None:
        """Cancel all ends."""
        for end in found:
            end.cancel()

    return Pending(found[-1].writing, finish, cancel)


# Turns that have all of their tokens, while their memories are on their way to the disk.


class Parked:
    """Turns whose memories are on their way to the disk, in the order of their ends.

    Attributes:
        turns: each with its last event and what it waits for, by the number of its request.
    """

    def __init__(self) -> None:
        self.turns: dict[int, tuple[Sequence, Event, Pending]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self.turns

    def __len__(self) -> int:
        return len(self.turns)

    def add(self, sequence: Sequence, event: Event, pending: Pending) -> None:
        """Hold back the last event of a turn until its memory is on the disk."""
        self.turns[sequence.id] = sequence, event, pending

    def drop(self, number: int) -> None:
        """Remove a cancelled turn. Its session keeps the memory from before it."""
        if (turn := self.turns.pop(number, None)) is not None:
            turn[2].cancel()

    def ready(self, wait: float) -> Iterator[tuple[Sequence, Event]]:
        """Yield the turns whose memories are on the disk, the oldest first, each with its last event.

        A turn's memory is taken over before it is yielded; if that fails, its sequence ends with an error, and the
        event stays as it was. The first turn that is still being written ends the iteration; later turns wait with it.

        Args:
            wait: most seconds to wait for the oldest turn; ``inf``: for all.
        """
        for sequence, event, pending in list(self.turns.values()):
            pending.writing.join(None if wait == math.inf else wait)
            wait = wait if wait == math.inf else 0.0  # only the oldest one is waited for
            if pending.writing.is_alive():
                return
            del self.turns[sequence.id]
            try:
                pending.finish()
            except Exception as error:  # a full disk, for example: one turn must not end the others
                sequence.finish("error", reason_of(error))
            yield sequence, event
