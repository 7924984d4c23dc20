"""R-KV: attention of the newest rows against the likeness of keys, many tokens at a time."""

import pytest
import torch
from phases import phase_of

from kvkeep import AttentionOptions, BudgetError, Layer, parse
from kvkeep.policies._rounds import redundancy

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, make_layer, retained

CASES = [
    *family("rkv:buffer=4,window=3,kernel=3", budgets=(1, 2, 5, 16)),
    *variant("rkv", budgets=(2, 24)),
    *variant("rkv:buffer=5,window=2,balance=0.5,threshold=0.2,kernel=1", budgets=(4, 16)),
    Case("rkv:balance=1.0,buffer=3", 12, CHAT, chunk=4, pads=(8, 0)),
    Case("rkv:balance=0.0,buffer=3,window=1", 12, CHAT, chunk=5, inputs="twins", pads=(0,), heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_is_attended_and_unlike_the_rest(case):
    compare(case)


def test_tokens_go_in_rounds():
    sizes = [len(turn.kept[0][0]) for _, turn in lockstep(Case("rkv:buffer=4,window=2", 16, (20, *DECODE[:12])))]
    assert sizes == [12, 13, 14, 15, 16, 12, 13, 14, 15, 16, 12, 13, 14]


def test_an_example_by_hand():
    """Two equal keys, an opposite one, and one at a right angle: of the equal ones the newer is the less redundant."""
    keys = torch.tensor([[1.0, 0.0], [1.0, 0.0], [-1.0, 0.0], [0.0, 1.0]])[None, None]
    found = redundancy(keys, torch.arange(4).expand(1, 1, 4), 0.5)[0, 0]
    mean = torch.tensor([(0 - 1) / 4, (0 - 1) / 4, -2 / 4, 0.0])
    torch.testing.assert_close(found, mean.softmax(dim=-1))
    third = redundancy(keys[:, :, [0, 1, 1, 3]], torch.arange(4).expand(1, 1, 4), 0.5)[0, 0]
    assert third[0] > third[1]  # both older twins resemble the newest, which gets nothing from them
    assert third[2] < third[0]


def test_the_blocks_do_not_matter(monkeypatch):
    keys = torch.randn(2, 2, 50, 8, generator=torch.Generator().manual_seed(0))
    positions = (
        torch.stack([torch.randperm(60)[:50] for _ in range(4)])
        .view(2, 2, 50)
        .masked_fill(torch.rand(2, 2, 50) < 0.2, -1)
    )
    whole = redundancy(keys, positions, 0.3)
    monkeypatch.setattr("kvkeep.policies._rounds.BLOCK_BYTES", 1)
    torch.testing.assert_close(redundancy(keys, positions, 0.3), whole)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_goes_first(bad):
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(2, 2, 30, 8, generator=generator)
    query = torch.randn(2, 4, 30, 8, generator=generator)
    clean, spoilt = (Layer(parse("rkv:buffer=2,window=2"), 9) for _ in range(2))
    options = AttentionOptions(scaling=0.3)
    clean.step(query, keys, keys, options=options, phase=phase_of(keys))
    wrong = keys.clone()
    wrong[0, 0, 11] = bad
    spoilt.step(query, wrong, keys, options=options, phase=phase_of(keys))
    assert 11 not in retained(spoilt)[0][0]
    assert [len(head) for row in retained(spoilt) for head in row] == [7] * 4
    assert retained(spoilt)[1] == retained(clean)[1]


def test_equal_keys_and_zeros_pass():
    for fill in (0.0, 1.0, 1e-30, 1e30):
        layer = Layer(parse("rkv:buffer=2,window=2"), 9)
        x = torch.full((1, 2, 30, 8), fill)
        layer.step(x, x, x, options=AttentionOptions(scaling=0.3), phase=phase_of(x))
        assert [len(head) for head in retained(layer)[0]] == [7, 7]


def test_the_smallest_budget_and_a_wrong_option():
    make_layer(Case("rkv", 1, (1,)))
    with pytest.raises(BudgetError):
        make_layer(Case("rkv", 0, (1,)))
    with pytest.raises(Exception, match="use 1 to 64"):
        parse("rkv:window=65")
