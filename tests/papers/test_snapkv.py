"""SnapKV and PyramidKV: the prompt's last rows select, and what happens to generated tokens afterwards."""

from dataclasses import replace

import pytest
import torch

import kvkeep
from kvkeep import BudgetError, PolicyError

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, make_layer, played, refuse_last_turn
from .oracles import rule

CASES = [
    *family("snapkv:window=4", budgets=(4, 5, 16)),
    *variant("snapkv:window=3,kernel=3,pool=avg,decode=score", budgets=(4, 16)),
    Case("snapkv:window=5,decode=score,kernel=1", 12, CHAT, pads=(0, 4), pause=5, group=1),
    Case("snapkv:window=2,pool=avg", (6, 12), (20, 1, 1, 17, 8, 1, 30, *DECODE), pads=(3, 0), chunk=7, heads=1),
    Case("snapkv:window=2,decode=grow,room=20", (40, 33), (36, *(1,) * 20), pads=(0, 5), group=4, heads=1),
    Case("snapkv:window=8,decode=grow,room=24,pool=avg", 40, (50, *(1,) * 20, 12, *(1,) * 24), pads=(0,)),
    Case("snapkv", 40, (60, *(1,) * 200), heads=1),
    Case("snapkv:decode=score,kernel=5,pool=avg", 40, (60, *(1,) * 200), heads=1, group=1),
    *variant("snapkv:window=2,kernel=3,decode=score,recent=5", budgets=(4, 9, 16)),
    *variant("snapkv:window=4,recent=6", budgets=(2, 7, 16)),
    *variant("snapkv:window=6,recent=3,decay=0.7,decode=score", budgets=(4, 16)),
    *variant("snapkv:window=6,decay=0.5,pool=avg,kernel=3", budgets=(6, 16)),
    *variant("pyramidkv:window=3,kernel=5", budgets=(4, 16)),
    Case("pyramidkv:window=2,pool=avg,decode=score", 12, CHAT, heads=1),
    Case("pyramidkv:window=4", 20, (60, *(1,) * 200), pads=(0, 7), heads=1),
]

TIES = [
    Case(f"snapkv:{options},decode={decode}", budget, (24, *DECODE), inputs=inputs, group=group)
    for decode in ("local", "score")
    for options, budget, inputs, group in (
        ("window=2", 5, "twins", 1),
        ("window=2", 16, "twins", 1),
        ("window=1", 16, "twins", 2),
        ("window=3", 7, "constant", 2),
        ("window=3", 8, "hard", 2),
        ("window=2,kernel=3,pool=avg", 7, "constant", 2),
        ("window=2,kernel=3,pool=avg", 8, "hard", 2),
    )
]


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_what_the_end_of_the_prompt_looks_at(case):
    compare(case)


def test_recent_tokens_stay_in_place_of_the_window_up_to_half_of_the_budget():
    for recent, budget, stay in ((6, 16, 6), (6, 8, 4), (1, 16, 1), (6, 3, 1), (6, 1, 0), (0, 16, 3)):
        policy = kvkeep.parse(f"snapkv:window=3,recent={recent}")
        policy.check(budget)
        assert policy.protected(budget) == (0, stay)
        if recent:
            assert policy.protected(torch.tensor([[budget]]))[1].tolist() == [[stay]]


@pytest.mark.parametrize("policy", ["snapkv", "pyramidkv", "adakv"])
def test_of_a_plateau_of_the_pooling_the_newest_stay(policy):
    """Token 5 alone is looked at, so 3 to 7 are worth the same under a kernel of five."""
    prompt = [row(*[0.05 / n] * 5, 0.9, *[0.05 / n] * (n - 5)) for n in range(6, 13)]
    assert step(rule(f"{policy}:window=2,kernel=5", 5, 1), prompt) == [
        5,
        6,
        7,
        *range(len(prompt[-1]) - 2, len(prompt[-1])),
    ]


def test_the_selection_of_the_prompt_is_fixed_while_generated_tokens_pass_by():
    """The 12 selected tokens stay for ever; the newest of the window and the generated ones are a queue of 4."""
    prompt = 40
    chosen: list[list[list[int]]] = []
    for _, turn in lockstep(Case("snapkv:window=4", 16, (prompt, *DECODE))):
        chosen = chosen or [[head[:12] for head in row] for row in turn.kept]
        assert max(j for row in chosen for head in row for j in head) < prompt - 4
        for kept_row, chosen_row, seen in zip(turn.kept, chosen, turn.seen, strict=True):
            assert kept_row == [[*head, *range(seen - 4, seen)] for head in chosen_row]


def test_without_a_prompt_the_local_mode_is_the_sliding_window():
    case = Case("snapkv:window=3", 8, (1,) * 60)
    assert played(case, case.policy) == played(case, "local")


def test_without_a_prompt_the_score_mode_is_h2o():
    case = Case("snapkv:window=3,decode=score", 8, (1,) * 60)
    assert played(case, case.policy) == played(case, "h2o:recent=3")


def test_an_example_by_hand():
    """A window of 1 and room for two more: token 2 is looked at most, and pooling saves its neighbours 1 and 3."""
    prompt = [row(1.0)] * 5 + [row(0.2, 0.05, 0.4, 0.1, 0.15, 0.1)]
    assert step(rule("snapkv:window=1,kernel=1", 3, 1), prompt) == [0, 2, 5]
    assert step(rule("snapkv:window=1,kernel=3", 3, 1), prompt) == [2, 3, 5]
    assert step(rule("snapkv:window=1,kernel=3,pool=avg", 3, 1), prompt) == [1, 3, 5]


def test_a_pool_of_one_over_the_whole_prompt_is_one_row_of_h2o():
    """With a window as long as the prompt nothing is older, so nothing is selected; a chunked prompt goes on."""
    case = Case("snapkv:window=9,decode=score", 12, (9, *(1,) * 3, 2), chunk=9, pads=(0,))
    assert played(case, case.policy)[-2] == [[list(range(12))] * 2]


def test_nothing_goes_while_the_cache_grows():
    case = Case("snapkv:window=4,decode=grow,room=10", 22, (30, *(1,) * 10))
    for number, (_, turn) in enumerate(lockstep(case)):
        for row_kept, seen in zip(turn.kept, turn.seen, strict=True):
            assert [len(kept) for kept in row_kept] == [12 + number] * 2
            assert all(kept[12:] == list(range(30, seen)) for kept in row_kept)


def test_growing_past_the_budget_is_refused():
    case = Case("snapkv:window=4,decode=grow,room=3", 12, (20, *(1,) * 4))
    refuse_last_turn(case)
    compare(replace(case, turns=case.turns[:-1]))
    refuse_last_turn(Case("snapkv:window=4,decode=grow", 12, (20, 1)))


def test_room_without_growth_is_refused():
    with pytest.raises(PolicyError, match=r"room=3 is only of use with decode=grow, where slots are left free"):
        make_layer(Case("snapkv:window=4,room=3", 20, (1,)))


@pytest.mark.parametrize(
    ("policy", "budget"), [("snapkv", 31), ("snapkv:window=5,decode=grow,room=4", 8), ("pyramidkv:window=9", 8)]
)
def test_a_window_that_does_not_fit_is_refused(policy, budget):
    with pytest.raises(BudgetError):
        make_layer(Case(policy, budget, (1,)))
