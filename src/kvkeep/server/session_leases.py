"""The right to hold a session, where several servers share one folder: at most one of them holds a session at a time.

A lease is a lock on a range of one file, so it ends with its process, however that ends. Each server has a folder of
its own below the shared one. Whoever gets the lease of a session moves the session's file into its own folder.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Protocol, runtime_checkable

from kvkeep.engine.session_store import SUFFIX
from kvkeep.errors import InputError
from kvkeep.result_files import Lock, sync_folder
from kvkeep.server.errors import RefusalError
from kvkeep.server.settings import CONVERSATION, full_name

if sys.platform != "win32":
    import fcntl

HELD = "x-kvkeep-held"
"""The header of a refusal because another server holds the session."""
_FILE = ".leases"


@runtime_checkable
class Leases(Protocol):
    """The rights of a server to hold sessions."""

    @property
    def shared(self) -> bool:
        """Return whether several servers share the folder of sessions, and take over sessions from their files
        there.
        """

    def take(self, name: str) -> bool:
        """Take the lease of a session, by its name with its owner's in front, and move its file, if there is one, into
        this server's folder. Return ``False``, with nothing changed, if another server has the lease.
        """

    def give(self, name: str) -> None:
        """Give the lease of a session up, so that another server can take it; its file stays."""

    def names(self) -> Iterator[str]:
        """Yield the names, with their owners' in front, of the sessions that have a file in any server's folder; none
        if no other server uses the folder.
        """


class LocalLeases:
    """The rights of a server that shares its folder with nobody."""

    shared = False

    def take(self, name: str) -> bool:
        """Return ``True``: no other server uses the folder."""
        return True

    def give(self, name: str) -> None:
        """Do nothing, since no other server uses the folder."""

    def names(self) -> Iterator[str]:
        """Return an empty iterator, since the engine knows the names of all files."""
        return iter(())


class SharedFolder:
    """Leases of the sessions in a folder that several servers use, each in a process of its own.

    Args:
        root: the folder; all servers see it under this path or another one.
        own: the name of this server's folder in it, which no other server has ever had.

    Attributes:
        own: this server's folder, for its engine.

    Raises:
        InputError: the folder cannot be used, its file system has no locks, or a single server uses it.
    """

    shared = True

    def __init__(self, root: Path, own: str) -> None:
        """Make this server's folder in the shared one and lock its name, keep out engines that would use the shared
        folder alone, and take over the conversations of servers that have ended.
        """
        self._root, self.own = root, root / own
        self._held: set[str] = set()
        if sys.platform == "win32":
            raise InputError("Windows has no locks that several servers could share. Leave `session_dir` out.")
        try:
            root.mkdir(parents=True, exist_ok=True)
            # a: made if it is missing, and never cut
            self._file = open(root / _FILE, "a+b")  # noqa: SIM115  locks end with it: `close` closes it
            with ExitStack() as stack:
                stack.callback(self._file.close)
                # while this server lives, its folder stays; no session has a name with a slash
                self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, f"/{own}")
                self.own.mkdir(exist_ok=True)
                stack.pop_all()  # all went well, so the file stays open
        except OSError as error:
            why = error.strerror or str(error)
            raise InputError(
                f"`session_dir={root}` cannot be shared by servers: {why}. Give another folder."
            ) from error
        self._keep_single_servers_out()
        self._adopt_conversations()

    def take(self, name: str) -> bool:
        """Take the lease of a session, and move its file, if there is one, from another server's folder into this
        one's. Return ``False``, without waiting, if another server has the lease.

        Return ``True`` at once if this server has it already. A session need not exist yet.

        Raises:
            RefusalError: the lease cannot be locked, or the session's file cannot be moved.
        """
        if name in self._held:
            return True
        try:
            self._check_file()
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, name)
        except (BlockingIOError, PermissionError):  # POSIX allows both for a lock that another process has
            return False
        except OSError as error:
            raise RefusalError(500, f"The session cannot be locked: {error.strerror or error}.") from error
        self._held.add(name)
        try:
            self._fetch(f"{name}{SUFFIX}")
        except OSError as error:
            self.give(name)
            why = error.strerror or str(error)
            raise RefusalError(500, f"The file of the session cannot be taken over: {why}.") from error
        return True

    def give(self, name: str) -> None:
        """Give the lease of a session up, so that another server can take it; its file stays. Do nothing if this server
        does not have it.
        """
        if name in self._held:
            self._held.discard(name)
            self._lock(fcntl.LOCK_UN, name)

    def names(self) -> Iterator[str]:
        """Yield the names, with their owners' in front, of the sessions that have a file in any server's folder or in
        the shared one. Folders that cannot be read are passed over.

        Raises:
            RefusalError: the shared folder cannot be read.
        """
        try:
            folders = self._folders()
        except OSError as error:
            raise RefusalError(500, f"The session folder cannot be read: {error.strerror or error}.") from error
        for folder in folders:
            with suppress(OSError):  # removed meanwhile
                for entry in os.scandir(folder):
                    if entry.name.endswith(SUFFIX) and not entry.name.startswith("."):
                        yield entry.name.removesuffix(SUFFIX)

    def close(self) -> None:
        """Give all leases up, let single servers use the shared folder again, and remove this server's folder if it is
        empty.
        """
        self._file.close()  # its locks end with it
        self._single.release()
        with suppress(OSError):  # files are left
            self.own.rmdir()

    def _check_file(self) -> None:
        """Check that the open lock file is still the one at its path, which servers that start later open.

        Raises:
            RefusalError: the file of locks was removed or replaced.
        """
        with suppress(FileNotFoundError):  # a missing file is refused like another one
            if os.path.samestat(os.stat(self._root / _FILE), os.fstat(self._file.fileno())):
                return
        raise RefusalError(
            500,
            "The file of locks in the session folder was removed or replaced while servers use it, so two could hold "
            "one session. The server must be started anew.",
        )

    def _lock(self, kind: int, name: str) -> None:
        """Lock or unlock the byte of the lock file that stands for a name, as `fcntl.lockf` does: two processes cannot
        have one name, and this one can take it again.

        Args:
            kind: ``LOCK_EX | LOCK_NB``, or ``LOCK_UN``.
            name: a session's, or that of a server's folder with a slash in front.

        Raises:
            OSError: another process has the lock, or the file system fails.
        """
        # 62 bits, as places in a file are signed numbers of 64
        place = int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:8], "big") >> 2
        fcntl.lockf(self._file, kind, 1, place)

    def _fetch(self, file: str) -> None:
        """Move a session's file from another server's folder, or the shared one, into this server's; do nothing if it
        is here, or nowhere. The caller has the session's lease.

        Raises:
            OSError: it cannot be moved.
        """
        if (self.own / file).exists():
            return
        for folder in self._folders():
            with suppress(FileNotFoundError):  # it is in another folder, or nowhere yet
                (folder / file).replace(self.own / file)
                sync_folder(self.own)  # before the old folder goes: after a power cut the file must be somewhere
                self._clear(folder)
                return

    def _clear(self, folder: Path) -> None:
        """Remove another server's folder, if it is empty and the server has ended; never the shared one."""
        if folder == self._root:
            return
        with suppress(OSError):  # its server lives, or files are left
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, f"/{folder.name}")
            try:
                folder.rmdir()
            finally:
                self._lock(fcntl.LOCK_UN, f"/{folder.name}")

    def _adopt_conversations(self) -> None:
        """Move the files of conversations (sessions that keep chats, and that no client has named) from the folders of
        servers that have ended, and from the shared one, into this server's. Conversations have no leases.
        """
        for folder in self._folders():
            if folder == self.own:
                continue
            with suppress(OSError):  # its server lives, or the files are about to go
                if folder != self._root:  # single servers are kept out of the root already
                    self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, f"/{folder.name}")
                try:
                    for path in folder.glob(f"*{full_name('', CONVERSATION)}*{SUFFIX}"):
                        path.replace(self.own / path.name)
                finally:
                    if folder != self._root:
                        self._lock(fcntl.LOCK_UN, f"/{folder.name}")
                self._clear(folder)

    def _folders(self) -> list[Path]:
        """Return the shared folder, where a single server leaves its files, and the folders of all servers in it."""
        with os.scandir(self._root) as entries:
            return [self._root, *(self._root / entry.name for entry in entries if entry.is_dir(follow_symlinks=False))]

    def _keep_single_servers_out(self) -> None:
        """Lock the shared folder, together with its other servers, against engines that would use it alone, until
        `close`; see `kvkeep.engine.session_store`.

        Raises:
            InputError: such an engine uses the folder.
        """
        try:
            self._single = Lock(self._root, str(self._root), shared=True)
        except InputError as error:
            self._file.close()
            raise InputError(
                f"A server without replicas uses the session folder {self._root}, and would not know of theirs. Close "
                "it first, or give each a `session_dir` of its own."
            ) from error


def elsewhere(name: str) -> RefusalError:
    """Return the refusal with status 503 for a session that another server holds. By one of its headers a router knows
    it, waits, and asks again.
    """
    message = f"Another replica holds the session {name}, and is about to end. Try again in 1 s."
    return RefusalError(503, message, code="session_elsewhere", headers={"Retry-After": "1", HELD: "1"})
