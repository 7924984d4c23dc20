"""Every law over slots of codes: what is held is the codes of the original, coded once, bit for bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sweeps import sweep
from test_laws import PLAIN, SIZES

import kvkeep
from kvkeep.kv_bits import KV_BITS
from kvkeep.testing import LAWS, Case

TRIPLES = [(law, policy, bits) for law in LAWS for policy in PLAIN for bits in KV_BITS]
CODED = st.tuples(SIZES, st.sampled_from([2, 4, 6, 8, 32, 64]))


def chosen(triple):
    """Every law and every policy with some of the bits."""
    law, policy, bits = triple
    return ([*LAWS].index(law) + PLAIN.index(policy) + [*KV_BITS].index(bits)) % 6 == 0


@pytest.mark.long
@pytest.mark.parametrize(("law", "policy", "bits"), sweep(TRIPLES, chosen))
def test_law_over_codes(law, policy, bits):
    # One function for each case: Hypothesis nests a function's settings at every call, a thousand calls at most.
    @settings(max_examples=2, deadline=None, derandomize=True)
    @given(sizes=CODED)
    def holds(sizes):
        shape, dim = sizes
        LAWS[law](kvkeep.parse(policy), Case(**{**shape, "dim": dim, "kv_bits": bits}))

    holds()
