"""Every law over every policy of the registry, on shapes that hypothesis makes up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvkeep
from kvkeep.testing import LAWS, Case

VARIANTS = [
    *kvkeep.available_policies(),
    "h2o:recent=2",
    "h2o:recent=0",
    "h2o:recent=2,sinks=2",
    "h2o:recent=2,graduate=replace",
    "h2o_avg:recent=1,sinks=1",
    "random:mode=reservoir,seed=3",
    "random:recent=2,sinks=1",
    "streaming_llm:sinks=1",
    "tova:per_head=true",
    "tova:protect_last=true",
]

CASES = st.builds(
    Case,
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4]),
    dim=st.sampled_from([1, 4, 8]),
    prompt=st.integers(8, 24),
    steps=st.integers(1, 8),
    budget=st.integers(4, 12),
    chunk=st.sampled_from([None, None, 2, 5]),
    padding=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)


@pytest.mark.parametrize("policy", VARIANTS)
@pytest.mark.parametrize("law", LAWS.values(), ids=LAWS.keys())
@settings(max_examples=5, deadline=None, derandomize=True)
@given(case=CASES)
def test_law(law, policy, case):
    law(kvkeep.parse(policy), case)


@pytest.mark.parametrize("policy", ["streaming_llm", "h2o:recent=3,sinks=2", "random:recent=2,sinks=2"])
def test_protected_tokens_survive_thousands_of_evictions(policy):
    case = Case(rows=1, heads=1, group=1, dim=2, prompt=10, steps=2000, budget=8)
    LAWS["protected_tokens_stay"](kvkeep.parse(policy), case)
