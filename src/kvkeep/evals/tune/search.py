"""Successive halving over arms, then a confirmation on documents that had no part in the choice.

A round measures every remaining arm on twice as many documents, looks for the smallest budget at which the measured
share reaches the target, and keeps the half of the arms with the least memory. The last two arms are confirmed from
larger budgets to smaller ones, until one fails: such a sequence of tests keeps the confidence of a single one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from kvkeep.config import NAME
from kvkeep.errors import InputError
from kvkeep.evals.tune.measure import (
    FULL,
    Arm,
    Candidate,
    KeptQuality,
    Kind,
    Ladder,
    Measure,
    Outcome,
    Tally,
    best_case,
    kept,
    most,
)
from kvkeep.models.tokenization import Writer
from kvkeep.result_files import (
    MANIFEST,
    ROWS,
    RowFolder,
    ValueKind,
    check_same,
    either,
    first_fault,
    list_of,
    read_object,
    real_number,
    text_value,
    whole_number,
)

# The folder of a search: ``run.json`` describes the run, ``results.jsonl`` has one line per measured block of units.
#
# A line is written and synced before the next block starts, so a search that was stopped goes on where it was.

CURVE = "curve.png"

SETTINGS = {
    "model": "the model",
    "weights": "the model's weights",
    "dtype": "the dtype",
    "case": "the case",
    "text": "the text",
    "questions": "the file of questions",
    "context": "the context",
    "facts": "the number of facts",
    "seed": "the seed",
    "version": "the version of the measurement",
}
"""Settings that have to be the same for results to be compared."""

VERSION = 2
"""Incremented by every change that changes results."""

_REMEDY = "Restore it, or choose another `output` folder."


class TuneRecords(RowFolder):
    """Reads a folder of measurements, and adds to it.

    Args:
        folder: the folder; it need not exist yet.

    Attributes:
        outcomes: (arm's name, budget, unit) → what was measured.

    Raises:
        InputError: the path is no folder, or its files cannot be read.
    """

    names = (ROWS, CURVE, NAME)
    beginning = b'{"tune": "'  # the first entry of a row, see `add`

    def forget(self) -> None:
        """Forget all measurements, which are about to be read again."""
        self.outcomes: dict[tuple[str, int, int], Outcome] = {}

    def keep(self, row: dict[str, Any]) -> None:
        """Add the measurements of a row that is in the file: one for each unit from the row's first one on."""
        for unit, outcome in enumerate(row["found"], start=row["first"]):
            self.outcomes[row["tune"], row["budget"], unit] = outcome

    def fault(self, row: dict[str, Any]) -> str | None:
        """Return the defect of a row, as part of a sentence; ``None`` if it can be used."""
        return first_fault(row, _ROW)

    @property
    def safe(self) -> str:
        """Return a sentence with the number of measured documents, over all candidates; empty if there is none."""
        return f"The measurements of {len(self.outcomes)} documents written before are safe." if self.outcomes else ""

    def check(self, manifest: dict[str, Any]) -> dict[str, Any]:
        """Compare a run with the run that the folder already holds, if it holds measurements.

        Args:
            manifest: values of `SETTINGS`; those that are missing are not compared.

        Returns:
            The manifest, unchanged.

        Raises:
            InputError: the folder holds measurements of another run, or its ``run.json`` is damaged or of no search; or
                that is missing, and there are files that a search would overwrite.
        """
        path = self.path / MANIFEST
        found = read_object(path, _REMEDY)
        if found is None:
            self.check_new()
        elif "case" not in found:
            raise InputError(f"{path} is of no search: it does not name a case. Choose another `output` folder.")
        elif self.outcomes:
            check_same(self.path, found, manifest, SETTINGS)
        return manifest

    def add(self, arm: Arm, budget: int, first: int, found: list[Outcome]) -> None:
        """Write a block of units and wait until it is on the disk.

        Raises:
            InputError: the block cannot be written; all earlier rows are safe.
        """
        self.extend([{"tune": arm.name, "budget": budget, "first": first, "found": found}])


_MARKS = ValueKind(lambda value: isinstance(value, str) and set(value) <= {"0", "1"}, "marks")
_ROW = {
    "tune": text_value(),
    "budget": whole_number(),
    "first": whole_number(),
    "found": list_of(either(_MARKS, list_of(real_number()))).called("a list of marks or of losses"),
}


FINALISTS = 2
"""Arms that are confirmed. Two tests at 97.5 % each, the end of a 95 % interval, err together in 5 % at most."""


@runtime_checkable  # for beartype, by which tests check annotations
class Study(Protocol):
    """Measures candidates on documents; the same documents for all of them."""

    @property
    def kind(self) -> Kind:
        """Return what tallies count."""

    def tallies(self, candidate: Candidate, first: int, last: int) -> list[Tally]:
        """Return the tallies of the documents ``first`` to ``last - 1``."""

    def expected(self, first: int, last: int) -> float:
        """Return how many questions, or tokens, these documents contribute to tallies."""


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
        """Return whether the confirmation uses documents that had no part in the choice."""
        return self.confirm[0] >= self.rounds[-1]


@dataclass(frozen=True)
class SearchResult:
    """The result of a search.

    Attributes:
        chosen: the candidate with the smallest memory that passed; ``None`` if none did.
        kept: the quality that it keeps.
        confirmed: every candidate of the confirmation that was measured, with its quality.
        best: the candidate of the confirmation with the largest share.
    """

    chosen: Candidate | None
    kept: KeptQuality | None
    confirmed: dict[Candidate, KeptQuality]

    @property
    def best(self) -> Candidate:
        """Return the candidate that keeps the most quality."""
        return max(self.confirmed, key=lambda candidate: (self.confirmed[candidate].share, -candidate.row_bytes))


def search(
    ladders: Sequence[Ladder], study: Study, sizes: Sizes, target: float, *, promises: bool = True
) -> SearchResult:
    """Search for the candidate with the smallest memory that keeps the target share, and return the result.

    All measurements come from ``study``; only those that the search needs are made.

    Args:
        ladders: the candidates of each arm, the smallest memory first.
        study: measures candidates.
        sizes: the documents of each round, and of the confirmation.
        target: the share of the full cache's quality.
        promises: see `Confirmation`.
    """
    arms = [ladder for ladder in ladders if ladder]
    places = [len(ladder) for ladder in arms]
    for number, documents in enumerate(sizes.rounds):
        reaches = _by_share(study, documents, target)
        # the first round knows nothing; later ones begin where the one before has ended
        step = _halve if number == 0 else _walk
        places = [step(ladder, place, reaches) for ladder, place in zip(arms, places, strict=True)]
        arms, places = _best(arms, places, max(FINALISTS, -(-len(arms) // 2)))  # half of them, rounded up
    test = Confirmation(study, sizes.confirm, target, promises=promises)
    answers: list[Candidate] = []
    for ladder, place in zip(arms, places, strict=True):
        most = min((answer.row_bytes for answer in answers), default=None)
        # an answer is the smallest memory of all, so only smaller candidates are worth a test
        worth = ladder if most is None else tuple(step for step in ladder if step.row_bytes < most)
        # with its guess beyond these, the arm would need more memory than the answer has
        if worth and (most is None or place < len(worth)):
            answers += filter(None, [_descend(worth, place, test)])
    chosen = min(answers, key=lambda answer: answer.row_bytes, default=None)
    return SearchResult(chosen, None if chosen is None else test.seen[chosen], test.seen)


_Reaches = Callable[[Candidate], bool]


def _by_share(study: Study, documents: int, target: float) -> _Reaches:
    """Return a function that tells whether a candidate's measured share, whatever its interval, reaches the target on
    the first ``documents`` documents.
    """

    def reaches(candidate: Candidate) -> bool:
        return kept(study.tallies(candidate, 0, documents), study.kind).share >= target

    return reaches


def _halve(ladder: Ladder, place: int, reaches: _Reaches) -> int:
    """Return the index of a ladder's first step that reaches the target, found by bisection among those before
    ``place``; ``place`` if none does.
    """
    low, high = 0, place
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(ladder[middle]) else (middle + 1, high)
    return low


def _walk(ladder: Ladder, place: int, reaches: _Reaches) -> int:
    """Return the index of a ladder's first step that reaches the target, found step by step from the guess ``place``,
    down if it reaches it and up if not; the ladder's length if no step from there on does.
    """
    if place < len(ladder) and reaches(ladder[place]):
        while place > 0 and reaches(ladder[place - 1]):
            place -= 1
        return place
    while place < len(ladder) and not reaches(ladder[place]):
        place += 1
    return place


def _best(arms: list[Ladder], places: list[int], n: int) -> tuple[list[Ladder], list[int]]:
    """Return the ``n`` arms that need the least memory at their places, the least first, and these places.

    A place is the index of the step of an arm's ladder that reaches the target. Arms that do not reach it, with the
    place behind their last step, come last.
    """

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
        promises: whether the documents suffice to show the target with confidence. Otherwise a candidate passes whose
            share is at the target.

    Attributes:
        seen: every candidate that was tested, with its quality.
    """

    def __init__(self, study: Study, span: tuple[int, int], target: float, *, promises: bool = True):
        self._study, self._span, self._target, self._promises = study, span, target, promises
        self.seen: dict[Candidate, KeptQuality] = {}

    def __call__(self, candidate: Candidate) -> bool:
        """Return whether a candidate passes: whether the lower end of its interval, or without promises its share, is
        at least the target. It is measured on the first call only.
        """
        if candidate not in self.seen:
            self.seen[candidate] = self._measure(candidate)
        quality = self.seen[candidate]
        return quality.passes(self._target) if self._promises else quality.share >= self._target

    def _measure(self, candidate: Candidate) -> KeptQuality:
        """Return a candidate's quality on the documents of the confirmation.

        After each quarter of them it is given up if it could not pass any more; its quality is then that so far.
        """
        first, last = self._span
        found: list[Tally] = []
        step = max(1, (last - first) // 4)  # in quarters: after each it may be given up
        for start in range(first, last, step):
            stop = min(start + step, last)
            found += self._study.tallies(candidate, start, stop)
            # losses have no best case, and without a promise the share on all documents counts
            if self._promises and self._study.kind == "answers":
                rest = self._study.expected(stop, last)
                if best_case(found, rest, last - first) < self._target:
                    break
        return kept(found, self._study.kind)


def _descend(ladder: Ladder, place: int, passes: Callable[[Candidate], bool]) -> Candidate | None:
    """Return the last candidate that passes on the way down a ladder from just above the guess ``place``; ``None`` if
    the largest one fails.

    Where the first step of the way fails, it begins higher, each time twice as far up as before.
    """
    last = len(ladder) - 1
    # the guess was made by the measured share, and the interval's lower end, by which candidates pass, is below it
    start, jump = min(place + 1, last), 1
    while not passes(ladder[start]):
        if start == last:
            return None
        # a guess that is far too small should not cost a measurement of every step
        start, jump = min(start + jump, last), 2 * jump
    while start > 0 and passes(ladder[start - 1]):
        start -= 1
    return ladder[start]


# A search on a model: what is searched on which documents, measured once and stored at once.

_SEARCHED = 192
"""Questions that the search uses, beside those of the confirmation."""


@dataclass(frozen=True)
class Limits:
    """How many documents a search uses.

    Attributes:
        questions: number of questions of the confirmation by default.
        windows: number of texts of the confirmation by default, where text goes on.
        given: number of questions, or texts, that the user wants instead.
        apart: whether other documents choose than confirm, if there are enough.
    """

    questions: int = 448
    windows: int = 24
    given: int | None = None
    apart: bool = True


LIMITS = Limits()
"""The default."""

_BLOCK = 8
"""Most documents that are measured before they are stored."""

_SEARCHED_WINDOWS = 8
"""Texts that the search uses where text goes on, beside those of the confirmation."""

LEAST_WINDOWS = 6
"""Fewest windows that promise anything: with fewer, Student's quantile makes the interval useless."""


@dataclass(frozen=True)
class Progress:
    """The present stage of a search.

    Attributes:
        arm: what is measured.
        budget: its budget; ``None`` for the full cache.
        units: documents that were measured so far, over all candidates.
        expected: how many that will be in the end, estimated.
    """

    arm: str
    budget: int | None
    units: int
    expected: int


OnBlock = Callable[[Progress], object]


class CachedMeasure:
    """Measures candidates for a search, or takes what a folder already has.

    Args:
        measure: runs candidates.
        writer: the model.
        records: the folder.
        on_block: called before each block that is measured.
        expected: see `Progress`.
    """

    def __init__(self, measure: Measure, writer: Writer, records: TuneRecords, on_block: OnBlock, *, expected: int = 0):
        self._measure, self._writer, self._records, self._on_block = measure, writer, records, on_block
        self._expected = expected

    @property
    def kind(self) -> Kind:
        """Return what tallies count."""
        return self._measure.kind

    def tallies(self, candidate: Candidate, first: int, last: int) -> list[Tally]:
        """Return the tallies of the documents ``first`` to ``last - 1``, compared with the full cache's."""
        pairs = zip(self._outcomes(candidate.arm, candidate.budget, first, last), self.full(first, last), strict=True)
        return [self._measure.tally(outcome, full, candidate.budget) for outcome, full in pairs]

    def expected(self, first: int, last: int) -> float:
        """Return how many questions the full cache answers in these documents, or how many tokens they have."""
        found = self.full(first, last)
        # the full cache compared with itself: the number of its own right answers, or of all tokens
        return float(sum(self._measure.tally(outcome, outcome, 0)[1] for outcome in found))

    def full(self, first: int, last: int) -> list[Outcome]:
        """Return the full cache's outcomes of the documents ``first`` to ``last - 1``."""
        return self._outcomes(FULL, self._measure.room, first, last)

    def _outcomes(self, arm: Arm, budget: int, first: int, last: int) -> list[Outcome]:
        """Return an arm's outcomes at a budget for the documents ``first`` to ``last - 1``, in order.

        Known ones come from the folder; others are measured and stored there block by block.
        """
        known = self._records.outcomes
        start = first
        while start < last:
            if (arm.name, budget, start) in known:
                start += 1
                continue
            end = min(last, start + _BLOCK)
            # a block ends where known outcomes begin
            stop = next((unit for unit in range(start, end) if (arm.name, budget, unit) in known), end)
            self._on_block(Progress(arm.label, None if arm is FULL else budget, len(known), self._expected))
            self._records.add(arm, budget, start, self._measure.run(self._writer, arm, budget, range(start, stop)))
            start = stop
        return [known[arm.name, budget, unit] for unit in range(first, last)]


def sizes_of(measure: Measure, target: float, limits: Limits = LIMITS) -> Sizes:
    """Return which documents each round and the confirmation use.

    The confirmation has documents of its own, if there are enough for them to show the target. Else the same ones
    choose and confirm.

    Args:
        measure: the documents.
        target: the share to show.
        limits: how many there may be, and whether others may confirm than choose.
    """
    if measure.kind == "loss":
        return _windows(measure.count or 0, limits)
    # as many documents as have the questions that are asked for, rounded up
    documents = int(-(-(limits.given or limits.questions) // measure.per_unit))
    if not limits.apart:
        documents = documents if measure.count is None else min(documents, measure.count)
        return Sizes((documents,), (0, documents))  # so few that every policy can be measured on all
    searched = max(1, round(min(_SEARCHED, limits.given or _SEARCHED) / measure.per_unit))
    if measure.count is None:
        return _split(searched, searched + documents)
    # most of the documents are left for the confirmation, on which the answer rests
    searched = min(searched, measure.count // 3)
    left = min(documents, measure.count - searched)
    if most(round(left * measure.per_unit), left) < target or not searched:
        # too few to keep some apart: the same ones choose and confirm, as the user is told; without a number given all
        # that there are, beyond the default as well, since only more questions can still show the target
        return _together(measure.count if limits.given is None else min(documents, measure.count))
    return _split(searched, searched + left)


def _windows(count: int, limits: Limits) -> Sizes:
    """Return which of ``count`` windows each round and the confirmation use.

    The confirmation has windows of its own if at least `LEAST_WINDOWS` are left for it. Else the same ones choose and
    confirm.
    """
    limit = limits.given or limits.windows
    searched = min(_SEARCHED_WINDOWS, count // 3)  # a third, as in `sizes_of`
    if count - searched < LEAST_WINDOWS or not limits.apart:
        return _together(min(count, limit))
    return _split(searched, min(count, searched + limit))


def _together(documents: int) -> Sizes:
    """Return sizes under which the same documents choose and confirm."""
    return Sizes(_rounds(documents), (0, documents))


def _split(searched: int, end: int) -> Sizes:
    """Return sizes in which the first ``searched`` documents choose, and those after them up to ``end`` confirm."""
    return Sizes(_rounds(searched), (searched, end))


def _rounds(searched: int) -> tuple[int, ...]:
    """Return the numbers of documents of the rounds: a quarter, half and all of them."""
    return tuple(dict.fromkeys(max(1, -(-searched // part)) for part in (4, 2, 1)))


@dataclass(frozen=True)
class TuneResult:
    """The result of a search on a model.

    Attributes:
        found: the answer, and the confirmation.
        ladders: what was searched.
        searched: each measured candidate, with its quality on all documents that it was measured on.
        sizes: the documents that were used.
        target: the target.
        asked: number of questions of the confirmation, also those that the full cache cannot answer; or windows.
        answered: number of questions that the full cache answers, or of tokens.
        documents: number of documents of the confirmation of which the full cache answers something; or windows.
        promises: whether these documents suffice to show the target with confidence.
        kind: what was measured.
    """

    found: SearchResult
    ladders: Sequence[Ladder]
    searched: dict[Candidate, KeptQuality]
    sizes: Sizes
    target: float
    asked: int
    answered: int
    documents: int
    promises: bool
    kind: Kind


def tune(
    measure: Measure,
    ladders: Sequence[Ladder],
    writer: Writer,
    records: TuneRecords,
    *,
    target: float,
    limits: Limits = LIMITS,
    on_block: OnBlock = lambda progress: None,
) -> TuneResult:
    """Measure the full cache, search and confirm, and return the result. The folder has to be open for more rows.

    Args:
        measure: runs candidates on documents.
        ladders: the candidates of each arm, the smallest memory first.
        writer: the model.
        records: the folder: what it has is not measured again, and what is measured is written there.
        target: the share of the full cache's quality to keep.
        limits: how many documents may be used.
        on_block: called before each block of documents that is measured.

    Raises:
        InputError: the full cache answers no question, or a row cannot be written.
    """
    sizes = sizes_of(measure, target, limits)
    study = CachedMeasure(measure, writer, records, on_block, expected=_expected(ladders, sizes))
    study.full(0, sizes.rounds[-1])  # before all candidates, which are compared with it
    full = study.full(*sizes.confirm)
    answered, asked = round(study.expected(*sizes.confirm)), _asked(full)
    if measure.kind == "answers" and not answered:
        raise InputError(
            f"The full cache answers 0 of {asked} questions: these are beyond the model, whatever its memory. Ask "
            "others, or `case=stream`."
        )
    # documents of which the full cache answers something
    documents = sum(1 for outcome in full if not isinstance(outcome, str) or "1" in outcome)
    enough = documents >= LEAST_WINDOWS if measure.kind == "loss" else most(answered, documents) >= target
    found = search(ladders, study, sizes, target, promises=enough)
    measured = _all(study, records, measure, ladders)
    return TuneResult(found, ladders, measured, sizes, target, asked, answered, documents, enough, measure.kind)


def _expected(ladders: Sequence[Ladder], sizes: Sizes) -> int:
    """Return about how many documents a search measures, over all candidates.

    The first round bisects each ladder. Later ones and the confirmation measure two steps of those that are left.
    """
    lengths = [len(ladder) for ladder in ladders if ladder]
    first, last = sizes.confirm
    documents = max(sizes.rounds[-1], last)  # of the full cache
    documents += sum(length.bit_length() for length in lengths) * sizes.rounds[0]  # the steps of a bisection
    arms, known = len(lengths), sizes.rounds[0]
    for more in sizes.rounds[1:]:
        arms = max(min(arms, FINALISTS), -(-arms // 2))
        documents += arms * (2 * more - known)
        known = more
    return documents + min(arms, FINALISTS) * (2 if sizes.fresh else 1) * (last - first)


def _asked(outcomes: Sequence[Outcome]) -> int:
    """Return the number of questions that outcomes answer; a window counts as one."""
    return sum(len(outcome) if isinstance(outcome, str) else 1 for outcome in outcomes)


def _all(
    study: CachedMeasure, records: TuneRecords, measure: Measure, ladders: Sequence[Ladder]
) -> dict[Candidate, KeptQuality]:
    """Return candidate → quality, of every candidate of the ladders that the folder has measurements of.

    It is that on all documents on which both the candidate and the full cache were measured, also by earlier searches.
    """
    found = {}
    for candidate in (step for ladder in ladders for step in ladder):
        units = [
            unit
            for name, budget, unit in records.outcomes
            if (name, budget) == (candidate.arm.name, candidate.budget)
            and (FULL.name, measure.room, unit) in records.outcomes  # with which it is compared
        ]
        if units:
            # the folder has them all, so nothing is measured here
            tallies = [tally for unit in units for tally in study.tallies(candidate, unit, unit + 1)]
            found[candidate] = kept(tallies, measure.kind)
    return found
