"""What the papers on eviction describe, measured: sparsity, accumulated mass by rank, mass on the first token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

SKIPPED_ROWS = 64
"""The first rows see few tokens, so that none of the shares means anything there."""


def small_share(probabilities: Tensor, ratio: float = 0.01) -> Tensor:
    """Share of attention (heads, T, T) that is below a ratio of its row's maximum, causal part only."""
    length = probabilities.shape[-1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()[SKIPPED_ROWS:]
    rows = probabilities[:, SKIPPED_ROWS:]
    small = (rows < ratio * rows.amax(-1, keepdim=True)) & causal
    return small.sum((1, 2)) / causal.sum()


def top_share(probabilities: Tensor, share: float) -> Tensor:
    """Part of all accumulated mass that lies on the given share of the keys, per head."""
    mass = probabilities.sum(1).sort(-1, descending=True).values
    count = max(1, round(share * mass.shape[-1]))
    return mass[:, :count].sum(-1) / mass.sum(-1)


def first_share(probabilities: Tensor) -> Tensor:
    """Mean attention on the first token, per head."""
    return probabilities[:, SKIPPED_ROWS:, 0].mean(-1)


@torch.no_grad()
def observe(folder: Path, rows: Sequence[Tensor]) -> list[dict[str, float]]:
    """One record per layer, averaged over heads and rows of tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    measures = {
        "below_1_percent": small_share,
        "top_1_percent": lambda p: top_share(p, 0.01),
        "top_5_percent": lambda p: top_share(p, 0.05),
        "top_20_percent": lambda p: top_share(p, 0.20),
        "first_token": first_share,
    }
    sums = [dict.fromkeys(measures, 0.0) for _ in range(model.config.num_hidden_layers)]
    for row in rows:
        for record, layer in zip(sums, model(row[None], output_attentions=True).attentions, strict=True):
            for name, measure in measures.items():
                record[name] += measure(layer[0]).mean().item() / len(rows)
    return sums
