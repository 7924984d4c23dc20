"""Words, numbers and haystacks of which texts are made."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Sequence
from importlib import resources
from itertools import islice

from kvkeep.models.tiny.recall import own_filler

_LISTS = (resources.files("kvkeep.evals.synthetic") / "words.txt").read_text(encoding="utf-8").strip().split("\n\n")
ADJECTIVES, NOUNS = (tuple(part.split()) for part in _LISTS)

_LONGEST = 60

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""RULER's noise."""


def value(kind: str, drawn: random.Random) -> str:
    """A word (two, joined by a hyphen), a number of seven digits, or a UUID."""
    if kind == "words":
        return f"{drawn.choice(ADJECTIVES)}-{drawn.choice(NOUNS)}"
    if kind == "numbers":
        return str(drawn.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=drawn.getrandbits(128), version=4))


def values(kind: str, drawn: random.Random, n: int) -> list[str]:
    """Different values."""
    found: dict[str, None] = {}
    while len(found) < n:
        found[value(kind, drawn)] = None
    return list(found)


def words(drawn: random.Random, n: int) -> list[str]:
    """Different words; pairs with a hyphen where single words do not suffice."""
    single = sorted({*ADJECTIVES, *NOUNS})
    if n <= len(single):
        return drawn.sample(single, n)
    pairs = [f"{one}-{other}" for one in ADJECTIVES for other in NOUNS]
    return drawn.sample([*single, *pairs], n) if n <= len(single) + len(pairs) else values("uuids", drawn, n)


class Haystack:
    """Sentences without end: those of a text, from its start again when it is over, or the package's own."""

    def __init__(self, text: str | None, seed: int):
        self._all = sentences(text or "")
        self._own = not self._all
        self._filler = iter(own_filler(random.Random(seed)))

    def first(self, n: int) -> list[str]:
        """The first ``n`` sentences."""
        while len(self._all) < n:
            self._all += islice(self._filler, n - len(self._all)) if self._own else self._all[: n - len(self._all)]
        return self._all[:n]


def sentences(text: str) -> list[str]:
    """The sentences of a text, with single spaces; longer ones are split after `_LONGEST` words."""
    parts = [part.split() for part in re.split(r"(?<=[.!?])\s+", text)]
    return [" ".join(part[at : at + _LONGEST]) for part in parts for at in range(0, len(part), _LONGEST)]


def planted(hay: Sequence[str], needles: Sequence[str], depths: Sequence[float]) -> str:
    """Sentences with needles between them, each after a share of the sentences."""
    places = sorted(zip((round(depth * len(hay)) for depth in depths), needles, strict=True))
    parts, before = [], 0
    for place, needle in places:
        parts += [*hay[before:place], needle]
        before = place
    return " ".join([*parts, *hay[before:]])
