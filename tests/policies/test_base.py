"""What every policy inherits: budgets that are too small are refused, and the smallest one that would do is named."""

from typing import Literal

import pytest
import torch

import kvkeep
from kvkeep import AttentionOptions, BudgetError, Layer, Policy
from kvkeep.policies._keep_prompt import keeping, share_of
from kvkeep.policies._leverage import _whitening
from kvkeep.policies.base import kind_name
from kvkeep.types import Phase


class Share(Policy):
    """Protects a part of a budget."""

    def protected(self, budget):
        return 2, budget // 2

    def score(self, view, state):
        return view.positions.float()


class All(Share):
    def protected(self, budget):
        return 1, budget


def test_the_smallest_budget_that_would_do_is_named():
    """A larger budget may protect more tokens, and so be too small itself."""
    for refused, least in (
        (lambda: Share().check(1), 3),
        (lambda: Share().check_pins(5, ((4, 8),)), 11),
        (lambda: kvkeep.parse("snapkv:recent=32,decode=grow,room=10").check(16), 21),
    ):
        with pytest.raises(BudgetError, match=rf"at least {least}[,;]"):
            refused()
    Share().check(3)
    Share().check_pins(11, ((4, 8),))
    kvkeep.parse("snapkv:recent=32,decode=grow,room=10").check(21)


def test_none_is_named_where_none_would_do():
    with pytest.raises(BudgetError, match=r"budget of 8\. Protect fewer\."):
        All().check(8)
    with pytest.raises(BudgetError, match=r"budget of 8\. Pin fewer\."):
        All().check_pins(8, ((4, 8),))


def test_an_options_type_is_named_in_words():
    assert kind_name(int | None) == "a whole number or none"
    assert kind_name(Literal["true", "slot"]) == "'true' or 'slot'"
    assert [kind_name(kind) for kind in (float, bool, str, bytes)] == [
        "a number",
        "true or false",
        "text",
        "<class 'bytes'>",
    ]


def step(layer: Layer, n: int, phase: Phase, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    tokens = [torch.randn(1, heads, n, 8, generator=g) for heads in (4, 2, 2)]
    layer.step(*tokens, options=AttentionOptions(scaling=0.3), phase=phase)


def held(layer: Layer) -> list[set[int]]:
    return [{place for place in head if place >= 0} for head in layer.store.positions[0].tolist()]


def test_a_text_that_is_read_again_changes_no_rating():
    for policy in ("vase:recent=2", "rkv:window=2", "defensivekv:window=2", "restkv:window=2"):
        layer = Layer(kvkeep.parse(policy), 12)
        step(layer, 20, Phase.PREFILL)
        step(layer, 1, Phase.DECODE)
        before = {name: tensor.clone() for name, tensor in layer.block.per_row().items()}
        step(layer, 5, Phase.PROBE, seed=1)
        after = layer.block.per_row()
        assert [name for name in after if not torch.equal(after[name], before[name])] == [], policy


def test_pinned_tokens_stay_beside_a_pattern():
    layer = Layer(kvkeep.parse("sparse_strided:h2=0.25,stride=3"), 12, pins=[((4, 6),)])
    plain = Layer(kvkeep.parse("sparse_strided:h2=0.25,stride=3"), 12)
    for one in (layer, plain):
        step(one, 40, Phase.PREFILL)
    assert all({4, 5} <= head and len(head) <= 12 for head in held(layer))
    assert not any({4, 5} <= head for head in held(plain))


def test_a_share_of_several_budgets_is_that_of_each():
    policy = keeping(kvkeep.parse("local"), 0.29)
    assert share_of(policy, torch.tensor([100, 50, 1])).tolist() == [29, 14, 1]
    assert [share_of(policy, budget) for budget in (100, 50, 1)] == [29, 14, 1]


def test_keys_in_one_direction_have_a_leverage_without_a_ridge():
    """Their scatter is singular, so it has no factor."""
    key = torch.tensor([[[[3.0, 4.0, 0.0]]]])
    found = (key @ _whitening(key.mT @ key, 0.0)).square().sum()
    assert float(found) == pytest.approx(1.0, rel=1e-4)
    assert _whitening(torch.zeros(1, 1, 3, 3), 0.0).isfinite().all()
