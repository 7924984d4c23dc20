"""TOVA: attention of the last query row, one set for all heads."""

import pytest

from .cases import DECODE, Case, family, variant
from .lockstep import compare, lockstep, retained

CASES = [
    *family("tova"),
    *variant("tova:per_head=true", budgets=(2, 5, 12)),
    *variant("tova:protect_last=true", budgets=(1, 5, 16)),
    Case("tova:protect_last=true,per_head=true", (7, 3, 12), (25, *DECODE), pads=(0, 9, 6), chunk=3),
    *(
        Case(policy, budget, (24, *DECODE), inputs=inputs, group=group)
        for policy in ("tova", "tova:per_head=true", "tova:protect_last=true")
        for budget, inputs, group in ((5, "twins", 1), (16, "twins", 2), (7, "constant", 2), (6, "sink", 2))
    ),
    Case("tova", 8, (24, *DECODE), inputs="hard", group=4),
    Case("tova", 5, (24, *(1,) * 200), group=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_the_last_query_attends_to(case):
    compare(case)


def test_all_heads_keep_one_set():
    for layer, _ in lockstep(Case("tova", 5, (24, *DECODE), heads=4, group=1)):
        for row in retained(layer):
            assert row == [row[0]] * 4


def test_heads_differ_when_each_ranks_for_itself():
    *_, (layer, _) = lockstep(Case("tova:per_head=true", 5, (24, *DECODE), heads=4, group=1))
    assert len({tuple(head) for head in retained(layer)[0]}) > 1


def test_may_evict_the_newest_token_unless_it_is_protected():
    """policies.md §19.8."""
    newest = {}
    for policy in ("tova", "tova:protect_last=true"):
        case = Case(policy, 5, (24, *DECODE))
        newest[policy] = [
            seen - 1 in held
            for layer, turn in lockstep(case)
            for seen, (held, *_) in zip(turn.seen, retained(layer), strict=True)
        ]
    assert not all(newest["tova"])
    assert all(newest["tova:protect_last=true"])


def test_constant_attention_makes_it_a_sliding_window():
    """All scores tie in every step, and among equals the older token goes."""
    for layer, turn in lockstep(Case("tova", 7, (24, *DECODE), inputs="constant")):
        assert retained(layer) == [[list(range(seen - 7, seen))] * 2 for seen in turn.seen]
