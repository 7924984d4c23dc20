"""Policies on the same questions: shares of the full cache's answers, differences, and intervals that know of texts."""

import math
import random

import pytest

from kvkeep.evals import confidence, report
from kvkeep.evals.confidence import of_clustered_difference, of_clustered_share, of_share


def asked(texts, each, right):
    """Answers of one seed; ``right`` is told the text and the number of the question."""
    return {(0, text, i): right(text, i) for text in range(texts) for i in range(each)}


def test_questions_that_the_full_cache_cannot_answer_are_left_out_and_counted():
    full = asked(4, 5, lambda text, i: i != 0)
    own = asked(4, 5, lambda text, i: i in (0, 1))
    found = confidence.kept(own, full)
    assert (found.share, found.n, found.left_out) == (25.0, 16, 4)
    assert found.interval[0] < 25 < found.interval[1]


def test_only_questions_that_both_were_asked_count():
    full, own = asked(4, 5, lambda *_: True), asked(3, 2, lambda *_: True)
    assert (confidence.kept(own, full).n, confidence.difference(own, full, full).n) == (6, 6)


def test_nothing_to_compare_is_no_number():
    none = asked(3, 2, lambda *_: False)
    for found in (confidence.kept({}, none), confidence.kept(none, none), confidence.kept(none, {})):
        assert math.isnan(found.share)
        assert str(found) == "–"
    assert math.isnan(confidence.difference(none, none, none).points)
    assert not confidence.difference(none, none, none).clear


def test_one_text_has_no_interval():
    full = asked(1, 20, lambda *_: True)
    found = confidence.kept(asked(1, 20, lambda _, i: i < 5), full)
    assert (found.share, str(found)) == (25.0, "25")


@pytest.mark.parametrize("right", [0, 1])
def test_none_and_all_are_no_certainty(right):
    low, high = of_clustered_share([(16 * right, 16)] * 25)
    alone = of_share(400 * right, 400)
    assert (low, high)[right] == pytest.approx(100 * right, abs=1e-9)
    assert abs((low, high)[1 - right] - alone[1 - right]) < 0.3


def test_questions_alone_in_their_texts_have_the_usual_interval():
    clusters = [(int(i % 4 == 0), 1) for i in range(400)]
    assert of_clustered_share(clusters) == pytest.approx(of_share(100, 400), abs=0.2)


def test_answers_that_agree_within_a_text_widen_the_interval():
    together = of_clustered_share([(16 * (i % 2), 16) for i in range(24)])
    apart = of_clustered_share([(8, 16)] * 24)
    assert together[1] - together[0] > 3 * (apart[1] - apart[0])
    assert apart == pytest.approx(of_share(192, 384), abs=0.5)  # never narrower than independent questions


def test_a_difference_is_that_of_its_texts():
    one, other, full = (asked(6, 4, right) for right in (lambda t, i: i < 3, lambda t, i: i == t % 4, lambda *_: True))
    found = confidence.difference(one, other, full)
    assert found.points == pytest.approx(100 * 12 / 24)
    assert found.only == (13, 1)
    assert found.clear
    assert confidence.difference(other, one, full).points == -found.points


def test_equal_policies_may_still_differ_a_little():
    low, high = of_clustered_difference([(0, 16)] * 25)
    assert low == -high
    assert 0.5 < high < 1.5


def test_intervals_hold_the_true_share_as_often_as_they_say():
    rng, hits, runs = random.Random(0), 0, 300
    for _ in range(runs):
        clusters = []
        for _ in range(25):
            share = rng.betavariate(8, 2)  # texts differ: mean 0.8
            clusters.append((sum(rng.random() < share for _ in range(16)), 16))
        low, high = of_clustered_share(clusters)
        hits += low <= 80 <= high
    assert 0.92 <= hits / runs <= 0.99


def row(policy, budget, asked, **more):
    score = {"accuracy": 1.0, "asked": asked}
    place = {"task": "recall", "case": "context=1,ask=later", "policy": policy, "budget": budget, "seed": 0}
    return {**place, "budget_tokens": 1, "text_tokens": 10, "score": score, **more}


def test_tables_name_their_protocol_and_their_questions():
    full = [[text, i, int(i > 0)] for text in range(8) for i in range(3)]
    rows = [
        row("full", "100%", full),
        row("h2o", "10%", [[text, i, int(i == 1)] for text in range(8) for i in range(3)]),
        row("h2o", "10%", [[text, i, 1] for text in range(8) for i in range(3)], setup="positions=slot"),
    ]
    (table,) = report.share_tables(rows)
    assert "(context=1, later; the full cache answers 16 of 24 questions about 8 texts)" in table.title
    assert table.columns == ["10%"]
    assert table.rows["h2o"][0].startswith("50 (")
    assert table.rows["h2o (positions=slot)"][0].startswith("100 (")
    assert report.share_tables(rows[1:]) == []  # nothing to compare with
    wrong = row("full", "100%", [[text, i, 0] for text, i, _ in full])
    assert report.share_tables([wrong, *rows[1:]]) == []  # of no right answer none can stay
    assert report.share_tables([{**one, "score": {"accuracy": 1.0}} for one in rows]) == []  # rows of earlier versions


def test_seeds_are_other_texts():
    full = [row("full", "100%", [[0, 0, 1]], seed=seed) for seed in range(3)]
    assert len(confidence.answers(full)) == 3
    assert len({question[:2] for question in confidence.answers(full)}) == 3
