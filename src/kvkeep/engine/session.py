"""`Session`: a conversation whose memory stays between its turns, without a row of the engine."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from kvkeep.engine.admission import Admission, Settled, made_of
from kvkeep.engine.dispatcher import AsyncEvents, Box, Dispatcher, Uninterrupted
from kvkeep.engine.drops import check_drop, drops_of
from kvkeep.engine.prompt_encoding import ConversationHistory
from kvkeep.engine.request import Asked, Event, Request, Result, check_name, last_result, turn_of
from kvkeep.engine.sampling_params import SamplingParams, another_sequence, whole_within
from kvkeep.engine.sequence import Sequence
from kvkeep.engine.session_store import Move, SessionStore, State, StoredSnapshot
from kvkeep.errors import InputError, SnapshotError
from kvkeep.pins import Span, Spans, count, without
from kvkeep.pins import spans as pin_spans
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.fingerprint import Fingerprint
from kvkeep.snapshot.snapshot import Pending, Snapshot, SnapshotAbout


@dataclass(frozen=True)
class SessionHost:
    """What a session needs of the engine that runs its turns. Whoever calls a function has the dispatcher's turn.

    Attributes:
        admission: checks turns, and knows the model and the settings.
        dispatcher: hands the events of turns to those who listen.
        check_open: refuses to go on after the engine was closed.
        new_number: returns the number of the next request.
        enter: notes a turn, and where its events go.
        enqueue: lets a turn wait for a row.
        refuse: forgets a turn that cannot run after all, and raises the reason in its listener.
        step: brings the engine one step further. It takes the dispatcher's turn itself.
        cancel: ends the request of a number.
        settle: waits until the memories of all finished turns are on the disk.
    """

    admission: Admission
    dispatcher: Dispatcher
    check_open: Callable[[], None]
    new_number: Callable[[], int]
    enter: Callable[[Sequence, Box], None]
    enqueue: Callable[[Sequence], None]
    refuse: Callable[[Sequence, Exception], None]
    step: Callable[[], None]
    cancel: Callable[[int], Result | None]
    settle: Callable[[], None]


# The memory of a session between its turns: loaded into a row, taken over from it, written to the disk.


class SessionMemory:
    """The memory of a session between its turns. Whoever uses it has the engine's turn.

    Args:
        admission: knows the model and the settings.
        store: keeps the memories of idle sessions.
        state: the session after its last finished turn.
        settled: its policy, budget and adapter.
        sequence: its identity for drawn tokens.
        name: by which the engine finds it again, or ``None``.
        note: more that is noted in its snapshots.

    Attributes:
        state: the session after its last finished turn.
        messages: the conversation up to the message of the turn that runs.
        replaced: seconds since 1970 at which the engine last replaced the memory; 0: not yet.
    """

    def __init__(
        self,
        admission: Admission,
        store: SessionStore,
        state: State,
        settled: Settled,
        *,
        sequence: int,
        name: str | None,
        note: Mapping[str, Any],
    ) -> None:
        self.state, self.messages, self.replaced = state, tuple[Mapping[str, str], ...](), 0.0
        self._starts: tuple[int, ...] = ()  # of the messages of the turn that runs, and of its answer
        self._admission, self._store, self._settled = admission, store, settled
        self._sequence, self._name, self._note = sequence, name, note
        self._fingerprint: (
            Fingerprint  # of the turn that runs, as it was at its beginning; `load` sets it before `keep` reads it
        )

    def turn(self, asked: Sequence) -> Sequence:
        """Return the sequence of a turn. Its prompt is the session's tokens so far and those of the request.

        The turn's messages are noted for `keep`, so at most one turn may run at a time.

        Raises:
            KVKeepError: the engine cannot run it.
        """
        past, (policy, budget, adapter) = self.state.past, self._settled
        # each turn draws other random numbers, though its tokens are counted from 0 again
        sequence = another_sequence(self._sequence, len(past.ids)) if past.ids else self._sequence
        pins = (*asked.request.pins, *self.state.pins)
        if asked.request.keep_prompt is not None:
            raise InputError("`keep_prompt` belongs to the session: give it when the session is made.")
        keeps = False if policy.keep_prompt is None else policy.keep_prompt  # not the engine's
        settled = {"policy": policy, "budget": budget, "adapter": adapter, "keep_prompt": keeps}
        request = asked.request.replaced(**settled, sequence=sequence, pins=pin_spans(pins))
        made = self._admission.check(request, asked.id, past)
        # `times`, too: what the turn has waited for others counts
        made.times, made.reads, made.left = asked.times, asked.reads, asked.left
        made.load, made.keep = self.load, self.keep
        self.messages = self._admission.words.messages_of(request, past)
        self._starts = self._admission.words.starts_of(request, past)
        return made

    def load(self) -> Contents | None:
        """Return the memory with which a turn begins, after checking that it fits the model as it is now; ``None``
        before the first turn. Note the fingerprint that `keep` gives to the memory after the turn.

        Raises:
            SnapshotError: the memory does not belong to the model as it is now, or its file cannot be read any more.
        """
        self._fingerprint = self._admission.fingerprint(*self._settled)
        return self.contents()

    def contents(self) -> Contents | None:
        """Return the memory after the last finished turn; ``None`` if the session has none yet.

        Raises:
            SnapshotError: see `load`.
        """
        if (kept := self.state.kept) is None:
            return None
        snapshot = self._store.load(kept)
        # the model's weights may have changed since the last turn
        snapshot.fingerprint.check(self._admission.fingerprint(*self._settled))
        return snapshot.contents

    def keep(self, sequence: Sequence, contents: Contents) -> Pending | None:
        """Take over a row's contents after a turn that has ended well, with the conversation so far.

        Return the write for which the turn's last event waits, and after which the session has the memory; ``None`` if
        it has it already.

        Raises:
            SnapshotError: see `SessionStore.settle`.
        """
        ids = array("i", (*sequence.prompt, *sequence.token_ids))
        n, said = contents.seen, sequence.tail.text if sequence.tail else ""
        answered = (*self.state.past.messages, *self.messages, {"role": "assistant", "content": said})
        # they were counted without messages that the first turn left out, and an earlier chat's memory had
        starts = () if sequence.skipped else self._starts
        past = ConversationHistory(
            ids[:n],
            tuple(ids[n:]),
            answered if self.messages else (),
            drops=sequence.drops,
            starts=(*self.state.past.starts, *starts) if starts else (),
        ).held_in(contents)
        return self.go_on(past, Snapshot(contents, self._fingerprint, past.tokens))

    def go_on(self, past: ConversationHistory, snapshot: Snapshot, *, written: bool = False) -> Pending | None:
        """Replace the session's memory and history. Without room for the new memory, the session stays as it was.

        Return the write that must end before the replacement is done, by the write's ``finish``; ``None`` if it is
        done.

        Args:
            past: what the new memory stands for.
            snapshot: the new memory.
            written: whether a memory with a name is written to the folder, if there is one, before it counts.

        Raises:
            SnapshotError: see `SessionStore.settle`.
        """
        snapshot = replace(snapshot, note={**past.note, **self._note, "sequence": self._sequence})
        kept, move = self._store.keep(snapshot, self._name, instead=self.state.kept)
        own = self._store.write(kept) if written and self._name is not None else None

        def finish() -> None:
            """Free memory for the new one once writes have ended, and let the session go on from it."""
            self._store.settle(move)
            if own is not None:
                self._store.wrote(own)
            self._store.adopt(kept, instead=self.state.kept)
            self.state, self.replaced = State(past, kept), time.time()

        if (last := own or move) is not None:  # writes end in their order
            return Pending(last.writing, finish)
        finish()
        return None

    def fork(self) -> State:
        """Return the session's state for a fork. The memory of a session with a name is copied, since later turns will
        overwrite its file; another memory is shared, as nobody changes it.
        """
        kept = self.state.kept
        if kept is not None and kept.name is not None:  # its file will be overwritten by later turns of this session
            kept = self._store.keep_now(self._store.load(kept))
        return replace(self.state, kept=kept)

    @property
    def is_written(self) -> bool:
        """Return whether nothing is left to write: the memory is on disk, or the session has no name or no memory."""
        kept = self.state.kept
        return self._name is None or kept is None or self._store.is_written(kept)

    def write(self) -> Move | None:
        """Begin to write a named session's memory, and return the move; ``None`` if nothing is left to write."""
        kept = self.state.kept
        return None if self._name is None or kept is None else self._store.write(kept)


class Session:
    """A conversation whose memory stays between its turns. `Engine.session` makes it.

    A session has a row of the engine only while a turn runs. A turn that fails, is cancelled or interrupted leaves the
    session as it was before that turn. Turns that are sent while another one runs wait for it, in order.

    Attributes:
        name: by which the engine finds it again, or ``None``.
        policy, budget: its eviction policy, and its tokens kept per layer and head.
        adapter: the name of its adapter; ``None``: the base model runs.
        sequence: its identity for drawn tokens; forks get others.
    """

    def __init__(
        self,
        host: SessionHost,
        store: SessionStore,
        state: State,
        settled: Settled,
        *,
        sequence: int = 0,
        name: str | None = None,
        note: Mapping[str, Any] = MappingProxyType({}),
        on_close: Callable[[Session], None] | None = None,
    ) -> None:
        self.name, self.sequence, (self.policy, self.budget, self.adapter) = name, sequence, settled
        self._host, self._store, self._on_close = host, store, on_close
        self._memory = SessionMemory(host.admission, store, state, settled, sequence=sequence, name=name, note=note)
        self._running: Sequence | None = None
        self._queue: deque[Sequence] = deque()
        self._forks, self._closed = 0, False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens to the end of the last finished turn. The model may not have read the last one yet."""
        past = self._state.past
        return (*past.ids, *past.pending)

    @property
    def messages(self) -> tuple[Mapping[str, str], ...]:
        """Return the messages to the end of the last finished turn; ``()`` if it did not use the chat template."""
        return self._state.past.messages

    @property
    def nbytes(self) -> int:
        """Return the bytes of the session's memory, in main memory or on the disk."""
        return self._state.kept.nbytes if self._state.kept else 0

    @property
    def running(self) -> bool:
        """Return whether a turn runs or waits."""
        return self._running is not None

    @property
    def closed(self) -> bool:
        """Return whether the session was closed."""
        return self._closed

    @property
    def history(self) -> ConversationHistory:
        """Return the tokens and messages to the end of the last finished turn."""
        return self._state.past

    @property
    def memory(self) -> SessionMemory:
        """Return the object that has the session's memory between turns. Whoever uses it has the engine's turn."""
        return self._memory

    @property
    def _state(self) -> State:
        """Return the state of the session after its last finished turn."""
        return self._memory.state

    def send(self, asked: Asked, sampling: SamplingParams | None = None) -> Iterator[Event]:
        """Continue the conversation, and yield the answer's tokens as they come.

        The turn begins when the first event is asked for. Whoever stops listening cancels the turn.

        Args:
            asked: a text, which becomes the user's message in the chat template; new messages; token ids; or a request
                with one of these, stop texts and more.
            sampling: how tokens are chosen, unless a request says it.

        Raises:
            InputError: the session or the engine is closed, or the request cannot be used; see `Engine.add`.
        """
        return self._events(asked, sampling)

    def ask(self, asked: Asked, sampling: SamplingParams | None = None) -> Result:
        """Continue the conversation, and return the whole answer. Arguments and errors are those of `send`."""
        return last_result(self.send(asked, sampling))

    def stop(self) -> bool:
        """Let the running turn end with its next token. The text so far is the turn's answer, and is kept.

        The call never waits, so a handler of Ctrl-C may make it. Return whether there is an answer that has begun;
        otherwise nothing is changed.
        """
        running = self._running
        if running is None or not running.token_ids:
            return False
        running.stopped = True
        return True

    def asend(self, asked: Asked, sampling: SamplingParams | None = None) -> AsyncEvents:
        """Continue the conversation from a coroutine: ``async for event in session.asend("a text")``. See `send`."""
        return AsyncEvents(lambda box: self._enqueue(asked, sampling, box), self._host.dispatcher.leave)

    def read(self, asked: str | GenericSequence[int]) -> Result:
        """Add a text or token ids to the memory without an answer. A text is taken as it is.

        Raises:
            KVKeepError: see `send`; or a step failed.
            InputError: the turn was cancelled or failed.
        """
        # a turn that reads ends without the one token that it asks for
        request = Request(prompt=asked, raw=isinstance(asked, str), sampling=SamplingParams(max_new_tokens=1))
        result = last_result(self._events(request, None, reads=True))
        if result.error or result.finish_reason == "cancelled":
            raise InputError(f"The text was not read: {result.error or 'the turn was cancelled'}. Read it again.")
        return result

    def fork(self, n: int = 1) -> list[Session]:
        """Return ``n`` new sessions that go on from the last finished turn.

        They share nothing with this one afterwards.

        Raises:
            InputError: the session or the engine is closed, or ``n`` is no whole number of 1 or more.
        """
        count = whole_within("n", n, 1, 2**20)
        with Uninterrupted(), self._host.dispatcher.turn:
            self._check_open()
            return [self._fork() for _ in range(count)]

    def snapshot(self) -> Snapshot:
        """Return the memory after the last finished turn, with its token ids and messages.

        Raises:
            InputError: the session or the engine is closed.
            SnapshotError: there is no finished turn yet, or the memory cannot be read from the disk.
        """
        with Uninterrupted(), self._host.dispatcher.turn:
            self._check_open()
            if self._state.kept is None:
                raise SnapshotError("The session has no memory yet: send it a turn, or read a text, first.")
            return self._store.load(self._state.kept)

    def rewind(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot of this session, or to any other snapshot of the same model, policy and budget.

        Return once the memory is kept.

        Raises:
            InputError: the session or the engine is closed, or a turn is running.
            SnapshotError: the snapshot belongs to another model, policy or budget; the session stays as it was.
        """
        if not isinstance(snapshot, Snapshot):
            raise InputError(f"{type(snapshot).__name__} is no kvkeep.Snapshot; give what session.snapshot() returned.")
        with Uninterrupted(), self._host.dispatcher.turn:
            self._check_open()
            if self._running is not None:
                raise InputError("A turn of the session is running. Wait for its end, or cancel it, before.")
            # for its checks alone: the session keeps its own
            self._host.admission.settle(self.policy, self.budget, snapshot.fingerprint, self.adapter)
            if (pending := self._memory.go_on(ConversationHistory.of(snapshot), snapshot)) is not None:
                pending.finish()

    @property
    def pins(self) -> Spans:
        """Return the spans of positions that no head may evict: those of the memory after the last finished turn, and
        those given for the next one.
        """
        return pin_spans((*self._state.past.pins, *self._state.pins))

    def pin(self, pins: GenericSequence[Span]) -> None:
        """Set which tokens no head may evict from now on.

        A token that a head has evicted already does not come back.

        Args:
            pins: spans of positions, such as ``((0, 120),)``, instead of the session's pins so far; ``()`` pins none.

        Raises:
            InputError: the session or the engine is closed, a turn is running, or the pins end beyond the tokens read.
            BudgetError: the budget does not hold the pins beside the tokens that the policy protects.
            SnapshotError: there is no finished turn yet, or the memory cannot be read from the disk.
        """
        found = pin_spans(pins)
        with Uninterrupted(), self._host.dispatcher.turn:
            self._check_open()
            snapshot = self.snapshot().pinned(found)
            self._host.admission.check_pins(self.policy, self.budget, found)
            self.rewind(snapshot)

    def drop(
        self,
        messages: GenericSequence[int] = (),
        spans: GenericSequence[Span] = (),
        *,
        reposition: bool | None = None,
    ) -> Spans:
        """Let tokens leave the memory: every head evicts them now, and nothing is read again.

        The tokens that stay have been read in the presence of those that go. An earlier snapshot still has them.

        Args:
            messages: indexes of messages, -1 for the last; with each go the tokens by which the template begins and
                ends it.
            spans: positions, such as ``((20, 60),)``.
            reposition: whether the tokens behind move up. They do under slot positions, and stay where they are under
                true ones, so the other value is refused; ``None``: whatever the engine's positions do.

        Returns:
            The positions that have left the memory with this call.

        Raises:
            InputError: the session or the engine is closed, a turn is running, there is no such message, or tokens are
                pinned, not read yet, or all that there are.
            UnsupportedOperationError: the model has layers with a state.
            SnapshotError: there is no finished turn yet, or the memory cannot be read from the disk.
        """
        asked = pin_spans(spans)
        with Uninterrupted(), self._host.dispatcher.turn:
            self._check_open()
            if self._running is not None:
                raise InputError("A turn of the session is running. Wait for its end, or cancel it, before.")
            self._host.admission.check_drops(reposition)
            snapshot, past = self.snapshot(), self._state.past
            gone = without(pin_spans((*asked, *past.spans_of(messages))), past.dropped)
            if not gone:
                return ()
            check_drop(gone, read=len(past.ids), dropped=count(past.dropped), pins=self.pins)
            # `shortest=None`: no earlier state of this memory can be cut out of it any more
            after = replace(past, drops=drops_of((*past.drops, (len(past.ids), gone))), shortest=None)
            left = replace(snapshot, contents=snapshot.contents.without(gone))
            if (pending := self._memory.go_on(after, left)) is not None:
                pending.finish()
            return gone

    def save(self) -> None:
        """Write the memory of a named session to the engine's ``session_dir``; do nothing without a name or a folder.

        `close` calls it as well.

        Raises:
            SnapshotError: the memory cannot be written; an older file stays as it was.
        """
        # writing takes long and happens without the lock, so a turn may end meanwhile and leave a newer memory to write
        while True:
            with Uninterrupted(), self._host.dispatcher.turn:
                # a turn that has ended since the last look has left another memory
                if (move := self._memory.write()) is None:
                    return
            move.writing.join()  # others step the engine meanwhile
            with Uninterrupted(), self._host.dispatcher.turn:
                self._store.wrote(move)
                if self._store.folder is not None:
                    self._store.folder.sync()

    def close(self, *, delete: bool = False) -> None:
        """Cancel all turns and give the memory up; do nothing if the session is closed.

        A named session is saved, so that it can be opened again.

        Args:
            delete: remove the file of a named session instead of writing it.

        Raises:
            SnapshotError: the memory cannot be written. The session stays open and loses nothing.
        """
        # written without the lock, so that others go on meanwhile
        if not (delete or self._memory.is_written):
            with Uninterrupted(), self._host.dispatcher.turn:
                self._cancel()
            self.save()
        with Uninterrupted(), self._host.dispatcher.turn:
            if self._closed:
                return
            self._cancel()
            if not delete:
                self.save()  # of a turn that came in between
            elif self.name is not None:
                self._store.remove(self.name)
            self._give_up()

    def discard(self) -> None:
        """Close an idle session and delete its file; nothing is written. Whoever calls it has the engine's turn."""
        if self.name is not None:
            self._store.remove(self.name)
        self._give_up()

    def _give_up(self) -> None:
        """Close the session, forget its memory without writing it, and tell ``on_close``."""
        self._store.give_up(self._state.kept)
        self._closed, self._memory.state = True, State(ConversationHistory())
        if self._on_close is not None:
            self._on_close(self)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        return f"Session({name}{len(self.token_ids)} tokens, policy='{self.policy}', budget={self.budget})"

    def _events(self, asked: Asked, sampling: SamplingParams | None, *, reads: bool = False) -> Iterator[Event]:
        """Return an iterator over a turn's events. The turn is queued when the first event is asked for."""

        def add(turn: Asked, box: Box) -> int:
            """Start or queue the turn, and return its number."""
            return self._enqueue(turn, sampling, box, reads=reads)

        step, end = self._host.step, self._host.cancel
        return self._host.dispatcher.drain(iter([asked]), add, lambda: True, step=step, end=end)

    def _fork(self) -> Session:
        """Return a new session without a name that goes on from this one's last finished turn.

        Each fork draws other random numbers. That this session is open is the caller's to check.
        """
        self._forks += 1
        own, seed = Settled(self.policy, self.budget, self.adapter), another_sequence(self.sequence, self._forks)
        return Session(self._host, self._store, self._memory.fork(), own, sequence=seed)

    def _cancel(self) -> None:
        """Cancel the running turn and all waiting ones. Turns that only wait for the disk are finished first."""
        self._host.settle()
        waiting, self._queue = self._queue, deque()
        for sequence in (*waiting, *filter(None, (self._running,))):  # the running one last: its end starts the next
            self._host.cancel(sequence.id)

    def _check_open(self) -> None:
        """Refuse to go on after `close`.

        Raises:
            InputError: the session or its engine is closed.
        """
        self._host.check_open()
        if self._closed:
            raise InputError("The session is closed. Open it again by its name, or begin a new one.")

    def _enqueue(self, asked: Asked, sampling: SamplingParams | None, box: Box, *, reads: bool = False) -> int:
        """Start a turn, or queue it behind the running one, and return its number.

        Nothing is queued if the listener has left meanwhile.

        Raises:
            KVKeepError: the turn cannot be run, see `send`.
        """
        request = turn_of(asked, sampling)
        if request.structured_outputs is not None:
            self._host.admission.grammars.constraint(request)  # compiled outside of the lock: it may take seconds
        with Uninterrupted(), self._host.dispatcher.turn:
            self._check_open()
            # its prompt and its ends are known when it is its turn, see `SessionMemory.turn`
            sequence = Sequence(self._host.new_number(), request, self.policy, self.budget, frozenset())
            sequence.reads, sequence.left = reads, self._left
            if box.left:
                return sequence.id
            if self._running is None:  # before it is entered: a turn that cannot run is no request of the engine
                sequence = self._memory.turn(sequence)
            self._host.enter(sequence, box)
            if self._running is None:
                self._start(sequence)
            else:
                self._queue.append(sequence)
            return sequence.id

    def _start(self, sequence: Sequence) -> None:
        """Make a sequence the running turn, and queue it for a row."""
        self._running = sequence
        self._host.enqueue(sequence)

    def _left(self, sequence: Sequence) -> None:
        """Remove a turn that has ended, and start the next one that can run.

        A turn that cannot start is refused, and the one after it tried.
        """
        self._queue = deque(other for other in self._queue if other.id != sequence.id)
        if sequence is self._running:
            self._running = None
        while self._queue and self._running is None:
            waiting = self._queue.popleft()
            try:
                self._start(self._memory.turn(waiting))
            except Exception as error:  # what the user did wrong; or a tokenizer that fails
                self._host.refuse(waiting, error)


# The turns of a session that can be taken back.

MOST_TURNS_BACK = 8
"""Turns that can be taken back."""
MOST_STATE_BYTES = 2**30
"""Bytes that the memories before these turns may take, of all sessions together; one turn can always be taken back."""


class TurnStates:
    """The memories of a session after its last turns, to which it can go back with `Session.rewind`.

    Args:
        first: the memory with which the session begins; ``None``: it has not read anything.
    """

    def __init__(self, *first: Snapshot | None) -> None:
        self._states = deque[Snapshot | None](first, maxlen=MOST_TURNS_BACK + 1)

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[Snapshot | None]:
        """Yield the memories, the oldest first."""
        return iter(self._states)

    def __getitem__(self, index: int) -> Snapshot | None:
        """Return the memory at an index, counted from the oldest one."""
        return self._states[index]

    def copied(self) -> TurnStates:
        """Return a new list of the same memories for a fork, which shares them: nobody changes a memory."""
        return TurnStates(*self._states)

    @property
    def turns(self) -> int:
        """Return how many turns can be taken back: one fewer than there are memories."""
        return max(0, len(self._states) - 1)

    @property
    def nbytes(self) -> int:
        """Return the bytes of all memories that can be gone back to, the present one included."""
        return sum(state.nbytes for state in self._states if state is not None)

    def add(self, state: Snapshot | None) -> None:
        """Append the memory after a turn. Beyond `MOST_TURNS_BACK` and the present one, the oldest one is dropped."""
        self._states.append(state)

    def add_oldest(self, state: Snapshot) -> None:
        """Insert a memory before the oldest one, if there is room."""
        if len(self._states) <= MOST_TURNS_BACK:
            self._states.appendleft(state)

    def drop_oldest(self) -> None:
        """Forget the oldest memory."""
        self._states.popleft()

    def take_back(self, turns: int) -> None:
        """Drop the newest ``turns`` memories, so that the last one is that from before these turns."""
        for _ in range(turns):
            self._states.pop()

    def replace_last(self, state: Snapshot | None) -> None:
        """Replace the memory after the last turn; without one that was noted, append it."""
        if self._states:
            self._states.pop()
        self._states.append(state)


# The sessions of an engine, found by their names.


class Sessions:
    """The sessions of an engine.

    Args:
        store: keeps the memories of idle sessions.
    """

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self._named: dict[str, Session] = {}

    @property
    def names(self) -> list[str]:
        """Return the names of all sessions that are open or on the disk, in order."""
        on_disk = self._store.folder.names() if self._store.folder else []
        return sorted({*self._named, *on_disk})

    @property
    def nbytes(self) -> tuple[int, int]:
        """Return the bytes of all memories in main memory, and the bytes of the folder's files."""
        return self._store.held_bytes, self._store.folder.nbytes if self._store.folder else 0

    def open(  # noqa: PLR0913  the choices of a user
        self,
        host: SessionHost,
        name: str | None,
        *,
        policy: str | Policy | None,
        budget: int | None,
        sequence: int,
        snapshot: Snapshot | None,
        pins: GenericSequence[Span] = (),
        adapter: str | None = None,
        keep_prompt: bool | float | None = None,
    ) -> Session:
        """Return the open session of a name, the saved one, or a new one, see `Engine.session`.

        The caller holds the engine's lock.

        Raises:
            InputError: a name is taken and a snapshot or pins are given, or policy, budget or adapter differ
                from the open session's.
        """
        kept, seed = None, whole_within("sequence", sequence, -(2**63), 2**63 - 1)
        if name is not None:
            found = self._named.get(check_name(name))
            kept = self._store.open(name) if found is None else None
            if snapshot is not None and (found or kept):
                raise InputError(
                    f"There is a session {name!r} already. Open it without a `snapshot` and rewind it, or choose "
                    "another name."
                )
            if pins and (found or kept):
                raise InputError(f"There is a session {name!r} already. Only a new one takes `pins`.")
            if found is not None:
                return _agreed(found, host, policy, budget, adapter, keep_prompt)
        if kept is not None:
            snapshot = self._store.load(kept)
            seed = whole_within("sequence", snapshot.note.get("sequence", 0), -(2**63), 2**63 - 1)
        settled = host.admission.settle(policy, budget, made_of(snapshot), adapter, keep_prompt=keep_prompt)
        return self._made(host, name, settled, seed=seed, snapshot=snapshot, kept=kept, pins=pin_spans(pins))

    def is_open(self, name: str) -> bool:
        """Return whether a session of this name is open."""
        return name in self._named

    def add(
        self,
        host: SessionHost,
        name: str,
        settled: Settled,
        state: State,
        *,
        seed: int,
        note: Mapping[str, Any],
        on_close: Callable[[Session], None],
    ) -> Session:
        """Register and return a new session under a name that the caller knows to be free.

        Args:
            host: what it needs of the engine.
            name: its name.
            settled: its policy, budget and adapter.
            state: its memory, if it has one.
            seed: identity for drawn tokens.
            note: more that is noted in its snapshots.
            on_close: is told when it was closed.
        """

        def leave(session: Session) -> None:
            """Free the name of the session, which was closed, and tell the caller."""
            self.leave(session)
            on_close(session)

        session = Session(host, self._store, state, settled, sequence=seed, name=name, note=note, on_close=leave)
        self._named[name] = session
        return session

    def described(self) -> Iterator[tuple[StoredSnapshot, SnapshotAbout]]:
        """Yield the saved sessions that are not open, with what their files say of them, the least recently written one
        first.
        """
        return ((kept, about) for kept, about in self._store.described() if kept.name not in self._named)

    def write(self) -> None:
        """Write the memories of all named sessions to the disk.

        Raises:
            SnapshotError: a memory cannot be written.
        """
        for session in self._named.values():
            session.save()

    def leave(self, session: Session) -> None:
        """Remove a closed session from the names. Its file stays."""
        if session.name is not None and self._named.get(session.name) is session:
            del self._named[session.name]

    def close(self) -> None:
        """Wait for writes, and release the folder for another engine."""
        self._store.close()

    def _made(
        self,
        host: SessionHost,
        name: str | None,
        settled: Settled,
        *,
        seed: int,
        snapshot: Snapshot | None,
        kept: StoredSnapshot | None,
        pins: Spans,
    ) -> Session:
        """Create a session, continuing a snapshot if one is given, and register its name.

        Args:
            host: what it needs of the engine.
            name: its name, if it has one.
            settled: its policy, budget and adapter.
            seed: identity for drawn tokens.
            snapshot: the memory that it continues.
            kept: the stored form of this memory, if it comes from the session's own file.
            pins: spans of positions of its first turn.
        """
        host.admission.fingerprint(*settled)  # refuses what the engine has no rows for
        if pins:
            host.admission.check_pins(settled.policy, settled.budget, pins)  # no turn could keep them
        state = State(ConversationHistory(), pins=pins)
        if snapshot is not None:
            past = ConversationHistory.of(snapshot)
            state = State(past, kept or self._store.keep_now(snapshot, name), pins)
        session = Session(host, self._store, state, settled, sequence=seed, name=name, on_close=self.leave)
        if name is not None:
            self._named[name] = session
        return session


def _agreed(
    session: Session,
    host: SessionHost,
    policy: str | Policy | None,
    budget: int | None,
    adapter: str | None,
    keep_prompt: bool | float | None,
) -> Session:
    """Return an open session, after checking that the policy, budget, adapter and ``keep_prompt`` asked for are its
    own. What is ``None`` is not asked for.

    Raises:
        InputError: the session has another policy, budget, adapter or ``keep_prompt``.
        KVKeepError: there is no such policy or adapter, or the budget is out of range.
    """
    adapter = session.adapter if adapter is None else adapter
    if keep_prompt is None and policy is None:  # the session's own, and not the engine's
        keep_prompt = False if session.policy.keep_prompt is None else session.policy.keep_prompt
    asked = host.admission.settle(
        session.policy if policy is None else policy,
        session.budget if budget is None else budget,
        adapter=adapter,
        keep_prompt=keep_prompt,
    )
    if asked.adapter != session.adapter:
        raise InputError(
            f"The session {session.name!r} is open with {session.adapter or 'no adapter'}. Leave the adapter out, or "
            "choose another name."
        )
    if asked != (session.policy, session.budget, session.adapter):
        raise InputError(
            f"The session {session.name!r} is open under {session.policy} with a budget of {session.budget}. Leave "
            "policy and budget out, or choose another name."
        )
    return session
