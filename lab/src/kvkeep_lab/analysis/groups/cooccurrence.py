"""A3: are heavy hitters words that occur together with many others (H2O, Figure 2b), beyond being frequent?

The paper gives no formula. Here ``C(v)`` counts the other kinds of tokens in each consecutive window of the text that
contains ``v``, summed over these windows. ``C(v)`` and the accumulated attention both grow with the frequency of ``v``,
and both fall with its position, so their plain correlation is partly trivial. The correlation beyond count and position
is reported beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep_lab.analysis.groups import _ranks as stats
from kvkeep_lab.analysis.groups._ranks import by_kind
from kvkeep_lab.analysis.measure import AttentionRows, Axes, Context, Measurement, Reading, Result, Verdict

WINDOW = 128
"""Tokens of a window: about a paragraph."""

FEWEST = 5
"""Kinds of tokens with fewer occurrences are left out: their averages are chance."""

FEWEST_KINDS = 30
"""With fewer kinds the 95 % interval of a correlation is wider than 0.7."""

STRONG = 0.5
"""Least rank correlation that counts as the paper's claim."""


@final
class Cooccurrence(Measurement):
    """Rank correlation of accumulated attention with co-occurrence, plain and beyond frequency."""

    name: ClassVar[str] = "cooccurrence"
    source: ClassVar[str] = "H2O, Figure 2b"
    title: ClassVar[str] = "Heavy hitters are words that occur together with many others"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    VERSION: ClassVar[int] = 2
    least_tokens: ClassVar[int] = 2 * WINDOW

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._mass = torch.zeros(context.n_layers, context.n_tokens, dtype=torch.float64)

    def rows(self, rows: AttentionRows) -> None:
        """Add the attention that each key receives, over all heads."""
        part = rows.weights.sum(dim=(0, 1))
        self._mass[rows.layer, : len(part)] += part

    def result(self) -> Result:
        """Return correlations over the kinds of tokens with enough occurrences, for all layers and for each."""
        tokens = self.context.tokens
        mass, _, counts = by_kind(self._mass, tokens)
        level, _, _ = by_kind(stats.uniform_mass(len(tokens), self.context.windows).sum(dim=0), tokens)
        often = counts >= FEWEST
        others = cooccurrences(tokens, WINDOW)[often]
        n, level, total = counts[often].double(), level[often], mass.sum(dim=0)[often]
        return {
            "n_kinds": int(often.sum()),
            "window": WINDOW,
            **_correlations(total, others, n, level),
            "by_layer": [stats.spearman(layer[often], others) for layer in mass],
            "points": {
                "others": stats.rounded(others / n),
                "mass": stats.rounded(total / n),
                "count": counts[often].tolist(),
            },
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if the correlation is strong and remains beyond count and position."""
        raw, left = result["spearman"], result["given_count_and_place"]
        span = result["interval"]
        rest = "that has no value here" if left is None else f"it is {left:+.2f}"
        if span is not None:
            rest += f" (95 % interval {span[0]:+.2f} to {span[1]:+.2f})"
        return Reading(
            paper="The accumulated attention of words and their co-occurrence in the data go together.",
            here=f"Rank correlation {'–' if raw is None else format(raw, '+.2f')} over {result['n_kinds']} kinds of "
            f"tokens; with frequency and place taken out {rest}.",
            meaning="Where nothing is left, a token's frequency says as much as its company: a policy gains nothing "
            "from counting co-occurrences and has to watch attention itself.",
            verdict=_verdict(result),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw attention over co-occurrence, both per occurrence so that frequency is divided out."""
        points = result["points"]
        axes.plot(points["others"], points["mass"], marker="o", markersize=4, linestyle="none", color="black")
        axes.set_yscale("log")
        axes.set_xlabel("other words in the window, per occurrence")
        axes.set_ylabel("attention received, per occurrence")


def cooccurrences(tokens: Int[Tensor, " T"], window: int) -> Float[Tensor, " V"]:
    """Return ``C(v)`` of every kind of token, in rising order of token ids."""
    kinds, which = tokens.unique(sorted=True, return_inverse=True)
    found = torch.zeros(len(kinds), dtype=torch.float64)
    for part in which.split(window):
        present = part.unique()
        found[present] += len(present) - 1
    return found


def _correlations(
    mass: Float[Tensor, " V"], others: Float[Tensor, " V"], counts: Float[Tensor, " V"], level: Float[Tensor, " V"]
) -> dict[str, Any]:
    """Return the plain correlation, per occurrence, beyond the count, and beyond count and position."""
    x, y, n, place = (values.clamp(min=1e-12).log() for values in (mass, others, counts, level))
    left = stats.partial(x, y, torch.stack([n, place], dim=1))
    return {
        "spearman": stats.spearman(mass, others),
        "log_pearson": stats.pearson(x, y),
        "per_occurrence": stats.spearman(mass / counts, others / counts),
        "count_alone": stats.spearman(mass, counts),
        "given_count": stats.partial(x, y, n[:, None]),
        "given_count_and_place": left,
        "interval": stats.interval(left, len(mass), controls=2),
    }


def _verdict(result: Result) -> Verdict:
    """Return the verdict: a strong correlation with nothing beyond frequency cannot tell."""
    raw, span = result["spearman"], result["interval"]
    if result["n_kinds"] < FEWEST_KINDS or raw is None:
        return "cannot tell"
    if raw < STRONG:
        return "differ"
    return "agree" if span is not None and span[0] > 0 else "cannot tell"
