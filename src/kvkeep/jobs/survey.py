"""What a batch job keeps of its lines after it has read them once: a few numbers each, however long they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvkeep.engine.engine import Engine
from kvkeep.engine.request import Request
from kvkeep.engine.sampling import Sampling
from kvkeep.errors import KVKeepError
from kvkeep.jobs.lines import BadLine, Line, reason_of


class Shape(NamedTuple):
    """All of a request that decides whether an engine takes it."""

    prompt_tokens: int
    max_new_tokens: int
    policy: str | None
    budget: int | None


@dataclass
class Survey:
    """The lines of a job: which there are, and how long they are.

    Attributes:
        digests: the fingerprint of every line that can be run, by its number.
        bad: why the others cannot be run, by their numbers.
    """

    digests: dict[int, str] = field(default_factory=dict)
    bad: dict[int, str] = field(default_factory=dict)
    _shapes: dict[int, Shape] = field(default_factory=dict)
    _known: dict[Shape, Shape] = field(default_factory=dict)

    def add(self, line: Line | BadLine) -> None:
        """Note a line."""
        if isinstance(line, BadLine):
            self.bad[line.number] = line.reason
            return
        asked = line.request
        policy = asked.policy if isinstance(asked.policy, str) else None
        shape = Shape(len(asked.prompt or ()), asked.sampling.max_new_tokens, policy, asked.budget)
        self.digests[line.number] = line.digest
        self._shapes[line.number] = self._known.setdefault(shape, shape)

    @property
    def longest(self) -> int:
        """Tokens of the longest line, prompt and new ones."""
        return max((shape.prompt_tokens + shape.max_new_tokens for shape in self._known), default=0)

    @property
    def longest_line(self) -> int:
        """The number of the first line of that length."""
        return next(
            n for n, shape in self._shapes.items() if shape.prompt_tokens + shape.max_new_tokens == self.longest
        )

    @property
    def policies(self) -> set[str]:
        """The policies that lines name."""
        return {shape.policy for shape in self._known if shape.policy is not None}

    def check(self, engine: Engine, numbers: Iterable[int]) -> dict[int, str]:
        """Why the engine does not take some of these lines, by their numbers; nothing is read again."""
        verdicts: dict[Shape, str | None] = {}
        for number in numbers:
            shape = self._shapes[number]
            if shape not in verdicts:
                verdicts[shape] = _problem(shape, engine)
        return {number: reason for number in numbers if (reason := verdicts[self._shapes[number]])}

    def set_aside(self, found: dict[int, str]) -> None:
        """Count lines among the bad ones."""
        self.bad |= found
        for number in found:
            del self.digests[number]


def _problem(shape: Shape, engine: Engine) -> str | None:
    """Why an engine does not take a request of this shape, if it does not."""
    sampling = Sampling(max_new_tokens=shape.max_new_tokens)
    try:
        prompt = [0] * shape.prompt_tokens
        engine.check(Request(prompt=prompt, sampling=sampling, policy=shape.policy, budget=shape.budget))
    except KVKeepError as error:
        return reason_of(error)
    return None
