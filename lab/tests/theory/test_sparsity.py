"""Definition D.33 and Claim D.34: a core that every row supports, and how much all rows have outside of it."""

import random

import pytest

from kvkeep.errors import InputError
from kvkeep_lab.theory.loops import softmax
from kvkeep_lab.theory.submodular import goodness, support


def rows_with(core, extras, m):
    """Rows of length m that are large on the core and on some entries of their own."""
    return [[0.9 if j in core or j in extra else 0.01 for j in range(m)] for extra in extras]


def test_the_support_is_what_exceeds_tau():
    assert support([0.1, 0.5, 0.2], 0.2) == {1}


def test_by_hand():
    found = goodness(rows_with({0, 1, 2, 3}, [{5}, {6, 7}, {7}], 9), 0.5)
    assert found.core == {0, 1, 2, 3}
    assert found.alpha == 0.5
    assert found.union == {5, 6, 7}
    assert found.allowed == 6.0


def test_a_smaller_core_may_be_given_and_no_other():
    rows = rows_with({0, 1, 2, 3}, [{5}, {6}], 9)
    found = goodness(rows, 0.5, frozenset({0, 1}))
    assert (found.core, found.alpha, found.allowed) == ({0, 1}, 1.5, 6.0)
    assert found.union == {2, 3, 5, 6}
    with pytest.raises(InputError, match="not in every support"):
        goodness(rows, 0.5, frozenset({0, 5}))


def test_without_a_common_core_there_is_no_alpha():
    found = goodness(rows_with(set(), [{5}, {6}], 9), 0.5)
    assert found.core == frozenset()
    assert found.alpha == float("inf")
    assert found.allowed == 0.0
    assert goodness([[0.1], [0.1]], 0.5).alpha == 0.0


@pytest.mark.parametrize("seed", range(8))
def test_claim_d34_on_rows_of_softmax(seed):
    noise = random.Random(seed)
    sinks = [noise.uniform(2.0, 4.0) if j < 3 else 0.0 for j in range(20)]
    rows = [softmax([level + noise.gauss(0.0, 0.7) for level in sinks]) for _ in range(12)]
    found = goodness(rows, 0.04)
    assert found.core
    assert all(found.core <= support(row, 0.04) for row in rows)
    assert 0 < len(found.union) <= found.allowed


def test_the_bound_is_reached_when_no_two_rows_share_an_extra():
    found = goodness(rows_with({0, 1}, [{2 + n} for n in range(6)], 9), 0.5)
    assert len(found.union) == found.allowed == 6.0


def test_the_bound_for_one_row():
    """Erratum: the proof starts from αkn elements outside of S_0 in each row, where the definition gives αk. Rows that
    use what is printed have a union of αkn², not αkn."""
    n, k, alpha = 3, 4, 0.5
    printed, meant = int(alpha * k * n), int(alpha * k)
    core = set(range(k))

    def union(each):
        extras = [set(range(k + each * row, k + each * (row + 1))) for row in range(n)]
        return len(goodness(rows_with(core, extras, k + each * n), 0.5).union)

    assert union(printed) == n * printed > alpha * k * n
    assert union(meant) == alpha * k * n
