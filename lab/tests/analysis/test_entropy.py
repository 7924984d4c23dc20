"""Row entropy: rows whose entropy is known, Gaussian logits, and the gain."""

import math

import pytest
import torch
from constructed import Axes
from shown import context, hide_future, logits_of, random_logits, show

from kvkeep_lab.analysis.groups import entropy
from kvkeep_lab.analysis.groups.entropy import Entropy, entropies, gains, slope, variance


def measured(logits):
    layers, heads, n, _ = logits.shape
    return show(Entropy(context(n, layers=layers, heads=heads)), logits, block=100).result()


def test_uniform_rows_have_the_entropy_of_their_number():
    result = measured(torch.zeros(2, 2, 600, 600))
    assert result["slope"] == pytest.approx(1.0, abs=1e-5)
    assert result["off_by_layer"] == pytest.approx([0.0, 0.0], abs=1e-5)  # no variance: exact
    assert result["sigma2_by_layer"] == pytest.approx([0.0, 0.0], abs=1e-9)
    curves = result["curves"]
    assert curves["entropy"] == pytest.approx(curves["ln i"], abs=1e-5)
    assert curves["entropy with gain"] == pytest.approx(curves["entropy"], abs=1e-5)  # a gain changes nothing
    assert 17.0 <= curves["i"][0] < 20.0
    assert 500.0 < curves["i"][-1] <= 600.0


def test_rows_that_look_at_one_key_have_none():
    result = measured(logits_of(torch.eye(200)[None, None]))
    assert result["effective_keys"] == pytest.approx(1.0, abs=1e-4)
    assert Entropy.reading(result).verdict == "differ"


def test_gaussian_logits_follow_the_formula():
    """observables.md F2: 5.741 measured and 5.738 by the formula at i = 512, σ² = 1."""
    weights = random_logits(100, 1, 512).softmax(dim=-1)
    assert entropies(weights).mean().item() == pytest.approx(5.741, abs=0.01)
    result = measured(random_logits(1, 4, 500, 500))
    assert result["sigma2_by_layer"] == pytest.approx([1.0], abs=0.01)
    assert result["off_by_layer"] == pytest.approx([0.0], abs=0.02)
    assert [claim.verdict for claim in Entropy.claims(result)] == ["agree", "agree", "agree"]


def test_a_row_under_a_window_has_the_variance_of_the_keys_that_it_sees():
    n, window = 400, 50
    place = torch.arange(n)
    outside = place[:, None] - place >= window
    logits = torch.stack([random_logits(4, n, n).masked_fill(outside, -torch.inf), random_logits(4, n, n, scale=1.5)])
    result = measured(logits)
    assert result["sigma2_by_layer"] == pytest.approx([1.0, 2.25], rel=0.05)
    assert result["calmest_layer"] == 0
    assert result["off_by_layer"][0] == pytest.approx(0.0, abs=0.05)


def test_the_gain_brings_gaussian_rows_to_the_budget():
    """observables.md F3: at (i, k) = (1024, 512) the entropy is 6.240, ln k is 6.238."""
    gain = gains(torch.tensor([1024.0]), 512)
    assert gain.item() == pytest.approx(math.sqrt(2 * math.log(2)))
    weights = (gain * random_logits(100, 1, 1024)).softmax(dim=-1)
    assert entropies(weights).mean().item() == pytest.approx(6.240, abs=0.01)


def test_the_gain_is_never_below_one():
    k = 100
    assert gains(torch.tensor([10.0, 100.0, 160.0]), k).tolist() == [1.0, 1.0, 1.0]
    assert gains(torch.tensor([k * math.exp(0.5)]).double(), k).item() == pytest.approx(1.0)
    assert gains(torch.tensor([3600.0]), 720).item() == pytest.approx(1.79, abs=0.005)


def test_variance_is_over_what_a_row_sees():
    logits = hide_future(random_logits(2, 30, 30) * 3 + 5)
    found = variance(logits)
    for row in range(30):
        expected = logits[:, row, : row + 1].double().var(dim=-1, correction=0)
        torch.testing.assert_close(found[:, row], expected)


def test_every_sampled_row_lands_in_its_place():
    """Rows of a known entropy, which no smooth curve would match: i attends equally to 1 + i mod 7 keys."""
    n = 1500
    counts = [1 + i % 7 if i > 7 else 1 for i in range(1, n + 1)]
    weights = torch.zeros(n, n)
    for row, count in enumerate(counts):
        weights[row, :count] = 1 / count
    measurement = show(Entropy(context(n)), logits_of(weights[None, None]), block=111)
    rows, found = measurement._rows.tolist(), measurement._found[0, :, 0].tolist()
    assert len(rows) > 512
    assert found == pytest.approx([math.log(counts[row]) for row in rows], abs=1e-4)
    curves = measurement.result()["curves"]
    last = [row for row in rows if math.log((row + 1) / 17) / math.log((rows[-1] + 1) / 17) >= 23 / 24]
    assert curves["i"][-1] == pytest.approx(sum(last) / len(last) + 1)
    assert curves["entropy"][-1] == pytest.approx(sum(math.log(counts[row]) for row in last) / len(last), abs=1e-4)


def test_blocks_without_a_sampled_row_change_nothing(monkeypatch):
    monkeypatch.setattr(entropy, "SAMPLES", 10)
    logits = random_logits(2, 2, 120, 120)
    whole, cut = (show(Entropy(context(120, layers=2, heads=2)), logits, block=n).result() for n in (120, 5))
    assert cut["slope"] == pytest.approx(whole["slope"])
    assert cut["curves"]["entropy"] == pytest.approx(whole["curves"]["entropy"])


def test_slope_of_a_line():
    x = torch.tensor([1.0, 2.0, 4.0]).double()
    assert slope(x, 3 - 2 * x) == pytest.approx(-2.0)


def test_it_draws_finite_lines():
    axes = Axes()
    Entropy.draw(measured(torch.zeros(1, 1, 200, 200)), axes)
    drawn = [args for name, args, _ in axes.calls if name == "plot"]
    assert len(drawn) == 5
    assert all(math.isfinite(value) for _, values in drawn for value in values)
