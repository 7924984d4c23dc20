"""Numbers of tokens that are drawn: ``128``, ``64-512`` or ``~200``."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from kvkeep.errors import InputError

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
        """The distribution that a text describes: ``128`` always, ``64-512`` uniform, ``~200`` exponential.

        Args:
            text: the text.
            name: the argument that errors name.

        Raises:
            InputError: the text describes none.
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
        """The mean."""
        return (self.low + self.high) / 2 if self.mean is None else float(self.mean)

    @property
    def most(self) -> int:
        """The largest that is drawn."""
        return self.high if self.mean is None else _TAIL * self.mean

    def draw(self, source: random.Random) -> int:
        """A length."""
        if self.mean is None:
            return source.randint(self.low, self.high)
        return min(_TAIL * self.mean, max(1, round(source.expovariate(1 / self.mean))))
