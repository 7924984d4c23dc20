"""Turns that have all of their tokens, while their memories are on their way to the disk."""

from __future__ import annotations

import math
from collections.abc import Iterator

from kvkeep.engine.generation import Generation
from kvkeep.engine.request import Event
from kvkeep.engine.writing import Pending
from kvkeep.models.device import reason_of


class Parked:
    """Turns whose memories are on their way to the disk, in the order of their ends."""

    def __init__(self) -> None:
        self._turns: dict[int, tuple[Generation, Event, Pending]] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._turns

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, one: Generation, event: Event, pending: Pending) -> None:
        """Let the last event of a turn wait for the disk."""
        self._turns[one.id] = one, event, pending

    def drop(self, number: int) -> None:
        """Forget a turn that is cancelled; its memory is not taken over."""
        self._turns.pop(number, None)

    def ready(self, wait: float) -> Iterator[tuple[Generation, Event]]:
        """Yield the turns whose memories are taken over now, or could not be written, with their last events.

        Args:
            wait: most seconds to wait for the oldest turn; ``inf``: for all.
        """
        for one, event, pending in list(self._turns.values()):
            pending.writing.join(None if wait == math.inf else wait)
            wait = wait if wait == math.inf else 0.0
            if pending.writing.is_alive():
                return
            del self._turns[one.id]
            try:
                pending.finish()
            except Exception as error:
                one.finish("error", reason_of(error))
            yield one, event
