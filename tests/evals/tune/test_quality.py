"""Shares, intervals, and the numbers of questions that can show a share."""

import math
import random

import pytest

from kvkeep.evals.tune import measure
from kvkeep.evals.tune.measure import most, needed


def kept(tallies, kind):
    return measure.kept([(float(x), float(n)) for x, n in tallies], kind)


def best_case(tallies, rest, documents):
    return measure.best_case([(float(x), float(n)) for x, n in tallies], float(rest), documents)


def test_the_share_is_of_the_questions_that_the_full_cache_answers():
    found = kept([(3, 4), (5, 6)], "answers")
    assert found.share == pytest.approx(0.8)
    assert found.low < 0.8 < found.high
    assert found.weight == 10


def test_without_an_answered_question_nothing_is_known():
    found = kept([(0, 0), (0, 0)], "answers")
    assert math.isnan(found.share)
    assert not found.passes(0.01)


def test_all_answers_kept_are_no_certainty():
    assert 0.95 < kept([(16, 16)] * 8, "answers").low < 0.98
    assert kept([(16, 16)] * 8, "answers").high == 1.0


@pytest.mark.parametrize("each", [1.0, 2.5, 16.0])
@pytest.mark.parametrize("target", [0.5, 0.9, 0.98, 0.999])
def test_the_number_of_questions_that_a_target_takes(target, each):
    questions, documents = needed(target, each)
    assert questions == round(documents * each)
    assert most(questions, documents) >= target
    assert most(round((documents - 1) * each), documents - 1) < target


def test_a_target_of_98_percent_takes_some_200_questions():
    assert needed(0.98, 1.0) == (191, 191)
    assert needed(0.98, 16.0) == (240, 15)


@pytest.mark.parametrize(("documents", "each"), [(2, 16), (12, 16), (15, 16), (189, 1), (191, 1), (10, 19)])
def test_what_can_be_shown_is_what_a_confirmation_would_say(documents, each):
    assert most(documents * each, documents) == pytest.approx(kept([(each, each)] * documents, "answers").low)
    assert best_case([(each, each)], (documents - 1) * each, documents) == most(documents * each, documents)


def test_one_document_shows_nothing():
    assert most(0, 0) == most(16, 1) == 0.0


def test_questions_that_fail_together_count_for_less():
    scattered, together = [(15, 16)] * 16, [(16, 16)] * 15 + [(0, 16)]
    assert kept(scattered, "answers").share == kept(together, "answers").share
    assert kept(together, "answers").low < kept(scattered, "answers").low - 0.05


@pytest.mark.parametrize("alike", [0.0, 0.15])
@pytest.mark.parametrize("share", [0.9, 0.97])
def test_the_interval_covers_the_truth(share, alike):
    """Documents of 16 questions, some of which succeed or fail together."""
    rng, missed = random.Random(0), 0
    for _ in range(400):
        tallies = []
        for _ in range(28):
            common = rng.random() < share
            marks = [common if rng.random() < alike else rng.random() < share for _ in range(16)]
            tallies.append((sum(marks), 16))
        missed += kept(tallies, "answers").low > share
    assert missed <= 20  # 2.5 % are promised; 5 % leaves room for chance


def test_the_best_case_is_what_the_rest_could_still_show():
    assert best_case([(16, 16)] * 7, 336, 28) == pytest.approx(most(448, 28), abs=0.001)
    assert best_case([(8, 16)], 336, 28) < 0.98 < best_case([(16, 16)], 336, 28)


def test_a_loss_becomes_a_ratio_of_perplexities():
    found = kept([(10, 100), (10, 100), (10, 100)], "loss")
    assert found.share == pytest.approx(math.exp(-0.1))
    assert found.low == pytest.approx(found.share)
    assert kept([(5, 100), (15, 100)], "loss").low < 0.8
    assert kept([(-1, 100), (-1, 100)], "loss").share > 1.0


def test_one_text_shows_nothing():
    assert not kept([(10, 100)], "loss").passes(0.01)
