"""Ctrl-C and failures in a step: an interrupt waits for the step's end, and a failure ends the requests it touched."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvkeep.engine.generation import Generation


class Uninterrupted:
    """A context that holds back Ctrl-C until its end; a second Ctrl-C interrupts at once.

    An interrupt in the middle of a step would leave no way to tell which parts of the step were done. So the step is
    brought to its end first. Signals reach the main thread only; in other threads this context does nothing.
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
    """A context that recovers from failures. An interrupt is passed on to the caller after the recovery.

    Args:
        recover: called with the exception and the requests that it touched.
        touched: returns these requests; called when something fails.
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
