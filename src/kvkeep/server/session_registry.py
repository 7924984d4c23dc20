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
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from kvkeep.engine.engine import Engine
from kvkeep.engine.session import MOST_STATE_BYTES, MOST_TURNS_BACK, Session, TurnStates
from kvkeep.errors import InputError, SnapshotError
from kvkeep.pins import Spans, spans
from kvkeep.server.errors import RefusalError, unknown
from kvkeep.server.schemas import DropBody, SessionBody, check_policy
from kvkeep.server.session_leases import Leases, LocalLeases, elsewhere
from kvkeep.server.settings import full_name
from kvkeep.snapshot.snapshot import Snapshot

log = logging.getLogger("kvkeep.access")
_NAME = re.compile("[A-Za-z0-9_-]{1,64}", re.ASCII)
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
        states: its memories after its last turns.
        beginning: the settings with which a client has made it; ``None``: they were given to another process.
    """

    id: str
    session: Session
    answer: Mapping[str, Any] | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    states: TurnStates = field(default_factory=TurnStates)
    beginning: Mapping[str, Any] | None = None
    _users: set[threading.Event] = field(default_factory=set)
    _unwritten: bool = False
    _not_before: float = 0.0

    @property
    def beginning_again(self) -> Mapping[str, Any]:
        """Return the settings with which the session can be started anew. After a restart of the server its pins are
        not known.
        """
        own = self.session
        return self.beginning or {"policy": own.policy, "budget": own.budget, "pins": (), "adapter": own.adapter}

    @property
    def used(self) -> bool:
        """Return whether a request is using the session."""
        return any(not ended.is_set() for ended in self._users)

    def use(self, until: threading.Event) -> None:
        """Count the session as in use until a request ends.

        Args:
            until: is set when the request ends.
        """
        self._users = {ended for ended in self._users if not ended.is_set()} | {until}

    @property
    def answers(self) -> int:
        """Return the number of answers in the conversation."""
        return sum(message["role"] == "assistant" for message in self.session.messages)

    @property
    def turns_to_rewind(self) -> int:
        """Return how many last turns can be taken back one by one.

        Taking back all turns at once is possible in any case; so is taking back the only one.
        """
        return self.states.turns or int(self.answers == 1)

    def note(self) -> None:
        """Store the present memory in ``states`` as one that the session can go back to.

        Store nothing before the first turn, or if the memory cannot be read.
        """
        if not self.session.token_ids:
            return
        with suppress(SnapshotError, InputError):  # its file is gone, or it was deleted meanwhile
            self.states.add(self.session.snapshot())

    def state_before(self, turns: int) -> Snapshot | None:
        """Return the memory before the last ``turns`` turns; ``None`` if that is before the first one.

        Raises:
            RefusalError: it is not kept.
        """
        if turns <= (most := self.states.turns):
            return self.states[-1 - turns]
        if turns == self.answers:
            return None
        message = f"The session {self.id} can go back {most} turns, and not {turns}."
        if turns < self.answers:
            message += (
                f" The memory before that turn is not kept: memories are dropped beyond {MOST_TURNS_BACK} turns, when "
                f"space is short, and when the server ends. All {self.answers} turns can be taken back."
            )
        raise RefusalError(400, message, param="turns")

    def rewind(self, turns: int) -> None:
        """Take back the last ``turns`` turns, but not all of them, which is up to the registry.

        Raises:
            RefusalError: the earlier turns are not kept.
        """
        target = self.state_before(turns)
        assert target is not None  # the registry begins such a session anew
        self.session.rewind(target)
        self.states.take_back(turns)

    def close(self) -> bool:
        """Write the session to the disk and close it. Return ``False`` if that fails, or has failed within the last
        second.

        The first failure is logged.
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
        """Return whether the table has this session, without marking it as used."""
        return (owner, name) in self._entries

    def find(self, owner: str, name: str) -> ServerSession | None:
        """Return a session and mark it as used; ``None`` if the table does not have it."""
        entry = self._entries.get((owner, name))
        if entry is not None:
            self._entries.move_to_end((owner, name))
        return entry

    def add(self, owner: str, name: str, entry: ServerSession) -> None:
        """Add a session."""
        self._entries[owner, name] = entry

    def remove(self, owner: str, name: str) -> ServerSession | None:
        """Remove a session from the table and return it; ``None`` if the table does not have it."""
        return self._entries.pop((owner, name), None)

    def drop_closed(self) -> None:
        """Remove the sessions that were closed."""
        for key, entry in list(self._entries.items()):
            if entry.session.closed:
                self._entries.pop(key, None)

    def trim(self) -> list[ServerSession]:
        """Remove the least recently used sessions beyond ``most``, and return them."""
        return [self._entries.popitem(last=False)[1] for _ in range(len(self._entries) - self.most)]


# The sessions that clients name.


def _alone(method: Callable[Concatenate[SessionRegistry, _P], _T]) -> Callable[Concatenate[SessionRegistry, _P], _T]:
    """Decorate a method so that it holds the registry's lock: no name may be given twice."""

    @functools.wraps(method)
    def wrapper(self: SessionRegistry, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        with self.lock:
            return method(self, *args, **kwargs)

    return wrapper


class SessionRegistry:
    """The sessions of a server that clients name. Its methods wait for the end of a step, so call them in a thread.

    Args:
        engine: the engine.
        most: sessions that may be open.
        folder: the engine's folder of saved sessions.
        leases: the rights to hold sessions, where several servers share them.

    Attributes:
        lock: held by the thread that looks something up or changes it.
    """

    def __init__(self, engine: Engine, most: int, folder: str | None = None, leases: Leases | None = None) -> None:
        self.lock = threading.RLock()  # `SessionRoutes` holds it around the methods below, which take it as well
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
        """Return the names of an owner's sessions, open or saved, in order."""
        mine = f"{owner}--"
        names = {*self._engine.session_names, *self._leases.names()}
        return sorted(name.removeprefix(mine) for name in names if name.startswith(mine))

    def holds(self, owner: str, name: str) -> bool:
        """Return whether a session is open on this server. A saved one does not count."""
        return self._open.holds(owner, name) or self._engine.has_session(full_name(owner, name))

    @_alone
    def make(self, owner: str, body: SessionBody, adapter: str | None = None) -> ServerSession:
        """Open a new session with the name, policy, budget, pins and ``keep_prompt`` of a body, and with an adapter.

        Raises:
            RefusalError: the name is taken or cannot be used, or there are too many sessions.
            KVKeepError: the engine refuses the session.
        """
        if body.policy is not None:
            check_policy(body.policy)
        pins = spans([(start, stop) for start, stop in body.pins or ()])
        settings: dict[str, Any] = {"policy": body.policy, "budget": body.budget, "pins": pins, "adapter": adapter}
        settings["keep_prompt"] = body.keep_prompt
        entry = self._opened(owner, self._reserve(owner, body.id), None, **settings)
        # None: with all turns taken back, the session has read nothing
        entry.beginning, entry.states = settings, TurnStates(None)
        return entry

    @_alone
    def find(self, owner: str, name: str, until: threading.Event | None = None) -> ServerSession:
        """Return an owner's session. A saved session is opened.

        Args:
            owner, name: of the session.
            until: the session counts as in use until this is set.

        Raises:
            RefusalError: there is no such session, another server holds it, or too many are open.
        """
        entry = self._open.find(owner, name)
        if entry is not None and entry.session.closed:  # a conversation that had to make room for others
            self._open.remove(owner, name)
            entry = None
        entry = entry or self._reopened(owner, name)
        if until is not None:
            entry.use(until)
        return entry

    def _reopened(self, owner: str, name: str) -> ServerSession:
        """Open a saved session, after taking its lease from other servers.

        Raises:
            RefusalError: there is no such session, another server holds it, or too many are open.
        """
        if _NAME.fullmatch(name) is None or name not in self.names(owner):
            raise unknown("session", name, "Make it with POST /v1/sessions.")
        self._check_room()
        if not self._leases.take(full := full_name(owner, name)):
            raise elsewhere(name)
        if full not in self._engine.session_names:  # another server has deleted it meanwhile
            self._leases.give(full)
            raise unknown("session", name, "Make it with POST /v1/sessions.")
        try:
            return self._opened(owner, name, None, create=False)
        except InputError as error:
            if full in self._engine.session_names:
                raise
            # a conversation that has made room for others meanwhile
            raise unknown("session", name, "Make it with POST /v1/sessions.") from error

    @_alone
    def fork(self, owner: str, name: str, copy: str | None) -> ServerSession:
        """Copy a session under the name ``copy``, or a random one: the copy goes on from the last finished turn.

        Raises:
            RefusalError: there is no such session, the name of the copy is taken, or too many are open.
        """
        parent = self.find(owner, name)
        session, settled = parent.session, dict(parent.beginning_again)
        memory = session.snapshot() if session.token_ids else None
        states = parent.states.copied()
        if memory is not None:
            settled["pins"] = ()  # the memory has them
            last = states[-1] if len(states) else None
            if last is None or last.seen != memory.seen:  # a turn has just ended, and is not noted yet
                states.add(memory)
        entry = self._opened(owner, self._reserve(owner, copy), memory, states=states, **settled)
        entry.beginning = parent.beginning_again
        return entry

    @_alone
    def rewind(self, owner: str, name: str, turns: int) -> ServerSession:
        """Take back the last turns of a session. With all of them it begins anew, with its first settings.

        Raises:
            RefusalError: there is no such session, or its earlier turns are not kept.
        """
        entry = self.find(owner, name)
        if entry.state_before(turns) is None:
            self._begin_anew(owner, entry)
        else:
            entry.rewind(turns)
        return entry

    def _begin_anew(self, owner: str, entry: ServerSession) -> None:
        """Take back all turns of a session: delete it, and open it again with its first settings.

        Raises:
            InputError: a turn is running.
        """
        entry.session.rewind(entry.session.snapshot())  # refuses while a turn runs
        beginning = entry.beginning_again
        entry.session.close(delete=True)
        entry.session = self._engine.session(name=full_name(owner, entry.id), **beginning)
        entry.states = TurnStates(None)

    @_alone
    def pin(self, owner: str, name: str, pins: Spans) -> ServerSession:
        """Set which tokens of a session may not be evicted, in place of the pins before. The stored state after the
        last turn gets them, too.

        Raises:
            RefusalError: there is no such session, or it has no turn yet.
            KVKeepError: the engine refuses the pins.
        """
        entry = self.find(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so it has no tokens to pin.", param="pins")
        entry.session.pin(pins)
        if len(entry.states):  # the state after the last turn was noted without these pins
            entry.states.take_back(1)
        self.note(entry)
        return entry

    @_alone
    def drop(self, owner: str, name: str, body: DropBody) -> ServerSession:
        """Let tokens of a session leave its memory, and the stored state after the last turn. Earlier states keep them.

        Raises:
            RefusalError: there is no such session, it has no turn yet, or a turn is running.
            KVKeepError: the engine refuses the drop.
        """
        entry = self.find(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so there is nothing to drop.")
        if entry.session.running:
            raise RefusalError(409, f"A turn of the session {name} is running. Drop its messages when it has ended.")
        spans_given = [(start, stop) for start, stop in body.spans or ()]
        if entry.session.drop(body.messages or (), spans_given, reposition=body.reposition):
            if len(entry.states):  # the state after the last turn was noted with these tokens
                entry.states.take_back(1)
            self.note(entry)
        return entry

    @_alone
    def save(self, owner: str, name: str) -> ServerSession:
        """Write a session to the disk.

        Raises:
            RefusalError: there is no such session, it has no turn yet, or the server has no folder.
        """
        self._need_folder()
        entry = self.find(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so there is nothing to save.")
        entry.session.save()
        return entry

    @_alone
    def restore(self, owner: str, name: str) -> ServerSession:
        """Go back to the state in which a session was saved last. It is stored behind the states of earlier turns.

        Raises:
            RefusalError: there is no such session, or it was never saved.
        """
        folder = self._need_folder()
        entry = self.find(owner, name)
        path = Path(folder) / f"{full_name(owner, name)}.kvkeep"
        if not path.exists():
            raise unknown("saved session", name, "Save it first.")
        entry.session.rewind(Snapshot.load(path))
        self.note(entry)
        return entry

    @_alone
    def remove(self, owner: str, name: str) -> None:
        """Close a session, delete its file, and give up its lease.

        Raises:
            RefusalError: there is no such session.
        """
        entry = self.find(owner, name)
        entry.session.close(delete=True)
        self._open.remove(owner, name)
        self._leases.give(full_name(owner, name))

    def let_go(self) -> None:
        """Close all idle sessions of a server that shares its folder, so that other servers can open them from their
        files.

        Do nothing unless several servers share the folder. A session that cannot be written stays open, and so does one
        without a turn, which has no file.
        """
        if not self._leases.shared:
            return
        for owner, name in self._open.names():
            self._let_go(owner, name)

    @_alone
    def _let_go(self, owner: str, name: str) -> None:
        """Close one session and give up its lease, if it is idle and can be written."""
        entry = self._open.find(owner, name)
        if entry is not None and entry.session.token_ids and not entry.used and entry.close():
            self._open.remove(owner, name)
            self._leases.give(full_name(owner, name))

    def keep(self, entry: ServerSession) -> None:
        """Write a session to the disk after a change, if several servers share the folder; else do nothing.

        A failure is logged: the session goes on here, and elsewhere from its last file.
        """
        if not self._leases.shared:
            return
        try:
            entry.session.save()
        except (SnapshotError, InputError) as error:
            log.error("Session %s was not written: %s", entry.id, error)

    @_alone
    def note(self, entry: ServerSession) -> None:
        """Store a session's state after a turn, to go back to later, and drop the oldest stored states beyond a limit.

        The states of other sessions are dropped first. Each session keeps at least one, so the limit may stay exceeded.
        """
        entry.note()
        self._trim(entry)

    def _trim(self, entry: ServerSession) -> None:
        """Drop the oldest states until all fit into the limit, those of this session last."""
        for other in sorted(self._open, key=lambda other: other is entry):  # its own states go last
            while other.states.turns and self._state_bytes() > MOST_STATE_BYTES:
                other.states.drop_oldest()

    def _state_bytes(self) -> int:
        """Return the bytes of all states of open sessions. Those that forks share count once."""
        states = {id(state): state for entry in self._open for state in entry.states}
        return sum(state.nbytes for state in states.values() if state is not None)

    def ran(self, entry: ServerSession) -> None:
        """Record the end of a turn: remember its memory, and write the session to the disk if servers share the
        folder.
        """
        self.note(entry)
        self.keep(entry)

    def _opened(
        self, owner: str, name: str, memory: Snapshot | None, states: TurnStates | None = None, **options: object
    ) -> ServerSession:
        """Open a session in the engine and add it to the table. If the engine refuses it, give up its lease.

        Args:
            owner, name: of the session.
            memory: with which it begins.
            states: its memories after its last turns, if they are known.
            options: further arguments of `Engine.session`.
        """
        full = full_name(owner, name)
        try:
            # the callers' options have types of all kinds, and the engine checks them
            made = self._engine.session(name=full, snapshot=memory, **options)  # type: ignore[arg-type]
        except BaseException:
            # the caller has taken the lease for this session
            self._leases.give(full)
            raise
        entry = ServerSession(name, made)
        self._open.add(owner, name, entry)
        if states is None:
            entry.note()
        else:
            entry.states = states
        self._trim(entry)
        return entry

    def _reserve(self, owner: str, name: str | None) -> str:
        """Reserve a name for a new session, taking its lease: the given name, or a random one.

        Whoever opens the session gives the lease back if that fails.

        Raises:
            RefusalError: the name is taken or cannot be used, or there are too many sessions.
        """
        self._check_room()
        if name is None:
            name = f"sess_{secrets.token_hex(12)}"
        if _NAME.fullmatch(name) is None:
            raise RefusalError(400, "The name of a session has 1 to 64 letters, digits, - and _.", param="id")
        # the lease last: it is taken only when nothing else stands against the name
        if self._open.holds(owner, name) or name in self.names(owner) or not self._leases.take(full_name(owner, name)):
            raise RefusalError(409, f"There is a session {name} already. Choose another name.", param="id")
        return name

    def _check_room(self) -> None:
        """Refuse another session if as many are open as may be.

        Raises:
            RefusalError: so many are open.
        """
        self._open.drop_closed()  # conversations that made room for others
        if len(self._open) >= self._open.most:
            message = (
                f"{self._open.most} sessions are open, the most that this server has. Delete one that is not needed."
            )
            raise RefusalError(429, message, code="too_many_sessions", headers={"Retry-After": "60"})

    def _need_folder(self) -> str:
        """Return the folder of saved sessions; refuse if the server has none.

        Raises:
            RefusalError: it has none.
        """
        if self._folder is None:
            raise RefusalError(400, "This server keeps no sessions on disk: it was started without a session folder.")
        return self._folder


# The sessions of a server that is about to end: others get them before it has ended.

_LOOK_S, _HANDOVER_AGAIN_S = 0.1, 10.0
"""Seconds between two looks at whether the server stays and which of its sessions are idle; and after a failed look."""


class Handover:
    """Closes a server's idle sessions while it takes no requests, in a thread, so that other servers can open them.

    A server may still have answers to write then. Their sessions are closed when the answers end.

    Args:
        sessions: the sessions.
        stays: whether the server takes requests.
    """

    def __init__(self, sessions: SessionRegistry, stays: Callable[[], bool]) -> None:
        self._sessions, self._stays, self._ended = sessions, stays, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-handover", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop the thread, and wait for it. No more sessions are closed."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        """Close idle sessions whenever the server takes no requests, until `end`."""
        while not self._ended.wait(_LOOK_S):
            try:
                if not self._stays():
                    self._sessions.let_go()
            except Exception:  # whatever Ray Serve raises: without this thread all sessions would stay
                log.exception("Sessions could not be handed over. The next attempt is in %d s.", _HANDOVER_AGAIN_S)
                self._ended.wait(_HANDOVER_AGAIN_S)
