"""DefensiveKV: the worst case over the rows of a prompt's end, weighed by what a token adds to the output."""

import pytest
import torch
from phases import phase_of

from kvkeep import AttentionOptions, Layer, parse

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, retained

CASES = [
    *family("defensivekv:window=4", budgets=(5, 6, 16)),
    *variant("defensivekv:window=3,kernel=1,first=0.0,decode=score", budgets=(5, 16)),
    *variant("defensivekv:window=2,alpha=0.5,first=0.5", budgets=(6, 16)),
    Case("defensivekv:window=4,alpha=1.0", 12, (40, *DECODE)),
    Case("defensivekv:window=4,first=1.0", 12, CHAT, heads=3, group=1),
    Case("defensivekv", 40, (60, *DECODE), heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_the_worst_case(case):
    compare(case)


def test_heads_share_a_budget():
    """No head gives up its window, and together they hold what they may."""
    for _, turn in lockstep(Case("defensivekv:window=3", 12, (40, *DECODE[:9]), pads=(0,))):
        (heads,) = turn.kept
        assert sum(map(len, heads)) == 24
        assert all(set(range(turn.seen[0] - 3, turn.seen[0])) <= set(head) for head in heads)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["keys", "values"])
def test_numbers_that_are_none_break_their_row_alone(where, bad):
    generator = torch.Generator().manual_seed(1)
    query, keys, values = (torch.randn(2, heads, 30, 8, generator=generator) for heads in (4, 2, 2))
    clean, spoilt = (Layer(parse("defensivekv:window=2"), 9) for _ in range(2))
    options = AttentionOptions(scaling=0.3)
    clean.step(query, keys.clone(), values.clone(), options=options, phase=phase_of(query))
    (keys if where == "keys" else values)[0, 0, 11] = bad
    spoilt.step(query, keys, values, options=options, phase=phase_of(query))
    assert sum(len(head) for head in retained(spoilt)[0]) <= 18
    assert retained(spoilt)[1] == retained(clean)[1]
    assert all({28, 29} <= set(head) for head in retained(spoilt)[0])


def test_a_prompt_within_its_window_and_a_prompt_of_one_token():
    for n in (1, 3, 5):
        layer = Layer(parse("defensivekv:window=4"), 5)
        x = torch.randn(1, 2, n, 8, generator=torch.Generator().manual_seed(n))
        layer.step(x, x, x, options=AttentionOptions(scaling=0.3), phase=phase_of(x))
        assert retained(layer)[0] == [[*range(n)]] * 2
