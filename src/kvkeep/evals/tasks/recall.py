"""Recall: questions over planted facts, by the depth of the asked fact.

The prompt without its last token is one chunk (the papers' semantics) and is then cut to the budget. With ``ask=later``
this chunk is the text alone, and the question follows as a chunk of its own. The last token and the reply are decoded
greedily under the budget. The last token is fed apart because its attention chooses the first token of the reply: with
the whole prompt in one chunk, a reply of one word would not depend on the policy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals import metrics
from kvkeep.evals.drive import PLAIN, Drive, Setup, batches, left_padded
from kvkeep.evals.task import Options, Outcome, Task, check_positions, past_training
from kvkeep.memory import Memory
from kvkeep.models import tiny
from kvkeep.models.generation import ends_of
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import Writer, encode
from kvkeep.models.tiny.recall import Question, question
from kvkeep.models.tiny.wordings import HELD_OUT
from kvkeep.policies.base import Policy

Wording = Literal["embedded", "instruction", "plain"]

NEW_TOKENS = {"embedded": 8, "instruction": 24, "plain": 16}
"""Tokens of the longest reply, by wording."""

_INSTRUCTION = "Read the text and answer the question at its end with the one word or number asked for, nothing else."
_KINDS = tuple(kind.name for kind in HELD_OUT.kinds)
_GOLDEN = 0.6180339887


@dataclass(frozen=True)
class Prompted:
    """A question and its prompt as tokens.

    Attributes:
        question: the question.
        ids: the prompt.
        first: number of tokens that are fed at once and then cut to the budget; the others follow after that.
    """

    question: Question
    ids: Int[torch.Tensor, " n"]
    first: int


def wording_of(checkpoint: Checkpoint) -> Wording:
    """How to ask a model: in the embedded model's chat if it has that template, else as its tokenizer allows."""
    template = checkpoint.tokenizer.chat_template
    if template is None:
        return "plain"
    own = (resources.files(tiny) / "chat_template.jinja").read_text(encoding="utf-8")
    return "embedded" if str(template).strip() == own.strip() else "instruction"


def ask(checkpoint: Checkpoint, options: Options, context: int, n: int) -> list[Prompted]:
    """``n`` questions, of all kinds in turn, with prompts of about ``context`` tokens and never more.

    Raises:
        InputError: the facts alone are longer than the context.
    """
    wording = wording_of(checkpoint)
    room = context - len(encoded(checkpoint, wording, "a", "b")) + _count(checkpoint, "a b")
    asked = []
    for index in range(n):
        item = question(
            options.seed * 1_000_003 + index,
            kind=_KINDS[index % len(_KINDS)],
            depth=_depth(options.depths, index),
            n_facts=options.facts,
            tokens=room,
            count=lambda text: _count(checkpoint, text),
        )
        ids = encoded(checkpoint, wording, *parts_of(item))
        first = _text_tokens(checkpoint, wording, item, ids) if options.ask == "later" else len(ids) - 1
        asked.append(Prompted(item, ids, first))
    longest = max(len(item.ids) for item in asked)
    if longest > context * 1.02 + 8:
        raise InputError(
            f"A recall prompt with {options.facts} facts has {longest} tokens, more than the context of {context}. "
            "Give fewer `facts` or longer `contexts`."
        )
    return asked


def right(wording: Wording, asked: Question, reply: str) -> bool:
    """Whether a reply answers the question.

    The embedded model has to give exactly the answer. For other models the first line counts: it has to contain the
    answer, and no other value that the text gives for such a thing.
    """
    if wording == "embedded":
        return asked.right(reply)
    line = next(filter(None, (line.strip() for line in reply.splitlines())), "").lower()
    words = set(re.findall(r"[^\W_]+", line))
    others = {choice.lower() for choice in asked.choices} - {asked.answer.lower()}
    return asked.answer.lower() in words and not words & others


def _depth(depths: tuple[float, ...], index: int) -> float:
    return depths[index % len(depths)] if depths else (index * _GOLDEN % 1.0) * 0.998 + 0.001


def _count(checkpoint: Checkpoint, text: str) -> int:
    return len(checkpoint.tokenizer.encode(text, add_special_tokens=False))


def parts_of(asked: Question) -> tuple[str, str]:
    """The text of a question's prompt, and the question at its end."""
    fact = asked.facts[-1]
    ending = next(said for t in fact.kind.questions if asked.prompt.endswith(said := fact.say(t)))
    return asked.prompt.removesuffix(ending).rstrip(), ending


def _text_tokens(checkpoint: Checkpoint, wording: Wording, asked: Question, ids: Int[torch.Tensor, " n"]) -> int:
    """Number of tokens before the question: the common prefix with a prompt in which other words follow the text."""
    text, ending = parts_of(asked)
    other = encoded(checkpoint, wording, f"{text} ;", ending)[: len(ids)]
    return int((ids[: len(other)] != other).nonzero()[0])


def encoded(checkpoint: Checkpoint, wording: Wording, text: str, ending: str) -> Int[torch.Tensor, " n"]:
    """The tokens of a prompt: a text, and the question at its end."""
    if wording == "embedded":
        return encode(checkpoint, f"{text} {ending}")[0]
    if wording == "instruction":
        return encode(checkpoint, f"{_INSTRUCTION}\n\n{text}\n\n{ending}")[0]
    return encode(checkpoint, f"{text}\n\nQuestion: {ending}\nAnswer:", raw=True)[0]


# -- the task ----------------------------------------------------------------------------------------------------------

QUESTIONS = 30
"""Default number of questions per context."""


@dataclass(frozen=True)
class _Batch:
    """The results of one batch of questions: replies, positions of kept tokens after the prompt, and bytes."""

    replies: list[str]
    kept: Float[Tensor, " 10"]
    memory: Memory


@final
@dataclass(frozen=True)
class Recall(Task):
    """Share of questions answered right, by depth and kind; one case per context."""

    name: ClassVar[str] = "recall"
    VERSION: ClassVar[int] = 2
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
        way = "" if options.ask == "prompt" else f",ask={options.ask}"
        questions = {
            f"context={context}{way}": ask(checkpoint, options, context, options.limit or QUESTIONS)
            for context in dict.fromkeys(options.contexts)
        }
        return cls(options, wording, questions, tuple(notes))

    def settings(self) -> dict[str, Any]:
        """Number of questions, facts, depths and wording."""
        return {
            "questions": self.options.limit or QUESTIONS,
            "facts": self.options.facts,
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
        questions = self.questions[case]
        parts = batches([len(asked.ids) for asked in questions])
        done = [
            self._answer(writer, Drive(writer, policy, budgets[at], first=at.start, setup=setup), questions[at])
            for at in parts
        ]
        replies = [reply for batch in done for reply in batch.replies]
        rights = [right(self.wording, q.question, reply) for q, reply in zip(questions, replies, strict=True)]
        sizes = torch.tensor([len(batch.replies) for batch in done])
        kept = torch.stack([batch.kept for batch in done]).mul(sizes[:, None]).sum(dim=0) / sizes.sum()
        score = {**_score(questions, rights), "kept": [round(share, 6) for share in kept.tolist()]}
        return Outcome(score, sum((batch.memory for batch in done), Memory()))

    def _length(self, asked: Prompted) -> int:
        """The number of tokens that a budget in percent refers to."""
        return asked.first if self.options.ask == "later" else len(asked.ids)

    def _answer(self, writer: Writer, drive: Drive, questions: Sequence[Prompted]) -> _Batch:
        """Run one batch: the texts, which are then cut, the rest of the prompts, and the replies."""
        lengths = [asked.first for asked in questions]
        drive.feed(*left_padded([asked.ids[: asked.first] for asked in questions]), last_only=True)
        layers = drive.cache.bounded_layers()
        kept = torch.stack([metrics.kept_by_tenth(drive.cache.positions(layer), lengths) for layer in layers])
        between = [asked.ids[asked.first : -1] for asked in questions]
        if any(map(len, between)):
            drive.feed(*left_padded(between), last_only=True)
        logits = drive.feed(*left_padded([asked.ids[-1:] for asked in questions]), last_only=True)
        tokens = decode_greedily(drive, logits, NEW_TOKENS[self.wording], ends_of(writer.model))
        replies = [writer.text_of(row) for row in tokens]
        return _Batch(replies, kept.mean(dim=0).cpu(), drive.cache.memory())


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
        "rights": "".join(str(int(ok)) for ok in rights),
    }
