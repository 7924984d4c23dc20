"""Top-K: the current row's attention, alone and together with the heavy hitters."""

import pytest

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, played
from .oracles import rule

CASES = [
    *family("topk"),
    *variant("topk:h2=0.5", budgets=(2, 5, 16)),
    *variant("topk:h2=0.3", budgets=(5, 12)),
    Case("topk:h2=1.0", (7, 16), (30, *DECODE), pads=(5, 0), chunk=4, group=1),
    Case("topk", 8, (24, *(1,) * 200), heads=1),
    Case("topk:h2=0.5", 16, (24, *(1,) * 200), heads=1),
]

TIES = [
    Case(policy, budget, (24, *DECODE), inputs=inputs, group=group)
    for policy in ("topk", "topk:h2=0.5")
    for budget, inputs, group in ((5, "twins", 1), (16, "twins", 2), (7, "constant", 2), (6, "sink", 2), (8, "hard", 2))
]


@pytest.mark.long
@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_what_the_current_row_looks_at(case):
    compare(case)


@pytest.mark.long
@pytest.mark.parametrize("turns", [(24, *DECODE), CHAT], ids=["prompt", "chat"])
def test_without_heavy_hitters_it_is_tova_for_each_head_with_the_newest_token_safe(turns):
    case = Case("topk", 7, turns, pads=(0, 5))
    assert played(case, "topk") == played(case, "tova:per_head=true,protect_last=true")


def test_the_newest_token_stays():
    for _, turn in lockstep(Case("topk:h2=0.5", 5, (24, *DECODE))):
        for row_kept, seen in zip(turn.kept, turn.seen, strict=True):
            assert all(kept[-1] == seen - 1 for kept in row_kept)


def test_heavy_hitters_make_a_difference_and_outlive_rows_that_pass_them_over():
    case = Case("topk:h2=0.5", 8, (24, *DECODE))
    ages = []
    for policy in ("topk:h2=0.5", "topk"):
        kept = played(case, policy)[-1]
        ages.append(sum(84 - j for row_kept in kept for head in row_kept for j in head))
    assert ages[0] > ages[1]


def test_an_example_by_hand():
    """Two by the current row (0, 3), two by mass (0, 1): of the others, 2 has the smallest current score."""
    prompt = [row(1.0), row(0.3, 0.7), row(0.3, 0.5, 0.2), row(0.2, 0.6, 0.1, 0.1), row(0.4, 0.1, 0.05, 0.3, 0.15)]
    assert step(rule("topk:h2=0.5", 4, 1), prompt) == [0, 1, 3, 4]
    assert step(rule("topk:h2=0.7", 3, 1), prompt) == [0, 1, 4]  # one by the row, two by mass
    assert step(rule("topk", 3, 1), prompt) == [0, 3, 4]


def test_if_only_the_newest_token_is_in_neither_set_the_smallest_current_score_goes():
    """0 and 1 are the top of the row, 2 and 3 the heaviest; 3 is the weakest of the row but for the newest, 4."""
    prompt = [row(1.0), row(0.1, 0.9), row(0.0, 0.1, 0.9), row(0.0, 0.0, 0.5, 0.5)]
    weighty = rule("topk:h2=0.5", 4, 1)
    assert step(weighty, prompt) == [0, 1, 2, 3]
    weighty.mass[0].update({2: 3.0, 3: 2.5})
    assert step(weighty, [row(0.35, 0.3, 0.2, 0.1, 0.05)]) == [0, 1, 2, 4]
