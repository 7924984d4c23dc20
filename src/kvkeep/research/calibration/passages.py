"""The passages of a calibration: texts with planted facts and questions about them, and windows of the user's text.

A model's own answers under the full cache are its targets, so neither its tokenizer nor its way to answer matters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import InputError
from kvkeep.evals import texts
from kvkeep.evals.drive import Drive, batches, left_padded
from kvkeep.evals.task import Options
from kvkeep.evals.tasks.recall import NEW_TOKENS, Wording, decode_greedily, encoded, parts_of, right, wording_of
from kvkeep.models.generation import ends_of
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import Writer
from kvkeep.models.tiny.recall import Question, question
from kvkeep.registry import parse
from kvkeep.research.calibration.limited import Passage

TAIL = 128
"""Last tokens of a window of text whose predictions are compared."""

FACTS = 16
"""Facts of a text."""


@dataclass(frozen=True)
class Document:
    """A text with planted facts, and questions about some of them.

    Attributes:
        questions: the questions.
        prompts: each question's prompt, the text and the question.
    """

    questions: tuple[Question, ...]
    prompts: tuple[Int[Tensor, "_"], ...]

    @property
    def stem(self) -> int:
        """Number of tokens with which all prompts begin."""
        shortest = min(map(len, self.prompts)) - 1
        rows = torch.stack([prompt[:shortest] for prompt in self.prompts])
        same = (rows == rows[0]).all(dim=0)
        return shortest if bool(same.all()) else int((~same).nonzero()[0])


def documents(checkpoint: Checkpoint, *, n: int, questions: int, tokens: int, seed: int) -> list[Document]:
    """Texts of about ``tokens`` tokens with the prompt of each question.

    Raises:
        InputError: the facts alone are longer.
    """
    wording = wording_of(checkpoint)
    made = [_document(checkpoint, wording, questions, tokens, seed * 1_000_003 + index) for index in range(n)]
    longest = max((len(prompt) for document in made for prompt in document.prompts), default=0)
    if longest > tokens * 1.1 + 8:
        raise InputError(
            f"A text with {FACTS} planted facts has {longest} tokens, more than the context of {tokens}. Give a longer "
            "`context`, or `documents=0` to compare heads on the text alone."
        )
    return made


def _document(checkpoint: Checkpoint, wording: Wording, questions: int, tokens: int, seed: int) -> Document:
    def count(text: str) -> int:
        return len(checkpoint.tokenizer.encode(text, add_special_tokens=False))

    room = tokens - len(encoded(checkpoint, wording, "a", "b")) + count("a b")
    first = question(seed, n_facts=FACTS, tokens=room, count=count, depth=random.Random(seed).random())
    text, _ = parts_of(first)
    rng = random.Random(f"{seed}/asked")
    asked = []
    for fact in rng.sample(first.facts, questions):
        ending = fact.say(rng.choice(fact.kind.questions))
        same = tuple(other.value for other in first.facts if other.kind.name == fact.kind.name)
        asked.append(replace(first, prompt=f"{text} {ending}", answer=fact.value, kind=fact.kind.name, choices=same))
    prompts = [encoded(checkpoint, wording, text, one.prompt.removeprefix(text).lstrip()) for one in asked]
    return Document(tuple(asked), tuple(prompts))


def answered(writer: Writer, document: Document, *, together: bool) -> list[Passage]:
    """The questions that the model answers right under the full cache, each followed by its answer.

    Args:
        writer: the model.
        document: the text.
        together: whether all questions share one passage. A model with layers that have a state needs one for each.
    """
    replies = _replies(writer, document)
    wording = wording_of(writer.checkpoint)
    known = [
        (prompt, torch.tensor(reply))
        for asked, prompt, reply in zip(document.questions, document.prompts, replies, strict=True)
        if reply and right(wording, asked, writer.text_of(reply))
    ]
    if not together:
        return [_passage([one], len(one[0]) - 1) for one in known]
    return [_passage(known, document.stem)] if known else []


def _passage(known: Sequence[tuple[Int[Tensor, "_"], Int[Tensor, "_"]]], stem: int) -> Passage:
    branches = [torch.cat([prompt[stem:], reply]) for prompt, reply in known]
    return Passage(
        torch.cat([known[0][0][:stem], *branches]),
        stem,
        tuple(map(len, branches)),
        tuple(len(reply) for _, reply in known),
    )


def _replies(writer: Writer, document: Document) -> list[list[int]]:
    """The model's greedy replies under the full cache, without the token that ends them."""
    ends = ends_of(writer.model)
    most = NEW_TOKENS[wording_of(writer.checkpoint)]
    replies: list[list[int]] = []
    for at in batches([len(prompt) for prompt in document.prompts]):
        prompts = document.prompts[at]
        drive = Drive(writer, parse("full"), [max(map(len, prompts)) + most] * len(prompts))
        logits = drive.feed(*left_padded(prompts), last_only=True)
        replies += decode_greedily(drive, logits, most, ends)
    return [[token for token in reply if token not in ends] for reply in replies]


def windows(checkpoint: Checkpoint, text: str | None, *, n: int, tokens: int, seed: int) -> list[Passage]:
    """Windows of a text, or of the package's own sentences, whose last tokens are the targets.

    Raises:
        InputError: the text is too short.
    """
    rows = texts.windows(checkpoint, Options(text=text, seed=seed), rows=n, length=tokens)
    return [Passage(row, len(row), (), (min(TAIL, len(row) - 1),)) for row in rows]
