"""A session of the server: the engine's session, and the states to which it can go back."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

from kvkeep.engine import Session
from kvkeep.errors import InputError, SnapshotError
from kvkeep.snapshot import Snapshot

log = logging.getLogger("kvkeep.access")
_MOST_STATES = 9
"""States that a session can go back to, the present one included."""
_AGAIN_S = 1.0
"""Seconds between two attempts to write a session that could not be written."""


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
