"""The sessions of an engine, found by their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvkeep.engine.past import Past
from kvkeep.engine.sampling import whole_within
from kvkeep.engine.session import Session
from kvkeep.engine.shelf import Kept, Shelf, State, check_name
from kvkeep.errors import InputError
from kvkeep.pins import Span, Spans, spans
from kvkeep.policies.base import Policy
from kvkeep.snapshot import Snapshot

if TYPE_CHECKING:
    from kvkeep.engine.work import Work


class Sessions:
    """The sessions of an engine.

    Args:
        shelf: keeps the memories of idle sessions.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._named: dict[str, Session] = {}

    @property
    def names(self) -> list[str]:
        """The names of all sessions that are open or on the disk, in order."""
        on_disk = self._shelf.folder.names() if self._shelf.folder else []
        return sorted({*self._named, *on_disk})

    @property
    def nbytes(self) -> tuple[int, int]:
        """Bytes of all memories in main memory, and of their files."""
        return self._shelf.held_bytes, self._shelf.folder.nbytes if self._shelf.folder else 0

    def open(
        self,
        work: Work,
        name: str | None,
        *,
        policy: str | Policy | None,
        budget: int | None,
        sequence: int,
        memory: Snapshot | None,
        pins: Sequence[Span] = (),
    ) -> Session:
        """Make a session or find it again, see `Engine.session`. The caller has the turn."""
        work._check_open()
        kept, seed = None, whole_within("sequence", sequence, -(2**63), 2**63 - 1)
        if name is not None:
            found = self._named.get(check_name(name))
            kept = self._shelf.open(name) if found is None else None
            if memory is not None and (found or kept):
                raise InputError(
                    f"There is a session {name!r} already. Open it without a `memory` and rewind it, or choose another "
                    "name."
                )
            if pins and (found or kept):
                raise InputError(f"There is a session {name!r} already. Only a new one takes `pins`.")
            if found is not None:
                return _agreed(found, work, policy, budget)
        if kept is not None:
            memory = self._shelf.load(kept)
            seed = whole_within("sequence", memory.note.get("sequence", 0), -(2**63), 2**63 - 1)
        return self._made(work, name, policy, budget, seed=seed, memory=memory, kept=kept, pins=spans(pins))

    def write(self) -> None:
        """Write the memories of all named sessions to the disk.

        Raises:
            SnapshotError: one cannot be written.
        """
        for session in self._named.values():
            session.save()

    def leave(self, session: Session) -> None:
        """Forget a session that is closed."""
        if session.name is not None and self._named.get(session.name) is session:
            del self._named[session.name]

    def close(self) -> None:
        """Let another engine use the folder."""
        self._shelf.close()

    def _made(
        self,
        work: Work,
        name: str | None,
        policy: str | Policy | None,
        budget: int | None,
        *,
        seed: int,
        memory: Snapshot | None,
        kept: Kept | None,
        pins: Spans,
    ) -> Session:
        """Make a session, with the memory that it continues."""
        settled = work._admission.settle(policy, budget, memory)
        work._admission.fingerprint(*settled)  # refuses what the engine has no rows for
        state = State(Past(), pins=pins)
        if memory is not None:
            past = Past.of(memory)
            state = State(past, kept or self._shelf.keep_now(memory, name), pins)
        session = Session(work, self._shelf, state, settled, sequence=seed, name=name)
        if name is not None:
            self._named[name] = session
        return session


def _agreed(session: Session, work: Work, policy: str | Policy | None, budget: int | None) -> Session:
    """Return an open session after a comparison with what is asked for.

    Raises:
        InputError: it has another policy or budget.
    """
    asked = work._admission.settle(session.policy if policy is None else policy, budget or session.budget)
    if asked != (session.policy, session.budget):
        raise InputError(
            f"The session {session.name!r} is open under {session.policy} with a budget of {session.budget}. Leave "
            "policy and budget out, or choose another name."
        )
    return session
