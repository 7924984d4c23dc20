"""Documents with their questions as tokens: facts planted in a text, or the user's own questions."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import cycle, groupby, islice
from typing import Any

import torch
from jaxtyping import Int

from kvkeep.errors import InputError, closest
from kvkeep.evals.task import text_seed
from kvkeep.evals.tasks.recall import NEW_TOKENS, Wording, count_tokens, encoded, ending_of, right, wording_of
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.tiny.documents import document
from kvkeep.result_files import parse

# The user's questions: a JSONL file whose lines have a question, its answer, and perhaps a text of their own.

FIELDS = ("text", "question", "answer")


@dataclass(frozen=True)
class UserQuestion:
    """A question of the user.

    Attributes:
        text: the text that it is about.
        question: the question.
        answers: each of them is a right answer.
    """

    text: str
    question: str
    answers: tuple[str, ...]

    def right(self, reply: str) -> bool:
        """Return whether the first line of a reply contains an answer as whole words."""
        line = next(filter(None, (line.strip() for line in reply.splitlines())), "")
        # an answer without words, such as a sign, is looked for as it is
        return any(_words(answer) in _words(line) if _words(answer) else answer in line for answer in self.answers)


def read_questions(content: str, source: str, text: str | None) -> list[UserQuestion]:
    """Return the questions of a file of JSON lines, in its order. Empty lines are left out.

    Args:
        content: the file's content.
        source: the file's name in messages.
        text: the text of questions without one.

    Raises:
        InputError: a line is no question, or the file has none.
    """
    found = [
        _question(line, f"Line {number} of {source}", text)
        # `splitlines` would also split at separators that a text of JSON may hold
        for number, line in enumerate(content.split("\n"), start=1)
        if line.strip()
    ]
    if not found:
        raise InputError(f'{source} has no questions. A line is {{"question": "…", "answer": "…"}}.')
    return found


def _question(line: str, place: str, text: str | None) -> UserQuestion:
    """Return a line of ``--questions`` as a question; without a text of its own it is about ``text``.

    Raises:
        InputError: the line is no JSON object, has no question or no answer, or has no text and none was given.
    """
    try:
        entry = parse(line.encode("utf-8", "surrogatepass"))  # `parse` refuses half a character
    except ValueError as error:
        raise InputError(f'{place} is no JSON: {error}. Write {{"question": "…", "answer": "…"}}.') from error
    if not isinstance(entry, dict):
        raise InputError(f'{place} is no JSON object. Write {{"question": "…", "answer": "…"}}.')
    about = text if entry.get("text") is None else _text(entry, "text", place)
    if about is None:
        raise InputError(f"{place} has no text, and none was given. Give it one, or a `text` for all questions.")
    return UserQuestion(about, _text(entry, "question", place), _answers(entry, place))


def _answers(entry: dict[str, Any], place: str) -> tuple[str, ...]:
    """Return the answers that count as right, given as one or as a list; at least one.

    Raises:
        InputError: there is none, or one is empty.
    """
    given = entry.get("answer")
    several = given if isinstance(given, list) and given else [given]
    return tuple(_text({**entry, "answer": answer}, "answer", place) for answer in several)


def _text(entry: dict[str, Any], field: str, place: str) -> str:
    """Return a field of a line as text without white space around it; a number counts as text.

    Raises:
        InputError: the field is missing, blank or no text; the message begins with ``place``.
    """
    value = entry.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and value.strip():
        return value.strip()
    if value is None:
        others = [name for name in entry if name not in FIELDS]
        close = closest(field, others)
        meant = f" Did you mean {field!r} by {close!r}?" if close else ""
        raise InputError(f'{place} has no {field}.{meant} A line is {{"question": "…", "answer": "…"}}.')
    raise InputError(f"{place}: its {field} is empty or no text: {value!r:.80}.")


def _words(text: str) -> str:
    """Return the words of a text in lower case, each between spaces; empty if it has none."""
    found = re.findall(r"\w+", text.lower())
    return f" {' '.join(found)} " if found else ""


Ids = Int[torch.Tensor, " n"]

LONGEST_SENTENCE = 240
"""Characters of a sentence; a longer one is cut between words."""

# Chinese and Japanese have no white space between sentences
_PART = re.compile(r"(?<=[.!?])\s+|(?<=[。！？])\s*|\n+")
_FEW_TEXTS = 10
"""Texts that are too few to be the units of an interval."""


@dataclass(frozen=True)
class DocumentQuestion:
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


Unit = tuple[DocumentQuestion, ...]
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
    """Return documents without end, each of sentences of a text with facts between them; every fact is asked for.

    Args:
        checkpoint: the model.
        text: the text; ``None`` for the package's own sentences.
        context: tokens of a document with a question.
        facts: facts of a document.
        seed: chooses facts, and where in the text a document begins.

    Raises:
        InputError: the facts alone are longer than the context.
    """
    wording = wording_of(checkpoint)
    parts = None if text is None else sentences(text)

    @cache  # every candidate asks for the same documents
    def make(number: int) -> Unit:
        return _planted(checkpoint, wording, parts, number=text_seed(seed, number), context=context, facts=facts)

    first = make(0)
    longest = max(len(asked.ids) for asked in first)
    if longest > context * 1.02 + 16:  # a little more is no error: sentences are counted one by one
        raise InputError(
            f"A document with {facts} facts has {longest} tokens, more than the context of {context}. Give fewer "
            "`facts` or a longer `context`."
        )
    question = max(len(asked.ids) - asked.first for asked in first) + 8  # other documents may have longer ones
    return Documents(make, None, float(facts), context, question, NEW_TOKENS[wording])


def own(checkpoint: Checkpoint, questions: Sequence[UserQuestion], seed: int) -> Documents:
    """Return the user's questions as units: one for each text with its questions, or for each question if there are
    few texts. The seed chooses their order.

    Raises:
        InputError: a prompt cannot be encoded.
    """
    wording = wording_of(checkpoint)
    # `groupby` joins neighbours only
    by_text = sorted(questions, key=lambda question: question.text)
    groups = [list(group) for _, group in groupby(by_text, key=lambda question: question.text)]
    if len(groups) < _FEW_TEXTS:
        groups = [[question] for group in groups for question in group]
    random.Random(seed).shuffle(groups)
    units = [
        _asked(checkpoint, wording, group[0].text, [(question.question, question.right) for question in group])
        for group in groups
    ]
    asked = [question for unit in units for question in unit]
    longest = max(len(checkpoint.tokenizer.encode(answer)) for question in questions for answer in question.answers)
    return Documents(
        units.__getitem__,
        len(units),
        len(asked) / len(units),
        length=max(question.first for question in asked),
        question_tokens=max(len(question.ids) - question.first for question in asked),
        reply_tokens=max(NEW_TOKENS[wording], longest + 8),  # the answer, and some words around it
    )


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; they also end with a line, and long ones come in pieces."""
    found = [part.strip() for part in _PART.split(text)]
    return [piece for part in found if part for piece in _pieces(part)]


def _pieces(sentence: str) -> Iterator[str]:
    """Yield a sentence whole, or in pieces of at most `LONGEST_SENTENCE` characters, cut between words if possible."""
    start = 0
    while start < len(sentence):
        stop = start + LONGEST_SENTENCE
        # from the second character on, so that each piece has one
        if stop < len(sentence) and (space := sentence.rfind(" ", start + 1, stop)) > 0:
            stop = space
        if piece := sentence[start:stop].strip():
            yield piece
        start = stop


def _planted(
    checkpoint: Checkpoint, wording: Wording, parts: Sequence[str] | None, *, number: int, context: int, facts: int
) -> Unit:
    """Return the unit of a document with planted facts: its questions, one for each fact.

    Args:
        checkpoint: the model.
        wording: how it is asked.
        parts: sentences of the user's text, which go around; ``None`` for the package's own sentences.
        number: chooses the facts and the sentences.
        context: tokens of the document with a question.
        facts: number of facts.
    """
    made = document(
        number,
        n_facts=facts,
        n_questions=facts,
        # without what the wording puts around text and question, for which "a" and "b" stand; `document` itself leaves
        # room for its longest question
        tokens=context - len(encoded(checkpoint, wording, "a", "b")) + count_tokens(checkpoint, "a b"),
        first_kind=number * facts,  # where the last document has ended, so that all kinds are equally frequent
        filler=None if parts is None else _from(parts, random.Random(f"tune/{number}").randrange(len(parts))),
        count=lambda text: count_tokens(checkpoint, text),
    )
    pairs = [(ending_of(item), partial(right, wording, item)) for item in made.questions]
    return _asked(checkpoint, wording, made.text, pairs)


def _from(parts: Sequence[str], start: int) -> Iterator[str]:
    """Yield the parts from index ``start`` on, without end: after the last part comes the first."""
    return islice(cycle(parts), start, None)


def _asked(
    checkpoint: Checkpoint, wording: Wording, text: str, pairs: Sequence[tuple[str, Callable[[str], bool]]]
) -> Unit:
    """Return a unit: the questions about one text as prompts, each with the number of tokens of the text, in which no
    prompt differs from the others.

    Args:
        checkpoint: the model.
        wording: how it is asked.
        text: the text.
        pairs: of each question its words, and what tells whether a reply is right.
    """
    prompts = [encoded(checkpoint, wording, text, ending) for ending, _ in pairs]
    other = encoded(checkpoint, wording, f"{text} ;", pairs[0][0])  # shows where a tokenizer joins text and question
    first = min(_common(prompt, other) for prompt in prompts)
    return tuple(
        DocumentQuestion(text, ids, min(first, len(ids) - 1), grade)  # a token is left to ask with
        for ids, (_, grade) in zip(prompts, pairs, strict=True)
    )


def _common(one: Int[torch.Tensor, " n"], other: Int[torch.Tensor, " m"]) -> int:
    """Return the number of equal tokens at the beginning of two prompts."""
    n = min(len(one), len(other))
    different = (one[:n] != other[:n]).nonzero()
    return int(different[0]) if len(different) else n
