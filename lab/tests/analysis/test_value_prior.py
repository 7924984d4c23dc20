"""Retention by threshold, with and without the value prior."""

import pytest
import torch
from constructed import Axes
from shown import context, hide_future, random_logits, show

from kvkeep_lab.analysis.groups.value_prior import THRESHOLDS, ValuePrior, retention


def measured(logits, values):
    layers, heads, n, _ = logits.shape
    kv_heads = values.shape[1]
    return show(ValuePrior(context(n, layers=layers, heads=heads, kv_heads=kv_heads)), logits, values).result()


def test_retention_of_a_geometric_series():
    score = 10.0 ** -torch.arange(5).double()  # 1, 0.1 ... 1e-4
    found = retention(7.0 * score[None].float())
    for threshold, share in zip(THRESHOLDS, found.tolist(), strict=True):
        assert share == pytest.approx(sum(one >= threshold * 0.999 for one in score.tolist()) / 5), threshold


def test_equal_values_change_nothing():
    n = 150
    values = torch.ones(1, 1, n, 4) * torch.tensor([1.0, -1.0, 1.0, -1.0])
    result = measured(random_logits(1, 2, n, n), values)
    assert result["with"] == pytest.approx(result["without"])
    assert result["change"] == pytest.approx(0.0)
    assert result["first_token_size"] == pytest.approx(1.0)
    assert ValuePrior.reading(result).verdict == "cannot tell"


def test_a_few_large_values_lower_retention():
    """All tokens but a window of three have a squared norm of 1/100 of the others'."""
    n = 150
    values = torch.ones(1, 1, n, 1)
    values[:, :, 100:103] = 10.0
    result = measured(torch.zeros(1, 1, n, n), values)
    mass = torch.tensor([sum(1 / i for i in range(j, n + 1)) for j in range(1, n + 1)])
    sizes = values.flatten().square()
    prior = torch.stack([sizes[max(0, j - 2) : j + 3].mean() for j in range(n)])
    prior = prior / prior.max()
    assert result["without"] == pytest.approx(retention(mass[None]).tolist(), abs=1.1 / n)  # ties with a threshold
    assert result["with"] == pytest.approx(retention((mass * prior)[None]).tolist(), abs=1.1 / n)
    assert result["change"] < -0.15
    assert ValuePrior.reading(result).verdict == "agree"


def test_groups_are_averaged_and_heads_kept_apart():
    n, layers = 140, 2
    logits, values = random_logits(layers, 4, n, n, scale=3.0), random_logits(layers, 2, n, 3, seed=1)
    result = measured(logits, values)
    mass = hide_future(logits).softmax(dim=-1).sum(dim=2).view(layers, 2, 2, n).mean(dim=2).flatten(0, 1)
    assert result["without"] == pytest.approx(retention(mass).tolist(), abs=1.1 / n / 4)
    sizes = values.square().sum(dim=-1).flatten(0, 1)
    first = (sizes[:, 0] / sizes.median(dim=-1).values).median()
    assert result["first_token_size"] == pytest.approx(first.item())


@pytest.mark.parametrize(("change", "verdict"), [(-0.2, "agree"), (0.2, "differ"), (-0.01, "cannot tell")])
def test_the_reading_wants_a_clear_change(change, verdict):
    curves = [0.5] * len(THRESHOLDS)
    result = {"thresholds": THRESHOLDS, "without": curves, "with": curves, "change": change, "first_token_size": 0.1}
    reading = ValuePrior.reading(result)
    assert reading.verdict == verdict
    assert "sinks=4" in reading.meaning
    ValuePrior.draw(result, Axes())
