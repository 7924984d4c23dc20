"""NACL: proxy rows choose a part of the prompt, chance the rest."""

from dataclasses import replace

import pytest

from kvkeep import BudgetError

from .by_hand import row, step
from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import choose, compare, lockstep, make_layer, played, refuse_last_turn
from .oracles import rule

CASES = [
    *family("nacl:recent=1", budgets=(5, 6, 16)),
    *variant("nacl:proxies=0.5,random=0.6,sinks=1,recent=3,seed=7", budgets=(4, 16)),
    *variant("nacl:decode=score,sinks=2,temperature=0.5,recent=1", budgets=(5, 16)),
    Case("nacl:random=0.0,recent=2,decode=score,proxies=1.0", (12, 16), CHAT, pads=(0, 4), pause=5, group=1),
    Case("nacl:random=1.0,sinks=0,temperature=3.0,seed=5,recent=2", 12, (30, *DECODE), pads=(0, 3, 12), heads=1),
    Case("nacl:decode=grow,room=20,recent=3", (40, 33), (36, *(1,) * 20), pads=(0, 5), group=4, heads=1),
    Case("nacl", 16, (24, *DECODE)),
    Case("nacl:recent=4", 24, (60, *(1,) * 200), heads=1),
    Case("nacl:decode=score,recent=4,proxies=0.25", 24, (60, *(1,) * 200), heads=1),
]

TIES = [
    Case(f"nacl:recent=2,sinks=1,decode={decode}", budget, (24, *DECODE), inputs=inputs, group=group)
    for decode in ("local", "score")
    for budget, inputs, group in ((5, "twins", 1), (16, "twins", 1), (7, "constant", 2), (8, "hard", 2))
]


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_keeps_what_the_proxies_and_chance_choose(case):
    compare(case)


def test_chance_differs_in_every_head_and_sequence():
    """All rows see the same constant attention; each chooses other tokens."""
    case = Case("nacl:random=1.0,sinks=0,recent=0", 8, (40,), inputs="constant", heads=4, group=1, pads=(0, 0, 0))
    *_, (_, turn) = lockstep(case)
    assert len({tuple(kept) for row_kept in turn.kept for kept in row_kept}) == 12


def test_another_seed_draws_other_tokens():
    case = Case("nacl:random=1.0,sinks=0", 8, (40,), inputs="constant")
    assert played(case, case.policy) != played(case, f"{case.policy},seed=1")


def test_without_chance_and_with_all_rows_as_proxies_the_prompt_is_cut_as_by_h2o():
    case = Case("nacl:random=0.0,proxies=1.0,recent=5,sinks=2,decode=score", 16, (40, *(1,) * 100), pads=(0, 5))
    assert played(case, case.policy) == played(case, "h2o:recent=5,sinks=2")


def test_a_low_temperature_leaves_nothing_to_chance():
    case = Case("nacl:random=1.0,temperature=0.0001", 16, (40,), pads=(0,))
    assert played(case, case.policy) == played(case, "nacl:random=0.0")


def test_the_split_by_hand():
    """Sink 0 and recent 9; of the six slots left three are for the largest scores, 2, 4 and 6, three for chance."""
    prompt = [row(1.0)] * 9 + [row(0.1, 0.01, 0.2, 0.02, 0.2, 0.03, 0.3, 0.04, 0.05, 0.05)]
    options = "nacl:random=0.5,recent=1,sinks=1"
    drawn = set()
    for seed in range(100):
        kept = set(step(rule(f"{options},seed={seed}", 8, 1), prompt))
        assert len(kept) == 8
        assert {0, 2, 4, 6, 9} < kept
        drawn.add(tuple(sorted(kept - {0, 2, 4, 6, 9})))
    assert len(drawn) == 10  # all triples of 1, 3, 5, 7 and 8


def test_the_prompts_choice_is_fixed_while_generated_tokens_pass_by():
    """The 12 chosen tokens stay; the 4 newest of the prompt and the generated ones are a queue."""
    first, *later = [turn for _, turn in lockstep(Case("nacl:recent=4", 16, (40, *DECODE)))]
    for turn in later:
        for old_row, new_row, seen in zip(first.kept, turn.kept, turn.seen, strict=True):
            assert new_row == [[*old[:12], *range(seen - 4, seen)] for old in old_row]


def test_a_short_prompt_leaves_all_other_slots_to_the_queue():
    case = Case("nacl:sinks=2,recent=0", 8, (5, *(1,) * 40))
    _, turns = choose(case)
    assert turns[-1].kept == [[[0, 1, 2, 3, 4, 42, 43, 44]] * 2] * 2


def test_growing_past_the_budget_is_refused():
    case = Case("nacl:decode=grow,room=3,recent=0", 12, (20, *(1,) * 4))
    refuse_last_turn(case)
    compare(replace(case, turns=case.turns[:-1]))


@pytest.mark.parametrize(
    ("policy", "budget"),
    [("nacl", 3), ("nacl:sinks=3,recent=3", 5), ("nacl:recent=3,decode=grow,room=4", 10)],
)
def test_more_protected_than_the_budget_is_refused(policy, budget):
    with pytest.raises(BudgetError):
        make_layer(Case(policy, budget, (1,)))
