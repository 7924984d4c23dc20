"""Every law over every policy of the registry, on shapes that hypothesis makes up."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep

import kvkeep
from kvkeep.testing import LAWS, Case
from kvkeep.testing.case import run

SMALL = {
    "adakv": "window=2",
    "ahakv": "recent=2",
    "snapkv": "window=2",
    "pyramidkv": "window=2",
    "nacl": "sinks=1",
    "restkv": "window=2",
    "defensivekv": "window=2",
}
"""Options for policies whose defaults need larger budgets than these."""

PLAIN = [f"{name}:{SMALL[name]}" if name in SMALL else name for name in kvkeep.available_policies()]
VARIANTS = [
    "adakv:window=1,kernel=1,alpha=0,decode=score",
    "ahakv:recent=1,sinks=2,kernel=3",
    "ahakv:recent=2,recent_accumulation=false,value_prior=false",
    "ahakv:recent=2,sg_softmax=false,clamp=false",
    "h2o:decay=0.9",
    "h2o:recent=1",
    "keydiff:recent=1",
    "keyformer:noise=false,max_new_tokens=5",
    "keyformer:release_quirk=true,seed=4",
    "knorm:sinks=2",
    "nacl:sinks=0,recent=2,random=0.9,decode=score",
    "reread:recent=2,sinks=1,decode=score",
    "scissorhands:literal_ties=true,threshold=live",
    "scissorhands:window=1,recent=0,drop=2,theta=2",
    "scissorhands_release:window=3,recent=1,quantile=0.5",
    "snapkv:window=1,kernel=3,pool=avg,decode=score",
    "sparse_fixed:h2=0.5,summary=2",
    "sparse_strided:h2=0.25,stride=3",
    "spatten:recent=2",
    "topk:h2=0.5",
    "defensivekv:window=1,kernel=1,first=0,alpha=0.5,decode=score",
    "rkv:buffer=2,window=3,balance=0.5",
    "vase:buffer=2,recent=2,sinks=1,large=0.5,kernel=3",
    "random:buffer=3,recent=2,sinks=1",
    "triattention:buffer=2,sinks=1,recent=1",
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

SIZES = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "heads": st.integers(1, 3),
        "group": st.sampled_from([1, 2, 4]),
        "dim": st.sampled_from([1, 4, 8]),
        "prompt": st.integers(8, 24),
        "steps": st.integers(1, 8),
        "budget": st.integers(4, 12),
        "chunk": st.sampled_from([None, None, 2, 5]),
        "padding": st.integers(0, 3),
        "seed": st.integers(0, 2**16),
    }
)
"""Arguments of a case. Tests make the case: its types are checked by samples, which no strategy may draw."""


PAIRS = [(law, policy) for law in LAWS for policy in (*PLAIN, *VARIANTS)]


def chosen(pair):
    """Every policy with every law, and each variant of options with every twelfth law, neighbours with others."""
    law, policy = pair
    return policy in PLAIN or ([*LAWS].index(law) + VARIANTS.index(policy)) % 12 == 0


@pytest.mark.long
@pytest.mark.parametrize(("law", "policy"), sweep(PAIRS, chosen))
def test_law(law, policy):
    # One function for each case: Hypothesis nests a function's settings at every call, a thousand calls at most.
    @settings(max_examples=3, deadline=None, derandomize=True)
    @given(sizes=SIZES)
    def holds(sizes):
        LAWS[law](kvkeep.parse(policy), Case(**sizes))

    holds()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["streaming_llm", "h2o:recent=3,sinks=2", "random:recent=2,sinks=2"])
def test_protected_tokens_survive_thousands_of_evictions(policy):
    case = Case(rows=1, heads=1, group=1, dim=2, prompt=10, steps=2000, budget=8)
    LAWS["protected_tokens_stay"](kvkeep.parse(policy), case)


def test_a_case_without_a_prompt_begins_with_its_first_token():
    case = Case(prompt=0, steps=5, padding=0, budget=3)
    kept = [moment.positions[0, 0].tolist() for moment in run(kvkeep.parse("local"), case)]
    assert [[position for position in held if position >= 0] for held in kept] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [1, 2, 3],
        [2, 3, 4],
    ]


@pytest.mark.parametrize("policy", ["full", "snapkv:window=2"])
def test_laws_hold_for_rows_without_a_prompt(policy):
    for law in ("slots_do_not_matter", "never_over_budget", "scores_are_finite_numbers"):
        for prompt, padding in ((0, 0), (5, 5), (5, 7)):
            LAWS[law](kvkeep.parse(policy), Case(prompt=prompt, steps=12, budget=6, padding=padding))
