"""Entropy of attention rows by row number, with and without AhaKV's gain, compared with that of Gaussian logits.

For Gaussian logits of variance σ² a row of ``i`` keys has an entropy of about ln i - σ²/2, and under a gain g of about
ln i - g²σ²/2. Under a sliding window i is the number of keys that the row sees. The paper's Equation 8 has d/2 in place
of σ²/2, for unscaled logits; ordinary attention divides by √d first. Here σ² is measured in each row, as the variance
of the scaled logits.
"""

from __future__ import annotations

import math
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep_lab.analysis.groups._shared import lines, show
from kvkeep_lab.analysis.measure import AttentionRows, Axes, ClaimLine, Context, Measurement, Reading, Result

SAMPLES = 512
"""Number of measured rows, evenly spaced; neighbours hardly differ."""

FIRST_ROW = 16
"""First measured row; earlier rows see too few keys for a variance."""

KEEP_RATIO = 0.2
"""The budget as a share of the text, 720 of 3600 tokens in Figure 2; its logarithm is the target of the gain."""

POINTS = 24
"""Points of the curves, evenly spaced in ln i; each is a mean over the sampled rows around it."""

GROWS = 0.5
"""Slope of the entropy over ln i, 1 in Equation 8, from which attention counts as flattening as Equation 8 says."""

NEAR = 0.5
"""Largest error of the formula, in nats, that counts as right: an effective number of keys within a factor of 1.65."""


def gains(rows: Float[Tensor, " m"], k: int) -> Float[Tensor, " m"]:
    """Return AhaKV's gain on the scaled logits, for rows with ``rows`` keys: √(2 ln(i/k)), at least 1."""
    return (2.0 * (rows / k).clamp(min=1.0).log()).sqrt().clamp(min=1.0)


def variance(logits: Float[Tensor, "heads m S"]) -> Float[Tensor, "heads m"]:
    """Return the variance of each row's visible logits."""
    seen = logits > -torch.inf
    n = seen.sum(dim=-1)
    visible = logits.masked_fill(~seen, 0.0).double()
    centred = (visible - (visible.sum(dim=-1) / n)[..., None]).masked_fill(~seen, 0.0)
    return centred.square().sum(dim=-1) / n


def entropies(weights: Float[Tensor, "heads m S"]) -> Float[Tensor, "heads m"]:
    """Return the entropy of each row in nats."""
    entropy: Tensor = torch.special.entr(weights.double()).sum(dim=-1)
    return entropy


def slope(x: Float[Tensor, " m"], y: Float[Tensor, " m"]) -> float:
    """Return the slope of the least-squares line; NaN if all ``x`` are equal."""
    centred = x - x.mean()
    return ((centred * (y - y.mean())).sum() / centred.square().sum()).item()


@final
class Entropy(Measurement):
    """Row entropy by row number and layer, its formula, and both under the gain."""

    name: ClassVar[str] = "entropy"
    source: ClassVar[str] = "AhaKV, Equations 6-12"
    title: ClassVar[str] = "Attention flattens as the text grows"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    VERSION: ClassVar[int] = 2
    least_tokens: ClassVar[int] = 128

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        n = context.n_tokens
        self._k = budgets.from_ratio(KEEP_RATIO, n)
        step = max(1, (n - FIRST_ROW) // SAMPLES)
        self._rows = torch.arange(FIRST_ROW, n, step)
        self._found = torch.full((context.n_layers, len(self._rows), 5), torch.nan, dtype=torch.float64)

    def rows(self, rows: AttentionRows) -> None:
        """Measure the sampled rows of the block."""
        here = self._in(rows)
        if not here.any():
            return
        at = self._rows[here] - rows.first
        logits, seen = rows.logits[:, at], (rows.logits[:, at] > -torch.inf).sum(dim=-1).double()
        gain = gains(self._rows[here].double() + 1, self._k)
        sharpened = (logits * gain[:, None].float()).softmax(dim=-1)
        sigma2 = variance(logits)
        half = sigma2 / 2
        found = [
            entropies(rows.weights[:, at]),
            seen.log() - half,
            entropies(sharpened),
            seen.log() - gain.square() * half,
            sigma2,
        ]
        self._found[rows.layer, here] = torch.stack([value.mean(dim=0) for value in found], dim=-1)

    def _in(self, rows: AttentionRows) -> Bool[Tensor, " m"]:
        return (self._rows >= rows.first) & (self._rows < rows.first + rows.weights.shape[1])

    def result(self) -> Result:
        """Return curves over ln i, slopes, and the errors of formula and target in the second half of the text."""
        i = self._rows.double() + 1
        entropy, formula, gained, gained_formula, variances = self._found.unbind(dim=-1)
        late = i > i[-1] / 2
        off = (formula - entropy)[:, late].mean(dim=1)
        sigma2 = variances[:, late].mean(dim=1)
        return {
            "k": self._k,
            "curves": self._curves(i, int(sigma2.argmin())),
            "calmest_layer": int(sigma2.argmin()),
            "slope": slope(i.log(), entropy.mean(dim=0)),
            "slope_by_layer": [slope(i.log(), layer) for layer in entropy],
            "effective_keys": entropy[:, late].mean().exp().item(),
            "off_by_layer": off.tolist(),
            "gained_off_by_layer": (gained_formula - gained)[:, late].mean(dim=1).tolist(),
            "gained_minus_target": gained[:, late].mean().item() - math.log(self._k),
            "sigma2_by_layer": sigma2.tolist(),
        }

    def _curves(self, i: Float[Tensor, " m"], calmest: int) -> dict[str, list[float]]:
        """Return means over rows of similar ln i: over all layers, and of the layer with the smallest σ²."""
        place = (i / i[0]).log() / (i[-1] / i[0]).log() * POINTS
        near = place.long().clamp(max=POINTS - 1) == torch.arange(POINTS)[:, None]
        near = near[near.any(dim=1)].double()
        near = near / near.sum(dim=1, keepdim=True)
        means, calm = near @ self._found.mean(dim=0), near @ self._found[calmest]
        return {
            "i": (near @ i).tolist(),
            "ln i": (near @ i.log()).tolist(),
            "entropy": means[:, 0].tolist(),
            "entropy with gain": means[:, 2].tolist(),
            "calmest layer": calm[:, 0].tolist(),
            "calmest layer, formula": calm[:, 1].tolist(),
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: the slope decides whether attention flattens as the paper derives."""
        return Reading(
            paper="A row's expected entropy grows with ln i, so attention flattens as the text grows (Equation 8).",
            here=f"Entropy grows by {show(result['slope'])} nats per unit of ln i, to that of "
            f"{result['effective_keys']:.1f} equal keys in the second half of the text.",
            meaning=_meaning(result),
            verdict="agree" if result["slope"] >= GROWS else "differ",
        )

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return claims about the growth of the entropy, the formula for it, and the effect of the gain."""
        found = cls.reading(result)
        near = sum(abs(off) <= NEAR for off in result["off_by_layer"])
        layers, missed = len(result["off_by_layer"]), result["gained_minus_target"]
        sizes = result["sigma2_by_layer"]
        return (
            ClaimLine(
                "Attention rows flatten as the text grows", "AhaKV, Equation 8", found.paper, found.here, found.verdict
            ),
            ClaimLine(
                "A row's entropy is ln i - σ²/2",
                "AhaKV, Equation 8 and Appendix A",
                "ln i - d/2 for Gaussian logits before the division by √d; with it, σ² takes the place of d.",
                f"Within {NEAR} nats in {near} of {layers} layers; σ² is {min(sizes):.1f} to {max(sizes):.1f}, and the "
                "formula needs it well below 2 ln i.",
                "agree" if near > layers / 2 else "differ",
            ),
            ClaimLine(
                "A gain of √(2 ln(i/k)) brings a row's entropy to ln k",
                "AhaKV, Equations 11 and 12",
                "Derived from the formula for entropy.",
                f"{missed:+.2f} nats from ln {result['k']} in the second half of the text.",
                "agree" if abs(missed) <= NEAR else "differ",
            ),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw entropy with and without gain, ln i and ln k, and the formula for the layer with the smallest σ²."""
        curves, i = result["curves"], result["curves"]["i"]
        layer = f"layer {result['calmest_layer']}"
        series = {
            "entropy, all layers": (i, curves["entropy"]),
            "with gain, all layers": (i, curves["entropy with gain"]),
            f"entropy, {layer}": (i, curves["calmest layer"]),
            f"ln i - σ²/2, {layer}": (i, curves["calmest layer, formula"]),
            "ln i": (i, curves["ln i"]),
        }
        lines(axes, series, x="row number i", y="nats")
        axes.set_xscale("log")
        axes.axhline(math.log(result["k"]), color="0.6", linewidth=0.8)
        axes.annotate("ln k", (i[0], math.log(result["k"])), xytext=(0, 3), textcoords="offset points", fontsize=8)


def _meaning(result: Result) -> str:
    keys = result["effective_keys"]
    if result["slope"] < GROWS:
        return (
            f"Rows do not spread in proportion to the text, they look at about {keys:.0f} keys: a budget need "
            "not grow with the text, and ahakv's gain has little to correct."
        )
    return f"Rows spread over {keys:.0f} keys, and over more in longer texts: let the budget grow with the text."
