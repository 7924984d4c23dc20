"""A3: whether heavy hitters are words that occur together with many others (H2O, Figure 2b), beyond being frequent.

The paper gives no formula. Here ``C(v)`` counts, over consecutive windows of the text that hold ``v``, the other kinds
of tokens in the window. Both it and the accumulated attention grow with how often ``v`` occurs and fall with how late,
so their plain correlation is partly trivial; what the count and the places do not explain is reported beside it.
"""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.research.analysis.groups import _ranks as stats
from kvkeep.research.analysis.groups._ranks import by_kind
from kvkeep.research.analysis.measure import Axes, Context, Measurement, Reading, Result, Rows, Verdict

WINDOW = 128
"""Tokens of a window: about a paragraph."""

FEWEST = 5
"""Kinds of tokens that occur less often are left out: their averages are chance."""

FEWEST_KINDS = 30
"""With fewer kinds the 95 % interval of a correlation is wider than 0.7."""

STRONG = 0.5
"""Rank correlation from which the paper's claim, that both go together, counts as seen."""


@final
class Cooccurrence(Measurement):
    """Rank correlation of accumulated attention with co-occurrence, and what is left of it beyond frequency."""

    name: ClassVar[str] = "cooccurrence"
    source: ClassVar[str] = "H2O, Figure 2b"
    title: ClassVar[str] = "Heavy hitters are words that occur together with many others"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    least_tokens: ClassVar[int] = 2 * WINDOW

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._mass = torch.zeros(context.n_layers, context.n_tokens, dtype=torch.float64)

    def rows(self, rows: Rows) -> None:
        """Add what each key receives, over all heads."""
        part = rows.weights.sum(dim=(0, 1))
        self._mass[rows.layer, : len(part)] += part

    def result(self) -> Result:
        """Correlations over the kinds of tokens that occur often enough; layers together, and each alone."""
        tokens = self.context.tokens
        mass, _, counts = by_kind(self._mass, tokens)
        level, _, _ = by_kind(stats.uniform_mass(len(tokens)), tokens)
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
        """Agrees if the correlation is strong and something of it is left beyond count and place."""
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
        """Attention per occurrence over co-occurrence per occurrence: the trivial part, frequency, is divided out."""
        points = result["points"]
        axes.plot(points["others"], points["mass"], marker="o", markersize=4, linestyle="none", color="black")
        axes.set_yscale("log")
        axes.set_xlabel("other words in the window, per occurrence")
        axes.set_ylabel("attention received, per occurrence")


def cooccurrences(tokens: Int[Tensor, " T"], window: int) -> Float[Tensor, " V"]:
    """``C(v)`` of every kind, in rising order of token ids: other kinds, summed over the windows that hold ``v``."""
    kinds, which = tokens.unique(sorted=True, return_inverse=True)
    found = torch.zeros(len(kinds), dtype=torch.float64)
    for part in which.split(window):
        present = part.unique()
        found[present] += len(present) - 1
    return found


def _correlations(
    mass: Float[Tensor, " V"], others: Float[Tensor, " V"], counts: Float[Tensor, " V"], level: Float[Tensor, " V"]
) -> dict[str, Any]:
    """The plain correlation, per occurrence, and what is left beyond the count and beyond count and place."""
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
    """A strong correlation of which nothing is left beyond frequency is no support, and no counter-evidence either."""
    raw, span = result["spearman"], result["interval"]
    if result["n_kinds"] < FEWEST_KINDS or raw is None:
        return "cannot tell"
    if raw < STRONG:
        return "differ"
    return "agree" if span is not None and span[0] > 0 else "cannot tell"
