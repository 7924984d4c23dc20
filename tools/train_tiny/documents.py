"""Recall documents as rows of tokens: facts in running text, and rounds of questions and answers.

What a document asks is what the model learns, so most documents have the form of the evaluation: all facts
first, filler between them, questions at the end. A question at the end comes with others, since one question
for a long text is too thin a signal.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from tokenizers import Tokenizer

from kvkeep.models.tiny.recall import Fact, Lexicon, draw_facts, draw_value

from .corpus import Corpus
from .drills import Drill
from .pools import ASKS, LEADS, draw_lexicon, plain_lexicon
from .words import Words

REPLIES = ("All right.", "I see.", "I will remember that.", "Very well.", "Yes.", "Noted.")
STORY_REQUESTS = ("Tell me a story.", "Please tell me a story.", "I would like to hear a story.", "A story, please.")

Row = tuple[np.ndarray, np.ndarray]
"""Tokens and their weights in the loss."""


@dataclass(frozen=True)
class Weights:
    """Weights of a token in the loss: answers are what counts.

    Statements and questions count, too: the later pieces of a name that was there before are what looking
    back is first learnt from.
    """

    answer: float = 8.0
    filler: float = 1.0
    statement: float = 0.7
    question: float = 0.7


@dataclass(frozen=True)
class Shape:
    """How recall documents of a stage look.

    Args:
        facts: Fewest and most facts in a document.
        filler: Largest share of the room left by the facts that is filled with text; the rest is questions.
        rounds: Share of documents with several rounds of facts and questions.
        changes: Share of documents in which facts are repeated and corrected.
        numbers: Share of documents with four-digit numbers among their kinds of facts.
        plain: Share of documents with names, things and values of one token and one wording.
        drills: Share of rows that are not documents but drills (see ``drills.py``).
        restated: Share of documents in which facts are said again before the questions, their values counting
            as answers: a shorter way to look up, which is found first.
    """

    facts: tuple[int, int]
    filler: float
    rounds: float = 0.25
    changes: float = 0.3
    numbers: float = 0.5
    plain: float = 0.1
    drills: float = 0.0
    restated: float = 0.1


class Writer:
    """Collects the pieces of one row, each with its weight."""

    def __init__(self, tokenizer: Tokenizer, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length
        self.ids: list[int] = []
        self.weights: list[float] = []

    @property
    def room(self) -> int:
        """Tokens left in the row."""
        return self._length - len(self.ids)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text; role and end marks are recognised in it."""
        return self._tokenizer.encode(text).ids

    def add(self, tokens: Sequence[int] | np.ndarray, weight: float) -> None:
        """Append tokens of one weight."""
        self.ids.extend(tokens)
        self.weights.extend([weight] * len(tokens))

    def row(self) -> Row:
        """The row, cut to its length."""
        n = self._length
        return np.array(self.ids[:n], dtype=np.int64), np.array(self.weights[:n], dtype=np.float32)


class Recall:
    """Writes recall documents of one shape."""

    def __init__(self, tokenizer: Tokenizer, words: Words, corpora: Sequence[Corpus]) -> None:
        self._tokenizer = tokenizer
        self._words = words
        self._corpora = corpora
        self._weights = Weights()
        self._plain = plain_lexicon(lambda word: len(tokenizer.encode(f" {word}").ids) == 1)
        self._drill = Drill(tokenizer)

    def row(self, rng: random.Random, length: int, shape: Shape) -> Row:
        """One row of exactly ``length`` tokens; what a document leaves free is filled with text."""
        lexicon = self._plain if rng.random() < shape.plain else draw_lexicon(rng, self._words)
        if rng.random() < shape.drills:
            return self._drill.row(rng, lexicon, length, shape.facts[1])
        writer = Writer(self._tokenizer, length)
        corpus = rng.choice(self._corpora)
        writer.add(writer.encode("<|begin|>"), 0.0)
        if rng.random() < shape.rounds:
            self._rounds(rng, writer, corpus, lexicon, shape)
        else:
            self._questions_last(rng, writer, corpus, lexicon, shape)
        if writer.room > 0:
            writer.add(corpus.row(rng, writer.room), self._weights.filler)
        return writer.row()

    def told(self, rng: random.Random, story: np.ndarray, length: int) -> Row:
        """A story as the answer to a request for one."""
        writer = Writer(self._tokenizer, length)
        request = rng.choice(STORY_REQUESTS)
        writer.add(writer.encode(f"<|begin|><|user|> {request}<|end|><|assistant|>"), self._weights.question)
        writer.add(story, 1.0)
        return writer.row()

    def _questions_last(
        self, rng: random.Random, writer: Writer, corpus: Corpus, lexicon: Lexicon, shape: Shape
    ) -> None:
        facts = draw_facts(lexicon, rng, _few_or_many(rng, *shape.facts), _kinds(rng, shape))
        said, facts = _statements(rng, facts, lexicon, changes=rng.random() < shape.changes)
        pieces = [writer.encode(" " + text) for text in said]
        room = writer.room - sum(map(len, pieces)) - 30
        filler = corpus.fill(rng, int(max(0, room) * shape.filler * rng.random() ** 0.6))
        writer.add(writer.encode("<|user|>"), self._weights.question)
        for piece, is_fact in _weave(rng, pieces, filler):
            writer.add(piece, self._weights.statement if is_fact else self._weights.filler)
        if rng.random() < shape.restated:
            self._restate(rng, writer, facts)
        self._ask(rng, writer, facts, opened=True, most=3 * len(facts))

    def _restate(self, rng: random.Random, writer: Writer, facts: Sequence[Fact]) -> None:
        """Some facts once more, in any wording; there is room left for at least one question."""
        for fact in rng.sample(facts, rng.randint(1, len(facts))):
            before, after = rng.choice(fact.kind.statements).split("{value}")
            start = writer.encode(" " + replace(fact, value="").say(before).strip())
            value = writer.encode(" " + fact.value)
            if len(start) + len(value) + 30 > writer.room:
                return
            writer.add(start, self._weights.statement)
            writer.add(value, self._weights.answer)
            writer.add(writer.encode(after), self._weights.statement)

    def _rounds(self, rng: random.Random, writer: Writer, corpus: Corpus, lexicon: Lexicon, shape: Shape) -> None:
        facts = draw_facts(lexicon, rng, _few_or_many(rng, *shape.facts), _kinds(rng, shape))
        known: list[Fact] = []
        while writer.room > 60 and (facts or known):
            now, facts = facts[: (k := rng.randint(1, 4))], facts[k:]
            text = " ".join(_state(rng, fact) for fact in now)
            known += now
            writer.add(writer.encode("<|user|> " + text), self._weights.statement)
            for sentence in corpus.fill(rng, int(rng.random() * shape.filler * writer.room * 0.4)):
                writer.add(sentence, self._weights.filler)
            asks = rng.random() < 0.7 or not facts
            if not asks:
                writer.add(writer.encode(f"<|end|><|assistant|> {rng.choice(REPLIES)}<|end|>"), 0.5)
            else:
                self._ask(rng, writer, known, opened=True, most=rng.randint(1, 6))
            if not facts and rng.random() < 0.5:
                break
        self._ask(rng, writer, known, opened=False, most=len(known))

    def _ask(self, rng: random.Random, writer: Writer, facts: Sequence[Fact], *, opened: bool, most: int) -> None:
        """Questions and answers until the row or their number is used up; the first may end an open message."""
        for fact in _in_turn(rng, facts, most):
            ask = _with_lead(rng, fact, fact.say(rng.choice(fact.kind.questions)), ASKS)
            head = writer.encode((" " if opened else "<|user|> ") + ask + "<|end|><|assistant|>")
            answer = writer.encode(f" {fact.value}<|end|>")
            if len(head) + len(answer) > writer.room:
                return
            writer.add(head, self._weights.question)
            writer.add(answer, self._weights.answer)
            opened = False


def _in_turn(rng: random.Random, facts: Sequence[Fact], most: int) -> list[Fact]:
    """Every fact once in random order, then again, ``most`` in all."""
    order: list[Fact] = []
    while facts and len(order) < most:
        order += rng.sample(facts, len(facts))
    return order[:most]


def _few_or_many(rng: random.Random, low: int, high: int) -> int:
    """A number of facts, half of the time from the upper half of the range."""
    return rng.randint((low + high) // 2, high) if rng.random() < 0.5 else rng.randint(low, high)


def _kinds(rng: random.Random, shape: Shape) -> list[str]:
    """The kinds of facts of one document: a few, or one alone, which makes every fact a distractor."""
    words = ["colour", "place", "word", "owner"]
    kinds = rng.sample(words, rng.choice((1, 2, 3, 4, 4, 4)))
    if "owner" in kinds or rng.random() < 0.3:
        kinds += ["owner"] * rng.choice((1, 1, 2))  # the hardest kind: its value is a name among the other facts' names
    if rng.random() < shape.numbers:
        kinds += ["number"] * rng.choice((1, 1, 2))
    return kinds


def _state(rng: random.Random, fact: Fact, *, corrects: bool = False) -> str:
    text = fact.say(rng.choice(fact.kind.corrections if corrects else fact.kind.statements))
    return _with_lead(rng, fact, text, LEADS)


def _with_lead(rng: random.Random, fact: Fact, text: str, leads: Sequence[str]) -> str:
    """The sentence, in one of four cases after some words that lead up to it (never in plain documents)."""
    if len(fact.kind.statements) == 1 or rng.random() < 0.75:
        return text
    lead = rng.choice(leads)
    keeps_capital = text.startswith(fact.owner)
    return f"{lead[0].upper()}{lead[1:]} {text if keeps_capital else text[0].lower() + text[1:]}"


def _statements(
    rng: random.Random, facts: Sequence[Fact], lexicon: Lexicon, *, changes: bool
) -> tuple[list[str], list[Fact]]:
    """What is said, in order, and the facts as they are at the end."""
    timeline = [(float(i), _state(rng, fact)) for i, fact in enumerate(facts)]
    last = list(facts)
    rate = rng.choice((0.2, 0.5, 0.9)) if changes else 0.0
    for i, fact in enumerate(facts):
        if rng.random() >= (rate**0.5 if fact.kind.name == "owner" else rate):
            continue
        for when in sorted(rng.uniform(i, len(facts)) for _ in range(rng.choice((1, 1, 2, 3)))):
            corrects = rng.random() < 0.8
            if corrects:
                last[i] = replace(fact, value=draw_value(fact.kind, lexicon, rng))
            timeline.append((when, _state(rng, last[i], corrects=corrects)))
    return [text for _, text in sorted(timeline, key=lambda entry: entry[0])], last


def _weave(
    rng: random.Random, pieces: Sequence[Sequence[int]], filler: Sequence[np.ndarray]
) -> list[tuple[Sequence[int] | np.ndarray, bool]]:
    """Facts between the sentences of the filler, in their order: spread out, all early, or in one place."""
    centre, width = rng.choice(((0.5, 1.0), (0.5, 1.0), (0.5, 1.0), (0.1, 0.2), (rng.random(), 0.2)))
    gaps = sorted(min(1.0, max(0.0, centre + width * (rng.random() - 0.5))) for _ in pieces)
    woven: list[tuple[Sequence[int] | np.ndarray, bool]] = []
    at = 0
    for i, sentence in enumerate(filler):
        while at < len(pieces) and gaps[at] * len(filler) <= i:
            woven.append((pieces[at], True))
            at += 1
        woven.append((sentence, False))
    return woven + [(piece, True) for piece in pieces[at:]]
