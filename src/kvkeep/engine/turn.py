"""A lock that threads get in the order in which they ask."""

from __future__ import annotations

import threading
from collections import deque

from kvkeep.errors import InputError


class Turn:
    """A lock that threads get in the order in which they ask. Its owner may take it again.

    A plain lock would let a thread that steps in a loop keep out everybody else.

    Attributes:
        lost: whether the thread that would pass it on was left behind in another process.
    """

    lost = False

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False
        self._owner: int | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Whether this thread has the turn."""
        return self._owner == threading.get_ident()

    @property
    def taken(self) -> bool:
        """Whether some thread has the turn."""
        return self._taken

    def __enter__(self) -> None:
        """Wait for the turn, and take it.

        Raises:
            InputError: it is lost.
        """
        if self.lost:
            raise InputError(
                "This process was forked while the engine was at work, and the engine's threads stayed behind. Make an "
                "engine in the new process, or start it with multiprocessing's method 'spawn'."
            )
        if not self.mine:
            self._take()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._pass_on()

    def _take(self) -> None:
        with self._inner:
            if not self._taken:
                self._taken = True
                return
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()  # until it is opened by the thread that had the turn before
        except BaseException:
            with self._inner:
                given = gate not in self._waiting
                if not given:
                    self._waiting.remove(gate)
            if given:
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        with self._inner:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False
