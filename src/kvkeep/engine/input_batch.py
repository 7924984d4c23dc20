"""The input of one run of the model: new tokens of some rows."""

from __future__ import annotations

from collections.abc import Sequence as GenericSequence
from dataclasses import dataclass

from kvkeep.engine.sequence import Sequence, SequenceStatus
from kvkeep.types import Phase


@dataclass(frozen=True)
class InputBatch:
    """New tokens of neighbouring rows, padded to one length. No request changes before `commit`.

    Attributes:
        start: the first row.
        rows: the request in each row from ``start`` on; ``None`` for a row that is fed nothing.
        tokens: the tokens that each row is fed; empty for ``None``.
        positions: the position of each row's first token in its sequence.
        phase: whether the tokens belong to prompts or were generated.
        fresh: whether every row begins its prompt.
    """

    start: int
    rows: GenericSequence[Sequence | None]
    tokens: GenericSequence[GenericSequence[int]]
    positions: GenericSequence[int]
    phase: Phase
    fresh: bool = False

    @property
    def stop(self) -> int:
        """Return the number of the row after the last one."""
        return self.start + len(self.rows)

    @property
    def requests(self) -> list[Sequence]:
        """Return the sequences that are fed to the model."""
        return [sequence for sequence in self.rows if sequence is not None]

    def commit(self) -> list[tuple[int, Sequence]]:
        """Note that the model has seen the tokens.

        Returns:
            The requests whose next token follows from this run, each with its place in the batch.
        """
        for sequence, tokens in zip(self.rows, self.tokens, strict=True):
            if sequence is not None:
                sequence.commit(len(tokens))
        return [
            (i, sequence)
            for i, sequence in enumerate(self.rows)
            if sequence is not None and sequence.status is SequenceStatus.DECODE
        ]


@dataclass(frozen=True)
class ModelRun:
    """One run of the model over one or several batches, whose rows need not be neighbours.

    The model gets the tokens of several batches as one sequence, so its matrices are read once. Each layer attends and
    evicts batch by batch.

    Attributes:
        batches: the batches, in the order of their tokens.
    """

    batches: GenericSequence[InputBatch]

    @property
    def reads(self) -> bool:
        """Return whether the batch has tokens of prompts. They come before generated tokens."""
        return self.batches[0].phase is Phase.PREFILL

    @property
    def requests(self) -> list[Sequence]:
        """Return the sequences that are fed to the model."""
        return [sequence for batch in self.batches for sequence in batch.requests]

    def commit(self) -> list[tuple[int, Sequence]]:
        """Note that the model has seen the tokens.

        Returns:
            The requests whose next token follows from this run, each with its place among the rows of all batches.
        """
        ready, before = [], 0
        for batch in self.batches:
            ready += [(before + place, sequence) for place, sequence in batch.commit()]
            before += len(batch.rows)
        return ready
