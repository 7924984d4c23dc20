"""Hidden units: frequencies of constructed activations, silencing against changed weights, overlap."""

import copy

import pytest
import torch
from constructed import Axes, context
from uniform_model import subject, tokens, unlimited, writer

from kvkeep.models.load import quiet
from kvkeep_lab.analysis.groups import mlp_units
from kvkeep_lab.analysis.groups.mlp_units import MlpUnits
from kvkeep_lab.analysis.measure import Mlp, Skipped


def shown(frequencies, activations, *, block, layer=0):
    for first in range(0, len(activations), block):
        part = activations[first : first + block]
        frequencies.mlp(Mlp(layer, first, torch.zeros(len(part), 2), torch.zeros(len(part), 2), part))
    return frequencies


def every(length, *steps):
    """Unit ``u`` is active in every ``steps[u]``-th token."""
    return torch.stack([(torch.arange(length) % step == 0).float() for step in steps], dim=1)


@pytest.mark.parametrize("block", [400, 128, 37])
def test_frequencies_of_units_that_are_active_every_so_often(block):
    found = shown(mlp_units.Frequencies(1, halves_at=200), every(400, 1, 2, 5, 400), block=block)
    assert found.positive()[0].tolist() == pytest.approx([1.0, 0.5, 0.2, 1 / 400])
    assert found.large()[0].tolist() == pytest.approx([1.0, 0.5, 0.2, 1 / 400])
    first, second = found.halves()
    assert first[0].tolist() == pytest.approx([1.0, 0.5, 0.2, 1 / 200])
    assert second[0].tolist() == pytest.approx([1.0, 0.5, 0.2, 0.0])
    assert found.has_zeros


@pytest.mark.parametrize("block", [300, 50])
def test_a_smooth_activation_is_large_from_one_percent_of_the_largest_first_one(block):
    activations = torch.full((300, 3), -0.05)
    activations[:, 1] = 0.011
    activations[:, 2] = 0.009
    activations[64, 0] = 1.0  # the largest of the first 128
    activations[200, 0] = 100.0  # too late to count
    found = shown(mlp_units.Frequencies(1, halves_at=150), activations, block=block)
    assert found.large()[0].tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert found.positive()[0].tolist() == pytest.approx([2 / 300, 1.0, 1.0])
    assert not found.has_zeros


def test_a_text_shorter_than_the_calibration_counts():
    found = shown(mlp_units.Frequencies(1, halves_at=10), every(20, 2), block=7)
    assert found.positive()[0].tolist() == [0.5]


def test_a_block_without_units_is_skipped():
    frequencies = mlp_units.Frequencies(1, halves_at=1)
    with pytest.raises(Skipped, match="no hidden activation"):
        frequencies.mlp(Mlp(0, 0, torch.zeros(1, 2), torch.zeros(1, 2), None))
    with pytest.raises(Skipped, match="not found"):
        frequencies.positive()


OUT = {"llama": "mlp.down_proj", "gpt2": "mlp.c_proj", "opt": "fc2"}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@torch.inference_mode()
def test_silent_units_are_columns_of_zeros(family):
    of = writer(family)
    n_units = {"llama": 48, "gpt2": 128, "opt": 48}[family]
    draw = torch.Generator().manual_seed(0)
    silent = [torch.rand(n_units, generator=draw) < 0.5 for _ in range(2)]
    ids = tokens(12)[None]
    before = of.model(ids).logits
    with mlp_units.Hushed(of.model, silent):
        hushed = of.model(ids).logits
    assert torch.equal(of.model(ids).logits, before)  # nothing is left behind
    with quiet():
        changed = copy.deepcopy(of.model)
    for name, module in changed.named_modules():
        if name.endswith(OUT[family]):
            layer = int(next(part for part in name.split(".") if part.isdigit()))
            rows = module.weight if family == "gpt2" else module.weight.T  # Conv1D has inputs first
            rows[silent[layer]] = 0.0
    assert torch.allclose(hushed, changed(ids).logits, atol=1e-5)
    assert not torch.allclose(hushed, before, atol=1e-2)


def test_layers_with_two_activation_functions_cannot_be_silenced():
    with quiet():
        model = copy.deepcopy(writer().model)
    model.model.layers[1].mlp.other = torch.nn.ReLU()
    silent = [torch.zeros(48, dtype=torch.bool)] * 2
    with pytest.raises(Skipped, match="a decoder layer has 2 activation functions"):
        mlp_units.Hushed(model, silent)
    del model.model.layers[1].mlp.other
    model.config.num_hidden_layers = 3
    with pytest.raises(Skipped, match="list of decoder layers was not found"):
        mlp_units.Hushed(model, silent)


def test_chosen_units_are_equally_many():
    frequency = [torch.tensor([0.9, 0.1, 0.5, 0.4, 0.3, 0.8, 0.2, 0.7, 0.6, 0.05])]
    sets = mlp_units.chosen(frequency, 0.2, seed=0)
    assert sets["frequent"][0].nonzero()[:, 0].tolist() == [0, 5]
    assert sets["rare"][0].nonzero()[:, 0].tolist() == [1, 9]
    assert int(sets["random"][0].sum()) == 2


def test_overlap_of_the_same_and_of_opposite_units():
    one = [torch.arange(40.0)]
    same = mlp_units.overlap(one, [one[0] * 3])
    assert same["spearman_by_layer"] == pytest.approx([1.0])
    assert same["jaccard_by_layer"] == [1.0]
    opposite = mlp_units.overlap(one, [-one[0]])
    assert opposite["spearman_by_layer"] == pytest.approx([-1.0])
    assert opposite["jaccard_by_layer"] == [0.0]
    assert opposite["chance"] == pytest.approx((16 / 40) / (8 - 16 / 40))


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp_units, "WINDOW", 30)
        patch.setattr(mlp_units, "OTHER", 40)
        text = tokens(64)
        measurement = MlpUnits(context(text, layers=2))
        for layer in range(2):
            for first in range(0, 64, 16):
                part = every(64, *range(1, 49))[first : first + 16]
                nothing = torch.zeros(16, 2)
                measurement.mlp(Mlp(layer, first, nothing, nothing, part))
        measurement.runs(subject(unlimited(writer()), text), lambda share: None)
        return measurement.result()


def test_result_of_a_power_law(result):
    # unit u is active in ceil(64 / u) of 64 tokens
    assert result["always_by_layer"] == [1 / 48] * 2
    assert result["above_by_layer"] == pytest.approx([sum(-(-64 // u) / 64 > 0.2 for u in range(1, 49)) / 48] * 2)
    assert result["curve"]["by_layer"][0][0] == 1.0
    assert set(result["loss"]) == {"full", "frequent", "random", "rare", "above"}
    assert len({round(value, 6) for value in result["loss"].values()}) == 5


def claims(result, **changes):
    return {claim.source: claim.verdict for claim in MlpUnits.claims({**result, **changes})}


def test_verdicts(result):
    base = {"full": 3.0, "frequent": 3.5, "random": 3.05, "rare": 3.0, "above": 4.0}
    overlap = {"spearman_by_layer": [0.9, 0.8], "jaccard_by_layer": [0.6, 0.5], "chance": 0.05}
    found = claims(result, loss=base, guessing=8.0, texts=overlap)
    assert found == {"H2O, Figure 11": "agree", "H2O, Table 12": "agree", "H2O, Figure 12": "agree"}
    assert MlpUnits.reading({**result, "loss": base, "guessing": 8.0, "texts": overlap}).verdict == "agree"
    flat = claims(result, median_by_layer=[0.5, 0.5], loss={**base, "random": 3.4}, texts={**overlap, "chance": 0.4})
    assert flat == {"H2O, Figure 11": "differ", "H2O, Table 12": "differ", "H2O, Figure 12": "differ"}
    assert claims(result, loss=base, guessing=3.0)["H2O, Table 12"] == "cannot tell"


def test_the_picture_shows_first_and_last_layer(result):
    axes = Axes()
    MlpUnits.draw(result, axes)
    labels = [options["label"] for name, _, options in axes.calls if name == "plot"]
    assert labels == ["layer 0", "layer 1"]
