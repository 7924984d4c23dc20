"""H2O's Algorithms 1 and 2: what the letter of the print does, and what the meant reading does."""

import math
import random

import pytest

from kvkeep_lab.theory.h2o import (
    CONCAVE,
    algorithm_1_literal,
    algorithm_2_literal,
    h2_eviction,
    row_of_algorithm_2,
    victim,
)


def gauss(n, d, seed, *, scale=1.0):
    noise = random.Random(seed)
    return [[noise.gauss(0.0, scale) for _ in range(d)] for _ in range(n)]


def last(sets):
    *_, found = sets
    return found


def log(*weights):
    """Keys of one number, so that a query of 1 looks at them in proportion to these weights."""
    return [[math.log(weight)] for weight in weights]


def test_the_meant_reading_by_hand():
    """Budget 2, weights 1, 1/4, 20 and 20: rows (1), (4/5, 1/5), (4/85, 1/85, 16/17), then over the tokens 0, 2, 3.

    After row 2 the sums are 1.85, 0.21 and 0.94, so token 1 goes; after row 3 they are 1.87, 1.43 and 0.49.
    """
    assert list(h2_eviction([[1.0]] * 4, log(1.0, 0.25, 20.0, 20.0), 2)) == [[0], [0, 1], [0, 2], [0, 2]]


def test_even_as_meant_nothing_enters_once_all_have_received_more_than_one_row():
    """A new token has at most 1 and its rivals only grow: without a recent window the cache closes for ever."""
    Q, K = gauss(200, 4, 5), gauss(200, 4, 6)
    sets = list(h2_eviction(Q, K, 8))
    assert all(kept == sets[40] for kept in sets[40:])
    loud = [[50.0 * x for x in query] for query in Q[100:]]  # rows that see themselves alone do not get in, either
    late = list(h2_eviction(Q[:100] + loud, K[:100] + loud, 8))
    assert late[-1] == sets[40]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("k", [4, 6, 9])
def test_line_9_freezes_the_first_tokens(k, seed):
    """Erratum: the new token's score is exp(0) - 1 = 0 in every step, the smallest. Here the first token is a sink."""
    Q, K = [[1.0]] * 30, [[5.0], *gauss(29, 1, seed, scale=2.0)]
    assert last(algorithm_1_literal(Q, K, k)) == list(range(k))
    assert last(h2_eviction(Q, K, k)) != list(range(k))


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_no_probabilities(seed):
    """Erratum: with the indicator left in line 8 the row sums to 1 and one more exp(0)/D for every token outside."""
    Q, K = gauss(12, 3, seed), gauss(12, 3, seed + 50)
    S, i = [0, 3, 7], 11
    row = row_of_algorithm_2(Q, K, S, i)
    D = sum(math.exp(sum(a * b for a, b in zip(Q[i], K[s], strict=True))) for s in S)
    assert sum(row[s] for s in S) == pytest.approx(1.0)
    assert sum(row) == pytest.approx(1.0 + (i + 1 - len(S)) / D)
    assert [row[s] for s in range(i + 1) if s not in S] == pytest.approx([1.0 / D] * 9)


def test_the_new_key_has_no_part():
    """Erratum: a new token that all attention belongs to scores as little as one that gets none."""
    Q = [[1.0]] * 3
    strong, weak = [[2.0], [1.0], [9.0]], [[2.0], [1.0], [-9.0]]
    assert list(algorithm_2_literal(Q, strong, 2)) == list(algorithm_2_literal(Q, weak, 2)) == [[0], [0, 1], [0, 1]]
    assert last(h2_eviction(Q, strong, 2)) == [0, 2]
    assert last(h2_eviction(Q, weak, 2)) == [0, 1]


def test_rows_before_the_cache_is_full_are_lost():
    """Token 0 is loved by the rows of tokens 0 and 1 only; line 9 does not run for them."""
    K = [[3.0], [0.0], [1.0]]
    Q = [[1.0], [1.0], [-1.0]]
    assert last(algorithm_2_literal(Q, K, 2)) == [1, 2]  # row of token 2: e^-3, e^0 and 1 for itself
    assert last(h2_eviction(Q, K, 2)) == [0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_of_h_changes_what_goes(seed):
    Q, K = gauss(40, 4, seed), gauss(40, 4, seed + 10)
    meant = [list(h2_eviction(Q, K, 5, h=h)) for h in CONCAVE.values()]
    printed = [list(algorithm_2_literal(Q, K, 5, h=h)) for h in CONCAVE.values()]
    assert meant[1:] == meant[:1] * 2
    assert printed[1:] == printed[:1] * 2


def test_the_smallest_goes_and_of_equals_the_oldest():
    assert victim([2, 5, 9], {2: 0.3, 5: 0.1, 9: 0.2}) == 5
    assert victim([2, 5, 9], {2: 0.3, 5: 0.1, 9: 0.1}) == 5


def test_a_falling_h_would_evict_the_heaviest():
    assert victim([0, 1], {0: 1.0, 1: 2.0}, h=lambda z: -z) == 1


def test_scaling_is_that_of_the_logits():
    Q, K = gauss(20, 4, 1), gauss(20, 4, 2)
    scaled = [[0.5 * q for q in query] for query in Q]
    assert list(h2_eviction(Q, K, 4, scaling=0.5)) == list(h2_eviction(scaled, K, 4))
