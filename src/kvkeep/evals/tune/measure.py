"""Runs candidates: answers to questions after the text was cut or with it, and losses of text that goes on."""

from __future__ import annotations

import abc
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import BudgetError, InputError, UnsupportedModelError, UnsupportedOperationError
from kvkeep.evals.confidence import of_clustered_share, of_clusters, of_mean
from kvkeep.evals.forward import PLAIN, Drive, Setup, batches, left_padded
from kvkeep.evals.qa_task import decode_greedily
from kvkeep.evals.results import over
from kvkeep.evals.tasks.perplexity import feed_in_pieces
from kvkeep.evals.tune.documents import DocumentQuestion, Documents
from kvkeep.models.generation_config import ends_of
from kvkeep.models.tokenization import Writer
from kvkeep.policies import DEFAULT, FALLBACK, LATER
from kvkeep.policies.registry import label, parse

# What is searched: policies with the options of their caches, each at a ladder of budgets.

Case: TypeAlias = Literal["later", "inside", "stream"]
"""When memory is asked: after the text was cut, at the end of the text, or not at all: the text goes on."""

CASES: tuple[Case, ...] = ("later", "inside", "stream")

POLICIES: dict[Case, tuple[str, ...]] = {
    "later": ("keydiff:document", LATER, FALLBACK, "leverage", "reread", "blend", "expected_attention"),
    "inside": (DEFAULT, "snapkv:late", "blend", "reread", "leverage", "tova", FALLBACK),
    "stream": ("local", "streaming_llm", "h2o", DEFAULT, "tova", "leverage", "blend", "ahakv"),
}
"""The policies that are searched for each case, unless the user names others."""

SHARES = (0.03, 0.04, 0.06, 0.08, 0.11, 0.16, 0.23, 0.32, 0.45, 0.64, 0.9)
"""Budgets as shares of the text; each is about 1.4 times the one before."""


@dataclass(frozen=True)
class Arm:
    """Everything about a cache but its budget.

    Attributes:
        policy: the policy's string.
        setup: the other options of the cache.
        differences: options that differ from the policy's own, as text.
    """

    policy: str
    setup: Setup = PLAIN
    differences: str = ""

    @property
    def name(self) -> str:
        """Return the policy, with the options that differ from the policy's own, as files have it."""
        return self._named(self.policy)

    @property
    def label(self) -> str:
        """Return the policy's label, which has its own options, and in brackets the options of the cache (`setup`) that
        differ from what the policy would choose: ``h2o:recent=32 (positions=slot)``. Tables have it so.
        """
        return self._named(label(self.policy))

    def _named(self, policy: str) -> str:
        """Return the policy's name with the settings in which the arm differs from it."""
        return f"{policy} ({self.differences})" if self.differences else policy


FULL = Arm("full")
"""The full cache."""


@dataclass(frozen=True)
class Candidate:
    """An arm at a budget.

    Attributes:
        arm: the policy and the options of its cache.
        budget: tokens kept per layer and head.
        row_bytes: memory of a row.
    """

    arm: Arm
    budget: int
    row_bytes: int

    def __str__(self) -> str:
        return f"{self.arm.label} at {self.budget}"


Ladder: TypeAlias = tuple[Candidate, ...]
"""The candidates of one arm, the smallest memory first."""


def budgets_of(length: int, shares: Sequence[float] = SHARES) -> list[int]:
    """Return shares of a text as numbers of tokens, each once, the smallest first."""
    return sorted({max(1, round(share * length)) for share in shares})


def ladder(arm: Arm, budgets: Sequence[int], row_bytes: Callable[[Arm, int], int]) -> Ladder:
    """Return the candidates of an arm, the smallest memory first; budgets that its policy or the model refuses are
    left out.

    Args:
        arm: the arm.
        budgets: tokens per layer and head.
        row_bytes: returns the bytes of a row, or raises an error for a budget that the policy or the model refuses.
    """
    steps = []
    for budget in budgets:
        try:
            steps.append(Candidate(arm, budget, row_bytes(arm, budget)))
        except (BudgetError, UnsupportedModelError, UnsupportedOperationError):  # left out, see above
            continue
    return tuple(sorted(steps, key=lambda step: step.row_bytes))


# The quality that a candidate keeps of the full cache's, with its 95 % interval.
#
# Both measures are ratios of sums over documents, the units that are drawn: questions about one document have much in
# common, and so do tokens of one text.

Tally: TypeAlias = tuple[float, float]
"""One document. Answers: of the questions that the full cache answers, those that stay right; and their number.
Losses: nats beyond the full cache's, summed over tokens; and the number of tokens, the same for all documents."""

Kind: TypeAlias = Literal["answers", "loss"]

_MOST = 2**53
"""Documents that no target needs; a float counts no further."""


@dataclass(frozen=True)
class KeptQuality:
    """The share of the full cache's quality that a candidate keeps.

    Attributes:
        share: the measured share; may exceed 1 for losses. NaN if there is nothing to compare.
        low: lower end of the 95 % interval; NaN if a single document was measured.
        high: upper end.
        weight: number of questions or tokens.
    """

    share: float
    low: float
    high: float
    weight: float

    def passes(self, target: float) -> bool:
        """Return whether the share is at least the target, with confidence."""
        return self.low >= target


def kept(tallies: Sequence[Tally], kind: Kind) -> KeptQuality:
    """Return the share of the full cache's quality that tallies show, with its 95 % interval over documents: Wilson's
    (`of_clustered_share`) for answers, Student's, of the mean loss per token, for losses.

    If the tallies have nothing to compare, the weight is 0 and the other numbers are NaN. If a single document has
    something to compare, the interval is NaN.

    Args:
        tallies: one for each document.
        kind: ``answers``: the share of answers that stay. ``loss``: the full cache's perplexity relative to the
            candidate's.
    """
    weight = float(sum(n for _, n in tallies))
    if not weight:
        return KeptQuality(math.nan, math.nan, math.nan, 0.0)
    # a document of which the full cache answers nothing is no unit
    if kind == "answers":
        low, high = of_clustered_share([(round(x), round(n)) for x, n in tallies if n])
        return KeptQuality(sum(x for x, _ in tallies) / weight, low / 100, high / 100, weight)
    spread = over([x / n for x, n in tallies if n])
    low, high = of_mean(spread)
    return KeptQuality(_ratio(spread.mean), _ratio(high), _ratio(low), weight)  # a high loss is a low quality


def most(questions: int, documents: int) -> float:
    """Return the largest share that so many questions can show with confidence, if all answers stay; 0 below two
    documents.
    """
    return of_clusters(questions, questions, documents)[0] / 100 if questions and documents > 1 else 0.0


def needed(target: float, each: float) -> tuple[int, int]:
    """Return how many questions can show a target if all answers stay, and how many documents of ``each`` questions."""
    # more documents never show less, so their number can be bisected
    documents = bisect_left(range(_MOST), target, key=lambda n: most(round(n * each), n))
    return round(documents * each), documents


def best_case(tallies: Sequence[Tally], expected: float, documents: int) -> float:
    """Return the interval's lower end if all answers to the questions still to be asked stay; 1 below two documents.

    Args:
        tallies: those of the documents so far.
        expected: questions that are still to be asked.
        documents: number of documents in the end.
    """
    right, asked = (round(sum(column) + expected) for column in zip(*tallies, strict=True))
    return of_clusters(right, asked, documents)[0] / 100 if asked and documents > 1 else 1.0


def _ratio(excess: float) -> float:
    """Return the full cache's perplexity relative to one that is higher by this many nats per token."""
    # e^710 is more than a float holds
    return excess if math.isnan(excess) else math.exp(-min(max(excess, -700.0), 700.0))


Outcome: TypeAlias = str | list[float]
"""What is stored of a unit, a document with its questions or a window of text: which questions were right, as ``1`` and
``0``; or sums of losses in pieces of the window."""


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
        """Run an arm at a budget on units, and return what was measured on each. `FULL` has room for everything."""

    @abc.abstractmethod
    def tally(self, outcome: Outcome, full: Outcome, budget: int) -> Tally:
        """Compare the outcome of a unit with the full cache's, and return what counts of it, see `Tally`.

        Args:
            outcome: what was measured under an arm.
            full: what was measured under the full cache.
            budget: the arm's, up to which no loss of a text can differ.

        Raises:
            InputError: the two outcomes do not fit together.
        """

    @property
    def room(self) -> int:
        """Return the budget that holds every text and everything that follows it."""
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
        """Ask the questions of all units, and return for each unit a text with a mark for each of its questions.

        A mark is ``1`` for a right reply and ``0`` for another.
        """
        made = [self._documents.make(number) for number in units]
        asked = [question for unit in made for question in unit]
        replies = self._replies(writer, arm, budget, asked, units.start)
        marks = iter("01"[question.right(reply)] for question, reply in zip(asked, replies, strict=True))
        return ["".join(next(marks) for _ in unit) for unit in made]

    def tally(self, outcome: Outcome, full: Outcome, budget: int) -> Tally:
        """Return, of a unit's questions that the full cache answers, how many the arm answers, too, and their number.

        Raises:
            InputError: the two outcomes have not the same number of marks.
        """
        check(isinstance(outcome, str) and isinstance(full, str) and len(outcome) == len(full))
        stays = [answered == "1" for answered, other in zip(outcome, full, strict=True) if other == "1"]
        return float(sum(stays)), float(len(stays))

    def _replies(
        self, writer: Writer, arm: Arm, budget: int, asked: Sequence[DocumentQuestion], first: int
    ) -> list[str]:
        """Return the reply to each question under an arm at a budget, in the order of the questions.

        Args:
            writer: the model.
            arm: the policy and the options of its cache.
            budget: tokens kept per layer and head.
            asked: the questions, of one or more texts.
            first: the number of the first row for policies with randomness.
        """
        if self._later:
            return self._later_replies(writer, arm, budget, asked, first)
        replies: list[str] = []
        for at in batches([len(question.ids) for question in asked]):
            part = asked[at]
            drive = _drive(writer, arm, budget, len(part), first + at.start)
            # the last token is fed after the cut: else the reply's first word would follow from the whole text
            drive.feed(*left_padded([question.ids[:-1] for question in part]), last_only=True)
            replies += self._finish(writer, drive, part, [question.ids[-1:] for question in part])
        return replies

    def _later_replies(
        self, writer: Writer, arm: Arm, budget: int, asked: Sequence[DocumentQuestion], first: int
    ) -> list[str]:
        """Read each text once, cut it, ask all its questions in copies of that memory, and return the replies.

        The arguments are those of `_replies`, and so is the order: questions about one text may lie apart.
        """
        replies = dict.fromkeys(range(len(asked)), "")
        texts = {question.text: question.ids[: question.first] for question in asked}
        places = {text: place for place, text in enumerate(texts)}
        for at in batches([len(ids) for ids in texts.values()]):
            rows = list(texts.values())[at]
            read = _drive(writer, arm, budget, len(rows), first + at.start)
            read.feed(*left_padded(rows), last_only=True)
            numbers = [i for i, question in enumerate(asked) if at.start <= places[question.text] < at.stop]
            # a copy takes the memory of its budget and of the question, not of the text
            for few in batches([budget + len(asked[i].ids) - asked[i].first for i in numbers]):
                part = [asked[i] for i in numbers[few]]
                copies = read.copies([places[question.text] - at.start for question in part])
                found = self._finish(writer, copies, part, [question.ids[question.first :] for question in part])
                replies |= zip(numbers[few], found, strict=True)
        return list(replies.values())

    def _finish(
        self, writer: Writer, drive: Drive, asked: Sequence[DocumentQuestion], rest: Sequence[Tensor]
    ) -> list[str]:
        """Feed the rest of the prompts, their last tokens apart, and return the replies, in their order.

        Args:
            writer: the model.
            drive: the cache that has read the beginnings of the prompts.
            asked: the questions.
            rest: what the cache has not read of each prompt, one token or more.
        """
        if any(len(ids) > 1 for ids in rest):
            drive.feed(*left_padded([ids[:-1] for ids in rest]), last_only=True)
        logits = drive.feed(*left_padded([ids[-1:] for ids in rest]), last_only=True)
        ends = ends_of(writer.model, writer.checkpoint.tokenizer, chat=True)
        tokens = decode_greedily(drive, logits, self._documents.reply_tokens, ends)
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
        """Read texts in pieces of `PIECE` tokens, with a cut after each, and return for each text the sum of the losses
        of each piece, in nats.

        Raises:
            InputError: a loss is infinite or no number.
        """
        found: list[Outcome] = []
        ids = self._windows[units.start : units.stop]
        for at in batches([self.length] * len(ids)):
            drive = _drive(writer, arm, budget, len(ids[at]), units.start + at.start)
            found += map(_sums, feed_in_pieces(drive, ids[at], PIECE))
        if not all(math.isfinite(float(loss)) for losses in found for loss in losses):
            raise InputError(
                f"Under {arm.name} the model's losses on this text are infinite or no numbers, so there is nothing to "
                "compare. Try another dtype; float16 overflows first."
            )
        return found

    def tally(self, outcome: Outcome, full: Outcome, budget: int) -> Tally:
        """Return by how many nats a text's losses exceed the full cache's after the budget, and how many tokens count.

        These are the tokens of the pieces that begin when the budget is full.

        Raises:
            InputError: the two outcomes have not the same number of losses.
        """
        check(isinstance(outcome, list) and isinstance(full, list) and len(outcome) == len(full))
        # for a type checker, which does not see that `check` has raised
        assert not isinstance(outcome, str)
        assert not isinstance(full, str)
        # until the budget is full nothing is evicted, so no loss can differ
        first = -(-budget // PIECE)
        tokens = self.length - 1 - first * PIECE  # the first token has no loss
        more = sum(loss - loss_of_full for loss, loss_of_full in zip(outcome[first:], full[first:], strict=True))
        return more, float(max(0, tokens))


def check(fits: bool) -> None:
    """Refuse a folder in which the measurement of a document does not fit the full cache's of the same document.

    Raises:
        InputError: ``fits`` is false.
    """
    if not fits:
        raise InputError(
            "The folder's results do not fit together: a document has other numbers of marks or losses than under the "
            "full cache. Restore the file of results, or choose another `output` folder."
        )


def _sums(losses: Float[Tensor, " n"]) -> list[float]:
    """Return the sum of the losses of each `PIECE` tokens, rounded as files hold it."""
    return [round(piece.double().sum().item(), 6) for piece in losses.split(PIECE)]


def _drive(writer: Writer, arm: Arm, budget: int, rows: int, first: int) -> Drive:
    """Return an empty cache of ``rows`` rows, numbered from ``first`` on for random policies, which feeds the model
    under the arm's policy.
    """
    return Drive(writer, parse(arm.policy), [budget] * rows, first=first, setup=arm.setup)
