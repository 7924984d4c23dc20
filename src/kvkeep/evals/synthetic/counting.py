"""RULER's other tasks made by rule: chains of variables (vt), common words (cwe), frequent coded words (fwe)."""

from __future__ import annotations

import itertools
import random
import string
from collections.abc import Callable

from kvkeep.evals.answered import Item
from kvkeep.evals.synthetic.words import NOISE, words

_HOPS = 4
_COMMON = 10
_SHORT = 4096
"""Contexts below this length have fewer repetitions, as in RULER."""

_ZETA_2 = 1.6449340668482264

_CHAIN_TEXT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
_CHAIN_QUESTION = "\nQuestion: Find all variables that are assigned the value {query} in the text above."
_CHAIN_LEAD = (
    " Answer: According to the chain(s) of variable assignment in the text above, {n} variables are assigned the "
    "value {query}, they are: "
)
_COMMON_TEXT = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}"
)
_COMMON_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
_COMMON_LEAD = " Answer: The top 10 words that appear most often in the list are:"
_CODED_TEXT = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}"
)
_CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
    "appeared words in the above coded text?"
)
_CODED_LEAD = " Answer: According to the coded text above, the three most frequently appeared words are:"


def chain(seed: str) -> Callable[[int], Item]:
    """Makes a text with one chain of variables among this many lines of noise, after a solved example."""

    def make(n: int) -> Item:
        drawn = random.Random(seed)
        example, text = _chained(drawn, 5, letters=3), _chained(drawn, n, letters=5)
        shown = f"{example.text}{example.question}{example.lead}{' '.join(example.answers)}\n\n"
        return Item(text=shown + text.text, question=text.question, lead=text.lead, answers=text.answers)

    return make


def _chained(drawn: random.Random, n: int, letters: int) -> Item:
    names: dict[str, None] = {}
    while len(names) < _HOPS + 1:
        names["".join(drawn.choices(string.ascii_uppercase, k=letters))] = None
    found, number = list(names), str(drawn.randint(10000, 99998))
    said = [f"VAR {found[0]} = {number}"]
    said += [f"VAR {name} = VAR {before} " for before, name in itertools.pairwise(found)]
    lines = [NOISE] * n
    for i, place in enumerate(sorted(drawn.choices(range(n + 1), k=len(said)))):
        lines.insert(place + i, said[i])
    return Item(
        text=_CHAIN_TEXT.format(context="\n".join(lines)),
        question=_CHAIN_QUESTION.format(query=number),
        lead=_CHAIN_LEAD.format(query=number, n=_HOPS + 1),
        answers=tuple(found),
    )


def common(seed: str, context: int) -> Callable[[int], Item]:
    """Makes a list in which ten words come back often and this many others seldom, after a solved example."""
    often, seldom, example = (6, 1, (20, 3, 1)) if context < _SHORT else (30, 3, (40, 10, 3))

    def make(n: int) -> Item:
        drawn = random.Random(seed)
        shown, solution = _numbered(drawn, *example)
        listed, answers = _numbered(drawn, n + _COMMON, often, seldom)
        solved = " ".join(f"{i}. {word}" for i, word in enumerate(solution, 1))
        before = f"{_COMMON_TEXT.format(context=shown)}{_COMMON_QUESTION}{_COMMON_LEAD} {solved}\n"
        text = before + _COMMON_TEXT.format(context=listed)
        return Item(text=text, question=_COMMON_QUESTION, lead=_COMMON_LEAD, answers=tuple(answers))

    return make


def _numbered(drawn: random.Random, n: int, often: int, seldom: int) -> tuple[str, list[str]]:
    chosen = words(drawn, n)
    listed = chosen[:_COMMON] * often + chosen[_COMMON:] * seldom
    drawn.shuffle(listed)
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, 1)), chosen[:_COMMON]


def coded(seed: str, room: int) -> Callable[[int], Item]:
    """Makes a text of about this many coded words, whose counts follow a zeta distribution with exponent 2."""
    size = max(6, room // 50)

    def make(n: int) -> Item:
        drawn = random.Random(seed)
        codes: dict[str, None] = {}
        while len(codes) < size:
            codes["".join(drawn.choices(string.ascii_lowercase, k=6))] = None
        vocabulary = ["...", *list(codes)[1:]]
        counts = [int(n / _ZETA_2 / rank**2) for rank in range(1, size + 1)]
        text = [word for word, times in zip(vocabulary, counts, strict=True) for _ in range(times)]
        drawn.shuffle(text)
        return Item(
            text=_CODED_TEXT.format(context=" ".join(text)),
            question=_CODED_QUESTION,
            lead=_CODED_LEAD,
            answers=tuple(vocabulary[1:4]),
        )

    return make
