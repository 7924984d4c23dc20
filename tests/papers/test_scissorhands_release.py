"""The rule of the released Scissorhands code: one high score in the last rows keeps a token."""

import pytest

from kvkeep import BudgetError

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, make_layer
from .oracles import rule

CASES = [
    *family("scissorhands_release:recent=2,window=6", budgets=(2, 5, 16)),
    *variant("scissorhands_release:quantile=0.5,window=4,recent=3", budgets=(4, 16)),
    Case("scissorhands_release:window=5,recent=1,quantile=0.8", (12, 16), CHAT, pads=(0, 4), pause=5),
    Case("scissorhands_release:window=1,recent=1", 16, (30, *DECODE), heads=1, group=4),
    Case("scissorhands_release:window=12", 40, (60, *(1,) * 200), heads=1),
    Case("scissorhands_release:recent=10", 24, (40, *(1,) * 200), heads=1),
]

TIES = [
    Case("scissorhands_release:recent=2,window=6,quantile=0.7", budget, (24, *DECODE), inputs=inputs, group=group)
    for budget, inputs, group in ((5, "twins", 1), (16, "twins", 4), (7, "constant", 2), (6, "sink", 2), (8, "hard", 2))
]


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_what_was_hit_in_the_last_rows(case):
    compare(case)


def test_the_number_held_floats_below_the_budget():
    sizes = {
        len(kept)
        for _, turn in lockstep(Case("scissorhands_release:recent=3,window=3", 40, (60, *(1,) * 120)))
        for row_kept in turn.kept
        for kept in row_kept
    }
    assert len(sizes) > 5
    assert max(sizes) < 40
    assert min(sizes) > 3


def test_constant_attention_hits_nothing_until_most_is_gone():
    """Every row's threshold is the one score that all keys have, so only the recent tokens stay; once nine tenths of
    the history are gone the threshold is 0, and everything is hit."""
    case = Case("scissorhands_release:recent=4,window=8", 16, (24, *(1,) * 30), inputs="constant", pads=(0,))
    for _, turn in lockstep(case):
        seen = turn.seen[0]
        if seen <= 40:
            assert turn.kept[0][0] == list(range(seen - 4, seen))
    assert len(turn.kept[0][0]) > 4


def test_an_example_by_hand():
    """With the median as the threshold (the third of five), the last row hits 0 and 3; the row before it 1 as well."""
    prompt = [row(1.0), row(0.5, 0.5), row(0.4, 0.3, 0.3), row(0.2, 0.4, 0.1, 0.3), row(0.4, 0.1, 0.05, 0.3, 0.15)]
    options = "scissorhands_release:quantile=0.5,recent=1"
    assert step(rule(f"{options},window=1", 4, 1), prompt) == [0, 3, 4]
    assert step(rule(f"{options},window=2", 4, 1), prompt) == [0, 1, 3, 4]
    assert step(rule(f"{options},window=2", 3, 1), prompt) == [0, 3, 4]  # 1 was hit longest ago
    assert step(rule(f"{options},window=2", 2, 1), prompt) == [3, 4]  # 0 and 3 were hit by the same row


def test_tokens_that_are_gone_count_as_zeros_in_the_quantile():
    """Of ten positions seven are gone: the median is 0, the element at 8 is the second largest score."""
    last = [{2: 0.5, 8: 0.3, 9: 0.2}]
    assert step(rule("scissorhands_release:quantile=0.5,recent=1", 5, 1), last) == [2, 8, 9]
    assert step(rule("scissorhands_release:quantile=0.8,recent=1", 5, 1), last) == [2, 9]


def test_more_recent_tokens_than_the_budget_are_refused():
    with pytest.raises(BudgetError):
        make_layer(Case("scissorhands_release:recent=10", 9, (1,)))
