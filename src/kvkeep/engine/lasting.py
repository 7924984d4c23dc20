"""The memory of a session between its turns: loaded into a row, taken over from it, written to the disk."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from kvkeep.engine.generation import Generation
from kvkeep.engine.past import Past
from kvkeep.engine.sampling import another_sequence
from kvkeep.engine.shelf import Move, Shelf, State
from kvkeep.engine.writing import Pending
from kvkeep.policies.base import Policy
from kvkeep.snapshot import Contents, Fingerprint, Snapshot

if TYPE_CHECKING:
    from kvkeep.engine.admission import Admission


class Lasting:
    """The memory of a session between its turns. Whoever uses it has the engine's turn.

    Args:
        admission: knows the model and the settings.
        shelf: keeps the memories of idle sessions.
        state: the session after its last finished turn.
        settled: its policy and budget.
        sequence: its identity for drawn tokens.
        name: by which the engine finds it again, or ``None``.

    Attributes:
        state: the session after its last finished turn.
        messages: the conversation up to the message of the turn that runs.
    """

    def __init__(
        self,
        admission: Admission,
        shelf: Shelf,
        state: State,
        settled: tuple[Policy, int],
        *,
        sequence: int,
        name: str | None,
    ) -> None:
        self.state, self.messages = state, tuple[Mapping[str, str], ...]()
        self._admission, self._shelf, self._settled = admission, shelf, settled
        self._sequence, self._name = sequence, name
        self._fingerprint: Fingerprint  # of the turn that runs, as it was at its beginning

    def turn(self, asked: Generation) -> Generation:
        """Return a turn of the session: the token ids so far and the request's are its prompt.

        Raises:
            KVKeepError: the engine cannot run it.
        """
        past, (policy, budget) = self.state.past, self._settled
        sequence = another_sequence(self._sequence, len(past.ids)) if past.ids else self._sequence
        pins = (*asked.request.pins, *self.state.pins)
        request = replace(asked.request, policy=policy, budget=budget, sequence=sequence, pins=pins)
        made = self._admission.check(request, asked.id, past)
        made.times, made.reads, made.left = asked.times, asked.reads, asked.left
        made.load, made.keep = self.load, self.keep
        self.messages = self._admission.words.messages_of(request, past)
        return made

    def load(self) -> Contents | None:
        """Return the memory with which a turn begins.

        Raises:
            SnapshotError: it does not belong to the model as it is now, or its file cannot be read any more.
        """
        self._fingerprint = self._admission.fingerprint(*self._settled)
        if (kept := self.state.kept) is None:
            return None
        snapshot = self._shelf.load(kept)
        snapshot.fingerprint.check(self._fingerprint)
        return snapshot.contents

    def keep(self, one: Generation, contents: Contents) -> Pending | None:
        """Take over the memory of a turn that has ended well, at once or when there is room for it.

        Raises:
            SnapshotError: see `Shelf.settle`.
        """
        ids = array("i", (*one.prompt, *one.token_ids))
        n, said = contents.seen, one.tail.text if one.tail else ""
        answered = (*self.state.past.messages, *self.messages, {"role": "assistant", "content": said})
        past = Past(ids[:n], tuple(ids[n:]), answered if self.messages else ()).held_in(contents)
        return self.go_on(past, Snapshot(contents, self._fingerprint, past.tokens))

    def go_on(self, past: Past, snapshot: Snapshot) -> Pending | None:
        """Go on from a memory. Without room for it, the session stays as it is.

        Raises:
            SnapshotError: see `Shelf.settle`.
        """
        snapshot = replace(snapshot, note={**past.note, "sequence": self._sequence})
        kept, move = self._shelf.keep(snapshot, self._name, instead=self.state.kept)

        def finish() -> None:
            self._shelf.settle(move)
            self._shelf.adopt(kept, instead=self.state.kept)
            self.state = State(past, kept)

        if move is not None:
            return Pending(move.writing, finish)
        finish()
        return None

    def fork(self) -> State:
        """Return the state for a fork."""
        kept = self.state.kept
        if kept is not None and kept.name is not None:  # its file will be overwritten by later turns of this session
            kept = self._shelf.keep_now(self._shelf.load(kept))
        return replace(self.state, kept=kept)

    @property
    def is_written(self) -> bool:
        """Whether there is nothing to write: it is done, or the session has no name or no memory."""
        kept = self.state.kept
        return self._name is None or kept is None or self._shelf.is_written(kept)

    def write(self) -> Move | None:
        """Begin to write the memory of a named session; ``None`` if that is done, or there is nothing to write."""
        kept = self.state.kept
        return None if self._name is None or kept is None else self._shelf.write(kept)
