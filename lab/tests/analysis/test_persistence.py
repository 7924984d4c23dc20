"""The persistence ratio: known sets, loops over the definition, and the rules of the reading."""

import pytest
import torch
from constructed import Axes
from shown import context, hide_future, logits_of, random_logits, show

from kvkeep_lab.analysis.groups.persistence import Persistence, prefixes


def test_prefixes_are_halved_down_to_256():
    assert prefixes(4096) == [256, 512, 1024, 2048, 4096]
    assert prefixes(1030) == [257, 515, 1030]
    assert prefixes(300) == [300]


def test_half_of_what_matters_later_mattered_before():
    n, half = 256, 128
    weights = torch.zeros(n, n)
    weights[:half, :10] = 1 / 10  # the first ten rows see fewer, each at its average
    weights[half:, :5] = weights[half:, 10:15] = 1 / 10
    result = show(Persistence(context(n)), logits_of(weights[None, None])).result()
    found = result["by_prefix"]["256"]
    assert found["ratio_without_own"] == [pytest.approx(0.5)]
    assert found["size_without_own"] == [pytest.approx(10 / half)]
    assert found["ratio"] == [pytest.approx(0.5)]


def test_a_token_that_attends_to_itself_is_pivotal_once_and_says_nothing():
    n, half = 256, 128
    weights = torch.eye(n)
    weights[half:] = 0.0
    weights[half:, 40:60] = 1 / 20
    found = show(Persistence(context(n)), logits_of(weights[None, None])).result()["by_prefix"]["256"]
    assert found["ratio"] == [1.0]
    assert found["size"] == [pytest.approx(1 - 1 / half)]  # the first row's own weight is its average
    assert found["ratio_without_own"] == [0.0]
    assert found["size_without_own"] == [0.0]


@pytest.mark.parametrize("block", [37, 600])
def test_ratio_and_size_as_loops_find_them(block):
    n, layers, heads = 530, 2, 2
    logits = random_logits(layers, heads, n, n, scale=0.5) + 3.0 * random_logits(1, 1, 1, n, seed=1)
    result = show(Persistence(context(n, layers=layers, heads=heads)), logits, block=block).result()
    weights = hide_future(logits).softmax(dim=-1)
    for length in (265, 530):
        found = result["by_prefix"][str(length)]
        for layer in range(layers):
            ratios, sizes, plain_ratios, plain_sizes = zip(
                *(by_loops(weights[layer, head], length) for head in range(heads)), strict=True
            )
            assert found["ratio"][layer] == pytest.approx(sum(ratios) / heads)
            assert found["size"][layer] == pytest.approx(sum(sizes) / heads)
            assert found["ratio_without_own"][layer] == pytest.approx(sum(plain_ratios) / heads)
            assert found["size_without_own"][layer] == pytest.approx(sum(plain_sizes) / heads)
    assert result["read"] == 530
    assert result["ratio"] == pytest.approx(sum(result["by_prefix"]["530"]["ratio"]) / layers)


def by_loops(weights, length):
    half = length // 2
    early, others, late = set(), set(), set()
    for row in range(1, length + 1):
        pivotal = set((weights[row - 1, :row] * row > 1.0).nonzero().flatten().tolist())
        if row <= half:
            early |= pivotal
            others |= pivotal - {row - 1}
        else:
            late |= {key for key in pivotal if key < half}
    return len(early & late) / len(late), len(early) / half, len(others & late) / len(late), len(others) / half


def test_a_layer_without_late_pivotal_tokens_has_no_ratio():
    result = show(Persistence(context(256)), logits_of(torch.eye(256)[None, None])).result()
    assert result["by_prefix"]["256"]["ratio"] == [None]
    assert Persistence.reading(result).verdict == "cannot tell"
    Persistence.draw(result, Axes())


def result_of(ratio, size):
    found = {"ratio": ratio, "size": [size] * len(ratio)}
    return {
        "read": 512,
        "ratio": sum(ratio) / len(ratio),
        "size": size,
        "by_prefix": {"512": {**found, "ratio_without_own": ratio, "size_without_own": found["size"]}},
    }


@pytest.mark.parametrize(
    ("ratio", "size", "verdict"),
    [
        ([0.97, 0.98, 0.90], 0.4, "agree"),
        ([0.97, 0.98, 0.99], 0.85, "cannot tell"),  # a random set would do nearly as well
        ([0.97, 0.90, 0.90], 0.4, "differ"),
        ([0.80, 0.70, 0.75], 0.7, "differ"),
    ],
)
def test_the_reading_wants_a_high_ratio_and_a_small_set(ratio, size, verdict):
    assert Persistence.reading(result_of(ratio, size)).verdict == verdict


def test_the_size_is_a_claim_of_its_own():
    verdicts = [Persistence.claims(result_of([0.97] * 3, size))[1].verdict for size in (0.3, 0.6, 0.9)]
    assert verdicts == ["agree", "cannot tell", "differ"]
