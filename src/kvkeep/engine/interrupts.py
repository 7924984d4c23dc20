"""Ctrl-C between steps, not in the middle of one; and what else fails in a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.engine.request import Generation


class Uninterrupted:
    """A context in which Ctrl-C waits for the end; a second one comes through at once.

    What is half done when an interrupt comes cannot be told from what is done, so a step is brought to its end first.
    Signals reach the main thread only; in any other one this does nothing.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._held = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # neither ignored nor left to the system
                self._before = before
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._held:
            self._before(signal.SIGINT, None)

    def _hold(self, number: int, frame: object) -> None:
        self._held = True
        signal.signal(signal.SIGINT, self._before)


class Guard:
    """A context whose failures are mended; an interrupt goes on to the caller after that.

    Args:
        recover: what mends them, given the exception and the requests that it touched.
        touched: these requests, asked for when something fails.
    """

    def __init__(
        self,
        recover: Callable[[BaseException, Sequence[Generation]], None],
        touched: Callable[[], Sequence[Generation]],
    ) -> None:
        self._recover, self._touched = recover, touched

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or isinstance(error, GeneratorExit):
            return False
        self._recover(error, self._touched())
        return isinstance(error, Exception)
