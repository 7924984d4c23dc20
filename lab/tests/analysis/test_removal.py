"""Hiding keys under uniform attention, where sums fall with the position: losses against plain loops."""

import math
from dataclasses import replace

import pytest
import torch
from constructed import Axes, context
from uniform_model import loss_when, subject, tokens, uniform

from kvkeep_lab import hindsight
from kvkeep_lab.analysis.groups import removal
from kvkeep_lab.analysis.groups.removal import Removal
from kvkeep_lab.analysis.measure import Skipped

LENGTH = 30


@pytest.fixture
def result(monkeypatch):
    monkeypatch.setattr(removal, "WINDOW", LENGTH)
    text = tokens(2 * LENGTH)
    measurement = Removal(context(text))
    measurement.runs(subject(uniform(), text), lambda share: None)
    return measurement.result(), text


def hidden(keys):
    return lambda t, layer: [j for j in range(t + 1) if j == t or j not in keys]


def expected(text, keys):
    halves = text[:LENGTH], text[LENGTH:]
    return sum(loss_when(hidden(keys), half, uniform()) for half in halves) / 2


def test_the_heaviest_keys_of_uniform_attention_are_the_first(result):
    result, text = result
    assert result["shares"] == [0.01, 0.05, 0.1, 0.2]
    assert result["full"] == pytest.approx(expected(text, set()), abs=1e-5)
    assert result["heavy"][-1] == pytest.approx(expected(text, set(range(6))), abs=1e-5)
    assert result["heavy"][2] == pytest.approx(expected(text, {0, 1, 2}), abs=1e-5)
    assert result["heavy_but_first"][-1] == pytest.approx(expected(text, set(range(1, 6))), abs=1e-5)
    assert result["light"][-1] == pytest.approx(expected(text, set(range(24, 30))), abs=1e-5)
    assert result["heavy"][0] == pytest.approx(result["full"], abs=1e-5)  # one percent of 30 keys is none
    assert result["perplexity"]["heavy"] == pytest.approx(math.exp(result["heavy"][-1]))


def test_random_keys_are_as_many_and_follow_the_seed():
    text = tokens(LENGTH)[None]
    totals = hindsight.measure(uniform().model, text)
    sets = {seed: removal.chosen(totals, 0.2, seed) for seed in (0, 1)}
    for keys in (sets[0]["heavy"], sets[0]["random"], sets[0]["light"]):
        assert all((mask.sum(dim=-1) == 6).all() for mask in keys.chosen.values())
    assert any(
        not torch.equal(mask, sets[1]["random"].chosen[layer]) for layer, mask in sets[0]["random"].chosen.items()
    )
    assert sets[0]["heavy"].chosen[0][..., 0].all()  # sparing the first token changes a copy


def found(*, full=3.0, heavy=3.0, spared=3.0, drawn=3.0, guessing=8.0):
    losses = {"heavy": [heavy], "heavy_but_first": [spared], "random": [drawn], "light": [full]}
    return {"shares": [0.2], "full": full, "guessing": guessing, **losses}


@pytest.mark.parametrize(
    ("result", "verdict"),
    [
        (found(heavy=5.0, spared=4.5, drawn=3.2), "agree"),
        (found(heavy=3.3, spared=3.3, drawn=3.2), "differ"),  # random keys cost nearly as much
        (found(heavy=3.05), "differ"),  # no harm worth the name
        (found(full=7.8, heavy=9.9), "cannot tell"),  # the model knows nothing of this text
    ],
)
def test_verdicts(result, verdict):
    assert Removal.reading(result).verdict == verdict


def test_a_sink_is_told_from_heavy_hitters():
    assert "first token" in Removal.reading(found(heavy=5.0, spared=3.2)).meaning
    assert "first token" not in Removal.reading(found(heavy=5.0, spared=4.8)).meaning


def test_the_picture_has_all_sets():
    axes = Axes()
    Removal.draw(found(heavy=5.0), axes)
    assert sum(name == "plot" for name, _, _ in axes.calls) == 4


def test_a_picture_of_great_harm_has_a_logarithmic_axis():
    shown = {}
    for heavy in (5.0, 20.0):
        axes = Axes()
        Removal.draw(found(heavy=heavy), axes)
        shown[heavy] = [args for name, args, _ in axes.calls if name == "set_yscale"]
    assert shown == {5.0: [], 20.0: [("log",)]}


def test_a_loss_that_is_no_number_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setattr(removal, "WINDOW", LENGTH)
    monkeypatch.setattr(removal._shared, "loss", lambda *_: math.nan)
    text = tokens(LENGTH)
    with pytest.raises(Skipped, match="the model's loss on this text is no number"):
        Removal(context(text)).runs(subject(uniform(), text), lambda share: None)


def test_a_model_with_few_positions_has_no_window_beside_new_tokens():
    few = replace(uniform(), checkpoint=replace(uniform().checkpoint, position_limit=20))
    given = subject(few, tokens(LENGTH))
    assert removal._shared.windows(given, rows=1, length=LENGTH, room=18).shape == (1, 2)
    with pytest.raises(Skipped, match="has 20 positions, too few for a window of text and 19 new tokens"):
        removal._shared.windows(given, rows=1, length=LENGTH, room=19)
