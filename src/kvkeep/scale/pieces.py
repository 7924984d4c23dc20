"""The pieces of a job on their way to workers: new ones, those of workers that died, and those that may be the cause.

Nothing here knows Ray.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

Item: TypeAlias = tuple[int, Any]
"""The number of a piece, and what its worker is told of it: the bytes of a line, for example."""

Source: TypeAlias = Callable[[int], Item | None]
"""Returns a new piece for the worker at a place, by the place's number; ``None`` if there is no more."""

SUSPECT = 2
"""Deaths of its worker after which a piece waits for the end of the job, and then runs alone."""
GUILTY = 2
"""Deaths of a worker that ran a piece alone, after which the piece has failed."""


@dataclass(frozen=True)
class Answer:
    """What became of a piece.

    Attributes:
        number: the piece's number.
        digest: a line's fingerprint.
        whole: its result, such as a line of the output; ``None`` if it failed.
        reason: why it failed.
        new: tokens that were generated for a line.
    """

    number: int
    digest: str = ""
    whole: Any = None
    reason: str | None = None
    new: int = 0


class Pieces:
    """The pieces of a job that wait for a worker.

    Args:
        source: gives new pieces.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._again: deque[Item] = deque()
        self._suspects: deque[Item] = deque()
        self._died: Counter[int] = Counter()
        self._died_alone: Counter[int] = Counter()

    def take(self, place: int) -> Item | None:
        """A piece for the worker at a place; those of dead workers come first, and suspects never."""
        return self._again.popleft() if self._again else self._source(place)

    def suspect(self) -> Item | None:
        """A piece that has to run alone."""
        return self._suspects.popleft() if self._suspects else None

    def any_left(self, place: int) -> bool:
        """Whether a piece waits; a new one is fetched for the worker at a place to know it."""
        if not self._again and not self._suspects and (item := self._source(place)) is not None:
            self._again.append(item)
        return bool(self._again or self._suspects)

    def give_back(self, item: Item, *, alone: bool) -> Answer | None:
        """Queue a piece of a dead worker again; the answer of one that has failed, as it killed workers all alone."""
        number = item[0]
        self._died[number] += 1
        self._died_alone[number] += alone
        if self._died_alone[number] >= GUILTY:
            return Answer(number, reason=f"its worker died {self._died[number]} times")
        (self._suspects if self._died[number] >= SUSPECT else self._again).append(item)
        return None
