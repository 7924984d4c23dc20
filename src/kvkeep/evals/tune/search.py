"""Successive halving over arms, then a confirmation on documents that had no part in the choice.

A round measures every remaining arm on twice as many documents, looks for the smallest budget at which the measured
share reaches the target, and keeps the half of the arms with the least memory. The last two arms are confirmed from
larger budgets to smaller ones, until one fails: such a sequence of tests keeps the confidence of a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kvkeep.evals.tune.candidates import Candidate, Ladder
from kvkeep.evals.tune.quality import Kept, Kind, Tally, best_case, kept

FINALISTS = 2
"""Arms that are confirmed. Two tests at 97.5 % each, the end of a 95 % interval, err together in 5 % at most."""


@runtime_checkable
class Study(Protocol):
    """Measures candidates on documents; the same documents for all of them."""

    @property
    def kind(self) -> Kind:
        """What tallies count."""

    def tallies(self, candidate: Candidate, first: int, last: int) -> list[Tally]:
        """The tallies of the documents ``first`` to ``last - 1``."""

    def expected(self, first: int, last: int) -> float:
        """The number of questions, or tokens, of these documents that count."""


@dataclass(frozen=True)
class Sizes:
    """The documents that are used.

    Attributes:
        rounds: number of documents of each round; a round begins with the documents of the one before.
        confirm: the first document of the confirmation, and the end.
    """

    rounds: tuple[int, ...]
    confirm: tuple[int, int]

    @property
    def fresh(self) -> bool:
        """Whether the confirmation uses documents that had no part in the choice."""
        return self.confirm[0] >= self.rounds[-1]


@dataclass(frozen=True)
class Found:
    """The result of a search.

    Attributes:
        chosen: the candidate with the smallest memory that passed; ``None`` if none did.
        kept: the quality that it keeps.
        confirmed: every candidate of the confirmation that was measured, with its quality.
        best: the candidate of the confirmation with the largest share.
    """

    chosen: Candidate | None
    kept: Kept | None
    confirmed: dict[Candidate, Kept]

    @property
    def best(self) -> Candidate:
        """The candidate that keeps most."""
        return max(self.confirmed, key=lambda one: (self.confirmed[one].share, -one.row_bytes))


def search(ladders: Sequence[Ladder], study: Study, sizes: Sizes, target: float) -> Found:
    """Find the candidate with the smallest memory that keeps the target share.

    Args:
        ladders: the candidates of each arm, the smallest memory first.
        study: measures candidates.
        sizes: the documents of each round, and of the confirmation.
        target: the share of the full cache's quality.
    """
    arms = [ladder for ladder in ladders if ladder]
    places = [len(ladder) for ladder in arms]
    for number, documents in enumerate(sizes.rounds):
        reaches = _by_share(study, documents, target)
        step = _halve if number == 0 else _walk
        places = [step(ladder, place, reaches) for ladder, place in zip(arms, places, strict=True)]
        arms, places = _best(arms, places, max(FINALISTS, -(-len(arms) // 2)))
    test = Confirmation(study, sizes.confirm, target)
    answers: list[Candidate] = []
    for ladder, place in zip(arms, places, strict=True):
        most = min((answer.row_bytes for answer in answers), default=None)
        worth = ladder if most is None else tuple(step for step in ladder if step.row_bytes < most)
        if worth and (most is None or place < len(worth)):
            answers += filter(None, [_descend(worth, place, test)])
    chosen = min(answers, key=lambda answer: answer.row_bytes, default=None)
    return Found(chosen, None if chosen is None else test.seen[chosen], test.seen)


_Reaches = Callable[[Candidate], bool]


def _by_share(study: Study, documents: int, target: float) -> _Reaches:
    """Whether a candidate's measured share reaches the target on the first documents."""

    def reaches(candidate: Candidate) -> bool:
        return kept(study.tallies(candidate, 0, documents), study.kind).share >= target

    return reaches


def _halve(ladder: Ladder, place: int, reaches: _Reaches) -> int:
    """The first step of a ladder that reaches the target, by bisection; ``place``, the end, if none does."""
    low, high = 0, place
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(ladder[middle]) else (middle + 1, high)
    return low


def _walk(ladder: Ladder, place: int, reaches: _Reaches) -> int:
    """The same, step by step from an earlier guess."""
    if place < len(ladder) and reaches(ladder[place]):
        while place > 0 and reaches(ladder[place - 1]):
            place -= 1
        return place
    while place < len(ladder) and not reaches(ladder[place]):
        place += 1
    return place


def _best(arms: list[Ladder], places: list[int], n: int) -> tuple[list[Ladder], list[int]]:
    """The arms that need least memory; arms that do not reach the target come last."""

    def memory(pair: tuple[Ladder, int]) -> tuple[bool, int]:
        ladder, place = pair
        return place == len(ladder), ladder[min(place, len(ladder) - 1)].row_bytes

    pairs = sorted(zip(arms, places, strict=True), key=memory)[:n]
    return [ladder for ladder, _ in pairs], [place for _, place in pairs]


class Confirmation:
    """Tests candidates on the documents of the confirmation.

    A candidate is given up as soon as it would fail even if it kept all remaining answers.

    Args:
        study: measures candidates.
        span: the first document, and the end.
        target: the share of the full cache's quality.

    Attributes:
        seen: every candidate that was tested, with its quality.
    """

    def __init__(self, study: Study, span: tuple[int, int], target: float):
        self._study, self._span, self._target = study, span, target
        self.seen: dict[Candidate, Kept] = {}

    def __call__(self, candidate: Candidate) -> bool:
        """Whether a candidate passes."""
        if candidate not in self.seen:
            self.seen[candidate] = self._measure(candidate)
        return self.seen[candidate].passes(self._target)

    def _measure(self, candidate: Candidate) -> Kept:
        first, last = self._span
        found: list[Tally] = []
        step = max(1, (last - first) // 4)
        for start in range(first, last, step):
            stop = min(start + step, last)
            found += self._study.tallies(candidate, start, stop)
            rest = self._study.expected(stop, last)
            if self._study.kind == "answers" and best_case(found, rest, last - first) < self._target:
                break
        return kept(found, self._study.kind)


def _descend(ladder: Ladder, place: int, passes: Callable[[Candidate], bool]) -> Candidate | None:
    """The last candidate that passes on the way down from a step above the guess; ``None`` if the largest one fails.

    Where the first step fails, the way begins higher, twice as far each time.
    """
    last = len(ladder) - 1
    start, jump = min(place + 1, last), 1
    while not passes(ladder[start]):
        if start == last:
            return None
        start, jump = min(start + jump, last), 2 * jump
    while start > 0 and passes(ladder[start - 1]):
        start -= 1
    return ladder[start]
