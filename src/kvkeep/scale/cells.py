"""A worker for evaluations: a process with a model of its own, which runs the cells that it is given, one at a time.

Nothing here knows Ray.
"""

from __future__ import annotations

import logging
import os
import platform
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvkeep.errors import KVKeepError
from kvkeep.evals.apart import Bench, Piece
from kvkeep.evals.run import fingerprint
from kvkeep.scale.pieces import Answer
from kvkeep.scale.trade import Facts, Layout, Trade


@runtime_checkable
class Make(Protocol):
    """Loads a model in the process of a worker. It travels there, so it is small."""

    def __call__(self) -> Bench:
        """Load the model.

        Raises:
            KVKeepError: the model cannot be used there.
        """


@dataclass(frozen=True)
class ModelFacts(Facts):
    """What a worker says of itself once its model is there.

    Attributes:
        dtype: of the weights.
    """

    dtype: str


@dataclass(frozen=True)
class Refusal(Answer):
    """The answer of a worker that cannot run a cell, and perhaps no other one either."""


class CellWorker:
    """Runs cells; the row of each is its answer.

    Args:
        make: loads the model.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._bench: Bench | None = None

    def begin(self, like: Layout | None) -> ModelFacts | str:
        """Load the model; return facts, or the message of an error.

        Args:
            like: of no effect: evaluations leave weights as they are.
        """
        try:
            bench = self._bench = self._make()
        except KVKeepError as error:
            return str(error)
        weights = fingerprint(bench.writer)
        return ModelFacts(weights, (False, False), platform.node(), os.getpid(), bench.writer.dtype)

    def run(self, number: int, piece: Piece) -> Answer:
        """Run a cell. What fails here would fail in every worker, so it is no reason to start another one."""
        assert self._bench is not None
        try:
            return Answer(number, whole=self._bench.run(piece))
        except KVKeepError as error:
            return _refusal(number, str(error))
        except Exception as error:  # a defect, or a file that cannot be read
            logging.getLogger(__name__).exception("Cell %d failed.", number)
            return _refusal(number, f"{type(error).__name__}: {error}")


def _refusal(number: int, why: str) -> Refusal:
    return Refusal(number, reason=f"On {platform.node()}: {why}")


CELLS = Trade[ModelFacts](CellWorker, "cell", at_once=1, ahead=lambda facts: 1, patience_s=3600.0)
"""Evaluations: cells take seconds to hours, so none waits in the hands of a worker while another one is free."""
