"""The search against an exhaustive one, on curves whose truth is known."""

import functools
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.errors import InputError
from kvkeep.evals.tune.measure import Arm, budgets_of, kept, ladder
from kvkeep.evals.tune.search import Sizes, TuneRecords, search

SIZES = Sizes((3, 6, 12), (12, 40))
ASKED = 16
BUDGETS = budgets_of(1000)


class Fake:
    """Questions with a threshold each: an arm answers one from a certain budget on.

    Args:
        curves: arm → function from a share in [0, 1] to the budget at which that share of the questions is answered.
        exact: every document has the same thresholds; otherwise they are drawn.
    """

    kind = "answers"

    def __init__(self, curves, *, exact=True, seed=0, alike=0.0):
        self.curves, self.exact, self.seed, self.alike = curves, exact, seed, alike
        self.asked = []

    def tallies(self, candidate, first, last):
        self.asked += [(candidate, document) for document in range(first, last)]
        return [self.tally(candidate, document) for document in range(first, last)]

    def tally(self, candidate, document):
        thresholds = self.thresholds(candidate.arm.name, 0 if self.exact else document)
        return float(sum(threshold <= candidate.budget for threshold in thresholds)), float(ASKED)

    @functools.cache  # noqa: B019  as long as a test
    def thresholds(self, name, document):
        rng = random.Random(f"{self.seed}/{name}/{document}")
        common, even = rng.random(), [(question + 0.5) / ASKED for question in range(ASKED)]
        drawn = [common if rng.random() < self.alike else rng.random() for _ in even]
        return [self.curves[name](place) for place in (even if self.exact else drawn)]

    def expected(self, first, last):
        return float((last - first) * ASKED)


def ladders(names, sizes=None):
    sizes = sizes or {}
    return [ladder(Arm(name), BUDGETS, lambda arm, budget: 100 * budget + sizes.get(arm.name, 0)) for name in names]


def exhaustive(arms, study, target, span=SIZES.confirm):
    """The candidate with the smallest memory that passes, of all."""
    passing = [
        candidate
        for steps in arms
        for candidate in steps
        if kept(study.tallies(candidate, *span), study.kind).passes(target)
    ]
    return min(passing, key=lambda candidate: candidate.row_bytes, default=None)


def sigmoid(middle, steepness):
    """Thresholds around ``middle``, in tokens."""

    def threshold(place):
        return middle * math.exp((math.log(place) - math.log1p(-place)) / steepness)

    return threshold


curves = st.dictionaries(
    st.sampled_from("abcdefg"),
    st.builds(sigmoid, st.floats(5, 2000), st.floats(1.5, 12)),
    min_size=1,
)


NAMES = st.sampled_from("abcdefg")


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(curves, st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.98]), st.dictionaries(NAMES, st.integers(0, 9000)))
def test_without_noise_the_answer_is_within_a_step_of_the_exhaustive_one(made, target, sizes):
    arms, study = ladders(sorted(made), sizes), Fake(made)
    found, best = search(arms, study, SIZES, target).chosen, exhaustive(arms, study, target)
    assert (found is None) == (best is None)
    if found is not None:
        assert within_a_step(arms, found, best)


def within_a_step(arms, found, best):
    """Whether a candidate needs no more memory than the best one, or the step below it on its ladder does not."""
    (own,) = (steps for steps in arms if steps[0].arm == found.arm)
    return found.row_bytes <= best.row_bytes or own[own.index(found) - 1].row_bytes <= best.row_bytes


def test_on_a_few_curves_the_answer_is_within_a_step_of_the_exhaustive_one():
    """Where guesses are too small or too large, and where the arms' sizes decide."""
    for made, target, sizes in (
        ({"a": sigmoid(8, 12)}, 0.5, {}),
        ({"a": sigmoid(40, 2), "b": sigmoid(400, 9)}, 0.9, {"a": 9000}),
        ({"a": sigmoid(1500, 2), "b": sigmoid(700, 1.5), "c": sigmoid(900, 8)}, 0.95, {}),
    ):
        arms, study = ladders(sorted(made), sizes), Fake(made)
        found, best = search(arms, study, SIZES, target).chosen, exhaustive(arms, study, target)
        assert (found is None) == (best is None)
        assert found is None or within_a_step(arms, found, best)


TRUE = {"a": sigmoid(60, 2.5), "b": sigmoid(90, 5), "c": sigmoid(150, 2), "d": sigmoid(50, 3), "e": sigmoid(300, 6)}
"""At 90 % a, b, c, d and e need about 145, 140, 450, 104 and 433 of 1 000 tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("alike", [0.0, 0.3])
@pytest.mark.parametrize("target", [0.8, 0.9])
def test_with_noise_nearly_all_answers_are_within_a_step(target, alike):
    arms = ladders(TRUE)
    near = 0
    for seed in range(30):
        study = Fake(TRUE, exact=False, seed=seed, alike=alike)
        near += within_a_step(arms, search(arms, study, SIZES, target).chosen, exhaustive(arms, study, target))
    assert near >= 27


def test_later_rounds_correct_the_guesses_of_earlier_ones_up_and_down():
    arms = ladders("abd")
    for seed in range(3):
        study = Fake(TRUE, exact=False, seed=seed, alike=0.3)
        assert within_a_step(arms, search(arms, study, SIZES, 0.8).chosen, exhaustive(arms, study, 0.8))


def test_a_folder_that_is_of_no_search_or_of_another_one_is_refused(tmp_path):
    about = {"case": "later", "seed": 3}
    records = TuneRecords(tmp_path)
    assert records.check(about) is about
    (tmp_path / "run.json").write_text(json.dumps(about))
    assert records.check({**about, "seed": 4}) == {**about, "seed": 4}  # nothing is measured yet
    records.add(Arm("h2o"), 64, 0, [[1.0, 2.0]])
    assert records.safe.startswith("The measurements of 1 documents")
    assert TuneRecords(tmp_path).check(about) is about
    with pytest.raises(InputError, match="seed"):
        TuneRecords(tmp_path).check({**about, "seed": 4})
    (tmp_path / "run.json").write_text('{"seed": 3}')
    with pytest.raises(InputError, match="is of no search: it does not name a case"):
        TuneRecords(tmp_path).check(about)


@pytest.mark.slow
def test_an_answer_that_does_not_keep_the_target_is_rare():
    arms, target, wrong = ladders(TRUE), 0.9, 0
    for seed in range(100):
        found = search(arms, Fake(TRUE, exact=False, seed=seed), SIZES, target).chosen
        wrong += found is not None and TRUE[found.arm.name](target) > found.budget
    assert wrong <= 5


def test_most_of_the_grid_is_never_measured():
    arms, study = ladders(TRUE), Fake(TRUE)
    search(arms, study, SIZES, 0.9)
    assert len(set(study.asked)) < 0.25 * len(BUDGETS) * len(TRUE) * SIZES.confirm[1]


def test_the_choice_and_the_confirmation_have_no_document_in_common():
    arms, study = ladders("ab"), Fake(TRUE)
    found = search(arms, study, SIZES, 0.9)
    first = [document for candidate, document in study.asked if candidate not in found.confirmed]
    assert SIZES.fresh
    assert max(first) < SIZES.confirm[0]


def test_a_target_that_nothing_reaches_names_the_best():
    never = {"a": lambda place: 10 if place < 0.7 else 10**6, "b": lambda place: 10 if place < 0.3 else 10**6}
    found = search(ladders(never), Fake(never), SIZES, 0.9)
    assert found.chosen is None
    assert found.best.arm.name == "a"


def test_arms_without_a_budget_that_fits_are_left_out():
    arms = [(), *ladders("a")]
    assert search(arms, Fake(TRUE), SIZES, 0.9).chosen.arm.name == "a"


def test_a_candidate_that_cannot_pass_any_more_is_given_up():
    worse = {"a": lambda place: 10**6}
    study = Fake(worse)
    search(ladders(worse), study, SIZES, 0.9)
    confirmed = [document for _, document in study.asked if document >= SIZES.confirm[0]]
    assert len(confirmed) == 7  # a quarter, of the largest budget alone


class Loss:
    """Texts on which the loss falls with the budget; a tally has nats and tokens."""

    kind = "loss"

    def tallies(self, candidate, first, last):
        noise = [0.001 * math.sin(document) for document in range(first, last)]
        return [(100 * (10 / candidate.budget + one), 100.0) for one in noise]

    def expected(self, first, last):
        return 100.0 * (last - first)


def test_losses_are_searched_in_the_same_way():
    found = search(ladders("a"), Loss(), SIZES, 0.98)
    assert found.chosen.budget == min(budget for budget in BUDGETS if math.exp(-10 / budget) > 0.98)
