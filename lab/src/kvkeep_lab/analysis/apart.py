"""Measurements that are made in other processes than the one that writes the folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.models.device import enough_memory
from kvkeep.models.tokenization import Writer
from kvkeep_lab.analysis.job import find
from kvkeep_lab.analysis.measure import Measurement
from kvkeep_lab.analysis.run import Pass, Record

LONG = 16_384
"""Tokens of a text above which four workers wait for a single walk: it takes longer than a third of all runs."""

_WALKED = frozenset({"attention", "mlp"})


@dataclass(frozen=True)
class Piece:
    """Measurements on their way to the process that makes them.

    Attributes:
        names: of the measurements.
        dtype: of the weights that they are made with.
    """

    names: tuple[str, ...]
    dtype: str


class Bench:
    """Makes measurements of one model on one text.

    Args:
        writer: the model.
        tokens: the text.
        seed: seed of random choices.

    Raises:
        UnsupportedModelError: the model's attention cannot be analysed.
    """

    def __init__(self, writer: Writer, tokens: Int[Tensor, " n"], seed: int) -> None:
        self._writer = writer
        self._pass = Pass(writer, tokens, seed)

    def about(self) -> dict[str, Any]:
        """The model, as the description of a run has it."""
        return self._pass.about()

    def run(self, piece: Piece) -> list[Record]:
        """The records of all measurements of a piece.

        Raises:
            KVKeepError: a measurement cannot be made, or this process computes in another dtype.
        """
        if piece.dtype != self._writer.dtype:
            raise InputError(
                f"This worker computes in {self._writer.dtype}, and others in {piece.dtype}. Give `dtype`."
            )
        with enough_memory(self._writer.model.device):
            return [*self._pass.make(find(piece.names))]


def cut(kinds: Sequence[type[Measurement]], tokens: int, workers: int) -> list[list[type[Measurement]]]:
    """Measurements in the groups in which workers make them, in the order in which they are begun.

    A measurement that does not read the walk is a group of its own. The others read one walk, as in one process: it
    takes as long as what they do with its rows, or longer (9 and 5 s of 4 096 tokens, 66 and 72 s of 16 384, with the
    embedded model on one thread), so a second walk would cost more than it shares out. Only workers that would have
    nothing else to do walk again. For them these measurements are cut into more groups, those with a control or with
    runs of their own first. In a `LONG` text all workers will have nothing else to do.

    The walk grows with the square of the text and the runs do not, so it is begun first; then come the longest runs, so
    that no long one is alone at the end.

    Args:
        kinds: the measurements.
        tokens: tokens of the text.
        workers: number of workers, 1 or more.
    """
    walked = sorted((kind for kind in kinds if kind.reads & _WALKED), key=lambda kind: (not kind.control, -kind.effort))
    others = sorted((kind for kind in kinds if not kind.reads & _WALKED), key=lambda kind: -kind.effort)
    idle = workers if tokens > LONG else workers - len(others)
    groups = max(1, min(len(walked), idle)) if walked else 0
    return [*(walked[first::groups] for first in range(groups)), *([kind] for kind in others)]
