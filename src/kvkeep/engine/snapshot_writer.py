"""Memories written to the disk beside the steps of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

_T = TypeVar("_T")


class Writing(threading.Thread, Generic[_T]):
    """A thread that writes memories, one after the other. Python waits for it when it ends.

    Args:
        memories: what is written.
        write: writes one memory.
        before: the writing that must have ended before this one begins.

    Attributes:
        error: the failure that has ended the thread early.
    """

    def __init__(self, memories: Sequence[_T], write: Callable[[_T], None], before: Writing[_T] | None) -> None:
        super().__init__(name="kvkeep-writer", daemon=False)
        self._memories, self._write, self._before = memories, write, before
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """Write all memories."""
        before, self._before = self._before, None
        try:
            if before is not None:
                before.join()
            for one in self._memories:
                self._write(one)
        except BaseException as error:
            self.error = error
        self._memories = ()  # whoever needs them has them


class Pending(NamedTuple):
    """The end of a turn that waits for memories on their way to the disk.

    Attributes:
        writing: writes them.
        finish: called when they are written, or cannot be; raises the reason.
    """

    writing: Writing[Any]
    finish: Callable[[], None]
