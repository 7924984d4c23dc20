"""Ada-KV: SnapKV's choice under head budgets that follow the scores."""

import pytest

from kvkeep import BudgetError

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, make_layer, refuse_last_turn, retained

CASES = [
    *family("adakv:window=4", budgets=(5, 16)),
    *variant("adakv:window=3,kernel=3,pool=avg,decode=score", budgets=(4, 12)),
    Case("adakv:window=2,alpha=0", 12, CHAT, pads=(0, 4), heads=4, group=1),
    Case("adakv:window=2,alpha=1", 12, CHAT, heads=4, group=1),
    Case("adakv:window=2,alpha=0.35,kernel=1", (6, 12), (40, *DECODE), pads=(3, 0), heads=3),
    Case("adakv:window=2,decode=grow,room=20", (40, 33), (60, *(1,) * 20), pads=(0, 5), heads=3),
    Case("adakv:window=4", 20, (60, *(1,) * 200), heads=2, group=1),
    Case("adakv:window=3", 7, (24, *DECODE), inputs="constant"),
    Case("adakv:window=3", 8, (24, *DECODE), inputs="hard"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shares_the_budget_among_heads(case):
    compare(case)


def test_heads_differ_and_add_up_and_the_layer_holds_no_more_than_equal_heads_need():
    case = Case("adakv:window=2,kernel=1,alpha=0.1", 12, (60, *DECODE), heads=4, group=1, pads=(0, 0))
    for layer, _ in lockstep(case):
        for row in retained(layer):
            sizes = [len(head) for head in row]
            assert sum(sizes) == 4 * 12
            assert len(set(sizes)) > 1
        assert layer.store.capacity == int(layer.block.budget.max()) + 1
        entries = 2 * (4 * (12 + 1) + 1)
        beside = sum(tensor.nbytes for name, tensor in layer.block.per_row().items() if tensor.shape[1:2] != (53,))
        assert layer.memory().allocated_bytes == entries * ((8 + 6) * 4 + 4 + 4) + beside
        assert layer.memory().occupied_bytes < layer.memory().allocated_bytes


def test_alpha_1_is_snapkv():
    ada, snap = (
        [retained(layer) for layer, _ in lockstep(Case(f"{name}window=3", 12, (40, *DECODE)))]
        for name in ("adakv:alpha=1,", "snapkv:")
    )
    assert ada == snap


def test_a_reset_layer_starts_with_equal_budgets():
    case = Case("adakv:window=2,kernel=1", 12, (60, *DECODE), heads=4, group=1)
    (*_, (layer, _)) = lockstep(case)
    assert layer.block.budget.shape == (2, 4)
    layer.reset()
    assert not layer.allocated


def test_growing_past_a_heads_budget_is_refused():
    case = Case("adakv:window=2,decode=grow,room=4", 12, (40, *(1,) * 5), heads=3)
    refuse_last_turn(case)
    with pytest.raises(BudgetError):
        make_layer(Case("adakv:window=9", 8, (1,)))
