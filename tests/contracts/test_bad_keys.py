"""Keys that tell nothing or are no numbers: every policy goes on, and no other row notices."""

import math

import pytest
import torch

import kvkeep
from kvkeep.policies._head_budgets import under
from kvkeep.types import AttentionOptions, Phase

POLICIES = [*kvkeep.available_policies(), "snapkv:late", "keydiff:document", "h2o+ada", "leverage+ada"]
BUDGET, DIM = 80, 8
PIECES = (120, 30, *[1] * 12)
"""A prompt, a second chunk, and tokens."""


def layer_of(text):
    name, _, rule = text.partition("+")
    policy = under(kvkeep.parse(name), rule or None)
    return kvkeep.Layer(policy, BUDGET if policy.evicts else sum(PIECES))


def steps(text, change):
    """Two rows of two heads; `change` may spoil the keys and values of a piece."""
    g, layer = torch.Generator().manual_seed(5), layer_of(text)
    for number, T in enumerate(PIECES):
        q, k, v = (torch.randn(2, heads, T, DIM, generator=g) for heads in (4, 2, 2))
        change(number, k, v)
        phase = Phase.DECODE if T == 1 else Phase.PREFILL
        out = layer.step(q, k, v, options=AttentionOptions(scaling=DIM**-0.5), phase=phase)
        yield layer, out


def held(layer, row):
    """The positions that each head of a row holds."""
    return [sorted(head[head >= 0].tolist()) for head in layer.store.positions[row]]


def check_held(layer):
    """Every head holds distinct tokens that were seen, in all no more than the budget."""
    for row in range(2):
        heads = held(layer, row)
        assert all(len(one) == len(set(one)) for one in heads)
        assert sum(map(len, heads)) <= 2 * max(BUDGET, 0 if layer.policy.evicts else sum(PIECES))
        assert any(heads)


@pytest.mark.parametrize("policy", POLICIES)
def test_identical_keys_and_values(policy):
    def same(number, keys, values):
        keys[:], values[:] = 1.0, 0.5

    for layer, out in steps(policy, same):
        torch.testing.assert_close(out, torch.full_like(out, 0.5))
        check_held(layer)


@pytest.mark.parametrize("policy", POLICIES)
def test_keys_and_values_of_zeros(policy):
    def nothing(number, keys, values):
        keys[:], values[:] = 0.0, 0.0

    for layer, out in steps(policy, nothing):
        assert not out.any()
        check_held(layer)


@pytest.mark.long
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 1, 3], ids=["prompt", "chunk", "token"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_key_that_is_no_number_stays_in_its_row(policy, at, bad):
    def spoil(number, keys, values):
        if number == at:
            keys[0, 1, -1, 3] = bad

    for (layer, out), (clean, want) in zip(steps(policy, spoil), steps(policy, lambda *piece: None), strict=True):
        torch.testing.assert_close(out[1], want[1], rtol=1e-5, atol=1e-6)  # a pool's sums may end elsewhere
        assert held(layer, 1) == held(clean, 1)
        check_held(layer)
