"""Conversations in progress."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

from kvkeep.cli import console
from kvkeep.cli.chat_folder import ChatFolder, ChatPlace
from kvkeep.cli.loading import with_source
from kvkeep.cli.progress import reading
from kvkeep.engine.dispatcher import Uninterrupted
from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request, Result
from kvkeep.engine.sampling_params import SamplingParams, whole_within
from kvkeep.engine.session import MOST_STATE_BYTES, MOST_TURNS_BACK, Session, TurnStates
from kvkeep.errors import InputError, KVKeepError
from kvkeep.pins import Spans
from kvkeep.policies.registry import label
from kvkeep.snapshot.snapshot import Snapshot

_ENDS = {
    "length": "stopped after {} tokens, the most that --max-new-tokens allows",
    "repetition": "stopped after {} tokens, since the answer repeats itself; --repetition-detection off lets it go on",
}
"""Notes on answers that the model has not ended, by the reason of their end."""


def _temperature(number: float) -> str:
    """Return a temperature as text, and in words what it means for the choice of tokens."""
    return f"{number:g}; tokens are drawn" if number else "0: the likeliest token, always; -t 0.8 draws"


class _StopOnInterrupt:
    """A context in which Ctrl-C stops the answer of a session, once it has begun. Before, it interrupts.

    Args:
        session: the session.

    Attributes:
        stopped: whether the answer was stopped.
    """

    def __init__(self, session: Session) -> None:
        self._session, self.stopped = session, False
        self._before: Any = None

    def __enter__(self) -> _StopOnInterrupt:
        self._before = signal.signal(signal.SIGINT, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    def _stop(self, number: int, frame: object) -> None:
        """Stop the answer at the first Ctrl-C; raise `KeyboardInterrupt` where there is no answer to stop."""
        if self._session.stop():
            self.stopped = True
        elif not self.stopped:  # otherwise a second Ctrl-C, which may come after the last token
            raise KeyboardInterrupt


# A conversation in progress: its session, and the place where it is saved.


class ChatSession:
    """A conversation that is saved after each answer.

    Args:
        engine: runs it.
        folder: the folder of saved conversations, for forks.
        place: where it is saved.
        sampling: how the tokens of answers are chosen.
        source: the model, as a command takes it, for the conversation's file; ``None`` for the embedded model.
        system: a system message for the first turn.
        pins: returns the spans of the first turn that are never evicted.
        memory: the memory with which it begins or goes on.

    Attributes:
        engine: runs it.
        folder: the folder of saved conversations.
        place: where it is saved.
        session: the conversation in the engine.

    Raises:
        KVKeepError: the memory does not belong to the engine's model and settings.
    """

    def __init__(
        self,
        engine: Engine,
        folder: ChatFolder,
        place: ChatPlace,
        *,
        sampling: SamplingParams,
        source: str | None = None,
        system: str | None = None,
        pins: Callable[[Sequence[Mapping[str, str]]], Spans] = lambda messages: (),
        memory: Snapshot | None = None,
    ) -> None:
        self.engine, self.folder, self.place = engine, folder, place
        self._sampling, self._source, self._system, self._pins = sampling, source, system, pins
        noted = 0 if memory is None else memory.note.get("sequence", 0)
        sequence = whole_within("The sequence in the file's note", noted, -(2**63), 2**63 - 1)
        self._adapter = next(iter(engine.adapters), None)  # if it could not be merged into the weights
        # the policy is named: an engine loads no module just because a snapshot names one
        own: dict[str, Any] = {"snapshot": memory, "sequence": sequence, "adapter": self._adapter}
        self.session: Session = engine.session(policy=engine.policy, **own)
        self._states = TurnStates(memory)
        # a memory of --memory is not in the file of the conversation yet
        self._is_saved = place.is_saved or memory is None
        self._on_disk = memory if place.is_saved else None

    @property
    def turns(self) -> int:
        """Return the number of answers in the conversation, those of earlier runs included."""
        return sum(message["role"] == "assistant" for message in self.session.messages)

    @property
    def state(self) -> Snapshot | None:
        """Return the memory after the last turn, or that with which the conversation began; ``None`` without one."""
        return self._states[-1]

    @property
    def _before(self) -> Snapshot | None:
        """Return the memory before the last turn; ``None`` if there was none, or this run does not know it."""
        return self._states[-2] if self._states.turns else None

    def greeting(self) -> dict[str, str]:
        """Return the lines to print when the conversation begins or goes on: name → text."""
        tokens = "" if self.state is None else console.count(self.state.seen, "token")
        if self.session.messages:
            what = f"{self.place.name}, {console.count(self.turns, 'turn')}, {tokens}"
        else:
            what = f"{self.place.name}, new" + (f", after {tokens} of memory" if tokens else "")
        return {
            "conversation": what,
            "policy": f"{label(self.session.policy)}, budget {self.session.budget}",
            "temperature": _temperature(self._sampling.temperature),
            "help": "/help; Ctrl-C stops an answer, Ctrl-D ends",
        }

    def answer(self, message: str, *, stoppable: bool) -> None:
        """Send a message, print the answer while it is generated, and save the conversation.

        Args:
            message: the user's message.
            stoppable: whether Ctrl-C stops the answer alone, and the conversation keeps what was said until then.

        Raises:
            KVKeepError: the message cannot be answered, or the conversation cannot be saved.
        """
        with _StopOnInterrupt(self.session) if stoppable else nullcontext() as stopping:
            try:
                result = self._answer(message)
            except KeyboardInterrupt:
                with Uninterrupted():
                    has_ended = self._take_over()  # the interrupt may have come after the turn's end
                if not stoppable:
                    raise
                if not has_ended:
                    console.note(
                        "stopped before the answer began; the conversation is as it was before this message, which the "
                        "up arrow brings back"
                    )
                return
            if stopping is not None and stopping.stopped:
                console.note("stopped; the conversation keeps the answer so far, and /rewind takes it back")
            elif result.finish_reason in _ENDS:
                console.note(_ENDS[result.finish_reason].format(len(result.token_ids)))

    def _answer(self, message: str) -> Result:
        """Send a message, print the answer, save the conversation, and return the answer's result.

        Raises:
            KVKeepError: the message cannot be answered, or the conversation cannot be saved.
        """
        result = self._stream(message)
        if result.finish_reason == "error":
            raise KVKeepError(f"The answer ends here, and the conversation is as it was before. {result.error}")
        with Uninterrupted():
            self._take_over()
        return result

    def _take_over(self) -> bool:
        """Store and save the session's memory if a turn has ended since the last call; return whether one has.

        Raises:
            SnapshotError: the memory cannot be saved.
        """
        state = self.session.snapshot() if self.session.token_ids else None
        # the session hands out the same snapshot until a turn ends
        if state is self.state:
            return False
        self._states.add(state)
        # the last turn can be taken back, however large its memories are
        while self._states.turns > 1 and self._states.nbytes > MOST_STATE_BYTES:
            self._states.drop_oldest()
        self._is_saved = False
        self.save()
        return True

    def _stream(self, message: str) -> Result:
        """Send a message, print the answer while it is made, and return its result, which may be that of an error."""
        result: Result | None = None
        begun = False
        assert self.engine.tokenizer is not None
        tokens = len(self.engine.tokenizer(message)["input_ids"])
        with console.streamed_text(wraps=True) as write, ExitStack() as read:
            read.enter_context(reading(self.engine.model, tokens))
            for event in self.session.send(self._request(message)):
                read.close()  # the first token is there
                if piece := event.text if begun else event.text.lstrip():  # answers often begin with white space
                    write(piece)
                    begun = True
                result = event.result
        assert result is not None
        return result

    def _request(self, message: str) -> Request:
        """Return the request for a message. The first one has the system message before it, if there is one."""
        if self._system is None or self.state is not None:
            return Request(prompt=message, sampling=self._sampling)
        messages: list[Mapping[str, str]] = [
            {"role": "system", "content": self._system},
            {"role": "user", "content": message},
        ]
        return Request(messages=messages, sampling=self._sampling, pins=self._pins(messages))

    def rewind(self, turns: int) -> None:
        """Take back the last ``turns`` turns, and save the conversation as it was before them.

        Raises:
            InputError: so many turns cannot be taken back.
        """
        if turns == len(self._states):  # one more than this run has
            self._look_back()
        if turns > (most := self._states.turns):
            have = console.count(most, "turn")
            raise InputError(
                f"{have} can be taken back: those of this run, {MOST_TURNS_BACK} at most."
                if most
                else "No turn can be taken back: there was none since the program started, and the memory before the "
                "last one was not saved."
            )
        state = self._states[-1 - turns]
        if state is None:
            self.session.close()
            self.session = self.engine.session(adapter=self._adapter)
        else:
            self.session.rewind(state)
            state = self.session.snapshot()  # another object, by which `_take_over` knows that no turn has ended
        self._states.take_back(turns)
        self._states.replace_last(state)
        self._is_saved = False
        self.save()

    def _look_back(self) -> None:
        """Load the memory before the last turn of an earlier run into the states, if it was kept; else do nothing."""
        first = self._states[0]
        if first is not None and (before := self.place.before(first)) is not None:
            self._states.add_oldest(before)

    def fork(self, name: str | None) -> str:
        """Save, go on under another name, and return the old one; the conversation of the old name stays as it is.

        For ``None`` the new name is made of date and time.

        Raises:
            InputError: the name cannot be used, or there is a conversation of that name.
        """
        self.save()
        if not self._states.turns:  # the memory before the last turn lies with the old name alone
            self._look_back()
        new, old = self.folder.claim(name, new=True), self.place
        try:
            session = self.session.fork()[0]
            if self.state is not None:
                new.save(with_source(self.state, self._source), self._before)
        except BaseException:
            new.leave()
            raise
        self.session.close()
        self.session, self.place, self._on_disk = session, new, self.state
        old.leave()
        return old.name

    def save(self) -> None:
        """Write the conversation to its file, unless that is up to date. One without a memory loses its file.

        Raises:
            SnapshotError: the file cannot be written; the file stays as it was.
        """
        if self._is_saved:
            return
        if self.state is None:
            self.place.clear()
        else:
            self.place.save(with_source(self.state, self._source), self._before, replaced=self._on_disk)
        self._is_saved, self._on_disk = True, self.state

    def close(self) -> None:
        """Close the session, and let other processes use the conversation."""
        self.session.close()
        self.place.leave()
