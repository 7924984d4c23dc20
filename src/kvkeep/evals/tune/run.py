"""A search on a model: what is searched on which documents, measured once and stored at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvkeep.errors import InputError
from kvkeep.evals.tune.candidates import FULL, Arm, Candidate, Ladder
from kvkeep.evals.tune.measure import Measure, Outcome
from kvkeep.evals.tune.quality import Kept, Kind, Tally, kept, most, needed
from kvkeep.evals.tune.records import Records
from kvkeep.evals.tune.search import Found, Sizes, search
from kvkeep.models.tokenization import Writer

_SEARCHED = 192
"""Questions that the search uses, beside those of the confirmation."""

QUESTIONS = 448
"""Default number of questions of the confirmation."""

WINDOWS = 24
"""Default number of texts of the confirmation where text goes on."""

_ABLE = 0.3
"""Share of the questions that a model answers at least, if more of them could help."""

_BLOCK = 8
"""Most documents that are measured before they are stored."""

_SEARCHED_WINDOWS = 8
_LEAST_WINDOWS = 6


@dataclass(frozen=True)
class Progress:
    """The present stage of a search.

    Attributes:
        arm: what is measured.
        budget: its budget; ``None`` for the full cache.
        units: documents that were measured so far, over all candidates.
    """

    arm: str
    budget: int | None
    units: int


OnBlock = Callable[[Progress], object]


class Measured:
    """Measures candidates for a search, or takes what a folder already has.

    Args:
        measure: runs candidates.
        writer: the model.
        records: the folder.
        on_block: called before each block that is measured.
    """

    def __init__(self, measure: Measure, writer: Writer, records: Records, on_block: OnBlock):
        self._measure, self._writer, self._records, self._on_block = measure, writer, records, on_block

    @property
    def kind(self) -> Kind:
        """What tallies count."""
        return self._measure.kind

    def tallies(self, candidate: Candidate, first: int, last: int) -> list[Tally]:
        """The tallies of some units, compared with the full cache's."""
        pairs = zip(self._outcomes(candidate.arm, candidate.budget, first, last), self.full(first, last), strict=True)
        return [self._measure.tally(one, full, candidate.budget) for one, full in pairs]

    def expected(self, first: int, last: int) -> float:
        """The number of questions that the full cache answers, or of tokens."""
        found = self.full(first, last)
        return float(sum(self._measure.tally(one, one, 0)[1] for one in found))

    def full(self, first: int, last: int) -> list[Outcome]:
        """The full cache's outcomes."""
        return self._outcomes(FULL, self._measure.room, first, last)

    def _outcomes(self, arm: Arm, budget: int, first: int, last: int) -> list[Outcome]:
        known = self._records.outcomes
        start = first
        while start < last:
            if (arm.name, budget, start) in known:
                start += 1
                continue
            end = min(last, start + _BLOCK)
            stop = next((unit for unit in range(start, end) if (arm.name, budget, unit) in known), end)
            self._on_block(Progress(arm.name, None if arm is FULL else budget, len(known)))
            self._records.add(arm, budget, start, self._measure.run(self._writer, arm, budget, range(start, stop)))
            start = stop
        return [known[arm.name, budget, unit] for unit in range(first, last)]


def sizes_of(measure: Measure, target: float, limit: int | None) -> Sizes:
    """The documents of the rounds and of the confirmation.

    Args:
        measure: the documents.
        target: the share to show.
        limit: questions of the confirmation, or texts; by default `QUESTIONS` or `WINDOWS`.

    Raises:
        InputError: there are too few documents to show the target.
    """
    if measure.kind == "loss":
        return _windows(measure.count or 0, limit or WINDOWS)
    wanted = -(-(limit or QUESTIONS) // measure.per_unit)
    searched = max(1, round(_SEARCHED / measure.per_unit))
    documents = int(wanted)
    if measure.count is not None:
        documents = measure.count if limit is None else min(measure.count, documents)
    questions = round(documents * measure.per_unit)
    if most(questions, documents) < target:
        said = "There is 1 question" if questions == 1 else f"There are {questions} questions"
        raise too_few(questions, documents, target, said)
    if measure.count is None:
        return _split(searched, searched + documents)
    searched = min(searched, measure.count // 3)
    left = min(int(wanted), measure.count - searched)
    if most(round(left * measure.per_unit), left) < target or not searched:
        return Sizes(_rounds(measure.count), (0, measure.count))
    return _split(searched, searched + left)


def too_few(questions: int, documents: int, target: float, said: str) -> InputError:
    """The error about questions, in so many documents, that cannot show a target."""
    enough, among = needed(target, questions / documents if documents else 1.0)
    about = f" about {among} texts" if enough > among else ""
    return InputError(
        f"{said}, and even if all answers stay these show no more than {most(questions, documents):.1%} with 95 % "
        f"confidence: too few for `target={target:g}`. It takes {enough}{about}; give more, or a lower target."
    )


def _windows(count: int, limit: int) -> Sizes:
    if count < _LEAST_WINDOWS:
        raise InputError(
            f"The text is long enough for {count} windows, and the search compares {_LEAST_WINDOWS} or more. Give a "
            "longer `text`, or a shorter `context`."
        )
    searched = min(_SEARCHED_WINDOWS, count // 3)
    if count - searched < _LEAST_WINDOWS:
        return Sizes(_rounds(count), (0, count))
    return _split(searched, min(count, searched + limit))


def _split(searched: int, end: int) -> Sizes:
    return Sizes(_rounds(searched), (searched, end))


def _rounds(searched: int) -> tuple[int, ...]:
    """A quarter of the documents, half of them, all."""
    return tuple(dict.fromkeys(max(1, -(-searched // part)) for part in (4, 2, 1)))


@dataclass(frozen=True)
class Result:
    """The result of a search on a model.

    Attributes:
        found: the answer, and the confirmation.
        ladders: what was searched.
        searched: each measured candidate, with its quality on all documents that it was measured on.
        sizes: the documents that were used.
        target: the target.
        asked: number of questions of the confirmation, also those that the full cache cannot answer; or windows.
        answered: number of questions that the full cache answers, or of tokens.
    """

    found: Found
    ladders: Sequence[Ladder]
    searched: dict[Candidate, Kept]
    sizes: Sizes
    target: float
    asked: int
    answered: int


def tune(
    measure: Measure,
    ladders: Sequence[Ladder],
    writer: Writer,
    records: Records,
    *,
    target: float,
    limit: int | None,
    on_block: OnBlock = lambda progress: None,
) -> Result:
    """Search; the folder has to be open for more rows.

    Raises:
        InputError: there are too few documents, the full cache answers too few questions, or a row cannot be written.
    """
    sizes = sizes_of(measure, target, limit)
    study = Measured(measure, writer, records, on_block)
    study.full(0, sizes.rounds[-1])
    answered, asked = round(study.expected(*sizes.confirm)), _asked(study.full(*sizes.confirm))
    counted = sum(1 for one in study.full(*sizes.confirm) if isinstance(one, str) and "1" in one)
    if measure.kind == "answers" and most(answered, counted) < target:
        said = f"The full cache answers {answered} of {asked} questions"
        if answered < _ABLE * asked:
            raise InputError(f"{said}: these are beyond the model, whatever its memory. Ask others, or `case=stream`.")
        raise too_few(answered, counted, target, said)
    found = search(ladders, study, sizes, target)
    return Result(found, ladders, _all(study, records, measure, ladders), sizes, target, asked, answered)


def _asked(outcomes: Sequence[Outcome]) -> int:
    return sum(len(one) if isinstance(one, str) else 1 for one in outcomes)


def _all(study: Measured, records: Records, measure: Measure, ladders: Sequence[Ladder]) -> dict[Candidate, Kept]:
    """The quality of every measured candidate, on all documents that it was measured on."""
    found = {}
    for candidate in (step for ladder in ladders for step in ladder):
        units = [
            unit
            for name, budget, unit in records.outcomes
            if (name, budget) == (candidate.arm.name, candidate.budget)
            and (FULL.name, measure.room, unit) in records.outcomes
        ]
        if units:
            tallies = [tally for unit in units for tally in study.tallies(candidate, unit, unit + 1)]
            found[candidate] = kept(tallies, measure.kind)
    return found
