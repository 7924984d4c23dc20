"""Where kept tokens stand: closed forms under uniform attention, and readings of constructed numbers."""

import pytest
import torch
from constructed import Axes, context
from uniform_model import loss_when, subject, tokens, uniform

from kvkeep_lab.analysis.groups import _ranks as stats
from kvkeep_lab.analysis.groups import position_bias
from kvkeep_lab.analysis.groups.position_bias import PositionBias

LENGTH = 40


@pytest.fixture(scope="module")
def result():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(position_bias, "WINDOW", LENGTH)
        patch.setattr(position_bias, "SHORT", LENGTH)
        patch.setattr(position_bias, "TEXTS", 1)
        text = tokens(LENGTH)
        measurement = PositionBias(context(text))
        measurement.runs(subject(uniform(), text), lambda share: None)
        return measurement.result()


def test_uniform_attention_keeps_the_first_tokens(result):
    kept = result["kept"]["h2o"]
    assert result["budget"] == 8
    assert kept["first_half"] == 1.0
    assert kept["first_tenth"] == 0.5
    assert kept["histogram"] == [0.25] * 4 + [0.0] * 16
    assert kept["first_half_by_layer"] == [1.0, 1.0]
    # an average over rows does not make early keys and late ones equal: early rows share among fewer keys
    assert result["kept"]["h2o_avg"]["first_half"] == 1.0


def test_random_tokens_are_spread():
    positions = [torch.randint(0, 1000, (2, 2, 500), generator=torch.Generator().manual_seed(0)) for _ in range(3)]
    found = position_bias.described(positions, 1000)
    assert found["first_half"] == pytest.approx(0.5, abs=0.03)
    assert found["first_tenth"] == pytest.approx(0.1, abs=0.02)
    assert found["entropy"] == pytest.approx(1.0, abs=0.01)


def test_empty_slots_do_not_count():
    found = position_bias.described([torch.tensor([[[0, 1, 6, -1, -1]]])], 8)
    assert found["first_half"] == pytest.approx(2 / 3)
    assert found["entropy"] < 1.0


def test_mass_by_place_is_that_of_uniform_attention(result):
    expected = stats.uniform_mass(LENGTH, [None]).view(20, 2).sum(dim=1) / LENGTH
    assert result["mass"] == pytest.approx(expected.tolist(), abs=1e-5)
    assert result["uniform"] == pytest.approx(expected.tolist(), abs=1e-5)


def test_losses(result):
    text = tokens(LENGTH)
    assert result["loss"]["full"] == pytest.approx(loss_when(lambda t, layer: range(t + 1), text, uniform()), abs=1e-5)

    def visible(t, layer):
        start = t - t % position_bias.STRIDE
        kept = range(start) if start <= 8 else [*range(4), *range(start - 4, start)]
        return [*kept, *range(start, t + 1)]

    assert result["loss"]["h2o"] == pytest.approx(loss_when(visible, text, uniform()), abs=1e-5)
    assert len(set(result["loss"].values())) >= 3


@pytest.mark.parametrize(
    ("first_half", "average", "verdict"),
    [(0.8, 3.1, "agree"), (0.8, 3.0, "cannot tell"), (0.8, 2.9, "differ"), (0.5, 3.1, "differ")],
)
def test_verdicts(result, first_half, average, verdict):
    kept = {**result["kept"], "h2o": {**result["kept"]["h2o"], "first_half": first_half}}
    loss = {**result["loss"], "h2o": 3.0, "h2o_avg": average}
    assert PositionBias.reading({**result, "kept": kept, "loss": loss}).verdict == verdict


def test_the_picture_has_a_line_per_policy(result):
    axes = Axes()
    PositionBias.draw(result, axes)
    assert sum(name == "plot" for name, _, _ in axes.calls) == 3
