"""The sessions of a server that is about to end: others get them before it has ended."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvkeep.server.book import Book

log = logging.getLogger("kvkeep.access")
_LOOK_S, _AGAIN_S = 0.1, 10.0
"""Seconds between two looks at whether the server stays and which of its sessions are idle; and after a failed look."""


class Handover:
    """Lets a server's idle sessions go while it takes no requests, in a thread.

    A server may still have answers to write then. Their sessions go when the answers end.

    Args:
        book: the sessions.
        stays: whether the server takes requests.
    """

    def __init__(self, book: Book, stays: Callable[[], bool]) -> None:
        self._book, self._stays, self._ended = book, stays, threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvkeep-handover", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let no more sessions go."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                if not self._stays():
                    self._book.let_go()
            except Exception:  # whatever Ray Serve raises: without this thread all sessions would stay
                log.exception("Sessions could not be handed over. The next attempt is in %d s.", _AGAIN_S)
                self._ended.wait(_AGAIN_S)
