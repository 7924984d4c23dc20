"""A session of the server: the engine's session, and the states to which it can go back."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from kvkeep.engine import Session
from kvkeep.snapshot import Snapshot

_MOST_STATES = 9
"""States that a session can go back to, the present one included."""


@dataclass(eq=False)
class Entry:
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

    @property
    def nbytes(self) -> int:
        """Bytes of the states to which it can go back."""
        return sum(one.nbytes for one in self.states)
