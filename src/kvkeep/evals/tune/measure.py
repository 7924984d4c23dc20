"""Runs candidates: answers to questions after the text was cut or with it, and losses of text that goes on."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias, final

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals.drive import Drive, batches, left_padded
from kvkeep.evals.replies import decode_greedily
from kvkeep.evals.tasks.perplexity import feed_in_pieces
from kvkeep.evals.tune.candidates import Arm
from kvkeep.evals.tune.documents import Asked, Documents
from kvkeep.evals.tune.quality import Kind, Tally
from kvkeep.models.load import ends_of
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse

Outcome: TypeAlias = str | list[float]
"""What is stored of a unit: which questions were right, as ``1`` and ``0``; or sums of losses in pieces of the text."""


class Measure(abc.ABC):
    """Measures an arm at a budget on units, and compares the result with the full cache's.

    Attributes:
        kind: what tallies count.
        count: number of units; ``None`` if there is no end.
        per_unit: questions, or tokens, of a unit.
        length: tokens of the longest text.
        new_tokens: most tokens that follow a text.
    """

    kind: Kind
    count: int | None
    per_unit: float
    length: int
    new_tokens: int

    @abc.abstractmethod
    def run(self, writer: Writer, arm: Arm, budget: int, units: range) -> list[Outcome]:
        """Run an arm; `FULL` with room for everything."""

    @abc.abstractmethod
    def tally(self, outcome: Outcome, full: Outcome, budget: int) -> Tally:
        """Compare the outcome of a unit with the full cache's."""

    @property
    def room(self) -> int:
        """The budget that holds every text and everything that follows it."""
        return self.length + self.new_tokens


@final
class Answers(Measure):
    """Questions about documents.

    Args:
        documents: the questions.
        later: whether they are asked after the text was cut to the budget.
    """

    kind: Kind = "answers"

    def __init__(self, documents: Documents, *, later: bool):
        self._documents, self._later = documents, later
        self.count, self.per_unit = documents.count, documents.per_unit
        self.length, self.new_tokens = documents.length, documents.question_tokens + documents.reply_tokens

    def run(self, writer: Writer, arm: Arm, budget: int, units: range) -> list[Outcome]:
        """Ask the questions of all units."""
        made = [self._documents.make(number) for number in units]
        asked = [one for unit in made for one in unit]
        replies = list(self._replies(writer, arm, budget, asked, units.start))
        marks = iter("01"[one.right(reply)] for one, reply in zip(asked, replies, strict=True))
        return ["".join(next(marks) for _ in unit) for unit in made]

    def tally(self, outcome: Outcome, full: Outcome, budget: int) -> Tally:
        """Of the questions that the full cache answers, those that stay right; and their number."""
        check(isinstance(outcome, str) and isinstance(full, str) and len(outcome) == len(full))
        stays = [one == "1" for one, other in zip(outcome, full, strict=True) if other == "1"]
        return float(sum(stays)), float(len(stays))

    def _replies(self, writer: Writer, arm: Arm, budget: int, asked: Sequence[Asked], first: int) -> Iterator[str]:
        if self._later:
            yield from self._later_replies(writer, arm, budget, asked, first)
            return
        for at in batches([len(one.ids) for one in asked]):
            part = asked[at]
            drive = _drive(writer, arm, budget, len(part), first + at.start)
            drive.feed(*left_padded([one.ids[:-1] for one in part]), last_only=True)
            yield from self._finish(writer, drive, part, [one.ids[-1:] for one in part])

    def _later_replies(
        self, writer: Writer, arm: Arm, budget: int, asked: Sequence[Asked], first: int
    ) -> Iterator[str]:
        """Read each text once, cut it, and ask all its questions in copies of that memory."""
        texts = {one.text: one.ids[: one.first] for one in asked}
        places = {text: place for place, text in enumerate(texts)}
        for at in batches([len(ids) for ids in texts.values()]):
            rows = list(texts.values())[at]
            read = _drive(writer, arm, budget, len(rows), first + at.start)
            read.feed(*left_padded(rows), last_only=True)
            part = [one for one in asked if at.start <= places[one.text] < at.stop]
            for few in batches([budget + len(one.ids) - one.first for one in part]):
                copies = read.copies([places[one.text] - at.start for one in part[few]])
                yield from self._finish(writer, copies, part[few], [one.ids[one.first :] for one in part[few]])

    def _finish(self, writer: Writer, drive: Drive, asked: Sequence[Asked], rest: Sequence[Tensor]) -> list[str]:
        """Feed the rest of the prompts, their last tokens apart, and decode the replies."""
        if any(len(ids) > 1 for ids in rest):
            drive.feed(*left_padded([ids[:-1] for ids in rest]), last_only=True)
        logits = drive.feed(*left_padded([ids[-1:] for ids in rest]), last_only=True)
        tokens = decode_greedily(drive, logits, self._documents.reply_tokens, ends_of(writer.model))
        return [writer.text_of(row) for row in tokens]


PIECE = 16
"""Tokens that are read at once, and whose losses are stored as a sum."""


@final
class Losses(Measure):
    """Text that goes on beyond the budget.

    Args:
        windows: the texts.
    """

    kind: Kind = "loss"
    new_tokens = 0

    def __init__(self, windows: Int[Tensor, "B T"]):
        self._windows = windows
        self.count, self.length = windows.shape
        self.per_unit = self.length

    def run(self, writer: Writer, arm: Arm, budget: int, units: range) -> list[Outcome]:
        """Read texts in pieces; the cache is cut after each."""
        found: list[Outcome] = []
        ids = self._windows[units.start : units.stop]
        for at in batches([self.length] * len(ids)):
            drive = _drive(writer, arm, budget, len(ids[at]), units.start + at.start)
            found += map(_sums, feed_in_pieces(drive, ids[at], PIECE))
        if not all(math.isfinite(float(loss)) for one in found for loss in one):
            raise InputError(
                f"Under {arm.name} the model's losses on this text are infinite or no numbers, so there is nothing to "
                "compare. Try another dtype; float16 overflows first."
            )
        return found

    def tally(self, outcome: Outcome, full: Outcome, budget: int) -> Tally:
        """Nats beyond the full cache's over the pieces after the budget, and the number of their tokens."""
        check(isinstance(outcome, list) and isinstance(full, list) and len(outcome) == len(full))
        assert not isinstance(outcome, str)
        assert not isinstance(full, str)
        first = -(-budget // PIECE)
        tokens = self.length - 1 - first * PIECE
        more = sum(one - other for one, other in zip(outcome[first:], full[first:], strict=True))
        return more, float(max(0, tokens))


def check(fits: bool) -> None:
    """Refuse what a folder holds of a document if it is nothing that this search has measured.

    Raises:
        InputError: it is not.
    """
    if not fits:
        raise InputError(
            "The folder's results do not fit together: a document has other numbers of marks or losses than under the "
            "full cache. Restore the file of results, or choose another `output` folder."
        )


def _sums(losses: Float[Tensor, " n"]) -> list[float]:
    """Sums over pieces."""
    return [round(piece.double().sum().item(), 6) for piece in losses.split(PIECE)]


def _drive(writer: Writer, arm: Arm, budget: int, rows: int, first: int) -> Drive:
    return Drive(writer, parse(arm.policy), [budget] * rows, first=first, setup=arm.setup)
