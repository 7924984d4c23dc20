"""Cosine and norms across an MLP block, for blocks whose geometry is known."""

import math

import pytest
import torch
from constructed import Axes
from shown import context

from kvkeep_lab.analysis.groups.residual import Residual
from kvkeep_lab.analysis.measure import Mlp


def measured(blocks, *, n=64, block=25):
    """Layers given by functions from the stream to what is added."""
    generator = torch.Generator().manual_seed(0)
    stream = torch.randn(n, 16, generator=generator)
    found = Residual(context(n, layers=len(blocks)))
    for first in range(0, n, block):
        part = stream[first : first + block]
        for layer, added in enumerate(blocks):
            found.mlp(Mlp(layer, first, part, added(part), None))
    return found.result(), stream


def turned(x):
    """As long as the stream, and at a right angle to it."""
    other = torch.roll(x, 1, dims=1) - x * (torch.roll(x, 1, dims=1) * x).sum(-1, keepdim=True) / x.square().sum(
        -1, keepdim=True
    )
    return other / other.norm(dim=-1, keepdim=True) * x.norm(dim=-1, keepdim=True)


def test_known_angles():
    result, stream = measured([lambda x: 0.5 * x, turned, lambda x: -3.0 * x, torch.zeros_like])
    assert result["cosine"] == pytest.approx([1.0, math.sqrt(0.5), -1.0, 1.0])
    assert result["norm_ratio"] == pytest.approx([0.5, 1.0, 3.0, 0.0])
    assert result["stream_norm"] == pytest.approx([stream.norm(dim=-1).median().item()] * 4)


def test_the_lowest_twentieth_is_of_tokens():
    """Three of 64 tokens are turned round."""

    def some(x):
        found = torch.zeros_like(x)
        if len(x) == 14:  # the last block
            found[:3] = -2.0 * x[:3]
        return found

    result, _ = measured([some])
    assert result["cosine"] == pytest.approx([(61 - 3) / 64])
    assert result["cosine_min"] == pytest.approx([-1.0])
    assert result["cosine_p05"][0] > 0.0  # 3 of 64 are less than a twentieth


def result_of(cosine, ratio=0.1):
    n = len(cosine)
    return {"cosine": cosine, "cosine_p05": cosine, "norm_ratio": [ratio] * n}


@pytest.mark.parametrize(
    ("cosine", "verdict"),
    [
        ([0.95, 0.9, 0.99, 0.5], "agree"),
        ([0.95, 0.9, 0.8, 0.5], "cannot tell"),
        ([0.95, 0.8, 0.8, 0.5], "differ"),
    ],
)
def test_the_reading_counts_layers(cosine, verdict):
    assert Residual.reading(result_of(cosine)).verdict == verdict


def test_the_norms_are_a_claim_of_their_own():
    verdicts = [Residual.claims(result_of([0.95], ratio))[1].verdict for ratio in (0.3, 0.6)]
    assert verdicts == ["agree", "differ"]
    Residual.draw(result_of([0.95, 0.9]), Axes())
