"""Attention made by hand, shown to measurements as a walk shows it: blocks in order, all layers of a block first."""

import torch

from kvkeep_lab.analysis.measure import AttentionRows, Context


def context(tokens, *, layers=1, heads=1, kv_heads=None, seed=0, windows=None):
    return Context(
        n_tokens=len(tokens),
        n_layers=layers,
        n_heads=heads,
        n_kv_heads=kv_heads or heads,
        tokens=torch.as_tensor(tokens, dtype=torch.int64),
        words=tuple(f"w{int(token)}" for token in tokens),
        seed=seed,
        windows=windows or (None,) * layers,
    )


def causal(scores):
    """Rows of probabilities from scores ``(L, Hq, T, T)`` above 0; what is after a row's own column is dropped."""
    kept = torch.tril(scores.double())
    return kept / kept.sum(dim=-1, keepdim=True)


def show(measurement, weights, *, block=7):
    """Hand over the rows ``(L, Hq, T, T)`` of all layers."""
    layers, _, length, _ = weights.shape
    for first in range(0, length, block):
        last = min(first + block, length)
        for layer in range(layers):
            part = weights[layer, :, first:last, :last].float()
            values = torch.zeros(measurement.context.n_kv_heads, last, 2)
            measurement.rows(AttentionRows(layer, first, part, values, part.log()))
    return measurement


class Axes:
    """Stands in for matplotlib's axes: remembers what was called."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def call(*args, **options):
            self.calls.append((name, args, options))
            return [None]

        return call
