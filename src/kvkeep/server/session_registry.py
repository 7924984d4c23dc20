"""The sessions of a server: each belongs to a key, has a name, and can go back a few turns."""

from __future__ import annotations

import functools
import logging
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from kvkeep.engine import Engine, Session
from kvkeep.errors import InputError, SnapshotError
from kvkeep.pins import Spans, spans
from kvkeep.server.errors import RefusalError, unknown
from kvkeep.server.request_parsing import check_policy
from kvkeep.server.schemas import SessionBody
from kvkeep.server.session_leases import Leases, LocalLeases, elsewhere
from kvkeep.snapshot import Snapshot

# A session of the server: the engine's session, and the states to which it can go back.

_MOST_STATES = 9
"""States that a session can go back to, the present one included."""
_AGAIN_S = 1.0
"""Seconds between two attempts to write a session that could not be written."""


@dataclass(eq=False)
class ServerSession:
    """A session of the server.

    Attributes:
        id: its name in the API.
        session: the engine's session.
        created: seconds since 1970 at which it was opened.
        states: its memory after its last turns, oldest first.
    """

    id: str
    session: Session
    created: int = field(default_factory=lambda: int(time.time()))
    states: deque[Snapshot] = field(default_factory=lambda: deque(maxlen=_MOST_STATES))
    _users: set[threading.Event] = field(default_factory=set)
    _unwritten: bool = False
    _not_before: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the states to which it can go back."""
        return sum(one.nbytes for one in self.states)

    @property
    def used(self) -> bool:
        """Whether a request uses it."""
        return any(not one.is_set() for one in self._users)

    def use(self, until: threading.Event) -> None:
        """Note that a request uses it.

        Args:
            until: is set when the request ends.
        """
        self._users = {one for one in self._users if not one.is_set()} | {until}

    def close(self) -> bool:
        """Write it to the disk and close it; ``False`` if that fails, or failed within the last second.

        The log says so once.
        """
        if time.monotonic() < self._not_before:
            return False
        try:
            self.session.close()
        except Exception as error:  # also one that nobody foresees must not keep other sessions here
            if not self._unwritten:
                foreseen = isinstance(error, SnapshotError | InputError)
                told = "Session %s was not written, so no other replica gets it yet: %s"
                log.error(told, self.id, error, exc_info=not foreseen)
            self._unwritten, self._not_before = True, time.monotonic() + _AGAIN_S
            return False
        return True


log = logging.getLogger("kvkeep.access")
_NAME = re.compile("[A-Za-z0-9_-]{1,64}", re.ASCII)
_MOST_BYTES = 2**30
"""Bytes of the states to which all sessions can go back."""


_P = ParamSpec("_P")
_T = TypeVar("_T")


def _alone(method: Callable[Concatenate[SessionRegistry, _P], _T]) -> Callable[Concatenate[SessionRegistry, _P], _T]:
    """Let one thread at a time into the methods of a book, so that no name is given twice."""

    @functools.wraps(method)
    def wrapper(self: SessionRegistry, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.lock:
            return method(self, *args, **kwargs)

    return wrapper


class SessionRegistry:
    """The sessions of a server. Its methods wait for the end of a step, so they belong into a thread.

    Args:
        engine: the engine.
        most: sessions that may be open.
        folder: the engine's folder of saved sessions.
        leases: the rights to hold sessions, where several servers share them.

    Attributes:
        lock: held by the thread that looks something up or changes it.
    """

    def __init__(self, engine: Engine, most: int, folder: str | None = None, leases: Leases | None = None) -> None:
        self.lock = threading.RLock()
        self._engine, self._most, self._folder = engine, most, folder
        self._leases = leases or LocalLeases()
        self._open: dict[tuple[str, str], ServerSession] = {}

    @property
    def count(self) -> int:
        """The number of open sessions."""
        return len(self._open)

    @property
    def running(self) -> int:
        """The number of open sessions of which a turn runs or waits."""
        return sum(one.session.running for one in list(self._open.values()))

    def names(self, owner: str) -> list[str]:
        """The names of an owner's sessions, open or saved."""
        mine = f"{owner}--"
        found = {*self._engine.session_names, *self._leases.names()}
        return sorted(name.removeprefix(mine) for name in found if name.startswith(mine))

    def holds(self, owner: str, name: str) -> bool:
        """Whether a session is open here."""
        return (owner, name) in self._open

    @_alone
    def make(self, owner: str, body: SessionBody) -> ServerSession:
        """Begin a session.

        Raises:
            RefusalError: its name is taken, or there are too many.
            KVKeepError: the engine refuses it.
        """
        if body.policy is not None:
            check_policy(body.policy)
        pins = spans([(one[0], one[1]) for one in body.pins or ()])
        return self._opened(owner, self._free(owner, body.id), None, policy=body.policy, budget=body.budget, pins=pins)

    @_alone
    def find(self, owner: str, name: str, until: threading.Event | None = None) -> ServerSession:
        """An owner's session; a saved one is opened.

        Args:
            owner, name: of the session.
            until: the session is not let go before this is set.

        Raises:
            RefusalError: there is none.
        """
        found = self._open.get((owner, name)) or self._reopened(owner, name)
        if until is not None:
            found.use(until)
        return found

    def _reopened(self, owner: str, name: str) -> ServerSession:
        """Open a saved session.

        Raises:
            RefusalError: there is none, another server holds it, or there are too many.
        """
        if _NAME.fullmatch(name) is None or name not in self.names(owner):
            raise unknown("session", name, "Make it with POST /v1/sessions.")
        self._check_room()
        if not self._leases.take(full := _full(owner, name)):
            raise elsewhere(name)
        if full not in self._engine.session_names:  # another server has deleted it meanwhile
            self._leases.give(full)
            raise unknown("session", name, "Make it with POST /v1/sessions.")
        return self._opened(owner, name, None)

    @_alone
    def fork(self, owner: str, name: str, copy: str | None) -> ServerSession:
        """A session that goes on from another one's last finished turn.

        Raises:
            RefusalError: there is no such session, or the name of the copy is taken.
        """
        parent = self.find(owner, name).session
        memory = parent.snapshot() if parent.token_ids else None
        settled = {"policy": parent.policy, "budget": parent.budget}
        return self._opened(owner, self._free(owner, copy), memory, **settled)

    @_alone
    def rewind(self, owner: str, name: str, turns: int) -> ServerSession:
        """Take back the last turns of a session.

        Raises:
            RefusalError: it is not there, or its earlier turns are not kept.
        """
        found = self.find(owner, name)
        if turns >= len(found.states):
            most = max(0, len(found.states) - 1)
            raise RefusalError(400, f"The session {name} can go back {most} turns, and not {turns}.", param="turns")
        target = found.states[-1 - turns]
        found.session.rewind(target)
        while found.states[-1] is not target:
            found.states.pop()
        return found

    @_alone
    def pin(self, owner: str, name: str, pins: Spans) -> ServerSession:
        """Say which tokens of a session may not be dropped.

        Raises:
            RefusalError: it is not there, or has no turn yet.
            KVKeepError: the engine refuses the pins.
        """
        found = self.find(owner, name)
        if not found.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so it has no tokens to pin.", param="pins")
        found.session.pin(pins)
        if found.states:
            found.states.pop()
        self.note(found)
        return found

    @_alone
    def save(self, owner: str, name: str) -> ServerSession:
        """Write a session to the disk.

        Raises:
            RefusalError: it is not there, or the server has no folder.
        """
        self._need_folder()
        found = self.find(owner, name)
        if not found.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so there is nothing to save.")
        found.session.save()
        return found

    @_alone
    def restore(self, owner: str, name: str) -> ServerSession:
        """Go back to the state in which a session was saved last.

        Raises:
            RefusalError: it is not there, or was never saved.
        """
        folder = self._need_folder()
        found = self.find(owner, name)
        path = Path(folder) / f"{_full(owner, name)}.kvkeep"
        if not path.exists():
            raise unknown("saved session", name, "Save it first.")
        found.session.rewind(Snapshot.load(path))
        self.note(found)
        return found

    @_alone
    def remove(self, owner: str, name: str) -> None:
        """End a session, and delete its file.

        Raises:
            RefusalError: it is not there.
        """
        found = self.find(owner, name)
        found.session.close(delete=True)
        self._open.pop((owner, name), None)
        self._leases.give(_full(owner, name))

    def let_go(self) -> None:
        """Give up all sessions that no request uses, so that other servers can go on with them from their files.

        A session that cannot be written stays, and so does one without a turn, which has no file.
        """
        if not self._leases.shared:
            return
        for key in list(self._open):
            self._let_go(*key)

    @_alone
    def _let_go(self, owner: str, name: str) -> None:
        entry = self._open.get((owner, name))
        if entry is not None and entry.session.token_ids and not entry.used and entry.close():
            del self._open[owner, name]
            self._leases.give(_full(owner, name))

    def keep(self, entry: ServerSession) -> None:
        """Write a session to the disk after a change, if another server may have to go on with it.

        What cannot be written is logged: the session goes on here, and elsewhere from its last file.
        """
        if not self._leases.shared:
            return
        try:
            entry.session.save()
        except (SnapshotError, InputError) as error:
            log.error("Session %s was not written: %s", entry.id, error)

    @_alone
    def note(self, entry: ServerSession) -> None:
        """Remember the state of a session after a turn, and forget the oldest ones if they take too much memory."""
        if not entry.session.token_ids:
            return
        try:
            entry.states.append(entry.session.snapshot())
        except (SnapshotError, InputError):  # its file is gone, or it was deleted meanwhile
            return
        held = sum(one.nbytes for one in self._open.values())
        for one in sorted(self._open.values(), key=lambda one: one is entry):
            while held > _MOST_BYTES and len(one.states) > 1:
                held -= one.states.popleft().nbytes

    def _opened(self, owner: str, name: str, memory: Snapshot | None, **options: object) -> ServerSession:
        """Open a session of the engine."""
        full = _full(owner, name)
        try:
            made = self._engine.session(name=full, snapshot=memory, **options)  # type: ignore[arg-type]
        except BaseException:
            self._leases.give(full)
            raise
        found = self._open[owner, name] = ServerSession(name, made)
        self.note(found)
        return found

    def _free(self, owner: str, name: str | None) -> str:
        """A name that no session of the owner has.

        Raises:
            RefusalError: it is taken, cannot be used, or there are too many sessions.
        """
        self._check_room()
        if name is None:
            name = f"sess_{secrets.token_hex(12)}"
        if _NAME.fullmatch(name) is None:
            raise RefusalError(400, "The name of a session has 1 to 64 letters, digits, - and _.", param="id")
        if (owner, name) in self._open or name in self.names(owner) or not self._leases.take(_full(owner, name)):
            raise RefusalError(409, f"There is a session {name} already. Choose another name.", param="id")
        return name

    def _check_room(self) -> None:
        if len(self._open) >= self._most:
            message = f"{self._most} sessions are open, the most that this server has. Delete one that is not needed."
            raise RefusalError(429, message, code="too_many_sessions", headers={"Retry-After": "60"})

    def _need_folder(self) -> str:
        if self._folder is None:
            raise RefusalError(400, "This server keeps no sessions on disk: it was started without a session folder.")
        return self._folder


def _full(owner: str, name: str) -> str:
    """The name of a session in the engine, and of its file."""
    return f"{owner}--{name}"


# The sessions of a server that is about to end: others get them before it has ended.

_LOOK_S, _HANDOVER_AGAIN_S = 0.1, 10.0
"""Seconds between two looks at whether the server stays and which of its sessions are idle; and after a failed look."""


class Handover:
    """Lets a server's idle sessions go while it takes no requests, in a thread.

    A server may still have answers to write then. Their sessions go when the answers end.

    Args:
        book: the sessions.
        stays: whether the server takes requests.
    """

    def __init__(self, book: SessionRegistry, stays: Callable[[], bool]) -> None:
        self._book, self._stays, self._ended = book, stays, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-handover", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let no more sessions go."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                if not self._stays():
                    self._book.let_go()
            except Exception:  # whatever Ray Serve raises: without this thread all sessions would stay
                log.exception("Sessions could not be handed over. The next attempt is in %d s.", _HANDOVER_AGAIN_S)
                self._ended.wait(_HANDOVER_AGAIN_S)
