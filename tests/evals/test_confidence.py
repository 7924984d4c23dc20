"""Intervals of cells and pairs of policies: what is known at n, and what chance may have made."""

import json
import math
import random

import pytest

from kvkeep.evals import confidence, report
from kvkeep.evals.confidence import of_share


def row(policy, grades, budget="20%", case="a", task="needle", seed=0, **more):
    share = 1.0 if budget == "100%" else 0.2
    place = {"task": task, "case": case, "policy": policy, "budget": budget, "seed": seed}
    memory = {"allocated_bytes": 1, "full_bytes": 2}
    score = {"score": sum(grades) / max(1, len(grades)), "grades": grades}
    return {**place, "budget_tokens": share, "text_tokens": 1, "score": score, "memory": memory, **more}


def drawn(share, n, seed):
    rng = random.Random(seed)
    return [float(rng.random() < share) for _ in range(n)]


def test_right_and_wrong_have_wilsons_interval_and_other_grades_a_bootstrap():
    assert confidence.of_cell([row("h2o", [1.0] * 5 + [0.0] * 15)]) == of_share(5, 20)
    low, high = confidence.of_cell([row("h2o", [0.1 * (i % 10) for i in range(100)])])
    assert low < 45 < high
    assert high - low == pytest.approx(2 * 1.96 * 28.7 / 10, rel=0.15)
    assert confidence.of_cell([row("h2o", [0.5] * 3)]) == (50, 50)


def test_seeds_are_more_questions_and_one_question_has_no_interval():
    both = [row("h2o", [1.0, 0.0], seed=seed) for seed in range(5)]
    assert confidence.of_cell(both) == of_share(5, 10)
    assert all(map(math.isnan, confidence.of_cell([row("h2o", [1.0])])))
    assert all(map(math.isnan, confidence.of_cell([row("h2o", [])])))


@pytest.mark.long
def test_bootstrap_intervals_hold_the_true_mean_as_often_as_they_say():
    rng, hits = random.Random(0), 0
    for _ in range(200):
        low, high = confidence.of_cell([row("h2o", [rng.random() for _ in range(60)])])
        hits += low <= 50 <= high
    assert 0.90 <= hits / 200 <= 0.99


@pytest.mark.parametrize(("only", "other"), [(5, 0), (6, 1), (3, 3), (8, 2)])
def test_the_sign_flip_test_of_right_and_wrong_is_mcnemars(only, other):
    n, k = only + other, min(only, other)
    exact = min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)
    assert confidence.sign_flip([1.0] * only + [-1.0] * other + [0.0] * 9) == pytest.approx(exact)


def test_no_difference_is_none_and_many_texts_are_drawn():
    assert confidence.sign_flip([]) == confidence.sign_flip([0.0] * 50) == 1.0
    assert confidence.sign_flip([1.0] * 40) < 0.001
    assert confidence.sign_flip([1.0, -1.0] * 20) == pytest.approx(1.0, abs=0.01)


def test_a_real_difference_is_clear_and_a_small_one_is_not():
    better, worse = [1.0] * 50, [1.0] * 25 + [0.0] * 25
    found = {
        (p.one, p.other): p for p in confidence.pairs([row("a", better), row("b", worse), row("c", [0.0, *better[1:]])])
    }
    assert found["a", "b"].clear
    assert found["a", "b"].points == 50
    assert not found["a", "c"].clear
    assert found["a", "c"].points == 2
    assert found["a", "c"].interval[0] < 0 < found["a", "c"].interval[1]
    assert found["a", "c"].needed > 50
    assert found["a", "b"].needed is None


@pytest.mark.slow
def test_equal_policies_are_seldom_told_apart_although_there_are_many_pairs():
    wrong = 0
    for run in range(60):
        rows = [row(f"p{i}", drawn(0.5, 40, 100 * run + i)) for i in range(5)]
        wrong += any(pair.clear for pair in confidence.pairs(rows))
    assert wrong <= 8  # 5 % of 60 are 3


def test_full_meets_every_budget_and_protocols_never_mix():
    rows = [
        row("full", [1.0] * 4, "100%"),
        row("h2o", [0.0] * 4, "10%"),
        row("h2o", [1.0] * 4, "20%"),
        row("tova", [1.0] * 4, "20%", case="a,ask=later"),
    ]
    found = [(p.protocol, p.budget, p.one, p.other) for p in confidence.pairs(rows)]
    assert found == [("inside", "10%", "full", "h2o"), ("inside", "20%", "full", "h2o")]


def test_only_the_same_questions_are_compared():
    rows = [row("a", [1.0] * 4), row("b", [0.0] * 2), row("c", [0.0] * 3, case="other")]
    found = {(p.one, p.other): p for p in confidence.pairs(rows)}
    assert (found["a", "b"].n, found["a", "b"].points) == (2, 100)
    assert found["a", "c"].n == 0
    assert math.isnan(found["a", "c"].points)
    assert not found["a", "c"].clear


def test_tables_show_intervals_the_best_policy_and_stars():
    rows = [row("full", [1.0] * 40, "100%"), row("a", [1.0] * 40), row("b", [0.0] * 40), row("c", [1.0] * 39 + [0.0])]
    (own, _) = report.tables(rows)
    assert own.rows["b"][0] == "0% (0–9)"
    assert own.title.endswith("with 95 % intervals")
    (table,) = report.difference_tables(rows)
    assert table.columns == ["20%"]
    assert table.rows["a"] == ["best"]
    assert table.rows["b"][0].startswith("−100 (")
    assert table.rows["b"][0].endswith(" *")
    assert not table.rows["c"][0].endswith("*")
    (note,) = report.notes(rows)
    assert "at n=40" in note
    assert "would need about" in note


def test_one_policy_or_rows_without_grades_have_no_table():
    assert report.difference_tables([row("a", [1.0, 0.0])]) == []
    assert report.notes([row("a", [1.0, 0.0])]) == []
    bare = {**row("a", []), "score": {"score": 0.5}}
    assert confidence.pairs([bare, {**bare, "policy": "b"}]) == []
    assert report.tables([bare])[0].rows == {"a": ["50%"]}


def test_json_is_plain_and_finite():
    found = confidence.as_json([row("a", [1.0]), row("b", [0.0]), row("c", [1.0], case="other")])
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["intervals"][0]["interval"] == [None, None]
    assert found["pairs"][0]["points"] == 100
