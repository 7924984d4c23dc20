"""Full, Local and StreamingLLM: the policies whose choice depends on positions alone."""

from dataclasses import replace

import pytest
import torch

from kvkeep import CapacityError

from .cases import DECODE, Case, family, make_streams, variant
from .lockstep import choose, compare, lockstep, make_layer, make_rule, play, retained, step_layer
from .loops import OverBudgetError

N = 24 + len(DECODE)

CASES = [
    *family("local"),
    *family("streaming_llm", budgets=(4, 5, 16)),
    *variant("streaming_llm:sinks=0", budgets=(1, 7)),
    Case("streaming_llm:sinks=1", 3, (2, 1, 9, 1, 1, 40, 1), chunk=8),
    Case("local", 16, (24, *DECODE), inputs="sink"),
    Case("local", 16, (24, *(1,) * 200), pads=(0, 5)),
    Case("streaming_llm", 16, (24, *(1,) * 200), inputs="sink", group=1, pads=(0,)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_the_rule_keeps(case):
    compare(case)


@pytest.mark.parametrize("chunk", [None, 5])
def test_full_attends_to_everything(chunk):
    compare(Case("full", N, (24, *DECODE), pads=(0, 5), chunk=chunk))


@pytest.mark.parametrize("turns", [(24,), (10, 9), (16, 1), (1,) * 17, (13, 4)], ids=str)
def test_full_refuses_exactly_what_the_rule_refuses(turns):
    case = Case("full", 16, turns, pads=(0,))
    streams = make_streams(case, 0)
    with pytest.raises(OverBudgetError):
        play(case, streams)
    layer, fits = make_layer(case), replace(case, turns=turns[:-1])
    seen = sum(fits.turns)
    for turn in play(fits, streams):
        step_layer(layer, streams, case, turn.tokens, turn.real)
    real = torch.ones(1, turns[-1], dtype=torch.bool)
    with pytest.raises(CapacityError):
        step_layer(layer, streams, case, [range(seen, sum(turns))], real)
    if seen:
        assert retained(layer) == [[list(range(seen))] * case.heads]


def test_full_measures_each_row_by_its_own_budget():
    """The first row fills its 24 slots, the second its 11."""
    compare(Case("full", (24, 11), (14, *(1,) * 10), pads=(0, 13)))


UNLIMITED = [
    "h2o",
    "h2o:recent=0",
    "h2o:graduate=replace",
    "h2o_avg",
    "local",
    "random",
    "streaming_llm",
    "tova",
    "tova:per_head=true",
]


@pytest.mark.long
def test_an_unlimited_budget_is_the_full_cache_bit_for_bit():
    """In decode; the prompt's rows are summed up in another order where a statistic counts them."""
    full = Case("full", N, (24, *DECODE))
    streams, turns = choose(full)
    others = [make_layer(replace(full, policy=policy)) for policy in UNLIMITED]
    layer = make_layer(full)
    for turn in turns:
        expected = step_layer(layer, streams, full, turn.tokens, turn.real)
        for policy, other in zip(UNLIMITED, others, strict=True):
            out = step_layer(other, streams, full, turn.tokens, turn.real)
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
            assert torch.equal(out, expected) or turn.real.shape[1] > 1, policy
            assert retained(other) == turn.kept, policy


@pytest.mark.parametrize("policy", UNLIMITED)
def test_with_an_unlimited_budget_every_rule_keeps_everything(policy):
    for _, turn in lockstep(Case(policy, 30, (12, *(1,) * 10, 8))):
        assert turn.kept == [[list(range(seen))] * 2 for seen in turn.seen]


def test_streaming_llm_drops_one_token_of_the_middle_per_step():
    rule = make_rule(Case("streaming_llm:sinks=2", 5, (1,)), 0)
    assert rule.cut(0, [0, 1, 4, 5, 6, 7], 8, decode=True) == [0, 1, 5, 6, 7]
