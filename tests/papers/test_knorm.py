"""Key norms: the longest key goes."""

import math

import pytest
import torch

from kvkeep import BudgetError

from .cases import DECODE, Case, family, make_streams, variant
from .lockstep import compare, lockstep, make_layer, played

CASES = [
    *family("knorm"),
    *variant("knorm:recent=2,sinks=3", budgets=(5, 16)),
    Case("knorm:recent=8", 8, (24, *DECODE)),
    Case("knorm", 12, (24, *(1,) * 200), heads=1),
]

TIES = [
    Case(policy, budget, (24, *DECODE), inputs=inputs)
    for policy in ("knorm", "knorm:recent=3")
    for budget, inputs in ((5, "twins"), (16, "twins"), (7, "hard"))
]


@pytest.mark.parametrize("case", [*CASES, *TIES], ids=str)
def test_drops_the_longest_keys(case):
    compare(case)


def test_the_shortest_keys_of_the_whole_history_are_held_however_they_came():
    """A score that never changes makes the policy a top-k of all tokens."""
    case = Case("knorm", 6, (20, *DECODE, 15, 1, 1), chunk=8, heads=3, group=1)
    streams = make_streams(case, 0)
    *_, (_, turn) = lockstep(case)
    for stream, row_kept, seen in zip(streams, turn.kept, turn.seen, strict=True):
        for keys, kept in zip(stream.keys, row_kept, strict=True):
            norms = [math.sqrt(sum(x * x for x in key)) for key in keys[:seen].tolist()]
            assert kept == sorted(sorted(range(seen), key=norms.__getitem__)[:6])


def test_queries_play_no_part():
    case = Case("knorm", 6, (24, *DECODE))
    streams = make_streams(case, 0)
    assert torch.equal(streams[0].keys, make_streams(Case("knorm", 6, case.turns, inputs="constant"), 0)[0].keys)
    constant = Case("knorm", 6, case.turns, inputs="constant")
    assert played(case, "knorm")[-1][0] == played(constant, "knorm")[-1][0]


def test_everything_recent_is_the_sliding_window():
    case = Case("knorm:recent=8", 8, (24, *DECODE))
    assert played(case, case.policy) == played(case, "local")


def test_more_protected_than_the_budget_is_refused():
    with pytest.raises(BudgetError):
        make_layer(Case("knorm:recent=3,sinks=3", 5, (1,)))
