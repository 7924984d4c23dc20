"""A place for a worker in a crew: who works there, at which pieces, and how long it has been silent."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from kvkeep.scale.pieces import Item
from kvkeep.scale.trade import Facts


@dataclass(eq=False)
class Place:
    """A place for a worker.

    Attributes:
        handle: the worker; ``None`` if nobody works here any more.
        starting: its `Facts`, to come; ``None`` once they are there.
        running: answer to come → piece.
        deaths: since its last answer.
        alone: whether its only piece is a suspect.
        facts: of its worker.
        most_s: seconds of silence after which the user is told first.
        heard: when it answered last, or began to work, in seconds of a clock.
        patience_s: seconds of silence after which the user is told next.
    """

    number: int
    most_s: float
    handle: Any = None
    starting: Any = None
    running: dict[Any, Item] = field(default_factory=dict)
    deaths: int = 0
    alone: bool = False
    facts: Facts | None = None
    heard: float = 0.0
    patience_s: float = 0.0

    def hear(self) -> None:
        """Note that the worker lives."""
        self.heard, self.patience_s = time.monotonic(), self.most_s

    def silence(self, piece: str) -> str | None:
        """What to tell the user of a worker that has not answered for long, each time after twice the time.

        Args:
            piece: a word for a piece of its work.
        """
        silent = time.monotonic() - self.heard
        if self.facts is None or not self.running or silent < self.patience_s:
            return None
        self.patience_s *= 2
        return (
            f"worker {self.number} (process {self.facts.pid} on {self.facts.host}) has answered nothing for "
            f"{silent / 60:.0f} minutes. If it hangs, end that process: it is replaced, and its {piece}s run again"
        )
