"""The laws of policies hold when heads share a layer's budget."""

from dataclasses import replace

import pytest
from sweeps import sweep

import kvkeep
from kvkeep.kv_bits import KV_BITS
from kvkeep.policies._head_budgets import under
from kvkeep.testing import LAWS, Case

POLICIES = [
    "h2o",
    "h2o:recent=2,sinks=1",
    "snapkv:window=2",
    "snapkv:window=2,decode=score",
    "leverage:sinks=1,recent=2",
    "adakv:window=2",
    "streaming_llm:sinks=1",
    "keydiff:recent=1",
    "random",
    "blend:sinks=1,recent=2",
]
CASES = [
    Case(seed=1, heads=3, budget=8, prompt=22, steps=6),
    Case(seed=2, heads=3, budget=9, prompt=22, steps=6, chunk=5, group=1),
]


PAIRS = [
    *((policy, "ada:0.1") for policy in POLICIES),
    *((policy, "global:0.1") for policy in ("h2o", "snapkv:window=2", "leverage:sinks=1,recent=2")),
]
CODED = [
    (law, policy, rule, bits)
    for i, law in enumerate(LAWS)
    for j, (policy, rule) in enumerate(PAIRS)
    for k, bits in enumerate(KV_BITS)
    if (i + j + k) % len(KV_BITS) == 0
]
"""Every law with every policy and rule, and all bits in turn."""


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("policy", "rule"), PAIRS)
def test_law(law, policy, rule):
    for case in CASES:
        LAWS[law](under(kvkeep.parse(policy), rule), case)


def chosen(case):
    """Every law and every policy with some of the bits."""
    law, policy, rule, bits = case
    return ([*LAWS].index(law) + PAIRS.index((policy, rule)) + [*KV_BITS].index(bits)) % 6 == 0


@pytest.mark.long
@pytest.mark.parametrize(("law", "policy", "rule", "bits"), sweep(CODED, chosen))
def test_law_over_codes(law, policy, rule, bits):
    for case in CASES:
        LAWS[law](under(kvkeep.parse(policy), rule), replace(case, kv_bits=bits))


def test_pins_fit_where_heads_protect_a_share_of_uneven_budgets():
    """What an equal share protects decides: a head that had more before the last chunk would protect more."""
    policy = under(kvkeep.parse("leverage"), "ada:0.1")
    LAWS["pinned_tokens_stay"](policy, Case(seed=2, heads=3, chunk=5, budget=9, prompt=22, steps=6, group=1))
