"""Recall: questions over planted facts, by the depth of the asked fact.

The prompt without its last token is one chunk (the papers' semantics) and is then cut to the budget. With ``ask=later``
this chunk is the text alone: it is read and cut once, and each of its questions follows as a chunk of its own in a copy
of that memory. The last token and the reply are decoded greedily under the budget. The last token is fed apart because
its attention chooses the first token of the reply: with the whole prompt in one chunk, a reply of one word would not
depend on the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.evals import metrics
from kvkeep.evals.asking import NEW_TOKENS, Prompted, Wording, ask, right, wording_of
from kvkeep.evals.drive import PLAIN, Drive, Setup, batches, left_padded
from kvkeep.evals.task import Options, Outcome, Task, check_positions, past_training
from kvkeep.memory import Memory
from kvkeep.models.generation import ends_of
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import Writer
from kvkeep.policies.base import Policy

QUESTIONS = 30
"""Default number of questions per context."""

_Make = Callable[[Sequence[int], int], Drive]
"""Makes a cache for some questions, given by their numbers; the second number is the identity of its first row."""


@dataclass(frozen=True)
class _Batch:
    """The results of one batch of questions.

    Attributes:
        replies: the reply to each question.
        kept: share of the tokens kept in each tenth of the text, for each question.
        memory: bytes that the caches held at the end.
    """

    replies: list[str]
    kept: Float[Tensor, "B 10"]
    memory: Memory


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
        replies = [reply for batch in done for reply in batch.replies]
        rights = [right(self.wording, q.question, reply) for q, reply in zip(questions, replies, strict=True)]
        kept = torch.cat([batch.kept for batch in done]).mean(dim=0)
        score = {**_score(questions, rights), "kept": [round(share, 6) for share in kept.tolist()]}
        return Outcome(score, sum((batch.memory for batch in done), Memory()))

    def _length(self, asked: Prompted) -> int:
        """The number of tokens that a budget in percent refers to."""
        return asked.first if self.options.ask == "later" else len(asked.ids)

    def _ask(
        self, writer: Writer, case: str, policy: Policy, budgets: Sequence[int], setup: Setup = PLAIN
    ) -> Iterator[_Batch]:
        def drive(at: Sequence[int], first: int) -> Drive:
            return Drive(writer, policy, [budgets[i] for i in at], first=first, setup=setup)

        ask = self._later if self.options.ask == "later" else self._inside
        return ask(writer, self.questions[case], drive)

    def _inside(self, writer: Writer, questions: Sequence[Prompted], drive: _Make) -> Iterator[_Batch]:
        """Read each prompt, cut it and decode the reply."""
        for at in batches([len(asked.ids) for asked in questions]):
            part = questions[at]
            bounded = drive(range(len(questions))[at], at.start)
            kept = _read(bounded, part)
            yield _Batch(self._replies(writer, bounded, part), kept, bounded.cache.memory())

    def _later(self, writer: Writer, questions: Sequence[Prompted], drive: _Make) -> Iterator[_Batch]:
        """Read each text once, cut it, and ask all its questions in copies of that memory."""
        heads = [i for i, asked in enumerate(questions) if not asked.number]
        for at in batches([questions[i].first for i in heads]):
            read = drive(heads[at], at.start)
            kept = _read(read, [questions[i] for i in heads[at]])
            row = {questions[i].document: place for place, i in enumerate(heads[at])}
            part = [asked for asked in questions if asked.document in row]
            for few in batches([max(read.budgets) + len(asked.ids) - asked.first for asked in part]):
                copies = read.copies([row[asked.document] for asked in part[few]])
                replies = self._replies(writer, copies, part[few])
                rows = [row[asked.document] for asked in part[few]]
                yield _Batch(replies, kept[rows], copies.cache.memory())

    def _replies(self, writer: Writer, drive: Drive, questions: Sequence[Prompted]) -> list[str]:
        """Feed the rest of the prompts and decode the replies."""
        between = [asked.ids[asked.first : -1] for asked in questions]
        if any(map(len, between)):
            drive.feed(*left_padded(between), last_only=True)
        logits = drive.feed(*left_padded([asked.ids[-1:] for asked in questions]), last_only=True)
        tokens = decode_greedily(drive, logits, NEW_TOKENS[self.wording], ends_of(writer.model))
        return [writer.text_of(row) for row in tokens]


def _read(drive: Drive, questions: Sequence[Prompted]) -> Float[Tensor, "B 10"]:
    """Feed the first part of each prompt, which is then cut; returns where in it the kept tokens stand."""
    drive.feed(*left_padded([asked.ids[: asked.first] for asked in questions]), last_only=True)
    lengths, cache = [asked.first for asked in questions], drive.cache
    return (
        torch.stack([metrics.kept_by_tenth(cache.positions(i), lengths) for i in cache.bounded_layers()]).mean(0).cpu()
    )


def decode_greedily(drive: Drive, logits: Float[Tensor, "B 1 V"], most: int, ends: set[int]) -> list[list[int]]:
    """Greedy replies of at most ``most`` tokens; a row that has ended is fed nothing more.

    Args:
        drive: the model and its cache, after the prompts.
        logits: logits of each prompt's last token.
        most: most tokens of a reply.
        ends: tokens that end a reply.
    """
    replies: list[list[int]] = [[] for _ in logits]
    running = torch.ones(len(replies), dtype=torch.bool)
    for step in range(most):
        best = logits[:, -1].argmax(dim=-1).cpu()
        for row in running.nonzero().flatten().tolist():
            replies[row].append(int(best[row]))
        running &= torch.tensor([int(token) not in ends for token in best])
        if step == most - 1 or not running.any():
            break
        logits = drive.feed(best[:, None], running[:, None], last_only=True)
    return replies


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
