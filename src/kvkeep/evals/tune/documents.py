"""Documents with their questions as tokens: facts planted in a text, or the user's own questions."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, groupby, islice

import torch
from jaxtyping import Int

from kvkeep.errors import InputError
from kvkeep.evals.tasks.recall import NEW_TOKENS, Wording, right, wording_of
from kvkeep.evals.tune.questions import UserQuestion
from kvkeep.models.load import Checkpoint
from kvkeep.models.text import encode
from kvkeep.models.tiny.recall import Fact, Question, question
from kvkeep.models.tiny.wordings import HELD_OUT

Ids = Int[torch.Tensor, " n"]

LONGEST_SENTENCE = 240
"""Characters of a sentence; a longer one is cut between words."""

_PART = re.compile(rf"(?<=[.!?。！？])\s+|\n+|(?<=\s)(?=\S{{{LONGEST_SENTENCE},}})")
_KINDS = [kind.name for kind in HELD_OUT.kinds]
_FEW_TEXTS = 10
"""Texts that are too few to be the units of an interval."""


@dataclass(frozen=True)
class Asked:
    """A question about a text.

    Attributes:
        text: the text.
        ids: the prompt: the text and the question.
        first: number of tokens of the text; they are the same in all prompts about it.
        right: whether a reply answers the question.
    """

    text: str
    ids: Ids
    first: int
    right: Callable[[str], bool]


Unit = tuple[Asked, ...]
"""Questions that are drawn together, all about one text."""


@dataclass(frozen=True)
class Documents:
    """Units of questions.

    Attributes:
        make: makes the unit of a number, always the same one.
        count: number of units; ``None`` if there is no end.
        per_unit: questions of a unit, on average.
        length: tokens of the longest text.
        question_tokens: most tokens of a question.
        reply_tokens: most tokens of a reply.
    """

    make: Callable[[int], Unit]
    count: int | None
    per_unit: float
    length: int
    question_tokens: int
    reply_tokens: int


def planted(checkpoint: Checkpoint, text: str | None, *, context: int, facts: int, seed: int) -> Documents:
    """Documents of sentences of a text with facts between them; every fact is asked for.

    Args:
        checkpoint: the model.
        text: the text; ``None`` for the package's own sentences.
        context: tokens of a document with a question.
        facts: facts of a document.
        seed: chooses facts, and where in the text a document begins.

    Raises:
        InputError: the facts do not fit.
    """
    wording = wording_of(checkpoint)
    parts = None if text is None else sentences(text)

    @cache
    def make(number: int) -> Unit:
        return _planted(checkpoint, wording, parts, number=seed * 1_000_003 + number, context=context, facts=facts)

    first = make(0)
    longest = max(len(asked.ids) for asked in first)
    if longest > context * 1.02 + 16:
        raise InputError(
            f"A document with {facts} facts has {longest} tokens, more than the context of {context}. Give fewer "
            "`facts` or a longer `context`."
        )
    room = max(len(asked.ids) - asked.first for asked in first) + 8
    return Documents(make, None, facts, context, room + NEW_TOKENS[wording])


def own(checkpoint: Checkpoint, questions: Sequence[UserQuestion], seed: int) -> Documents:
    """The user's questions: a unit for each text, or for each question if there are few texts.

    Raises:
        InputError: a prompt cannot be encoded.
    """
    wording = wording_of(checkpoint)
    by_text = sorted(questions, key=lambda one: one.text)
    groups = [list(group) for _, group in groupby(by_text, key=lambda one: one.text)]
    if len(groups) < _FEW_TEXTS:
        groups = [[one] for group in groups for one in group]
    random.Random(seed).shuffle(groups)
    units = [
        _asked(checkpoint, wording, group[0].text, [(one.question, one.right) for one in group]) for group in groups
    ]
    asked = [one for unit in units for one in unit]
    longest = max(len(checkpoint.tokenizer.encode(answer)) for one in questions for answer in one.answers)
    room = max(len(one.ids) - one.first for one in asked) + max(NEW_TOKENS[wording], longest + 8)
    length = max(one.first for one in asked)
    return Documents(units.__getitem__, len(units), len(asked) / len(units), length, room)


def sentences(text: str) -> list[str]:
    """The sentences of a text; lines, and pieces of lines, where it has none."""
    found = [part.strip() for part in _PART.split(text)]
    return [piece for part in found if part for piece in _pieces(part)]


def _pieces(sentence: str) -> Iterator[str]:
    while len(sentence) > LONGEST_SENTENCE:
        at = sentence.rfind(" ", 1, LONGEST_SENTENCE)
        at = LONGEST_SENTENCE if at < 0 else at
        yield sentence[:at]
        sentence = sentence[at:].strip()
    if sentence:
        yield sentence


def _planted(
    checkpoint: Checkpoint, wording: Wording, parts: Sequence[str] | None, *, number: int, context: int, facts: int
) -> Unit:
    rng = random.Random(f"tune/{number}")
    frame = len(encode_prompt(checkpoint, wording, "a", "b")) - _count(checkpoint, "a b")
    filler = None
    if parts is not None:
        start = rng.randrange(len(parts))
        filler = islice(cycle(parts), start, None)
    item = question(
        number,
        kind=rng.choice(_KINDS),
        depth=rng.random(),
        n_facts=facts,
        tokens=context - frame,
        filler=filler,
        count=lambda text: _count(checkpoint, text),
    )
    text = _without_question(item)
    pairs = [(fact.say(rng.choice(fact.kind.questions)), _Grader(wording, item, fact)) for fact in item.facts]
    return _asked(checkpoint, wording, text, pairs)


def _without_question(item: Question) -> str:
    """The text of a question."""
    fact = item.facts[-1]
    ending = next(said for template in fact.kind.questions if item.prompt.endswith(said := fact.say(template)))
    return item.prompt.removesuffix(ending).rstrip()


@dataclass(frozen=True)
class _Grader:
    """Whether a reply gives the value of a fact."""

    wording: Wording
    item: Question
    fact: Fact

    def __call__(self, reply: str) -> bool:
        same = tuple(fact.value for fact in self.item.facts if fact.kind.name == self.fact.kind.name)
        asked = Question(self.item.prompt, self.fact.value, self.fact.kind.name, 0.0, self.item.facts, same)
        return right(self.wording, asked, reply)


def _asked(
    checkpoint: Checkpoint, wording: Wording, text: str, pairs: Sequence[tuple[str, Callable[[str], bool]]]
) -> Unit:
    """A unit: the questions about one text, with the number of tokens that all prompts have in common."""
    prompts = [encode_prompt(checkpoint, wording, text, ending) for ending, _ in pairs]
    other = encode_prompt(checkpoint, wording, f"{text} ;", pairs[0][0])
    first = min(_common(prompt, other) for prompt in prompts)
    return tuple(Asked(ids, min(first, len(ids) - 1), grade) for ids, (_, grade) in zip(prompts, pairs, strict=True))


def _common(one: Int[torch.Tensor, " n"], other: Int[torch.Tensor, " m"]) -> int:
    """Number of equal tokens at the beginning of two prompts."""
    n = min(len(one), len(other))
    different = (one[:n] != other[:n]).nonzero()
    return int(different[0]) if len(different) else n


def _count(checkpoint: Checkpoint, text: str) -> int:
    return len(checkpoint.tokenizer.encode(text, add_special_tokens=False))


_INSTRUCTION = "Read the text and answer the question at its end with the one word or number asked for, nothing else."


def encode_prompt(checkpoint: Checkpoint, wording: Wording, text: str, ending: str) -> Ids:
    """The prompt of a text and a question."""
    if wording == "embedded":
        return encode(checkpoint, f"{text} {ending}")[0]
    if wording == "instruction":
        return encode(checkpoint, f"{_INSTRUCTION}\n\n{text}\n\n{ending}")[0]
    return encode(checkpoint, f"{text}\n\nQuestion: {ending}\nAnswer:", raw=True)[0]
