"""Questions of recall as tokens: texts with planted facts, several questions about each, and what answers them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import torch
from jaxtyping import Int

from kvkeep.errors import InputError
from kvkeep.evals.task import Options
from kvkeep.models import tiny
from kvkeep.models.load import Checkpoint
from kvkeep.models.tiny.documents import Document, document
from kvkeep.models.tiny.recall import Question
from kvkeep.models.tokenization import encode

Wording = Literal["embedded", "instruction", "plain"]

NEW_TOKENS = {"embedded": 8, "instruction": 24, "plain": 16}
"""Tokens of the longest reply, by wording."""

_INSTRUCTION = "Read the text and answer the question at its end with the one word or number asked for, nothing else."

LEAST_DOCUMENTS = 8
"""Fewest texts that questions are spread over, if there are so many questions."""


@dataclass(frozen=True)
class Prompted:
    """A question and its prompt as tokens.

    Attributes:
        question: the question.
        ids: the prompt.
        first: number of tokens that are fed at once and then cut to the budget; the others follow after that. If
            questions are asked later, all questions of a document have these tokens in common.
        document: the number of the text.
        number: the number of the question among those of its text.
    """

    question: Question
    ids: Int[torch.Tensor, " n"]
    first: int
    document: int
    number: int


def wording_of(checkpoint: Checkpoint) -> Wording:
    """How to ask a model: in the embedded model's chat if it has that template, else as its tokenizer allows."""
    template = checkpoint.tokenizer.chat_template
    if template is None:
        return "plain"
    own = (resources.files(tiny) / "chat_template.jinja").read_text(encoding="utf-8")
    return "embedded" if str(template).strip() == own.strip() else "instruction"


def ask(
    checkpoint: Checkpoint, options: Options, context: int, n: int, *, documents: int = LEAST_DOCUMENTS
) -> list[Prompted]:
    """``n`` questions, text by text, with prompts of about ``context`` tokens and never more.

    A text is asked about all its facts, or about fewer if ``n`` questions would come from fewer than ``documents``
    texts.

    Raises:
        InputError: the facts alone are longer than the context.
    """
    each = min(options.facts, len(options.depths) or options.facts, math.ceil(n / documents))
    asked: list[Prompted] = []
    for number in range(math.ceil(n / each)):
        asked += _about(checkpoint, options, number, context, each)[: n - len(asked)]
    longest = max(len(item.ids) for item in asked)
    if longest > context * 1.02 + 8:
        raise InputError(
            f"A recall prompt with {options.facts} facts has {longest} tokens, more than the context of {context}. "
            "Give fewer `facts` or longer `contexts`."
        )
    return asked


def _about(checkpoint: Checkpoint, options: Options, number: int, context: int, each: int) -> list[Prompted]:
    """The questions about one text."""
    wording = wording_of(checkpoint)
    made = document(
        options.seed * 1_000_003 + number,
        n_facts=options.facts,
        n_questions=each,
        tokens=context - len(encoded(checkpoint, wording, "a", "b")) + count_tokens(checkpoint, "a b"),
        depths=[options.depths[(number * each + i) % len(options.depths)] for i in range(each)]
        if options.depths
        else (),
        first_kind=number * options.facts,
        style=options.documents,
        count=lambda text: count_tokens(checkpoint, text),
    )
    ids = [encoded(checkpoint, wording, made.text, ending_of(item)) for item in made.questions]
    text = _text_tokens(checkpoint, wording, made, ids)
    return [
        Prompted(item, own, text if options.ask == "later" else len(own) - 1, number, i)
        for i, (item, own) in enumerate(zip(made.questions, ids, strict=True))
    ]


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


def ending_of(asked: Question) -> str:
    """The question itself, without the text before it."""
    fact = asked.facts[-1]
    return next(said for template in fact.kind.questions if asked.prompt.endswith(said := fact.say(template)))


def count_tokens(checkpoint: Checkpoint, text: str) -> int:
    """Number of tokens of a part of a text."""
    return len(checkpoint.tokenizer.encode(text, add_special_tokens=False))


def _text_tokens(
    checkpoint: Checkpoint, wording: Wording, made: Document, prompts: Sequence[Int[torch.Tensor, "_"]]
) -> int:
    """Number of tokens before the questions: those that all prompts share with one in which other words follow."""
    other = encoded(checkpoint, wording, f"{made.text} ;", ending_of(made.questions[0]))
    return min(_shared(other, ids) for ids in prompts)


def _shared(one: Int[torch.Tensor, " n"], two: Int[torch.Tensor, " m"]) -> int:
    """The length of the common beginning of two prompts, which part before their ends."""
    size = min(len(one), len(two))
    return int((one[:size] != two[:size]).nonzero()[0])


def encoded(checkpoint: Checkpoint, wording: Wording, text: str, ending: str) -> Int[torch.Tensor, " n"]:
    """The prompt of a text and a question."""
    if wording == "embedded":
        return encode(checkpoint, f"{text} {ending}")[0]
    if wording == "instruction":
        return encode(checkpoint, f"{_INSTRUCTION}\n\n{text}\n\n{ending}")[0]
    return encode(checkpoint, f"{text}\n\nQuestion: {ending}\nAnswer:", raw=True)[0]
