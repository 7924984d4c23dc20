"""The folder of saved conversations: a folder for each, with its memory in one file, used by one process at a time.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvkeep.cli.files import data_folder, place
from kvkeep.errors import InputError, KVKeepError
from kvkeep.result_files import Lock, in_full, remove_leftovers

if TYPE_CHECKING:
    from kvkeep.snapshot.snapshot import Snapshot

VARIABLE = "KVKEEP_SESSIONS"
"""The environment variable that names the folder of saved conversations."""

_MEMORY, _BEFORE = "memory.kvkeep", "before.kvkeep"
# of the form of a temporary file, so that `remove_leftovers` knows it
_LINK = f".{_BEFORE}.linkfile.new"
_MOST_OF_A_SECOND = 1000  # conversations that begin within a second, which names them


@dataclass(frozen=True)
class ChatFolder:
    """The folder of saved conversations.

    Attributes:
        path: the folder; it need not exist yet.
    """

    path: Path

    @classmethod
    def of(cls, asked: str | None) -> ChatFolder:
        """Return the folder that was asked for, else the environment variable's, else the one in the user's data
        folder.

        Raises:
            InputError: an empty name was given.
        """
        if asked is not None:
            return cls(place(asked, "--sessions"))
        named = os.environ.get(VARIABLE)
        return cls(in_full(named) if named else data_folder() / "kvkeep" / "sessions")

    def names(self) -> Iterator[str]:
        """Yield the names of all saved conversations, in order."""
        with suppress(OSError):  # there is no folder yet
            yield from sorted(folder.name for folder in self.path.iterdir() if (folder / _MEMORY).is_file())

    def file_of(self, name: str) -> Path:
        """Return the path of the file with a conversation's memory, which need not exist."""
        return self.path / name / _MEMORY

    def claim(self, name: str | None, *, new: bool = False) -> ChatPlace:
        """Lock a conversation, so that no other process uses it, and return its place.

        Args:
            name: the conversation's name; ``None``: a new one, named by date and time.
            new: whether there may be no conversation of that name yet.

        Raises:
            InputError: the name or the folder cannot be used, or another process uses the conversation.
        """
        if name is not None:
            return self._claim(_checked(name), new=new)
        today = time.strftime("%Y-%m-%d-%H%M%S")
        for number in range(1, _MOST_OF_A_SECOND):
            with suppress(_TakenError):
                return self._claim(today if number == 1 else f"{today}-{number}", new=True)
        raise InputError(f"There are too many conversations of {today}. Give a name: --session NAME.")

    def _claim(self, name: str, *, new: bool) -> ChatPlace:
        """Make a conversation's folder if need be, lock it, and return the place, so that no other process has it.

        Raises:
            InputError: the folder cannot be used.
            _TakenError: another process has the conversation, or a new one has the name of an old one.
        """
        folder = self.path / name
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.mkdir(exist_ok=True, mode=0o700)
            lock = Lock(folder, name)
        except OSError as error:
            raise InputError(
                f"Conversations cannot be saved in {self.path}: {error.strerror}. Give another folder with --sessions "
                f"or {VARIABLE}."
            ) from error
        except InputError as error:
            raise _TakenError(
                f"The conversation {name} is open in another process, and two would overwrite each other. End that "
                "one first, or give another name with --session."
            ) from error
        if new and (folder / _MEMORY).exists():
            lock.release()
            raise _TakenError(f"There is a conversation {name} already. Give another name.")
        if not folder.is_dir():  # whoever had it has removed it, since it was empty
            lock.release()
            return self._claim(name, new=new)
        remove_leftovers(folder, {_MEMORY, _BEFORE})
        return ChatPlace(name, folder / _MEMORY, lock)


@dataclass(frozen=True)
class ChatPlace:
    """Where one conversation is saved. The process that has it keeps others out.

    Attributes:
        name: of the conversation.
        file: its memory; there is none before the first answer.
        lock: released by `leave`.
    """

    name: str
    file: Path
    lock: Lock

    @property
    def is_saved(self) -> bool:
        """Return whether the conversation has a saved memory."""
        return self.file.exists()

    def save(self, snapshot: Snapshot, before: Snapshot | None = None, *, replaced: Snapshot | None = None) -> None:
        """Write a conversation's memory to its file. After a crash the file is the old one or the new one.

        Args:
            snapshot: the memory.
            before: the memory before the last turn, which is kept beside it if there is room.
            replaced: the memory that the file holds now.

        Raises:
            SnapshotError: the memory cannot be written; the old memory stays.
        """
        try:
            self._keep(before, linked=before is replaced)
        except KVKeepError:
            self._before.unlink(missing_ok=True)  # the conversation matters more
        snapshot.save(self.file)

    def before(self, snapshot: Snapshot) -> Snapshot | None:
        """Return the memory before the last turn of ``snapshot``; ``None`` if it was not kept, or is of another
        conversation.
        """
        from kvkeep.snapshot.snapshot import Snapshot

        try:
            found = Snapshot.load(self._before)
        except KVKeepError:  # there is none, or it is damaged: the last turn cannot be taken back
            return None
        return found if _precedes(found, snapshot) else None

    @property
    def _before(self) -> Path:
        """Return the path of the file with the memory before the last turn, which need not exist."""
        return self.file.with_name(_BEFORE)

    def _keep(self, before: Snapshot | None, *, linked: bool) -> None:
        """Keep the memory before the last turn: as a second name of the file that holds it, or as a file of its own.

        For ``None``, remove the one that was kept.

        Raises:
            SnapshotError: the memory cannot be written.
        """
        if before is None:
            self._before.unlink(missing_ok=True)
            return
        if linked:
            link = self.file.with_name(_LINK)
            with suppress(OSError):  # the file system has no links
                link.unlink(missing_ok=True)  # `os.link` replaces nothing, so a rename does that below
                os.link(self.file, link)
                link.replace(self._before)
                return
        before.save(self._before)

    def clear(self) -> None:
        """Remove the files of a conversation that is empty again; the folder and its lock stay."""
        for file in (self.file, self._before):
            file.unlink(missing_ok=True)

    def leave(self) -> None:
        """Release the lock on the conversation. The conversation's folder is removed if nothing was saved."""
        # before the lock is released: nobody has begun to use the folder yet
        with suppress(OSError):  # something was saved
            self.file.parent.rmdir()
        self.lock.release()


def _precedes(one: Snapshot, other: Snapshot) -> bool:
    """Return whether ``one`` is an earlier memory of the conversation of ``other``: by messages, settings and tokens.

    ``False`` also if one of them holds no messages or no token ids.
    """
    told, later = one.note.get("messages"), other.note.get("messages")
    if not isinstance(told, list) or not isinstance(later, list):
        return False
    return len(told) < len(later) and later[: len(told)] == told and extends(other, one)


def extends(later: Snapshot, one: Snapshot) -> bool:
    """Return whether a memory goes on from an earlier one, ``one``, or is the same: by settings and tokens.

    ``False`` also if one of them holds no token ids.
    """
    if one.tokens is None or later.tokens is None:
        return False
    same = one.fingerprint == later.fingerprint and one.seen <= later.seen
    return same and one.tokens.tolist() == later.tokens[: one.seen].tolist()


class _TakenError(InputError):
    """A conversation is in use, or exists."""


def complete_names(incomplete: str) -> list[tuple[str, str]]:
    """Return completions of a conversation's name for shells, from the folder that is used without ``--sessions``."""
    return [(name, "") for name in ChatFolder.of(None).names() if name.startswith(incomplete)]


def _checked(name: str) -> str:
    """Return the same name of a conversation, after a check that a folder can have it.

    Raises:
        InputError: no folder can have it.
    """

    from kvkeep.engine.request import check_name  # imports torch

    try:
        return check_name(name)
    except InputError as error:
        raise InputError(str(error).replace("name=", "The name ", 1)) from error
