"""A claim of a paper, and the check that decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class ClaimOutcome:
    """The result of a check.

    Attributes:
        verdict: whether the claim holds.
        by: the numbers behind the verdict, in words.
    """

    verdict: Literal["holds", "holds with a correction", "fails"]
    by: str


@dataclass(frozen=True)
class Claim:
    """One statement of a paper.

    Attributes:
        name: unique name.
        source: where the paper states it.
        statement: what it states.
        test: the pytest node of its test.
        check: decides the claim in less than a second.
    """

    name: str
    source: str
    statement: str
    test: str
    check: Callable[[], ClaimOutcome]


def claim(name: str, source: str, test: str) -> Callable[[Callable[[], ClaimOutcome]], Claim]:
    """Turn a check into a `Claim`; the check's docstring is the statement."""
    return lambda check: Claim(name, source, check.__doc__ or "", test, check)


def judge(by: str, *, printed: bool, corrected: bool = False) -> ClaimOutcome:
    """Return the outcome of a check.

    Args:
        by: the numbers behind the verdict, in words.
        printed: whether the claim holds as printed.
        corrected: whether it holds after a small correction.
    """
    return ClaimOutcome("holds" if printed else "holds with a correction" if corrected else "fails", by)
