"""Expected attention: the tokens stay that queries like the prompt's would attend to."""

import pytest
import torch
from phases import phase_of
from transformers import HunYuanDenseV1Config

import kvkeep
from kvkeep import AttentionOptions, BudgetError, Layer, parse
from kvkeep.policies._queries import met
from kvkeep.rotary import Rotation

from .cases import CHAT, DECODE, Case, family, variant
from .lockstep import compare, make_layer, retained

CASES = [
    *family("expected_attention:recent=3,sinks=1", budgets=(3, 5, 16)),
    *variant("expected_attention", budgets=(9, 24)),
    *variant("expected_attention:recent=0,sinks=0,epsilon=0.0", budgets=(2, 16)),
    Case("expected_attention:recent=2", 12, CHAT, chunk=4, heads=1),
    Case("expected_attention:recent=2", 12, (40, *DECODE), group=4, heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_keeps_what_is_expected_to_be_looked_at(case):
    compare(case)


@pytest.mark.parametrize("scaling", [1.0, 1.3])
@pytest.mark.parametrize("mode", ["true", "slot"])
def test_queries_are_averaged_over_the_next_positions(mode, scaling, monkeypatch):
    """An unrotated query times a key that `met` returns is the mean of the products at the next positions."""
    views, n, future = [], 17, 9
    honest = met

    def spied(view, number):
        views.append((view, honest(view, number)))
        return views[-1][1]

    monkeypatch.setattr("kvkeep.policies.expected_attention.met", spied)
    rotation = Rotation(torch.tensor([1.0, 0.2, 0.01]), scaling=scaling)
    plain = torch.randn(3, 2, 4, n, 10, generator=torch.Generator().manual_seed(0))
    query, keys = (rotation.apply(x, torch.arange(n)[None, None]) for x in plain[:2])
    layer = Layer(parse(f"expected_attention:future={future}"), 12, rotation=rotation if mode == "slot" else None)
    layer.rotary = rotation
    layer.step(query, keys, plain[2], options=AttentionOptions(scaling=0.3), phase=phase_of(query))
    view, keys_met = views[0]
    torch.testing.assert_close(view.queries.vectors, plain[0], rtol=1e-4, atol=1e-5)
    found = (plain[0][:, :, :, None] * keys_met[:, :, None]).sum(dim=-1)
    later = [rotation.apply(plain[0], torch.full((1, 1, n), n + t)) for t in range(future)]
    want = torch.stack([(x[:, :, :, None] * keys[:, :, None]).sum(dim=-1) for x in later]).mean(dim=0)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)


def test_a_rotation_that_cannot_be_undone_and_a_small_budget_are_refused():
    with pytest.raises(kvkeep.UnsupportedModelError, match="cannot undo for this 'hunyuan_v1_dense'"):
        kvkeep.BoundedCache(HunYuanDenseV1Config(num_hidden_layers=1), "expected_attention", 16)
    with pytest.raises(BudgetError):
        make_layer(Case("expected_attention", 3, (1,)))


def test_a_key_that_is_no_number_breaks_its_head_alone():
    g = torch.Generator().manual_seed(1)
    layer, (query, keys, values) = (
        Layer(parse("expected_attention:recent=2"), 9),
        torch.randn(3, 2, 2, 30, 8, generator=g),
    )
    clean = Layer(layer.policy, 9)
    clean.step(query, keys.clone(), values, options=AttentionOptions(scaling=0.3), phase=phase_of(keys))
    keys[0, 0, 11] = torch.nan
    layer.step(query, keys, values, options=AttentionOptions(scaling=0.3), phase=phase_of(keys))
    assert [len(head) for row in retained(layer) for head in row] == [9] * 4
    assert retained(layer)[1] == retained(clean)[1]
