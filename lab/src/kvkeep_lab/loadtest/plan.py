"""What is sent and when: arrivals by chance, prompts of drawn lengths or from a file, conversations."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError
from kvkeep.result_files import in_full

_MOST = 10**7
_RULE = re.compile(r"(?P<mean>~)?(?P<low>[0-9]{1,8})(?:-(?P<high>[0-9]{1,8}))?", re.ASCII)
_TAIL = 8
"""Exponential lengths are cut at so many times their mean."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens.

    Attributes:
        low, high: the least and the most; between them all are equally likely.
        mean: the mean of an exponential distribution in place of them.
    """

    low: int
    high: int
    mean: int | None = None

    @classmethod
    def read(cls, text: str, name: str) -> Lengths:
        """Return the distribution that a text describes: ``128`` always, ``64-512`` uniform, ``~200`` exponential.

        Args:
            text: the text.
            name: the argument that errors name.

        Raises:
            InputError: the text describes none, or a length is out of range.
        """
        found = _RULE.fullmatch(text.strip())
        if found is None or (found["mean"] and found["high"]):
            raise InputError(f"`{name}={text}` is no length: write 128, 64-512 (uniform) or ~200 (exponential mean).")
        low, high = int(found["low"]), int(found["high"] or found["low"])
        if not 1 <= low <= high <= _MOST:
            raise InputError(f"`{name}={text}` is out of range: lengths are 1 to {_MOST}, the smaller one first.")
        return cls(low, high, low if found["mean"] else None)

    def __str__(self) -> str:
        if self.mean is not None:
            return f"~{self.mean}"
        return f"{self.low}" if self.low == self.high else f"{self.low}-{self.high}"

    @property
    def average(self) -> float:
        """Return the mean of what is drawn: of short exponential lengths above `mean`, since no length is below 1."""
        if self.mean is None:
            return (self.low + self.high) / 2
        ends = [math.exp(-(count + 0.5) / self.mean) for count in (1, self.most)]  # chances of more than so many
        return 1.0 + (ends[0] - ends[1]) / -math.expm1(-1 / self.mean)

    @property
    def most(self) -> int:
        """Return the largest length that is drawn."""
        return self.high if self.mean is None else _TAIL * self.mean

    def draw(self, source: random.Random) -> int:
        """Draw a length."""
        if self.mean is None:
            return source.randint(self.low, self.high)
        return min(_TAIL * self.mean, max(1, round(source.expovariate(1 / self.mean))))


_WORDS = (
    *("dog", "cat", "tree", "house", "river", "garden", "boat", "star", "rain", "bread", "stone", "bird"),
    *("red", "old", "small", "warm", "quiet", "long", "ran", "saw", "made", "found", "took", "gave"),
)
"""Words that most tokenizers know as one token each."""
_PREFIX_SEED = _WARMUP_SEED = 2**32


@dataclass(frozen=True)
class Line:
    """A line of a file: a text or its length, and the length of the answer. What is missing is drawn.

    Attributes:
        text: the prompt.
        prompt_tokens: its length in place of it.
        new_tokens: length of the answer.
    """

    text: str | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None


@dataclass(frozen=True)
class Ask:
    """A message and the length of its answer."""

    text: str
    new_tokens: int


@dataclass(frozen=True)
class Arrival:
    """A conversation, most often of one message.

    Attributes:
        at: seconds after the start at which it arrives.
        turns: its messages; each is sent when the answer before it is complete.
    """

    at: float
    turns: tuple[Ask, ...]


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load for a server: how many conversations arrive, how fast, and how long they are.

    Attributes:
        requests: conversations that arrive.
        rate: of them per second; infinite: all at once.
        prompt_tokens, new_tokens: lengths of messages and answers.
        prefixes, prefix_tokens: so many common beginnings of prompts, of this length each.
        turns: messages of each conversation.
        seed: of everything that is drawn.
        lines: of a file, taken in turn.
    """

    requests: int
    rate: float
    prompt_tokens: Lengths
    new_tokens: Lengths
    prefixes: int = 1
    prefix_tokens: int = 0
    turns: int = 1
    seed: int = 0
    lines: tuple[Line, ...] = ()

    def __post_init__(self) -> None:
        for name in ("requests", "prefixes", "turns"):
            if not 1 <= getattr(self, name) <= 10**6:
                raise InputError(f"`{name}={getattr(self, name)}` is outside 1 … 1000000.")
        if not self.rate > 0:
            raise InputError(f"`rate={self.rate:g}` is no rate: give requests per second, or inf for all at once.")
        if not 0 <= self.prefix_tokens <= 10**7:
            raise InputError(f"`prefix_tokens={self.prefix_tokens}` is outside 0 … 10000000.")

    def warmup(self, requests: int) -> Load:
        """Return a load of so many requests like these, all at once.

        Their texts are others: a prefix cache would keep a file's.
        """
        lines = tuple(
            line if line.text is None else replace(line, text=None, prompt_tokens=len(line.text.split()))
            for line in self.lines
        )
        return replace(self, requests=requests, rate=math.inf, seed=self.seed + _WARMUP_SEED, turns=1, lines=lines)


def arrivals(load: Load) -> list[Arrival]:
    """Return all conversations of a load, in the order of their arrival. Times between them are exponential."""
    gaps, at, made = random.Random(load.seed), 0.0, []
    for number in range(load.requests):
        draw = random.Random(f"{load.seed} {number}")
        turns = tuple(_ask(load, draw, number * load.turns + turn, first=turn == 0) for turn in range(load.turns))
        made.append(Arrival(at, turns))
        at += 0.0 if math.isinf(load.rate) else gaps.expovariate(load.rate)
    return made


def _ask(load: Load, draw: random.Random, number: int, *, first: bool) -> Ask:
    """Return the message of a number."""
    line = load.lines[number % len(load.lines)] if load.lines else Line()
    text = line.text
    if text is None:
        text = words(draw, line.prompt_tokens or load.prompt_tokens.draw(draw))
    if first and load.prefix_tokens:
        common = random.Random(_PREFIX_SEED + draw.randrange(load.prefixes))
        text = f"{words(common, load.prefix_tokens)} {text}"
    return Ask(text, line.new_tokens or load.new_tokens.draw(draw))


def words(draw: random.Random, count: int) -> str:
    """Return a text of so many short words."""
    return " ".join(draw.choices(_WORDS, k=count))


def read_lines(path: str | Path) -> tuple[Line, ...]:
    """Read a JSONL file with lines ``{"prompt": "a text", "max_tokens": 64}`` or ``{"prompt_tokens": 512, ...}``.

    Raises:
        InputError: the file cannot be read, has no line, or a line is of another kind.
    """
    found = [_line(where, fields) for where, fields in objects(path)]
    if not found:
        raise InputError(f"{path} has no line.")
    return tuple(found)


def _line(where: str, fields: dict[str, Any]) -> Line:
    prompt = fields.get("prompt")
    if prompt is not None and not (isinstance(prompt, str) and prompt.strip() and is_whole(prompt)):
        raise InputError(f"{where}: prompt is no text.")
    lengths = [length(where, fields, names) for names in (("prompt_tokens",), ("max_tokens", "new_tokens"))]
    if prompt is None and lengths[0] is None:
        raise InputError(f"{where}: it has neither prompt nor prompt_tokens.")
    return Line(prompt, *lengths)


def is_whole(text: str) -> bool:
    """Return whether a text has no half of a character, which cannot be sent."""
    return text.encode("utf-8", "replace").decode() == text


# Files of one JSON object a line.

_LONGEST = 10**7


def objects(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the place of each line, for messages, and its object. Lines without text are left out.

    Raises:
        InputError: the file cannot be read, or a line is no JSON object.
    """
    try:
        raw = in_full(str(path)).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text.") from error
    for number, text in enumerate(raw.split("\n"), 1):
        if text.strip():
            where = f"{path}, line {number}"
            yield where, _object(where, text)


def length(where: str, fields: dict[str, Any], names: Sequence[str]) -> int | None:
    """Return the number of tokens under one of these names, an earlier one first; ``None`` if there is none.

    Raises:
        InputError: it is not a whole number of 1 or more.
    """
    for name in names:
        if (value := fields.get(name)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _LONGEST:
                raise InputError(f"{where}: {name} is not a whole number from 1 to {_LONGEST}.")
            return value
    return None


def _object(where: str, text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: no JSON.") from error
    if not isinstance(fields, dict):
        raise InputError(f"{where}: no JSON object.")
    return fields
