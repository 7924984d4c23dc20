"""Recall: questions over planted facts, by the depth of the asked fact.

The prompt without its last token is one chunk (the papers' semantics) and is then cut to the budget. With ``ask=later``
this chunk is the text alone: it is read and cut once, and each of its questions follows as a chunk of its own in a copy
of that memory. With ``turns`` the text is cut after each turn, and a question follows some turns after its fact. The
last token and the reply are decoded greedily under the budget, see `kvkeep.evals.replies`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, final

import torch

from kvkeep.errors import InputError
from kvkeep.evals import metrics, replies
from kvkeep.evals.asking import NEW_TOKENS, Prompted, Wording, ask, right, wording_of
from kvkeep.evals.drive import PLAIN, Drive, Setup
from kvkeep.evals.replies import Replies
from kvkeep.evals.task import Options, Outcome, Task, check_positions, past_training
from kvkeep.kv.memory_usage import Memory
from kvkeep.models.load import Checkpoint
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy

QUESTIONS = 30
"""Default number of questions per context."""

AFTER = 10
"""Turns between a fact and its question, where a text comes in turns."""


@final
@dataclass(frozen=True)
class Recall(Task):
    """Share of questions answered right, by depth and kind; one case per context."""

    name: ClassVar[str] = "recall"
    VERSION: ClassVar[int] = 3
    headline: ClassVar[str] = "accuracy"

    options: Options
    wording: Wording
    questions: dict[str, list[Prompted]]
    notes_: tuple[str, ...] = ()

    @classmethod
    def load(cls, checkpoint: Checkpoint, options: Options) -> Recall:
        """Make the questions.

        Raises:
            InputError: the facts do not fit into a context, or the model has too few learned positions.
        """
        wording = wording_of(checkpoint)
        notes: list[str] = []
        for context in options.contexts:
            check_positions(checkpoint, context + NEW_TOKENS[wording], cls.name, "contexts")
            notes += past_training(checkpoint, context + NEW_TOKENS[wording], f"recall context={context}")
        way = ",ask=later" if options.ask == "later" else ""
        if options.turns is not None:
            way, options = f"{way},turns={options.turns}", _early(options, options.turns)
        questions = {
            f"context={context}{way}": ask(checkpoint, options, context, options.limit or QUESTIONS)
            for context in dict.fromkeys(options.contexts)
        }
        return cls(options, wording, questions, tuple(notes))

    def settings(self) -> dict[str, Any]:
        """Number of questions and facts, the look of texts, depths and wording."""
        return {
            "questions": self.options.limit or QUESTIONS,
            "facts": self.options.facts,
            "documents": self.options.documents,
            "depths": list(self.options.depths) or "spread",
            "wording": self.wording,
            **({} if self.options.turns is None else {"turns": self.options.turns, "after": AFTER}),
        }

    def cases(self) -> dict[str, list[int]]:
        """Each context, with the lengths of its prompts, or of its texts if questions are asked later."""
        return {case: [self._length(asked) for asked in questions] for case, questions in self.questions.items()}

    @property
    def new_tokens(self) -> int:
        """Tokens of the longest reply, and of the longest question if it is asked later."""
        questions = [asked for part in self.questions.values() for asked in part]
        return NEW_TOKENS[self.wording] + max(len(asked.ids) - self._length(asked) for asked in questions)

    @property
    def notes(self) -> list[str]:
        """Notes about contexts longer than the model was trained for."""
        return list(self.notes_)

    def run(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], *, setup: Setup = PLAIN
    ) -> Outcome:
        """Ask all questions of a context."""
        questions, done = self.questions[case], list(self._ask(writer, case, policy, budgets, setup))
        texts = [text for batch in done for text in batch.texts]
        rights = [right(self.wording, q.question, text) for q, text in zip(questions, texts, strict=True)]
        kept = torch.cat([batch.kept for batch in done]).mean(dim=0)
        score = {**_score(questions, rights), "kept": [round(share, 6) for share in kept.tolist()]}
        return Outcome(score, sum((batch.memory for batch in done), Memory()))

    def _length(self, asked: Prompted) -> int:
        """The number of tokens that a budget in percent refers to."""
        return asked.first if self.options.ask == "later" else len(asked.ids)

    def _ask(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], setup: Setup = PLAIN
    ) -> Iterator[Replies]:
        def drive(at: Sequence[int], first: int) -> Drive:
            return Drive(writer, policy, [budgets[i] for i in at], first=first, setup=setup)

        ask = replies.later if self.options.ask == "later" else replies.inside
        questions, turns = self.questions[case], self.options.turns
        if turns is not None:
            due = [min(turns, int(asked.question.depth * turns) + 1 + AFTER) for asked in questions]
            ask = partial(replies.in_turns, turns=turns, due=due)
        return ask(writer, questions, drive, NEW_TOKENS[self.wording])


def _early(options: Options, turns: int) -> Options:
    """The same options with asked facts in those turns only that are followed by enough others.

    Raises:
        InputError: there are no such turns, questions do not come later, or a text has fewer tokens than turns.
    """
    if options.ask != "later":
        raise InputError("turns: a question some turns after its fact comes later than the cut; add `ask=later`.")
    if turns <= AFTER:
        raise InputError(f"turns={turns} leaves no fact that is asked {AFTER} turns later; give {AFTER + 1} or more.")
    if 2 * turns > min(options.contexts):
        raise InputError(
            f"turns={turns} leaves less than two tokens of {min(options.contexts)} for a turn; give fewer."
        )
    share = 1 - AFTER / turns
    spread = options.depths or [(i + 0.5) / options.facts for i in range(options.facts)]
    return replace(options, depths=tuple(share * depth for depth in spread))


def _score(questions: Sequence[Prompted], rights: Sequence[bool]) -> dict[str, Any]:
    by_depth = [[0, 0] for _ in range(metrics.TENTHS)]
    by_kind: dict[str, list[int]] = {}
    for asked, ok in zip(questions, rights, strict=True):
        for group in (
            by_depth[metrics.tenth_of(asked.question.depth)],
            by_kind.setdefault(asked.question.kind, [0, 0]),
        ):
            group[0] += ok
            group[1] += 1
    return {
        "accuracy": sum(rights) / len(rights),
        "right": sum(rights),
        "n": len(rights),
        "guess": sum(1 / len(asked.question.choices) for asked in questions) / len(questions),
        "by_depth": by_depth,
        "by_kind": by_kind,
        "asked": [[q.document, q.number, int(ok)] for q, ok in zip(questions, rights, strict=True)],
        "rights": "".join(str(int(ok)) for ok in rights),
    }
