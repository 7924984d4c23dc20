"""Repetitive patterns: sets that are known, the exact chance level, and the rules of the reading."""

from itertools import combinations

import pytest
import torch
from constructed import Axes
from shown import context, logits_of, random_logits, show

from kvkeep_lab.analysis.groups.repetition import RepetitivePatterns, chance_jaccard, compare, places, significant


def attending(n, columns_of):
    """Rows that share their attention equally among some columns (or among all, if there are none)."""
    weights = torch.zeros(n, n)
    for row in range(n):
        columns = [column for column in columns_of(row) if column <= row] or list(range(row + 1))
        weights[row, columns] = 1 / len(columns)
    return weights[None, None]


def measured(weights, **options):
    layers, heads, n, _ = weights.shape
    return show(RepetitivePatterns(context(n, layers=layers, heads=heads)), logits_of(weights), **options).result()


def test_places_are_the_papers_and_more_with_the_same_distances():
    assert places(277) == []
    assert places(278) == [(178, 228, 278)]
    many = places(4096)
    assert many[0] == (178, 228, 278)
    assert many[-1] == (3996, 4046, 4096)
    assert len(many) == 8
    assert {(b - a, c - a) for a, b, c in many} == {(50, 100)}


@pytest.mark.parametrize(("a", "b", "n"), [(2, 3, 6), (1, 1, 7), (4, 5, 6), (6, 3, 6), (0, 2, 5)])
def test_chance_is_the_mean_over_all_pairs_of_sets(a, b, n):
    values = [
        len(set(one) & set(other)) / len(set(one) | set(other))
        for one in combinations(range(n), a)
        for other in combinations(range(n), b)
    ]
    found = chance_jaccard(torch.tensor([a]), torch.tensor([b]), n).item()
    assert found == pytest.approx(sum(values) / len(values))


def test_exactly_the_average_is_not_significant():
    assert significant(torch.tensor([0.25, 0.2499, 0.2501, 0.25]), 4).tolist() == [False, False, True, False]


def test_rows_that_attend_to_the_same_ten_tokens():
    result = measured(attending(300, lambda row: range(3, 103, 10)))
    (layer,) = result["layers"]
    assert layer["jaccard"] == layer["repeated"] == 1.0
    assert layer["share"] == pytest.approx(10 / 178)
    assert result["example"]["positions"] == list(range(4, 84, 10))  # from 1, the first eight
    assert result["example"]["words"][0] == "w3"


def test_rows_that_attend_to_different_tokens():
    result = measured(attending(300, lambda row: [row % 50, 50 + row % 49]))  # 50 apart share the first, not the second
    (layer,) = result["layers"]
    assert layer["jaccard"] == pytest.approx(1 / 3)
    assert layer["repeated"] == pytest.approx(1 / 4)


def test_sets_as_loops_find_them():
    logits = random_logits(2, 3, 290, 290, scale=2.0)
    result = show(RepetitivePatterns(context(290, layers=2, heads=3)), logits).result()
    weights = logits.masked_fill(torch.ones(290, 290, dtype=torch.bool).triu(1), -torch.inf).softmax(dim=-1)
    pairs, union = [], []
    for layer in range(2):
        for head in range(3):
            a, b, c = ({j for j in range(178) if weights[layer, head, row - 1, j] > 1 / row} for row in (178, 228, 278))
            pairs += [len(x & y) / len(x | y) for x, y in ((a, b), (a, c), (b, c))]
            union.append(len(a & b & c) / len(a | b | c))
    assert result["places"] == [[178, 228, 278]]
    assert result["mean"]["jaccard"] == pytest.approx(sum(pairs) / len(pairs))
    assert result["mean"]["repeated"] == pytest.approx(sum(union) / len(union))


def test_independent_rows_are_at_chance():
    result = show(RepetitivePatterns(context(700, heads=4)), random_logits(1, 4, 700, 700)).result()
    assert result["mean"]["jaccard"] == pytest.approx(result["mean"]["chance"], abs=0.01)
    assert result["mean"]["repeated"] == pytest.approx(result["mean"]["repeated_chance"], abs=0.01)


def test_heads_without_significant_positions_are_left_out():
    sets = torch.zeros(2, 3, 20, dtype=torch.bool)
    sets[1, :, 4:8] = True
    found = compare(sets)
    assert found["jaccard"].isnan().tolist() == found["chance"].isnan().tolist() == [True, False]
    assert found["empty"].tolist() == [1.0, 0.0]
    uniform = measured(attending(280, lambda row: range(row + 1)))
    assert uniform["mean"]["jaccard"] is None
    assert RepetitivePatterns.reading(uniform).verdict == "differ"


def result_of(jaccard, chance, random=None):
    one = {"mean": {"jaccard": jaccard, "chance": chance}, "layers": [{"jaccard": jaccard, "chance": chance}]}
    return one if random is None else {**one, "random": result_of(*random)}


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (result_of(0.6, 0.1, (0.33, 0.32)), "agree"),
        (result_of(0.6, 0.1), "cannot tell"),  # without the control
        (result_of(0.6, 0.1, (0.6, 0.1)), "differ"),  # random weights do it, too
        (result_of(0.12, 0.1, (0.33, 0.32)), "differ"),
        (result_of(0.25, 0.1, (0.33, 0.32)), "cannot tell"),
    ],
)
def test_the_reading_compares_with_chance_and_with_random_weights(result, verdict):
    assert RepetitivePatterns.reading(result).verdict == verdict


def test_it_draws_the_control_too():
    axes = Axes()
    RepetitivePatterns.draw(result_of(0.6, 0.1, (0.33, 0.32)), axes)
    assert [options["label"] for name, _, options in axes.calls if name == "plot"] == [
        "this model",
        "chance",
        "random weights",
        "chance, random weights",
    ]
    pattern, control = RepetitivePatterns.claims(result_of(0.6, 0.1, (0.33, 0.32)))
    assert (pattern.verdict, control.verdict) == ("agree", "agree")


def test_without_the_control_there_is_one_claim():
    (pattern,) = RepetitivePatterns.claims(result_of(0.6, 0.1))
    assert pattern.text == "Distant rows attend to the same positions"
    assert pattern.verdict == "cannot tell"
