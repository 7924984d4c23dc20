"""Recall questions in a model's own wording: the embedded model's chat, an instruction, or plain text to continue."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import resources
from typing import Literal

import torch
from jaxtyping import Int

from kvkeep.errors import InputError
from kvkeep.evals.task import Options
from kvkeep.models import tiny
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import encode
from kvkeep.models.tiny.recall import Question, question
from kvkeep.models.tiny.wordings import HELD_OUT

Wording = Literal["embedded", "instruction", "plain"]

NEW_TOKENS = {"embedded": 8, "instruction": 24, "plain": 16}
"""Longest reply that is read, in tokens."""

_INSTRUCTION = "Read the text and answer the question at its end with the one word or number asked for, nothing else."
_KINDS = tuple(kind.name for kind in HELD_OUT.kinds)
_GOLDEN = 0.6180339887


@dataclass(frozen=True)
class Prompted:
    """A question and its prompt as tokens.

    Attributes:
        question: the question.
        ids: the prompt.
        first: tokens at its beginning that are fed at once and then cut to the budget; the others come after that.
    """

    question: Question
    ids: Int[torch.Tensor, " n"]
    first: int


def wording_of(checkpoint: Checkpoint) -> Wording:
    """How this model is asked: in the embedded model's chat if it has that template, else as its tokenizer allows."""
    template = checkpoint.tokenizer.chat_template
    if template is None:
        return "plain"
    own = (resources.files(tiny) / "chat_template.jinja").read_text(encoding="utf-8")
    return "embedded" if str(template).strip() == own.strip() else "instruction"


def ask(checkpoint: Checkpoint, options: Options, context: int, n: int) -> list[Prompted]:
    """``n`` questions of all kinds in turn with prompts of about ``context`` tokens, never more.

    Raises:
        InputError: the facts alone are longer than the context.
    """
    wording = wording_of(checkpoint)
    room = context - len(_encode(checkpoint, wording, "a", "b")) + _count(checkpoint, "a b")
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
        ids = _encode(checkpoint, wording, *_parts(item))
        first = _text_tokens(checkpoint, wording, item, ids) if options.ask == "later" else len(ids) - 1
        asked.append(Prompted(item, ids, first))
    longest = max(len(item.ids) for item in asked)
    if longest > context * 1.02 + 8:
        raise InputError(
            f"A recall prompt with {options.facts} facts has {longest} tokens, more than the context of {context}. "
            "Give fewer --facts or a longer --context."
        )
    return asked


def right(wording: Wording, asked: Question, reply: str) -> bool:
    """Whether a reply answers the question.

    The embedded model has to give exactly the answer. From others the first line counts, and it is right if it
    contains the answer and no other value that the text gives for such a thing.
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


def _parts(asked: Question) -> tuple[str, str]:
    """The text and the question that stands at its end."""
    fact = asked.facts[-1]
    ending = next(said for t in fact.kind.questions if asked.prompt.endswith(said := fact.say(t)))
    return asked.prompt.removesuffix(ending).rstrip(), ending


def _text_tokens(checkpoint: Checkpoint, wording: Wording, asked: Question, ids: Int[torch.Tensor, " n"]) -> int:
    """Tokens before the question: those that the prompt shares with one in which something else follows the text."""
    text, ending = _parts(asked)
    other = _encode(checkpoint, wording, f"{text} ;", ending)[: len(ids)]
    return int((ids[: len(other)] != other).nonzero()[0])


def _encode(checkpoint: Checkpoint, wording: Wording, text: str, ending: str) -> Int[torch.Tensor, " n"]:
    if wording == "embedded":
        return encode(checkpoint, f"{text} {ending}")[0]
    if wording == "instruction":
        return encode(checkpoint, f"{_INSTRUCTION}\n\n{text}\n\n{ending}")[0]
    return encode(checkpoint, f"{text}\n\nQuestion: {ending}\nAnswer:", raw=True)[0]
