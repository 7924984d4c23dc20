"""A4: the model's loss with heavy hitters hidden from it (H2O, Figure 2c).

The keys with the largest column sums, per layer and head, are hidden from all rows but their own. The controls are as
many random keys, and as many with the smallest sums. A fourth set is the heavy keys without the first token, since one
attention sink can account for much of the harm.
"""

from __future__ import annotations

import math
from typing import ClassVar, final

from kvkeep_lab import hindsight
from kvkeep_lab.analysis.groups import _shared
from kvkeep_lab.analysis.groups._shared import lines
from kvkeep_lab.analysis.measure import Axes, Measurement, Progress, Reading, Result, Skipped, Subject, Verdict
from kvkeep_lab.hindsight import Keys, Totals

SHARES = (0.01, 0.05, 0.1, 0.2)
"""Shares of the keys that are hidden; the last is the paper's budget."""

WINDOW, TEXTS = 512, 2

HARM = 0.1
"""Excess loss in nats that counts as harm: a tenth of perplexity."""

TIMES = 2.0
"""Heavy hitters matter if hiding them does this many times the harm of hiding random keys."""

WIDE = 10.0
"""Ratio between lines from which the picture's axis is logarithmic."""

KNOWS = 0.5
"""Distance from guessing, in nats, from which a model's loss says something about the text."""


@final
class Removal(Measurement):
    """Loss without the heaviest keys, compared with random and light ones."""

    name: ClassVar[str] = "removal"
    source: ClassVar[str] = "H2O, Figure 2c"
    title: ClassVar[str] = "Without its heavy hitters the model fails"
    reads: ClassVar[frozenset[str]] = frozenset({"model"})
    least_tokens: ClassVar[int] = 128
    effort: ClassVar[int] = 77
    slow: ClassVar[bool] = True

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Run each text for its loss, for its sums, and once for each set of hidden keys.

        Raises:
            Skipped: a loss is no number, or the model has too few positions.
        """
        ids, model = _shared.windows(subject, rows=TEXTS, length=WINDOW), subject.model
        steps = len(ids) * (1 + len(SHARES) * len(NAMES))
        losses: dict[str, list[float]] = {name: [0.0] * len(SHARES) for name in NAMES}
        full, done = 0.0, 0
        for text in ids.split(1):
            full += _shared.loss(model, text) / len(ids)
            totals = hindsight.measure(model, text.to(model.device))
            done += 1
            for place, share in enumerate(SHARES):
                for name, keys in chosen(totals, share, subject.seed).items():
                    harmed = _shared.loss(model, text, hindsight.without(model, keys))
                    losses[name][place] += harmed / len(ids)
                    done += 1
                    progress(done / steps)
        if not all(math.isfinite(value) for values in (*losses.values(), [full]) for value in values):
            raise Skipped("the model's loss on this text is no number")
        self._found: Result = {
            "shares": list(SHARES),
            "window": ids.shape[1],
            "texts": len(ids),
            "full": full,
            "guessing": _shared.guesses(model),
            **losses,
            # e to the power of 50 is bad enough, and a float holds it
            "perplexity": {name: math.exp(min(found[-1], 50.0)) for name, found in {**losses, "full": [full]}.items()},
        }

    def result(self) -> Result:
        """Return losses in nats: of the full cache, and per hidden share."""
        return self._found

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if hiding the heaviest fifth harms, far more than hiding random keys."""
        harm = {name: result[name][-1] - result["full"] for name in NAMES}
        times = {name: f"{math.exp(min(value, 50.0)):.3g}×" for name, value in harm.items()}
        return Reading(
            paper="With heavy hitters masked the accuracy of OPT drops drastically.",
            here=f"Hiding a fifth of the keys multiplies perplexity ({math.exp(min(result['full'], 50.0)):.3g}) by: "
            f"{times['heavy']} for the heaviest, {times['heavy_but_first']} for these without the first token, "
            f"{times['random']} for random and {times['light']} for the lightest.",
            meaning=_meaning(harm),
            verdict=_verdict(result, harm),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw perplexity over the hidden share."""
        places = [100 * share for share in result["shares"]]
        times = {name: [math.exp(min(x - result["full"], 50.0)) for x in result[name]] for name in NAMES}
        lines(
            axes,
            {label: (places, times[name]) for name, label in NAMES.items()},
            x="hidden keys, %",
            y="perplexity, times that of the full cache",
        )
        if max(map(max, times.values())) > WIDE:
            axes.set_yscale("log")


NAMES = {
    "heavy": "heaviest",
    "heavy_but_first": "heaviest but the first token",
    "random": "random",
    "light": "lightest",
}
"""The hidden sets, and their names on the page."""


def chosen(totals: Totals, share: float, seed: int) -> dict[str, Keys]:
    """Return the sets of keys to hide; all are of equal size, except the one that spares the first token."""
    heavy = totals.heaviest(share)
    later = {layer: keys.clone() for layer, keys in heavy.chosen.items()}
    for keys in later.values():
        keys[..., 0] = False
    return {
        "heavy": heavy,
        "heavy_but_first": Keys(later),
        "random": totals.drawn(share, seed=seed),
        "light": totals.lightest(share),
    }


def _meaning(harm: dict[str, float]) -> str:
    if harm["heavy"] < HARM:
        return (
            "This model gets by without its heavy hitters on this text, so any policy that keeps recent tokens will do."
        )
    if harm["heavy_but_first"] < harm["heavy"] / 2:
        return "Most of the harm comes from the first token: protect it (sinks=1 or more), whatever the policy."
    return "Keep what attention accumulates on: policies that do not look at attention risk losing these tokens."


def _verdict(result: Result, harm: dict[str, float]) -> Verdict:
    if result["full"] > result["guessing"] - KNOWS:
        return "cannot tell"
    return "agree" if harm["heavy"] >= HARM and harm["heavy"] >= TIMES * harm["random"] else "differ"
