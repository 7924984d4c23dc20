"""The sessions of a server: each belongs to a key, has a name, and can go back a few turns.

The answers of ``/v1/responses`` that can be continued are sessions as well; `SessionTable` holds both kinds.
"""

from __future__ import annotations

import functools
import logging
import re
import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvkeep.engine.engine import Engine
from kvkeep.engine.session import Session
from kvkeep.errors import InputError, SnapshotError
from kvkeep.pins import Spans, spans
from kvkeep.server.errors import RefusalError, unknown
from kvkeep.server.schemas import SessionBody, check_policy
from kvkeep.server.session_leases import Leases, LocalLeases, elsewhere
from kvkeep.snapshot.snapshot import Snapshot

log = logging.getLogger("kvkeep.access")
_NAME = re.compile("[A-Za-z0-9_-]{1,64}", re.ASCII)
_MOST_STATES = 9
"""States that a session can go back to, the present one included."""
_MOST_BYTES = 2**30
"""Bytes of the states to which all sessions can go back."""
_AGAIN_S = 1.0
"""Seconds between two attempts to write a session that could not be written."""

_P = ParamSpec("_P")
_T = TypeVar("_T")

# One session, and a table of sessions.


@dataclass(eq=False)
class ServerSession:
    """A session of the server.

    Attributes:
        id: its name in the API.
        session: the engine's session.
        answer: the answer of ``/v1/responses`` with which it ends; ``None`` for a session that a client has named.
        created: seconds since 1970 at which it was opened.
        states: its memory after its last turns, oldest first.
        beginning: the settings with which it began, if all of its turns can be taken back.
    """

    id: str
    session: Session
    answer: Mapping[str, Any] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    states: deque[Snapshot] = field(default_factory=lambda: deque(maxlen=_MOST_STATES))
    beginning: Mapping[str, Any] | None = None
    _users: set[threading.Event] = field(default_factory=set)
    _unwritten: bool = False
    _not_before: float = 0.0

    @property
    def nbytes(self) -> int:
        """Return the bytes of the states that the session can go back to."""
        return sum(state.nbytes for state in self.states)

    @property
    def used(self) -> bool:
        """Return whether a request uses the session."""
        return any(not ended.is_set() for ended in self._users)

    def use(self, until: threading.Event) -> None:
        """Note that a request uses it.

        Args:
            until: is set when the request ends.
        """
        self._users = {ended for ended in self._users if not ended.is_set()} | {until}

    def note(self) -> None:
        """Remember the present state, to which the session can go back later; without a turn there is none."""
        if not self.session.token_ids:
            return
        if len(self.states) == _MOST_STATES:
            self.beginning = None
        with suppress(SnapshotError, InputError):  # its file is gone, or it was deleted meanwhile
            self.states.append(self.session.snapshot())

    @property
    def turns_to_rewind(self) -> int:
        """Return how many turns can be taken back."""
        return len(self.states) if self.beginning is not None else max(0, len(self.states) - 1)

    def rewind(self, turns: int) -> None:
        """Take back the last turns, but not all.

        Raises:
            RefusalError: the earlier turns are not kept.
        """
        if turns > self.turns_to_rewind:
            told = f"The session {self.id} can go back {self.turns_to_rewind} turns, and not {turns}."
            raise RefusalError(400, told, param="turns")
        target = self.states[-1 - turns]
        self.session.rewind(target)
        while self.states[-1] is not target:
            self.states.pop()

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


class SessionTable:
    """Sessions by their owner and their name, least recently used first.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # ordered, because moving an entry to the end leaves no moment in which another thread misses it
        self._entries: OrderedDict[tuple[str, str], ServerSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[ServerSession]:
        return iter(list(self._entries.values()))  # a copy, because other threads open and close sessions meanwhile

    def names(self) -> list[tuple[str, str]]:
        """Return the owner and the name of each session."""
        return list(self._entries)

    def holds(self, owner: str, name: str) -> bool:
        """Return whether a session is here."""
        return (owner, name) in self._entries

    def find(self, owner: str, name: str) -> ServerSession | None:
        """Return a session, which has been used now; ``None`` if it is not here."""
        entry = self._entries.get((owner, name))
        if entry is not None:
            self._entries.move_to_end((owner, name))
        return entry

    def add(self, owner: str, name: str, entry: ServerSession) -> None:
        """Add a session."""
        self._entries[owner, name] = entry

    def remove(self, owner: str, name: str) -> ServerSession | None:
        """Take a session out and return it; ``None`` if it is not here."""
        return self._entries.pop((owner, name), None)

    def trim(self) -> list[ServerSession]:
        """Take out the least recently used sessions that are too many, and return them."""
        return [self._entries.popitem(last=False)[1] for _ in range(len(self._entries) - self.most)]


# The sessions that clients name.


def _alone(method: Callable[Concatenate[SessionRegistry, _P], _T]) -> Callable[Concatenate[SessionRegistry, _P], _T]:
    """Let one thread at a time into the methods of a registry, so that no name is given twice."""

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
        self._engine, self._folder = engine, folder
        self._leases = leases or LocalLeases()
        self._open = SessionTable(most)

    @property
    def count(self) -> int:
        """Return the number of open sessions."""
        return len(self._open)

    @property
    def running(self) -> int:
        """Return the number of open sessions that have a turn running or waiting."""
        return sum(entry.session.running for entry in self._open)

    def names(self, owner: str) -> list[str]:
        """Return the names of an owner's sessions, open or saved."""
        mine = f"{owner}--"
        names = {*self._engine.session_names, *self._leases.names()}
        return sorted(name.removeprefix(mine) for name in names if name.startswith(mine))

    def holds(self, owner: str, name: str) -> bool:
        """Tell whether a session is open on this server."""
        return self._open.holds(owner, name)

    @_alone
    def make(self, owner: str, body: SessionBody) -> ServerSession:
        """Begin a session.

        Raises:
            RefusalError: its name is taken, or there are too many.
            KVKeepError: the engine refuses it.
        """
        if body.policy is not None:
            check_policy(body.policy)
        pins = spans([(start, stop) for start, stop in body.pins or ()])
        settings = {"policy": body.policy, "budget": body.budget, "pins": pins}
        entry = self._opened(owner, self._free(owner, body.id), None, **settings)
        entry.beginning = settings
        return entry

    @_alone
    def find(self, owner: str, name: str, until: threading.Event | None = None) -> ServerSession:
        """Return an owner's session. A saved session is opened.

        Args:
            owner, name: of the session.
            until: the session is not let go before this is set.

        Raises:
            RefusalError: there is none.
        """
        entry = self._open.find(owner, name) or self._reopened(owner, name)
        if until is not None:
            entry.use(until)
        return entry

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
        """Return a new session that goes on from another session's last finished turn.

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
        entry = self.find(owner, name)
        if turns == len(entry.states) and entry.beginning is not None:
            self._begin_anew(owner, entry)
        else:
            entry.rewind(turns)
        return entry

    def _begin_anew(self, owner: str, entry: ServerSession) -> None:
        """Take back all turns of a session."""
        entry.session.rewind(entry.states[0])  # refuses while a turn runs
        entry.session.close(delete=True)
        entry.session = self._engine.session(name=_full(owner, entry.id), **(entry.beginning or {}))
        entry.states.clear()

    @_alone
    def pin(self, owner: str, name: str, pins: Spans) -> ServerSession:
        """Say which tokens of a session may not be dropped.

        Raises:
            RefusalError: it is not there, or has no turn yet.
            KVKeepError: the engine refuses the pins.
        """
        entry = self.find(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so it has no tokens to pin.", param="pins")
        entry.session.pin(pins)
        if entry.states:
            entry.states.pop()
        self.note(entry)
        return entry

    @_alone
    def save(self, owner: str, name: str) -> ServerSession:
        """Write a session to the disk.

        Raises:
            RefusalError: it is not there, or the server has no folder.
        """
        self._need_folder()
        entry = self.find(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so there is nothing to save.")
        entry.session.save()
        return entry

    @_alone
    def restore(self, owner: str, name: str) -> ServerSession:
        """Go back to the state in which a session was saved last.

        Raises:
            RefusalError: it is not there, or was never saved.
        """
        folder = self._need_folder()
        entry = self.find(owner, name)
        path = Path(folder) / f"{_full(owner, name)}.kvkeep"
        if not path.exists():
            raise unknown("saved session", name, "Save it first.")
        entry.session.rewind(Snapshot.load(path))
        self.note(entry)
        return entry

    @_alone
    def remove(self, owner: str, name: str) -> None:
        """End a session, and delete its file.

        Raises:
            RefusalError: it is not there.
        """
        entry = self.find(owner, name)
        entry.session.close(delete=True)
        self._open.remove(owner, name)
        self._leases.give(_full(owner, name))

    def let_go(self) -> None:
        """Give up all sessions that no request uses, so that other servers can go on with them from their files.

        A session that cannot be written stays, and so does one without a turn, which has no file.
        """
        if not self._leases.shared:
            return
        for owner, name in self._open.names():
            self._let_go(owner, name)

    @_alone
    def _let_go(self, owner: str, name: str) -> None:
        entry = self._open.find(owner, name)
        if entry is not None and entry.session.token_ids and not entry.used and entry.close():
            self._open.remove(owner, name)
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
        entry.note()
        nbytes = sum(other.nbytes for other in self._open)
        for other in sorted(self._open, key=lambda other: other is entry):  # its own states go last
            while nbytes > _MOST_BYTES and len(other.states) > 1:
                nbytes -= other.states.popleft().nbytes
                other.beginning = None

    def ran(self, entry: ServerSession) -> None:
        """Note that a turn of a session has ended well: it can be taken back, and other servers may go on from it."""
        self.note(entry)
        self.keep(entry)

    def _opened(self, owner: str, name: str, memory: Snapshot | None, **options: object) -> ServerSession:
        """Open a session of the engine."""
        full = _full(owner, name)
        try:
            made = self._engine.session(name=full, snapshot=memory, **options)  # type: ignore[arg-type]
        except BaseException:
            self._leases.give(full)
            raise
        entry = ServerSession(name, made)
        self._open.add(owner, name, entry)
        self.note(entry)
        return entry

    def _free(self, owner: str, name: str | None) -> str:
        """Return a session name that the owner does not use yet: the given name, or a random one.

        Raises:
            RefusalError: it is taken, cannot be used, or there are too many sessions.
        """
        self._check_room()
        if name is None:
            name = f"sess_{secrets.token_hex(12)}"
        if _NAME.fullmatch(name) is None:
            raise RefusalError(400, "The name of a session has 1 to 64 letters, digits, - and _.", param="id")
        if self._open.holds(owner, name) or name in self.names(owner) or not self._leases.take(_full(owner, name)):
            raise RefusalError(409, f"There is a session {name} already. Choose another name.", param="id")
        return name

    def _check_room(self) -> None:
        if len(self._open) >= self._open.most:
            message = (
                f"{self._open.most} sessions are open, the most that this server has. Delete one that is not needed."
            )
            raise RefusalError(429, message, code="too_many_sessions", headers={"Retry-After": "60"})

    def _need_folder(self) -> str:
        if self._folder is None:
            raise RefusalError(400, "This server keeps no sessions on disk: it was started without a session folder.")
        return self._folder


def _full(owner: str, name: str) -> str:
    """Return a session's full name, which the engine and its file use."""
    return f"{owner}--{name}"


# The sessions of a server that is about to end: others get them before it has ended.

_LOOK_S, _HANDOVER_AGAIN_S = 0.1, 10.0
"""Seconds between two looks at whether the server stays and which of its sessions are idle; and after a failed look."""


class Handover:
    """Lets a server's idle sessions go while it takes no requests, in a thread.

    A server may still have answers to write then. Their sessions go when the answers end.

    Args:
        sessions: the sessions.
        stays: whether the server takes requests.
    """

    def __init__(self, sessions: SessionRegistry, stays: Callable[[], bool]) -> None:
        self._sessions, self._stays, self._ended = sessions, stays, threading.Event()
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
                    self._sessions.let_go()
            except Exception:  # whatever Ray Serve raises: without this thread all sessions would stay
                log.exception("Sessions could not be handed over. The next attempt is in %d s.", _HANDOVER_AGAIN_S)
                self._ended.wait(_HANDOVER_AGAIN_S)
