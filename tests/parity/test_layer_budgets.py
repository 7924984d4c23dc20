"""Budgets that differ by layer, under every policy: they add up, and each layer holds its own."""

import functools
from collections import Counter
from typing import ClassVar

import pytest
import torch
from models import GATED
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep
from kvkeep.cache.layer_layout import Layout
from kvkeep.errors import BudgetError
from kvkeep.testing.laws import fills

LAYERS, BUDGET = 3, 10
SHARES = {
    "uniform": (1.0, 1.0, 1.0),
    "ramp:0.2": (0.8, 1.0, 1.2),
    "pyramid:4": (1.75, 1.0, 0.25),
    (3.0, 1.0, 2.0): (1.5, 0.5, 1.0),
}
"""By rule, what each layer gets of what is left once every layer has the least that it needs."""
SMALL = {
    "adakv": "window=2",
    "defensivekv": "window=2",
    "ahakv": "recent=2",
    "snapkv": "window=2",
    "pyramidkv": "window=2",
    "nacl": "sinks=1",
    "restkv": "window=2",
}
EVICTING = [name for name, policy in kvkeep.available_policies().items() if policy.evicts]


@functools.cache
def model():
    torch.manual_seed(0)
    config = LlamaConfig(**{**GATED, "num_hidden_layers": LAYERS})
    return kvkeep.attach(AutoModelForCausalLM.from_config(config).eval())


@torch.inference_mode()
def used(policy, rule):
    """A cache after a prompt of 24 tokens and 6 single ones, in two rows."""
    cache = kvkeep.BoundedCache(model().config, policy, BUDGET, layer_budget=rule)
    ids = torch.randint(3, 61, (2, 30), generator=torch.Generator().manual_seed(1))
    for piece in (ids[:, :24], *ids[:, 24:].split(1, dim=1)):
        model()(input_ids=piece, past_key_values=cache)
    return cache


@pytest.mark.long
@pytest.mark.parametrize("name", EVICTING)
def test_each_layer_holds_its_own_budget(name):
    policy = kvkeep.parse(f"{name}:{SMALL.get(name, '')}")
    least = policy.least
    for rule, shares in SHARES.items():
        cache = used(policy, rule)
        layers = [layer.budgets[0] for layer in cache.bounded_layers().values()]
        assert sum(layers) == LAYERS * BUDGET
        for budget, share in zip(layers, shares, strict=True):
            assert abs(budget - (least + share * (BUDGET - least))) < 1, (rule, layers)
        for number, budget in enumerate(layers):
            held = (cache.positions(number) >= 0).sum(dim=-1)
            heads = held.shape[1]
            assert (held.sum(dim=1) <= heads * budget).all()
            assert policy.spreads or (held <= budget).all()
            assert not fills(policy) or (held == budget).all()


def test_pyramidkv_is_a_pyramid_by_itself():
    budgets = [layer.budgets[0] for layer in used("pyramidkv:window=2", None).bounded_layers().values()]
    assert budgets == kvkeep.budget.per_layer("pyramid", BUDGET, LAYERS, least=2)
    assert sum(budgets) == LAYERS * BUDGET
    assert budgets[0] > budgets[1] > budgets[2]


class Counting(type(kvkeep.parse("h2o"))):
    """A policy that counts how often it is asked about each budget."""

    checked: ClassVar[Counter[int]] = Counter()

    def check(self, budget):
        self.checked[budget] += 1
        super().check(budget)


@pytest.fixture
def checked():
    Counting.checked.clear()
    return Counting.checked


def test_a_cache_asks_its_policy_once_about_each_budget(checked):
    config = LlamaConfig(**{**GATED, "num_hidden_layers": LAYERS})
    kvkeep.BoundedCache(config, Counting(), BUDGET)
    assert checked == {BUDGET: 1}
    checked.clear()
    kvkeep.BoundedCache(config, Counting(), [BUDGET, 30, BUDGET], layer_budget="pyramid:4")
    assert set(checked.values()) == {1}
    assert len(checked) == 2 * LAYERS


def test_a_layout_spreads_and_checks_each_budget_once(checked):
    layout = Layout.of(LlamaConfig(**{**GATED, "num_hidden_layers": LAYERS}), Counting(), layer_budget="ramp:0.2")
    first = layout.slots(BUDGET)
    layout.check_pins(BUDGET, ((1, 2),))
    assert layout.room(BUDGET) == min(first)
    first.append(7)
    assert layout.slots(BUDGET) == [8, 10, 12]
    assert checked == {8: 1, 10: 1, 12: 1}
    with pytest.raises(BudgetError, match="True is not a whole number"):
        layout.slots(True)  # equal to 1, which may be known


@pytest.mark.parametrize(
    "make", [kvkeep.BoundedCache, lambda config, *given: Layout.of(config, given[0]).slots(given[1])]
)
def test_a_budget_below_what_is_protected_is_refused_each_time(make):
    config = LlamaConfig(**{**GATED, "num_hidden_layers": LAYERS})
    for _ in range(2):
        with pytest.raises(BudgetError, match="protects 4 first and 20 recent tokens, more than the budget of 10"):
            make(config, kvkeep.parse("h2o:sinks=4,recent=20"), BUDGET)
