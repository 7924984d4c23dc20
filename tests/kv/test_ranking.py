import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.kv import ranking


def by_hand(values, positions, n):
    """Which slots stay: sort the occupied ones by (score, position), drop from the front."""
    occupied = [i for i, p in enumerate(positions) if p >= 0]
    ranked = sorted(occupied, key=lambda i: (values[i], positions[i]))
    return set(ranked[max(0, len(ranked) - n) :])


@st.composite
def slots(draw):
    size = draw(st.integers(1, 12))
    positions = draw(st.permutations(range(30)))[:size]
    empty = draw(st.lists(st.booleans(), min_size=size, max_size=size))
    values = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0, float("inf")]), min_size=size, max_size=size))
    return values, [-1 if gone else position for gone, position in zip(empty, positions, strict=True)]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(slots(), st.integers(0, 13))
def test_keep_follows_score_then_age(drawn, n):
    values, positions = drawn
    mask = ranking.keep(torch.tensor([[values]]), torch.tensor([[positions]], dtype=torch.int32), n)
    assert set(mask[0, 0].nonzero().flatten().tolist()) == by_hand(values, positions, n)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True)
@given(slots())
def test_weakest_is_what_keep_drops_first(drawn):
    values, positions = drawn
    occupied = sum(p >= 0 for p in positions)
    if occupied == 0:
        return
    tensors = torch.tensor([[values]]), torch.tensor([[positions]], dtype=torch.int32)
    kept = ranking.keep(*tensors, occupied - 1)[0, 0]
    (victim,) = {i for i, p in enumerate(positions) if p >= 0} - set(kept.nonzero().flatten().tolist())
    assert ranking.weakest(*tensors).item() == victim


def test_keep_takes_a_number_per_row_and_per_head():
    values = torch.arange(6.0).expand(2, 2, 6)
    positions = torch.arange(6, dtype=torch.int32).expand(2, 2, 6)
    assert ranking.keep(values, positions, torch.tensor([[1], [4]])).sum(-1).tolist() == [[1, 1], [4, 4]]
    assert ranking.keep(values, positions, torch.tensor([[1, 2], [3, 9]])).sum(-1).tolist() == [[1, 2], [3, 6]]


def test_protect_shields_by_position_not_by_slot():
    positions = torch.tensor([[[7, 0, 3, 9, -1, 1]]], dtype=torch.int32)
    got = ranking.protect(torch.zeros(1, 1, 6), positions, torch.tensor([10]), sinks=2, recent=3)
    assert positions[0, 0][got[0, 0].isinf()].tolist() == [7, 0, 9, -1, 1]  # the empty slot is nobody's concern
    assert ranking.keep(got, positions, 4).tolist() == [[[True, True, False, True, False, True]]]


def test_protect_takes_a_recent_window_per_row():
    positions = torch.arange(6, dtype=torch.int32).expand(2, 1, 6)
    got = ranking.protect(torch.zeros(2, 1, 6), positions, torch.tensor([6, 6]), recent=torch.tensor([[1], [4]]))
    assert got.isinf().sum(-1).tolist() == [[1], [4]]


@pytest.mark.parametrize(("window", "left"), [(3, [-1, -1, 4, 3]), (1, [-1, -1, -1, -1]), (9, [0, -1, 4, 3])])
def test_expire_empties_what_the_next_query_cannot_see(window, left):
    # five tokens were seen, the next query stands at position 5 and sees `window` positions including its own
    positions = torch.tensor([[[0, -1, 4, 3]]], dtype=torch.int32)
    assert ranking.expire(positions, torch.tensor([5]), window).tolist() == [[left]]


def test_nan_goes_first_and_never_harms_the_protected():
    nan = float("nan")
    positions = torch.tensor([[[5, 0, 1, 4, 3]]], dtype=torch.int32)
    got = ranking.protect(torch.tensor([[[nan, nan, 2.0, nan, 1.0]]]), positions, torch.tensor([6]), recent=2)
    assert got.tolist() == [[[float("inf"), -float("inf"), 2.0, float("inf"), 1.0]]]
    assert ranking.weakest(got, positions).item() == 1


def test_chosen_slots_stay_above_all_others_and_below_the_protected():
    inf, most = float("inf"), torch.finfo(torch.float32).max
    found = ranking.above_all(torch.tensor([[[inf, most, 1.0, inf]]]), torch.tensor([[[False, False, True, False]]]))
    positions = torch.tensor([[[0, 1, 2, 3]]], dtype=torch.int32)
    assert ranking.protect(found, positions, torch.tensor([4]), recent=1)[0, 0].argsort().tolist()[2:] == [2, 3]
    assert found.isfinite().all()
