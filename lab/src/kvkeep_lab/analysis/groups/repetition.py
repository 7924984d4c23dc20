"""Do distant rows attend to the same positions? Scissorhands' repetitive attention pattern."""

from __future__ import annotations

from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep_lab.analysis.groups._shared import by_layer, mean, percent, show
from kvkeep_lab.analysis.measure import AttentionRows, Axes, ClaimLine, Context, Measurement, Reading, Result, Verdict

PLACES = (178, 228, 278)
"""The rows, numbered from 1, that Figure 1 compares."""

TRIPLES = 8
"""Number of triples of rows with the same distances that are spread over a longer text."""

CLEAR = 0.2
"""Share of the way from chance to equality from which a pattern is repetitive; a fifth is visible in Figure 1."""

ABOVE_RANDOM = 0.1
"""Least lead of the trained weights over random ones, on the same scale, that shows an effect of training."""


def places(n_tokens: int) -> list[tuple[int, int, int]]:
    """Return the paper's three rows, and more triples with the same distances, as many as fit into the text.

    A text that is too short for the paper's rows has none.
    """
    first, middle, last = PLACES
    room = n_tokens - last
    if room < 0:
        return []
    n = min(TRIPLES, 1 + room // (last - first))
    shifts = [room * number // max(1, n - 1) for number in range(n)]
    return [(first + shift, middle + shift, last + shift) for shift in shifts]


def significant(weights: Float[Tensor, "... S"], row: int) -> Bool[Tensor, "... S"]:
    """Return the keys with more than the average of row number ``row`` (from 1): the discretised attention map."""
    return weights * row > 1.0


def jaccard(one: Bool[Tensor, "... N"], other: Bool[Tensor, "... N"]) -> Float[Tensor, "..."]:
    """Return common members over all members of two sets; NaN for two empty sets."""
    return (one & other).sum(dim=-1).double() / (one | other).sum(dim=-1)


def chance_jaccard(one: Int[Tensor, " m"], other: Int[Tensor, " m"], n: int) -> Float[Tensor, " m"]:
    """Return the expected Jaccard index of two random sets of these sizes, drawn from ``n`` without replacement.

    The number of common members is hypergeometric; the expectation is the exact sum over it, NaN for two empty sets.
    """
    a, b = one.double()[:, None], other.double()[:, None]
    common = torch.arange(int(torch.minimum(one, other).max()) + 1).double()
    possible = (common <= torch.minimum(a, b)) & (common >= a + b - n)
    i = common.where(possible, torch.maximum(torch.zeros(()), a + b - n))
    log_p = _log_choose(a, i) + _log_choose(n - a, b - i) - _log_choose(torch.full_like(a, n), b)
    return (log_p.exp() * possible * i / (a + b - i)).sum(dim=-1)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def compare(sets: Bool[Tensor, "heads 3 N"]) -> dict[str, Float[Tensor, " heads"]]:
    """Return the overlap of three rows of each head, with that of random sets of the same sizes.

    Returns:
        ``jaccard`` and ``chance``: means over the three pairs. ``repeated``: positions that are significant in all
            three rows, over those that are in any; ``repeated_chance``: the same of expected sizes. ``share``: share of
            positions that are significant in a row. ``empty``: share of rows without any. NaN where there is nothing to
            compare.
    """
    N = sets.shape[-1]
    sizes = sets.sum(dim=-1)
    pairs = [(0, 1), (0, 2), (1, 2)]
    share = sizes.double() / N
    return {
        "jaccard": torch.stack([jaccard(sets[:, a], sets[:, b]) for a, b in pairs]).nanmean(dim=0),
        "chance": torch.stack([chance_jaccard(sizes[:, a], sizes[:, b], N) for a, b in pairs]).nanmean(dim=0),
        "repeated": sets.all(dim=1).sum(dim=-1).double() / sets.any(dim=1).sum(dim=-1),
        "repeated_chance": share.prod(dim=1) / (1.0 - (1.0 - share).prod(dim=1)),
        "share": share.mean(dim=1),
        "empty": (sizes == 0).double().mean(dim=1),
    }


@final
class RepetitivePatterns(Measurement):
    """Significant positions of three rows of the text, and their overlap."""

    name: ClassVar[str] = "repetition"
    source: ClassVar[str] = "Scissorhands, Figures 1 and 5-9"
    title: ClassVar[str] = "Do distant rows attend to the same positions?"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    least_tokens: ClassVar[int] = PLACES[-1]
    control: ClassVar[bool] = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._places = places(context.n_tokens)
        self._sets: dict[tuple[int, int], Bool[Tensor, "heads _"]] = {}

    def rows(self, rows: AttentionRows) -> None:
        """Keep the significant positions of the rows to compare."""
        last = rows.first + rows.weights.shape[1]
        for row in {row for triple in self._places for row in triple if rows.first < row <= last}:
            self._sets[rows.layer, row] = significant(rows.weights[:, row - 1 - rows.first, :row], row)

    def result(self) -> Result:
        """Return means over heads and triples, for each layer and over all, and the positions of the paper's triple."""
        layers = [self._layer(layer) for layer in range(self.context.n_layers)]
        return {
            "places": [list(triple) for triple in self._places],
            "layers": layers,
            "mean": {key: mean([layer[key] for layer in layers]) for key in layers[0]},
            "example": self._example(self.context.n_layers // 2),
        }

    def _layer(self, layer: int) -> dict[str, float | None]:
        found = [compare(self._common(layer, triple)) for triple in self._places]
        return {key: mean(torch.cat([heads[key] for heads in found]).tolist()) for key in found[0]}

    def _common(self, layer: int, triple: tuple[int, int, int]) -> Bool[Tensor, "heads 3 N"]:
        """Return the significant positions of three rows among those that all three see."""
        return torch.stack([self._sets[layer, row][:, : triple[0]] for row in triple], dim=1)

    def _example(self, layer: int) -> dict[str, Any]:
        """Return up to eight positions, from 1, that the most heads of a layer find significant in the first triple."""
        votes = self._common(layer, self._places[0]).all(dim=1).sum(dim=0)
        best = votes.argsort(descending=True, stable=True)[:8]
        found = sorted(int(position) for position in best if votes[position] > 0)
        return {
            "layer": layer,
            "positions": [position + 1 for position in found],
            "words": [self.context.words[position] for position in found],
            "heads": [int(votes[position]) for position in found],
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Compare the distance from chance with `CLEAR`, and with that of random weights."""
        here, random = result["mean"], result.get("random", {}).get("mean")
        above, control = _above(here), None if random is None else _above(random)
        text = (
            f"Significant positions of rows that are 50 to 100 apart have a Jaccard index of {show(here['jaccard'])}, "
            f"{show(here['chance'])} by chance"
        )
        if random is not None:
            text += f"; with random weights {show(random['jaccard'])}, {show(random['chance'])} by chance"
        return Reading(
            paper="OPT-6B on C4 finds the same few positions significant at three distant rows; with random weights "
            "the pattern is gone (Figures 1 and 5).",
            here=text + ".",
            meaning=_meaning(above),
            verdict=_verdict(above, control),
        )

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return claims about the pattern and, if random weights were walked as well, about its absence under these."""
        found = cls.reading(result)
        pattern = ClaimLine(
            "Distant rows attend to the same positions", cls.source, found.paper, found.here, found.verdict
        )
        if "random" not in result:
            return (pattern,)
        above = _above(result["random"]["mean"])
        control = ClaimLine(
            "A model with random weights has no such pattern",
            "Scissorhands, Figure 5",
            "No repeated positions in a randomly initialised OPT.",
            f"Random weights are {percent(above)} of the way from chance to equal sets.",
            "agree" if above < CLEAR / 2 else "differ" if above >= CLEAR else "cannot tell",
        )
        return (pattern, control)

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw the Jaccard index of each layer, its chance level, and both for random weights."""
        series = {
            "this model": [layer["jaccard"] for layer in result["layers"]],
            "chance": [layer["chance"] for layer in result["layers"]],
        }
        if "random" in result:
            series["random weights"] = [layer["jaccard"] for layer in result["random"]["layers"]]
            series["chance, random weights"] = [layer["chance"] for layer in result["random"]["layers"]]
        by_layer(axes, series, y="Jaccard index of significant positions")
        axes.set_ylim(0, 1)


def _above(mean: dict[str, float | None]) -> float:
    """Return a Jaccard index on the scale from chance (0) to equality (1).

    It is 0 if no row has a significant position, or if chance alone gives equal sets.
    """
    jaccard, chance = mean["jaccard"], mean["chance"]
    return 0.0 if jaccard is None or chance is None or chance == 1.0 else (jaccard - chance) / (1.0 - chance)


def _verdict(above: float, control: float | None) -> Verdict:
    if above < CLEAR / 2:
        return "differ"
    if above < CLEAR or control is None:
        return "cannot tell"
    return "agree" if above - control >= ABOVE_RANDOM else "differ"


def _meaning(above: float) -> str:
    if above >= CLEAR:
        return (
            "What earlier rows attended to foretells later rows: policies that look back (scissorhands, h2o) can work."
        )
    return "Earlier rows say little about later ones here: looking back is a weak guide, so leave the budget generous."
