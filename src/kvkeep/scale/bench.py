"""A worker for evaluations and analyses: a process with a model, which runs the pieces that it is given one at a time.

Nothing here knows Ray, nor what a piece is.
"""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvkeep.errors import KVKeepError
from kvkeep.scale.pieces import Answer
from kvkeep.scale.trade import Facts, Layout, Trade


@runtime_checkable
class Bench(Protocol):
    """A model and what is done with it, such as `kvkeep.evals.run.Bench`."""

    def about(self) -> dict[str, Any]:
        """The model as the description of a run has it, ``weights`` and ``dtype`` among it."""

    def run(self, piece: Any) -> Any:
        """The result of a piece.

        Raises:
            KVKeepError: the piece cannot be run.
        """


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
        about: see `Bench.about`.
    """

    about: Mapping[str, Any]


@dataclass(frozen=True)
class Refusal(Answer):
    """The answer of a worker that cannot run a piece, and perhaps no other one either."""


class ModelWorker:
    """Runs pieces; the result of each is its answer.

    Args:
        make: loads the model.
    """

    def __init__(self, make: Make) -> None:
        self._make = make
        self._bench: Bench | None = None

    def begin(self, like: Layout | None) -> ModelFacts | str:
        """Load the model; return facts, or the message of an error.

        Args:
            like: of no effect: evaluations and analyses leave weights as they are.
        """
        try:
            self._bench = self._make()
            about = self._bench.about()
        except KVKeepError as error:
            return str(error)
        return ModelFacts(about["weights"], (False, False), platform.node(), os.getpid(), about)

    def run(self, number: int, piece: Any) -> Answer:
        """Run a piece. What fails here would fail in every worker, so it is no reason to start another one."""
        assert self._bench is not None
        try:
            return Answer(number, whole=self._bench.run(piece))
        except KVKeepError as error:
            return _refusal(number, str(error))
        except Exception as error:  # a defect, or a file that cannot be read
            logging.getLogger(__name__).exception("Piece %d failed.", number)
            return _refusal(number, f"{type(error).__name__}: {error}")


def _refusal(number: int, why: str) -> Refusal:
    return Refusal(number, reason=f"On {platform.node()}: {why}")


CELLS = Trade[ModelFacts](ModelWorker, "cell", at_once=1, ahead=lambda facts: 1, patience_s=3600.0)
"""Evaluations: cells take seconds to hours, so none waits in the hands of a worker while another one is free."""

MEASUREMENTS = Trade[ModelFacts](ModelWorker, "measurement group", at_once=1, ahead=lambda facts: 1, patience_s=3600.0)
"""Analyses: a group is a few measurements, and takes seconds to hours as well."""
