"""A claim of a paper beside the check that decides it here and now."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Outcome:
    """What a check found: the verdict, and by how much."""

    verdict: Literal["holds", "holds with a correction", "fails"]
    by: str


@dataclass(frozen=True)
class Claim:
    """One statement of a paper: where it stands, what it says, its test, and a check of under a second."""

    name: str
    source: str
    statement: str
    test: str
    check: Callable[[], Outcome]


def judge(by: str, *, printed: bool, corrected: bool = False) -> Outcome:
    """The verdict on a claim of which it is known whether it stands as printed, and if not, once it is corrected."""
    return Outcome("holds" if printed else "holds with a correction" if corrected else "fails", by)
