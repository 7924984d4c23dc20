"""Sparsity: constructed rows with a known share of small entries."""

import pytest
import torch
from constructed import Axes, causal, context, show

from kvkeep_lab.analysis.groups.sparsity import FIRST_ROW, Sparsity


def measured(weights, **options):
    layers, heads, length, _ = weights.shape
    return show(Sparsity(context(range(length), layers=layers, heads=heads)), weights, **options).result()


def test_against_plain_loops():
    n = 70
    weights = causal(torch.rand(2, 3, n, n, generator=torch.Generator().manual_seed(0)) ** 6 + 1e-9)
    shares, square = [[], []], [[], []]
    for layer in range(2):
        for row in range(FIRST_ROW, n):
            for head in range(3):
                entries = weights[layer, head, row, : row + 1].float().tolist()
                small = sum(p < 0.01 * max(entries) for p in entries)
                shares[layer].append(small / (row + 1))
                square[layer].append((small + n - row - 1) / n)
    result = measured(weights)
    assert result["sparsity_by_layer"] == pytest.approx([sum(s) / len(s) for s in shares], abs=1e-6)
    assert result["square_by_layer"] == pytest.approx([sum(s) / len(s) for s in square], abs=1e-6)
    assert result["sparsity"] == pytest.approx(sum(result["sparsity_by_layer"]) / 2)


@pytest.mark.parametrize("block", [80, 7])
def test_one_key_takes_all_but_little(block):
    n = 80
    scores = torch.full((1, 1, n, n), 0.005)
    scores[..., range(n), range(n)] = 1.0
    expected = sum((row - 0) / (row + 1) for row in range(FIRST_ROW, n)) / (n - FIRST_ROW)
    result = measured(causal(scores), block=block)
    assert result["sparsity_by_layer"] == pytest.approx([expected])
    assert Sparsity.reading(result).verdict == "agree"


@pytest.mark.parametrize(("sparse", "verdict"), [(10, "agree"), (9, "agree"), (8, "differ"), (6, "differ")])
def test_nearly_every_layer_has_to_be_sparse(sparse, verdict):
    layers = [0.951] * sparse + [0.949] * (10 - sparse)
    assert Sparsity.reading({"sparsity_by_layer": layers, "sparsity": 0.95}).verdict == verdict


def test_uniform_attention_is_dense():
    result = measured(causal(torch.ones(2, 1, 70, 70)))
    assert result["sparsity_by_layer"] == [0.0, 0.0]
    assert Sparsity.reading(result).verdict == "differ"
    axes = Axes()
    Sparsity.draw(result, axes)
    assert {"set_xlabel", "set_ylabel", "axhline"} <= {name for name, _, _ in axes.calls}
