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
        """Return the settings, arguments of `Engine.session`, with which the session can be started anew: those with
        which a client has made it. If they were given to another process, return its present policy, budget and
        adapter, and no pins, which are not known.
        """
        own = self.session
        return self.beginning or {"policy": own.policy, "budget": own.budget, "pins": (), "adapter": own.adapter}

    @property
    def used(self) -> bool:
        """Return whether a request that `use` has noted still uses the session."""
        return any(not ended.is_set() for ended in self._users)

    def use(self, until: threading.Event) -> None:
        """Count the session as in use until a request ends; several may use it at once.

        Args:
            until: is set when the request ends.
        """
        self._users = {ended for ended in self._users if not ended.is_set()} | {until}

    @property
    def answers(self) -> int:
        """Return the number of the assistant's messages in the conversation, those given by the client included."""
        return sum(message["role"] == "assistant" for message in self.session.messages)

    @property
    def turns_to_rewind(self) -> int:
        """Return how many of the last turns can be taken back: as many as memories before them are kept.

        All turns at once can be taken back in any case, and so can the only one, which counts here.
        """
        return self.states.turns or int(self.answers == 1)

    def note(self) -> bool:
        """Append the memory after the last finished turn to ``states``, so that the session can go back to it. Return
        whether that was done.

        Append nothing before the first turn, if the memory is there already (each turn reads tokens, so it would have
        seen more), or if it cannot be read; this is no error.
        """
        last, seen = self.states[-1] if len(self.states) else None, len(self.session.history.ids)
        if seen == (0 if last is None else last.seen):
            return False
        with suppress(SnapshotError, InputError):  # its file is gone, or it was deleted meanwhile
            self.states.add(self.session.snapshot())
            return True
        return False

    def state_before(self, turns: int) -> Snapshot | None:
        """Return the memory that the session had before its last ``turns`` turns, one at least; ``None`` if it had read
        nothing then. The session is not changed.

        Raises:
            RefusalError: this memory is not kept, or there are fewer turns.
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
        """Take back the last ``turns`` turns: the session goes on from the memory before them. Not all turns may be
        taken back so, see `SessionRegistry.rewind`.

        Raises:
            RefusalError: the memory before them is not kept.
            InputError: a turn is running.
        """
        target = self.state_before(turns)
        assert target is not None  # the registry begins such a session anew
        self.session.rewind(target)
        self.states.take_back(turns)

    def close(self) -> bool:
        """Write the session to the disk and close it. Return whether that was done: ``False``, and the session stays
        open, if it fails, or, without a new try, if it has failed within the last second.

        Only the first failure is logged; none is raised.
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
        """Return a list of the owner and the name of each session in the table, least recently used first."""
        return list(self._entries)

    def holds(self, owner: str, name: str) -> bool:
        """Return whether the table has the session of an owner with a name, without marking it as used."""
        return (owner, name) in self._entries

    def find(self, owner: str, name: str) -> ServerSession | None:
        """Return the session of an owner with a name, and mark it as used most recently; ``None`` if the table does not
        have it.
        """
        entry = self._entries.get((owner, name))
        if entry is not None:
            self._entries.move_to_end((owner, name))
        return entry

    def add(self, owner: str, name: str, entry: ServerSession) -> None:
        """Add a session for an owner under a name, as used most recently. More than ``most`` are taken, see `trim`."""
        self._entries[owner, name] = entry

    def remove(self, owner: str, name: str) -> ServerSession | None:
        """Remove a session from the table and return it, not closed; ``None`` if the table does not have it."""
        return self._entries.pop((owner, name), None)

    def drop_closed(self) -> None:
        """Remove the sessions from the table that were closed elsewhere."""
        for key, entry in list(self._entries.items()):
            if entry.session.closed:
                self._entries.pop(key, None)

    def trim(self) -> list[ServerSession]:
        """Remove the least recently used sessions beyond ``most`` from the table, and return them; the caller closes
        them.
        """
        return [self._entries.popitem(last=False)[1] for _ in range(len(self._entries) - self.most)]


# The sessions that clients name.


def _alone(method: Callable[Concatenate[SessionRegistry, _P], _T]) -> Callable[Concatenate[SessionRegistry, _P], _T]:
    """Return the method of a `SessionRegistry` as one that holds the registry's lock while it runs, so that no name is
    given twice.
    """

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
        """Return how many open sessions have a turn that runs or waits for a row."""
        return sum(entry.session.running for entry in self._open)

    def names(self, owner: str) -> list[str]:
        """Return the names of an owner's sessions, open or saved, on this server or one that shares its folder, sorted;
        those that keep chats included.
        """
        mine = f"{owner}--"  # as `full_name` writes it
        names = {*self._engine.session_names, *self._leases.names()}
        return sorted(name.removeprefix(mine) for name in names if name.startswith(mine))

    def holds(self, owner: str, name: str) -> bool:
        """Return whether a session of an owner is open on this server. One that is only saved does not count."""
        return self._open.holds(owner, name) or self._engine.has_session(full_name(owner, name))

    @_alone
    def make(self, owner: str, body: SessionBody, adapter: str | None = None) -> ServerSession:
        """Open a new session with the name (or a random one), policy, budget, pins and ``keep_prompt`` of a body.

        Args:
            owner: to whom it belongs.
            body: the body.
            adapter: the adapter that answers in it; ``None``: the model alone.

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
        """Return an owner's session, marked as used most recently. One that is only saved is opened, and counts as open
        from then on.

        A turn that has ended, and that was not noted yet, is noted first: the answer to it is perhaps still on its way,
        or its client has gone before the end of the answer.

        Args:
            owner, name: of the session.
            until: the session counts as in use until this is set; ``None``: it does not count so.

        Raises:
            RefusalError: there is no such session, another server holds it, or too many are open.
            KVKeepError: its file cannot be read.
        """
        entry = self._open.find(owner, name)
        if entry is not None and entry.session.closed:  # a conversation that had to make room for others
            self._open.remove(owner, name)
            entry = None
        entry = entry or self._reopened(owner, name)
        if until is not None:
            entry.use(until)
        self.note(entry)
        return entry

    def _idle(self, owner: str, name: str) -> ServerSession:
        """Return an owner's session, whose turns have all ended and are noted.

        Raises:
            RefusalError: see `find`; or a turn is running.
        """
        if self.find(owner, name).session.running:
            raise RefusalError(409, f"A turn of the session {name} is running. Wait for its end, or cancel it, before.")
        return self.find(owner, name)  # once more: the turn may have ended between the two looks

    def _reopened(self, owner: str, name: str) -> ServerSession:
        """Open the saved session of an owner, after its lease was taken, and its file moved from another server's
        folder.

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
        """Open a copy of an owner's session, with the memory after the last finished turn, the same states to go back
        to, and the same settings. Both go on independently.

        Args:
            owner, name: of the session.
            copy: the copy's name; ``None``: a random one.

        Raises:
            RefusalError: there is no such session, the name of the copy is taken or cannot be used, or too many are
                open.
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
        """Take back the last ``turns`` turns of an owner's session, one at least. With all of them it begins anew, with
        its first settings.

        Raises:
            RefusalError: there is no such session, a turn is running, the memory before these turns is not kept, or
                there are fewer turns.
        """
        entry = self._idle(owner, name)
        if entry.state_before(turns) is None:
            self._begin_anew(owner, entry)
        else:
            entry.rewind(turns)
        return entry

    def _begin_anew(self, owner: str, entry: ServerSession) -> None:
        """Take back all turns of a session: delete it with its file, and open a new one of the engine in its place,
        under its name and with its first settings.

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
        """Set which tokens of an owner's session may not be evicted from now on, in place of the pins before. The
        stored state after the last turn gets them, too; earlier states keep theirs.

        Args:
            owner, name: of the session.
            pins: spans of positions; ``()``: none are pinned.

        Raises:
            RefusalError: there is no such session, it has no turn yet, or a turn is running.
            KVKeepError: the engine refuses the pins.
        """
        entry = self._idle(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so it has no tokens to pin.", param="pins")
        entry.session.pin(pins)
        entry.states.replace_last(entry.session.snapshot())  # it was noted without these pins
        return entry

    @_alone
    def drop(self, owner: str, name: str, body: DropBody) -> ServerSession:
        """Let tokens leave the memory of an owner's session, and its stored state after the last turn. Earlier states
        keep them.

        Args:
            owner, name: of the session.
            body: names messages or spans of positions, and says whether what stands behind them moves up.

        Raises:
            RefusalError: there is no such session, it has no turn yet, or a turn is running.
            KVKeepError: the engine refuses the drop.
        """
        entry = self._idle(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so there is nothing to drop.")
        spans_given = [(start, stop) for start, stop in body.spans or ()]
        if entry.session.drop(body.messages or (), spans_given, reposition=body.reposition):
            entry.states.replace_last(entry.session.snapshot())  # it was noted with these tokens
        return entry

    @_alone
    def save(self, owner: str, name: str) -> ServerSession:
        """Write an owner's session, with the memory after its last turn, to its file, in place of what was saved
        before.

        Raises:
            RefusalError: there is no such session, it has no turn yet, or the server has no folder.
            KVKeepError: the file cannot be written.
        """
        self._need_folder()
        entry = self.find(owner, name)
        if not entry.session.token_ids:
            raise RefusalError(400, f"The session {name} has no turn yet, so there is nothing to save.")
        entry.session.save()
        return entry

    @_alone
    def restore(self, owner: str, name: str) -> ServerSession:
        """Let an owner's session go back to the memory in its file, which was saved last. It becomes the newest of the
        states to go back to, so that taking back one turn returns to the memory before this call.

        Raises:
            RefusalError: there is no such session, a turn is running, it was never saved, or the server has no folder.
            KVKeepError: the file cannot be read.
        """
        folder = self._need_folder()
        entry = self._idle(owner, name)
        path = Path(folder) / f"{full_name(owner, name)}.kvkeep"
        if not path.exists():
            raise unknown("saved session", name, "Save it first.")
        entry.session.rewind(Snapshot.load(path))
        entry.states.add(entry.session.snapshot())  # also where that is as long as the one before
        self._trim(entry)
        return entry

    @_alone
    def remove(self, owner: str, name: str) -> None:
        """Close an owner's session, delete its file, and give up its lease. A turn that is running is cancelled.

        Raises:
            RefusalError: there is no such session, or another server holds it.
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
        """Write and close one open session, and give up its lease; do nothing if a request uses it, if it has no turn
        yet, or if it cannot be written.
        """
        entry = self._open.find(owner, name)
        if entry is not None and entry.session.token_ids and not entry.used and entry.close():
            self._open.remove(owner, name)
            self._leases.give(full_name(owner, name))

    def keep(self, entry: ServerSession) -> None:
        """Write a session to its file after a change, if several servers share the folder; else do nothing.

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
        """Append a session's memory after the last finished turn to those that it can go back to, and drop the oldest
        ones of all open sessions while they have more bytes than `MOST_STATE_BYTES`.

        Do nothing if it is the last of them already. Those of other sessions are dropped first. Each session keeps its
        last one, so the limit may stay exceeded.
        """
        if entry.note():
            self._trim(entry)

    def _trim(self, entry: ServerSession) -> None:
        """Drop stored states of open sessions, the oldest of each, until all fit into the limit: those of this session
        last, and never the last one of any.
        """
        for other in sorted(self._open, key=lambda other: other is entry):  # its own states go last
            while other.states.turns and self._state_bytes() > MOST_STATE_BYTES:
                other.states.drop_oldest()

    def _state_bytes(self) -> int:
        """Return the bytes of the memories that open sessions keep to go back to. One that forks share counts once."""
        states = {id(state): state for entry in self._open for state in entry.states}
        return sum(state.nbytes for state in states.values() if state is not None)

    def ran(self, entry: ServerSession) -> None:
        """Record that a turn of a session has ended: store its memory as one to go back to, and, if servers share the
        folder, write the session to its file.
        """
        self.note(entry)
        self.keep(entry)

    def _opened(
        self, owner: str, name: str, memory: Snapshot | None, states: TurnStates | None = None, **options: object
    ) -> ServerSession:
        """Open a session in the engine, add it to the table, and return it. The caller has taken its lease, which is
        given up if the engine refuses the session.

        Args:
            owner, name: of the session.
            memory: with which it begins; ``None``: with what its file has, or empty.
            states: its memories after its last turns; ``None``: not known, so that its present memory is the only one.
            options: further arguments of `Engine.session`.

        Raises:
            KVKeepError: the engine refuses the session.
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
        """Check the name for a new session, or make a random one for ``None``; take its lease, and return it. The name
        is without the owner's.

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
        """Forget sessions that were closed elsewhere, and refuse another one if as many are open as may be.

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
        """Stop the thread that closes sessions, and wait for it. Sessions that are open then stay open."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        """Ask every 0.1 s whether the server takes requests, and if not, close its idle sessions; until `end` is
        called.
        """
        while not self._ended.wait(_LOOK_S):
            try:
                if not self._stays():
                    self._sessions.let_go()
            except Exception:  # whatever Ray Serve raises: without this thread all sessions would stay
                log.exception("Sessions could not be handed over. The next attempt is in %d s.", _HANDOVER_AGAIN_S)
                self._ended.wait(_HANDOVER_AGAIN_S)
