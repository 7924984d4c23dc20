"""A1: the share of each layer's attention matrix that is nearly nothing (H2O, Figure 2a)."""

from __future__ import annotations

from typing import ClassVar, final

import torch

from kvkeep_lab.analysis.measure import AttentionRows, Axes, Context, Measurement, Reading, Result

RELATIVE = 0.01
"""Weights below this share of their row's largest are nearly nothing."""

FIRST_ROW = 16
"""First measured row; earlier rows see so few keys that the share says nothing."""

REPORTED = 0.95
"""The paper's share for nearly every layer of OPT models."""

NEARLY_EVERY = 0.9
"""Share of layers that counts as nearly every one; our reading, as the paper gives no number."""


@final
class Sparsity(Measurement):
    """Share of the visible entries below 1 % of their row's largest, per layer."""

    name: ClassVar[str] = "sparsity"
    source: ClassVar[str] = "H2O, Figure 2a"
    title: ClassVar[str] = "Attention is sparse"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    least_tokens: ClassVar[int] = 64

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._shares = torch.zeros(context.n_layers, dtype=torch.float64)
        self._large = torch.zeros(context.n_layers, dtype=torch.float64)

    def rows(self, rows: AttentionRows) -> None:
        """Count the weights that are not small."""
        skipped = max(0, FIRST_ROW - rows.first)
        weights = rows.weights[:, skipped:]
        seen = (rows.logits[:, skipped:] > -torch.inf).sum(dim=-1)
        large = (weights >= RELATIVE * weights.amax(dim=-1, keepdim=True)).sum(dim=-1)
        self._shares[rows.layer] += ((seen - large) / seen).double().mean(dim=0).sum()
        self._large[rows.layer] += large.double().mean(dim=0).sum()

    def result(self) -> Result:
        """Return, per layer, the share of visible entries, and of the square, whose upper half is empty."""
        n = self.context.n_tokens
        rows = n - FIRST_ROW
        share = self._shares / rows
        return {
            "sparsity_by_layer": share.tolist(),
            "sparsity": share.mean().item(),
            "square_by_layer": (1 - self._large / rows / n).tolist(),
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if nearly every layer is as sparse as in the paper."""
        layers = result["sparsity_by_layer"]
        sparse = sum(share > REPORTED for share in layers)
        return Reading(
            paper="Over 95 % of the entries are below 1 % of their row's largest in nearly every layer of OPT.",
            here=f"{result['sparsity']:.0%} on average; {sparse} of {len(layers)} layers are above 95 %.",
            meaning="The sparser, the smaller the budget that can hold what rows look at.",
            verdict="agree" if sparse >= NEARLY_EVERY * len(layers) else "differ",
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw one point per layer, and the paper's share."""
        layers = result["sparsity_by_layer"]
        axes.plot(range(len(layers)), layers, marker="o", color="black")
        axes.axhline(REPORTED, linestyle="--", color="0.4")
        axes.annotate("95 %, the paper's", (0, REPORTED), xytext=(2, -11), textcoords="offset points", fontsize=8)
        axes.set_xlabel("layer")
        axes.set_ylabel("share of visible entries")
        axes.set_ylim(min(*layers, REPORTED) - 0.05, 1.005)
        axes.set_xticks(range(len(layers)))
