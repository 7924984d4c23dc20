"""The number of tokens above a threshold with and without AhaKV's value prior, and the sizes of the values."""

from __future__ import annotations

from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.kv import ranking
from kvkeep_lab.analysis.groups._shared import in_bins, lines, percent, show
from kvkeep_lab.analysis.measure import AttentionRows, Axes, Context, Measurement, Reading, Result, Verdict

KERNEL = 5
"""Width of the average over the values' sizes: the policy's default; the paper gives none."""

THRESHOLDS = [10 ** (-4 + step / 5) for step in range(21)]
"""From 1e-4 to 1 on a logarithmic grid, since scores are very uneven."""

CLEAR = 0.05
"""Least relative change of the mean retention over the grid that counts."""

NORM_BINS = 20


def retention(score: Float[Tensor, "heads n"]) -> Float[Tensor, " thresholds"]:
    """Return the share of the tokens that reach each of `THRESHOLDS`, a part of their head's largest score."""
    relative = score.double() / score.double().amax(dim=-1, keepdim=True).clamp(min=1e-300)
    thresholds = torch.tensor(THRESHOLDS, dtype=torch.float64)
    return (relative[..., None] >= thresholds * (1 - 1e-6)).double().mean(dim=(0, 1))


@final
class ValuePrior(Measurement):
    """Retention by threshold of the accumulated score and of its product with the value prior."""

    name: ClassVar[str] = "value_prior"
    source: ClassVar[str] = "AhaKV, Figure 2d"
    title: ClassVar[str] = "Values tell tokens apart that attention does not"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    least_tokens: ClassVar[int] = 128

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._mass = torch.zeros(context.n_layers, context.n_kv_heads, context.n_tokens)
        self._sizes = torch.zeros_like(self._mass)
        self._prior = torch.zeros_like(self._mass)

    def rows(self, rows: AttentionRows) -> None:
        """Add up the attention of each key; at the last block, take the values."""
        S = rows.weights.shape[2]
        grouped = rows.weights.sum(dim=1).unflatten(0, (self.context.n_kv_heads, -1)).mean(dim=1)
        self._mass[rows.layer, :, :S] += grouped
        if self.context.n_tokens == S:
            positions = torch.arange(S).expand(1, self.context.n_kv_heads, S)
            self._sizes[rows.layer] = rows.values.square().sum(dim=-1)
            self._prior[rows.layer] = ranking.value_prior(rows.values[None], positions, KERNEL)[0]

    def result(self) -> Result:
        """Return both curves, over all heads and by layer, and the sizes of the values by position."""
        plain, weighed = self._mass.flatten(0, 1), (self._mass * self._prior).flatten(0, 1)
        sizes = self._sizes.double().flatten(0, 1)
        relative = sizes / sizes.median(dim=-1, keepdim=True).values.clamp(min=1e-300)  # values may all be 0
        return {
            "thresholds": THRESHOLDS,
            "without": retention(plain).tolist(),
            "with": retention(weighed).tolist(),
            "change_by_layer": [
                _change(retention(mass), retention(mass * prior))
                for mass, prior in zip(self._mass, self._prior, strict=True)
            ],
            "change": _change(retention(plain), retention(weighed)),
            "value_sizes": in_bins(relative.mean(dim=0), NORM_BINS).tolist(),
            "first_token_size": relative[:, 0].median().item(),
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Compare the means of both curves over the logarithmic grid."""
        middle = THRESHOLDS.index(min(THRESHOLDS, key=lambda value: abs(value - 0.01)))
        return Reading(
            paper="At equal thresholds fewer tokens are retained with the value prior (Figure 2d).",
            here=f"Over thresholds from 1e-4 to 1 retention changes by {100 * result['change']:+.0f} %; at 0.01 it is "
            f"{percent(result['without'][middle])} without and {percent(result['with'][middle])} with the prior. The "
            f"first token's value is {show(result['first_token_size'])} times the median in size.",
            meaning=_meaning(result["first_token_size"]),
            verdict=_verdict(result["change"]),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw both curves over the threshold."""
        series = {
            "accumulated attention": (result["thresholds"], result["without"]),
            "times the value prior": (result["thresholds"], result["with"]),
        }
        lines(axes, series, x="threshold, as a share of the largest score", y="share of tokens at or above it")
        axes.set_xscale("log")
        axes.set_ylim(0, 1.03)


def _change(without: Float[Tensor, " thresholds"], weighed: Float[Tensor, " thresholds"]) -> float:
    """Return the relative change of the mean over the grid, which is never 0 without the prior.

    A token per head reaches any threshold.
    """
    return ((weighed.mean() - without.mean()) / without.mean()).item()


def _verdict(change: float) -> Verdict:
    if abs(change) < CLEAR:
        return "cannot tell"
    return "agree" if change < 0 else "differ"


def _meaning(first: float) -> str:
    if first < 0.5:
        return (
            "The first token takes attention but has a small value, so the value prior weighs it away: give ahakv "
            "sinks=4 on this model."
        )
    return "The first token's value is not small, so the value prior does not endanger the attention sink here."
