"""The sessions of an engine, found by their names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvkeep.engine.past import Past
from kvkeep.engine.session import Session, State
from kvkeep.engine.shelf import Shelf
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

    def open(
        self,
        work: Work,
        name: str | None,
        policy: str | Policy | None,
        budget: int | None,
        sequence: int,
        memory: Snapshot | None,
    ) -> Session:
        """Make a session, see `Engine.session`."""
        work._check_open()
        found, number = work._admission.settle(policy, budget, memory)
        work._admission.fingerprint(found, number)
        state = State(Past()) if memory is None else State(Past.of(memory), self._shelf.keep(memory, name))
        return Session(work, self._shelf, state, policy=found, budget=number, sequence=sequence, name=name)

    def leave(self, session: Session) -> None:
        """Forget a session that is closed."""
