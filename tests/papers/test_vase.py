"""VaSE: large values and a sample by attention stay, many tokens go at a time."""

import pytest
import torch
from phases import phase_of

import kvkeep
from kvkeep import AttentionOptions, BudgetError, Layer

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, make_layer, retained

CASES = [
    *family("vase:buffer=4,recent=3,sinks=1", budgets=(2, 5, 16)),
    *variant("vase:sinks=2", budgets=(4, 24)),
    *variant("vase:buffer=5,recent=4,sinks=0,large=0.5,kernel=1,seed=7", budgets=(4, 16)),
    Case("vase:large=0.0,buffer=3,recent=2,sinks=0", 12, CHAT, chunk=4, pads=(8, 0)),
    Case("vase:large=1.0,buffer=3,recent=0,sinks=1", 12, CHAT, chunk=5, pads=(0,), heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_large_values_and_a_sample_by_attention(case):
    compare(case)


def test_tokens_go_in_bursts():
    case = Case("vase:buffer=4,recent=2,sinks=1", 16, (20, *DECODE[:12]))
    sizes = [len(turn.kept[0][0]) for _, turn in lockstep(case)]
    assert sizes == [12, 13, 14, 15, 16, 12, 13, 14, 15, 16, 12, 13, 14]


def feed(policy, values, *, steps=0):
    layer = Layer(kvkeep.parse(policy), 16)
    x = torch.randn(1, 2, values.shape[2], 8, generator=torch.Generator().manual_seed(0))
    layer.step(x, x, values, options=AttentionOptions(scaling=0.3), phase=phase_of(x))
    return layer


def test_the_widest_values_stay():
    values = torch.zeros(1, 2, 40, 8)
    wide = [7, 11, 19, 23]
    for number, j in enumerate(wide):
        values[0, :, j, 3] = 5.0 + number
    for head in retained(feed("vase:buffer=4,recent=4,sinks=0,large=0.25", values))[0]:
        assert {*wide, *range(36, 40)} <= set(head)
    values[0, :, 7] = 100.0  # large, and without a range
    assert all(11 in head for head in retained(feed("vase:buffer=4,recent=4,sinks=0,large=0.2", values))[0])


def test_a_seed_draws_other_tokens_and_the_same_seed_the_same():
    values = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(1))
    one, same, other = (retained(feed(f"vase:buffer=4,recent=4,seed={seed}", values)) for seed in (0, 0, 1))
    assert one == same != other


def test_the_smallest_budget_and_wrong_options():
    make_layer(Case("vase", 4, (1,)))
    with pytest.raises(BudgetError):
        make_layer(Case("vase", 3, (1,)))
    for wrong in ("large=1.5", "kernel=4", "buffer=0"):
        with pytest.raises(kvkeep.PolicyError):
            kvkeep.parse(f"vase:{wrong}")
