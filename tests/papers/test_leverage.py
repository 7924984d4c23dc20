"""Leverage: keys that stand out from all keys of the prompt stay, also once those have gone."""

import pytest
import torch
from phases import phase_of

from kvkeep import AttentionOptions, BudgetError, Layer, parse
from kvkeep.types import Phase

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, lockstep, make_layer, played, retained
from .rules_leverage import Leverage, solved

CASES = [
    *family("leverage:recent=3,sinks=1", budgets=(3, 5, 16)),
    *variant("leverage", budgets=(9, 24)),
    *variant("leverage:recent=2,sinks=0,ridge=2.5,rotated=true", budgets=(3, 16)),
    Case("leverage:sinks=2", 12, CHAT, chunk=1, heads=1),
    *family("blend:recent=3,sinks=1,window=4,kernel=3", budgets=(3, 7, 16)),
    *variant("blend", budgets=(9, 24)),
    *variant("blend:recent=4,sinks=0,window=2,kernel=5,share=0.25", budgets=(5, 16)),
    Case("leverage:recent=0", 12, (40, *DECODE), inputs="drift", heads=1),
]
OPTIONS = AttentionOptions(scaling=0.5)


@pytest.mark.long
@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_the_keys_that_stand_out(case):
    compare(case)


def test_an_example_by_hand():
    """Four keys on a line and one beside it: the one beside explains its direction alone, the ends most of theirs."""
    rule = Leverage(3, 1, sinks=0, ridge=0.0)
    rule.keys[0] = [[-2.0, 0.0], [-1.0, 0.0], [0.0, 5.0], [1.0, 0.0], [2.0, 0.0]]
    rule.counted[0] = list(range(5))
    found = rule.leverage(0, list(range(5)))
    assert found == pytest.approx({0: 0.45, 1: 0.15, 2: 0.8, 3: 0.15, 4: 0.45})
    assert solved([[0.0, 2.0], [4.0, 0.0]], [2.0, 4.0]) == [1.0, 1.0]


def test_chunks_add_up_to_the_whole_prompt():
    """The scatter does not depend on where a prompt is cut, nor on what was evicted."""
    found = []
    for chunk in (None, 1, 7):
        case = Case("leverage:recent=2,sinks=3", 9, (40,), chunk=chunk, pads=(0, 9))
        layer = [layer for layer, _ in lockstep(case)][-1]
        found.append(layer.state)
    assert found[0]["count"].tolist() == [[37.0, 37.0], [28.0, 28.0]]
    for state in found[1:]:
        for name in ("count", "mean", "scatter"):
            torch.testing.assert_close(state[name], found[0][name], rtol=1e-5, atol=1e-5)


def test_generated_tokens_do_not_compete():
    """Beside the sinks and the chosen tokens there is a queue of as many tokens as are protected."""
    chosen = []
    for _, turn in lockstep(Case("leverage:recent=4", 16, (40, *DECODE))):
        chosen = chosen or [[head[:12] for head in row] for row in turn.kept]
        for kept_row, chosen_row, seen in zip(turn.kept, chosen, turn.seen, strict=True):
            assert kept_row == [[*head, *range(seen - 4, seen)] for head in chosen_row]


def feed(layer, keys):
    return layer.step(keys, keys, keys, options=OPTIONS, phase=phase_of(keys))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e3])
def test_identical_keys_and_fewer_tokens_than_dims(dtype, scale):
    """A singular scatter: the queue is all that is left of a choice, and nothing fails."""
    layer = Layer(parse("leverage:recent=2"), 8)
    feed(layer, scale * torch.ones(2, 1, 30, 16, dtype=dtype))
    assert [len(head) for row in retained(layer) for head in row] == [8, 8]
    assert all(head[:4] == [0, 1, 2, 3] and head[-2:] == [28, 29] for row in retained(layer) for head in row)
    layer = Layer(parse("leverage:recent=2"), 8)
    keys = scale * torch.randn(1, 1, 12, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    feed(layer, keys.repeat(1, 1, 3, 1))
    assert len(retained(layer)[0][0]) == 8


def test_a_far_mean_does_not_drown_the_scatter():
    """Keys of some models have a bias a thousand times as large as their spread; float32 sums of squares lose it."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(1, 1, 400, 8, generator=generator)
    kept = []
    for bias in (0.0, 1000.0):
        layer = Layer(parse("leverage:recent=0,sinks=0"), 40, prefill_chunk=50)
        feed(layer, keys + bias)
        kept.append(set(retained(layer)[0][0]))
    assert len(kept[0] & kept[1]) >= 38


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["leverage", "blend"])
def test_a_key_that_is_no_number_spoils_nothing_but_itself(name, bad):
    generator = torch.Generator().manual_seed(1)
    keys = torch.randn(1, 2, 40, 8, generator=generator)
    clean, spoilt = (Layer(parse(f"{name}:recent=2,sinks=1"), 9) for _ in range(2))
    feed(clean, keys)
    wrong = keys.clone()
    wrong[:, 0, 11] = bad
    feed(spoilt, wrong)
    assert spoilt.state["scatter"].isfinite().all()
    assert 11 not in retained(spoilt)[0][0]
    assert retained(spoilt)[0][1] == retained(clean)[0][1]


def test_a_second_prompt_adds_to_the_first_and_a_new_row_begins_at_zero():
    layer = make_layer(Case("leverage:recent=2", 9, (1,), pads=(0, 0)))
    keys = torch.randn(2, 2, 30, 8, generator=torch.Generator().manual_seed(2))
    feed(layer, keys)
    feed(layer, keys[:, :, :1])
    assert layer.state["count"].tolist() == [[26.0] * 2] * 2
    layer.step(*[keys[:, :, :5]] * 3, options=OPTIONS, phase=Phase.PREFILL)
    assert layer.state["count"].tolist() == [[31.0] * 2] * 2
    layer.block.clear_row(0)
    assert [float(layer.state[name][0].abs().sum()) for name in ("count", "mean", "scatter")] == [0.0] * 3
    assert layer.state["count"].tolist() == [[0.0] * 2, [31.0] * 2]
    layer.select_rows(torch.tensor([1, 0]))
    assert layer.state["count"].tolist() == [[31.0] * 2, [0.0] * 2]
    layer.reset()
    feed(layer, keys)
    assert layer.state["count"].tolist() == [[26.0] * 2] * 2


@pytest.mark.long
def test_a_share_of_nothing_is_leverage_and_of_all_is_attention():
    case = Case("blend:share=0,recent=4", 16, (40, *DECODE[:9]), chunk=15)
    assert played(case, case.policy) == played(case, "leverage:recent=4")
    case = Case("blend:share=1,recent=4,sinks=0,window=4,kernel=7", 16, (40, *DECODE[:9]))
    assert played(case, case.policy) == played(case, "snapkv:recent=4,window=4")


def test_more_protected_than_the_budget_is_refused():
    make_layer(Case("leverage", 4, (1,)))
    with pytest.raises(BudgetError):
        make_layer(Case("leverage", 3, (1,)))
