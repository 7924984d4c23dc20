"""A kind of work that a crew does in pieces, and what each of its workers says of itself. Nothing here knows Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

Layout: TypeAlias = tuple[bool, bool]
"""How weights were laid out for speed, see `kvkeep.models.prepare.chosen`. It changes the last digits of products."""


@dataclass(frozen=True)
class Facts:
    """What a worker says of itself once it can work.

    Attributes:
        weights: a fingerprint of the model's weights.
        layout: how they were laid out.
        host: name of its machine.
        pid: number of its process.
    """

    weights: str
    layout: Layout
    host: str
    pid: int


F = TypeVar("F", bound=Facts)


@dataclass(frozen=True)
class Trade(Generic[F]):
    """A kind of work.

    Attributes:
        worker: the class of its workers. It is made from what makes a worker's tools, ``begin(layout)`` returns its
            facts or the message of an error, and ``run(number, piece, …)`` returns the answer of a piece.
        piece: a word for a piece.
        at_once: the calls that a worker takes at once.
        ahead: the pieces that a worker with such facts has been handed at most.
        patience_s: seconds without an answer of a worker that has work, after which the user is told.
    """

    worker: type[Any]
    piece: str
    at_once: int
    ahead: Callable[[F], int]
    patience_s: float
