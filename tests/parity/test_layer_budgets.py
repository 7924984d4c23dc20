"""Budgets that differ by layer, under every policy: they add up, and each layer holds its own."""

import functools

import pytest
import torch
from models import GATED
from transformers import AutoModelForCausalLM, LlamaConfig

import kvkeep
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
