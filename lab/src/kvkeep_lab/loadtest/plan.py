"""What is sent and when: arrivals by chance, prompts of drawn lengths or from a file, conversations."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvkeep.errors import InputError
from kvkeep_lab.loadtest.jsonl import length, objects
from kvkeep_lab.loadtest.lengths import Lengths

_WORDS = (
    *("dog", "cat", "tree", "house", "river", "garden", "boat", "star", "rain", "bread", "stone", "bird"),
    *("red", "old", "small", "warm", "quiet", "long", "ran", "saw", "made", "found", "took", "gave"),
)
"""Words that most tokenizers know as one token each."""
_PREFIX_SEED = 2**32


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


def arrivals(load: Load) -> list[Arrival]:
    """All conversations of a load, in the order of their arrival. Times between them are exponential."""
    gaps, at, made = random.Random(load.seed), 0.0, []
    for number in range(load.requests):
        draw = random.Random(f"{load.seed} {number}")
        turns = tuple(_ask(load, draw, number * load.turns + turn, first=turn == 0) for turn in range(load.turns))
        made.append(Arrival(at, turns))
        at += 0.0 if math.isinf(load.rate) else gaps.expovariate(load.rate)
    return made


def _ask(load: Load, draw: random.Random, number: int, *, first: bool) -> Ask:
    """The message of a number."""
    line = load.lines[number % len(load.lines)] if load.lines else Line()
    text = line.text
    if text is None:
        text = words(draw, line.prompt_tokens or load.prompt_tokens.draw(draw))
    if first and load.prefix_tokens:
        common = random.Random(_PREFIX_SEED + draw.randrange(load.prefixes))
        text = f"{words(common, load.prefix_tokens)} {text}"
    return Ask(text, line.new_tokens or load.new_tokens.draw(draw))


def words(draw: random.Random, count: int) -> str:
    """A text of so many short words."""
    return " ".join(draw.choices(_WORDS, k=count))


def read_lines(path: str | Path) -> tuple[Line, ...]:
    """The lines of a JSONL file: ``{"prompt": "a text", "max_tokens": 64}`` or ``{"prompt_tokens": 512, ...}``.

    Raises:
        InputError: the file cannot be read, or a line is of another kind.
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
    """Whether a text has no half of a character, which cannot be sent."""
    return text.encode("utf-8", "replace").decode() == text
