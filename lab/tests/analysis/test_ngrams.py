"""Self-BLEU and repetition against hand-counted and independently written cases."""

import itertools
import math
import random

import pytest

from kvkeep_lab.analysis.groups import diversity


def test_bleu_of_papineni_s_clipping_example():
    # "the the the the the the the" against "the cat is on the mat": 2 of 7 words count
    the, cat, on, mat, there, a, on2 = range(7)
    reference = [the, cat, on, on2, the, mat]
    other = [there, on, a, cat, on2, the, mat]
    assert diversity.bleu([the] * 7, [reference, other], 1, smooth=False) == pytest.approx(2 / 7)


def test_bleu_is_the_geometric_mean():
    # unigrams 4/5, bigrams 2/4
    text, reference = [1, 2, 3, 4, 9], [1, 2, 3, 8, 4]
    assert diversity.bleu(text, [reference], 2, smooth=False) == pytest.approx(math.sqrt(4 / 5 * 2 / 4))


def test_brevity_penalty_against_the_closest_reference():
    reference, longer = [1, 2, 3, 4, 5, 6], list(range(1, 20))
    assert diversity.bleu([1, 2, 3, 4], [reference, longer], 1, smooth=False) == pytest.approx(math.exp(1 - 6 / 4))
    assert diversity.bleu([1, 2, 3, 4], [[1, 2, 3, 4, 5], [1, 2, 3]], 1, smooth=False) == pytest.approx(1.0)


def test_smoothing_replaces_a_count_of_zero_alone():
    text, reference = [1, 2, 3, 4], [1, 9, 3, 8]
    assert diversity.bleu(text, [reference], 2, smooth=False) == 0.0
    assert diversity.bleu(text, [reference], 2, smooth=True) == pytest.approx(math.sqrt(2 / 4 * 0.1 / 3))
    assert diversity.bleu(text, [text], 2, smooth=True) == 1.0


def test_self_bleu_bounds():
    same = [[1, 2, 3, 4, 5]] * 3
    assert diversity.self_bleu(same, 4, smooth=False) == pytest.approx([1.0] * 3)
    assert diversity.self_bleu([[1, 2, 3], [4, 5, 6], [7, 8, 9]], 2, smooth=False) == [0.0] * 3


def slow_precision(text, references, n):
    """Match the n-grams one by one, crossing them out in every reference."""
    runs = [tuple(text[i : i + n]) for i in range(len(text) - n + 1)]
    found = 0
    for run in set(runs):
        best = max(sum(tuple(ref[i : i + n]) == run for i in range(len(ref) - n + 1)) for ref in references)
        found += min(runs.count(run), best)
    return found / len(runs)


@pytest.mark.parametrize("order", [1, 2, 3])
def test_self_bleu_against_plain_loops(order):
    rng = random.Random(order)
    texts = [[rng.randrange(3) for _ in range(12)] for _ in range(4)]
    for i, value in enumerate(diversity.self_bleu(texts, order, smooth=False)):
        others = texts[:i] + texts[i + 1 :]
        product = math.prod(slow_precision(texts[i], others, n) for n in range(1, order + 1))
        assert value == pytest.approx(product ** (1 / order))


def test_distinct_and_repeated():
    assert diversity.distinct([[1, 2, 1, 2], [1, 2]], 2) == pytest.approx(2 / 4)  # 12, 21 of 12, 21, 12, 12
    assert diversity.repeated([1, 2, 1, 2, 1, 2], 2) == pytest.approx(3 / 5)
    assert diversity.repeated([1, 2, 3], 3) == 0.0
    assert diversity.repeated([1], 2) == 0.0
    everything = [list(pair) for pair in itertools.permutations(range(5), 2)]
    assert diversity.distinct(everything, 2) == 1.0
