"""Saving, loading and restoring at any step changes nothing: every policy, both position modes, two dtypes."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from snapshot_models import POLICIES, bounded, feed, ids, model
from sweeps import sweep

import kvkeep
from kvkeep import BoundedCache, Snapshot

MODES = [
    (policy, positions, dtype)
    for policy in POLICIES
    for positions in ("true", "slot")
    for dtype in (torch.float32, torch.bfloat16)
]


def chosen(mode):
    """One combination of each policy, neighbours in other modes; the rest runs with the long sweeps."""
    policy, positions, dtype = mode
    number = POLICIES.index(policy) % 4
    return (positions == "slot", dtype is torch.bfloat16) == (number % 2 == 1, number > 1)


@pytest.mark.long
@pytest.mark.parametrize(("policy", "positions", "dtype"), sweep(MODES, chosen))
@settings(max_examples=3, deadline=None, derandomize=True)
@given(
    prompt=st.integers(3, 24),
    steps=st.lists(st.integers(1, 6), min_size=2, max_size=3),
    chunk=st.sampled_from([None, 5]),
    budget=st.integers(6, 12),
    rows=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_any_step(policy, positions, dtype, prompt, steps, chunk, budget, rows, seed):
    made, tokens = model(dtype=dtype), ids(seed, rows=rows, columns=prompt + sum(steps))
    chunk = None if kvkeep.parse(policy).cascades else chunk
    options = {"positions": positions, "prefill_chunk": chunk}
    cache, other = (bounded(made, policy, budget, **options) for _ in range(2))
    end = prompt
    for cached in (cache, other):
        feed(made, cached, tokens, 0, end, prompt=prompt)
    for more in steps:
        with tempfile.TemporaryDirectory() as folder:
            for row in range(rows):
                other.snapshot(row).save(Path(folder, str(row)))
            read = [Snapshot.load(Path(folder, str(row))) for row in range(rows)]
        other = BoundedCache.from_snapshots(made.config, read)
        found = [feed(made, cached, tokens, end, end + more, prompt=prompt) for cached in (cache, other)]
        assert torch.equal(*found), f"saved after {end} tokens"
        assert torch.equal(cache.positions(1), other.positions(1))
        end += more
