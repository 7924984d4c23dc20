"""A11: does accumulated attention favour early tokens, and does averaging help (H2O, Appendix B.2)?

A key at position j is seen by all rows from j on, so its sum falls with j even under uniform attention. An average over
these rows falls less, but still falls: early rows share their attention among fewer keys. Positions are counted without
a recent window, so that the scores alone choose. For the loss each policy keeps the usual half of its budget for recent
tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.evals.forward import Drive
from kvkeep.evals.tasks.perplexity import feed_in_pieces
from kvkeep.models.tokenization import Writer
from kvkeep.policies.registry import parse
from kvkeep_lab import hindsight
from kvkeep_lab.analysis.groups import _ranks as stats
from kvkeep_lab.analysis.groups import _shared
from kvkeep_lab.analysis.groups._shared import lines
from kvkeep_lab.analysis.measure import Axes, Measurement, Progress, Reading, Result, Subject, Verdict

BUDGET = 0.2
"""Kept share of the text."""

WINDOW, TEXTS = 1024, 2
"""Tokens and number of the prompts whose kept positions are counted."""

SHORT, STRIDE = 512, 8
"""Tokens of a text for the loss, and tokens fed at once."""

BINS = 20

POLICIES = ("h2o", "h2o_avg", "random")

BIASED = 0.1
"""H2O is biased if the first half of the text has by this much more than half of its kept tokens."""

WORSE = 0.02
"""Least excess loss of averaging, in nats, that counts as the paper's remark."""


@final
class PositionBias(Measurement):
    """Positions of kept tokens under sums, averages and chance, and the loss of each."""

    name: ClassVar[str] = "position_bias"
    source: ClassVar[str] = "H2O, Appendix B.2"
    title: ClassVar[str] = "Accumulated attention favours early tokens, and averaging it does not help"
    reads: ClassVar[frozenset[str]] = frozenset({"model"})
    VERSION: ClassVar[int] = 2
    least_tokens: ClassVar[int] = 128
    effort: ClassVar[int] = 28

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Run one prompt per policy for the positions, and one text in pieces for the loss."""
        writer, ids = subject.writer, _shared.windows(subject, rows=TEXTS, length=WINDOW)
        length = ids.shape[1]
        totals = hindsight.measure(subject.model, ids.to(subject.model.device))
        kept = {}
        for number, name in enumerate(POLICIES):
            kept[name] = described(kept_positions(writer, name, ids, subject.seed), length)
            progress((number + 1) / (2 * len(POLICIES) + 2))
        short = _shared.windows(subject, rows=TEXTS, length=SHORT)
        losses = {}
        for number, name in enumerate((*POLICIES, "full")):
            losses[name] = _loss(writer, name, short, subject.seed)
            progress((number + 1 + len(POLICIES)) / (2 * len(POLICIES) + 2))
        self._found: Result = {
            "window": length,
            "texts": len(ids),
            "budget": max(1, int(BUDGET * length)),
            "kept": kept,
            "mass": mass_by_place(totals.mass, BINS),
            "uniform": _in_bins(stats.uniform_mass(length, self.context.windows).mean(dim=0), BINS),
            "loss": losses,
            "loss_window": short.shape[1],
        }

    def result(self) -> Result:
        """Return shares of kept positions, of mass, and losses."""
        return self._found

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if sums keep clearly more of the first half, and averaging costs quality."""
        half = {name: one["first_half"] for name, one in result["kept"].items()}
        tenth = {name: one["first_tenth"] for name, one in result["kept"].items()}
        loss = {name: math.exp(min(value, 50.0)) for name, value in result["loss"].items()}
        return Reading(
            paper="Sums give older tokens an advantage; averages over rows were tried and made the quality worse; many "
            "heavy hitters stand at the beginning.",
            here=f"The first half of a prompt holds {half['h2o']:.0%} of what sums keep, {half['h2o_avg']:.0%} of what "
            f"averages keep and {half['random']:.0%} of random tokens, its first tenth {tenth['h2o']:.0%}, "
            f"{tenth['h2o_avg']:.0%} and {tenth['random']:.0%}; perplexity {loss['h2o']:.3g}, {loss['h2o_avg']:.3g} "
            f"and {loss['random']:.3g} ({loss['full']:.3g} with everything).",
            meaning=_meaning(half["h2o"]),
            verdict=_verdict(half, result["loss"]),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw the kept share by position in the prompt."""
        middles = [100 * (place + 0.5) / BINS for place in range(BINS)]
        names = {"h2o": "sums (h2o)", "h2o_avg": "averages (h2o_avg)", "random": "random"}
        drawn = {
            names[name]: (middles, [100 * share for share in one["histogram"]]) for name, one in result["kept"].items()
        }
        lines(axes, drawn, x="position in the prompt, %", y="kept tokens, %")


def kept_positions(writer: Writer, name: str, ids: Int[Tensor, "N T"], seed: int) -> list[Int[Tensor, "N Hk S"]]:
    """Return the positions in each layer's slots after the whole prompt, with no recent window; -1 in an empty slot."""
    budget = max(1, int(BUDGET * ids.shape[1]))
    drive = Drive(writer, parse(_spec(name, 0, seed)), [budget] * len(ids))
    drive.feed(ids, last_only=True)
    return [layer.store.positions.cpu() for layer in drive.cache.bounded_layers().values()]


def described(layers: list[Int[Tensor, "N Hk S"]], length: int) -> Result:
    """Return the positions of kept tokens over all layers, and the share of the first half per layer."""
    kept = [positions[positions >= 0] for positions in layers]
    every = torch.cat(kept)
    shares = stats.histogram(every, length, BINS)
    entropy = -sum(share * math.log(share) for share in shares if share > 0) / math.log(BINS)
    return {
        "histogram": stats.rounded(shares),
        "entropy": entropy,
        "first_half": float((2 * every < length).double().mean()),
        "first_tenth": float((10 * every < length).double().mean()),
        "first_half_by_layer": [float((2 * positions < length).double().mean()) for positions in kept],
    }


def mass_by_place(mass: Mapping[int, Float[Tensor, "N Hk T"]], bins: int) -> list[float]:
    """Return the share of the accumulated attention by position in the prompt, over all layers and heads."""
    return _in_bins(torch.stack([layer.double().mean(dim=(0, 1)).cpu() for layer in mass.values()]).mean(dim=0), bins)


def _in_bins(mass: Float[Tensor, " T"], bins: int) -> list[float]:
    place = torch.arange(len(mass)) * bins // len(mass)
    sums = torch.zeros(bins, dtype=torch.float64).index_add_(0, place, mass.double())
    return stats.rounded(sums / sums.sum())


def _spec(name: str, recent: int, seed: int) -> str:
    return f"{name}:recent={recent}" + (f",seed={seed}" if name == "random" else "")


def _loss(writer: Writer, name: str, ids: Int[Tensor, "N T"], seed: int) -> float:
    budget = max(2, int(BUDGET * ids.shape[1]))
    policy = parse("full" if name == "full" else _spec(name, budget // 2, seed))
    drive = Drive(writer, policy, [ids.shape[1] if name == "full" else budget] * len(ids))
    return float(feed_in_pieces(drive, ids, STRIDE).double().mean())


def _meaning(first_half: float) -> str:
    if first_half > 0.5 + BIASED:
        return (
            "Facts late in a prompt are at a disadvantage under sums: keep a recent window, or take a policy that "
            "looks at recent rows only (snapkv, ahakv)."
        )
    return "On this text sums do not crowd out the later half; their bias is no reason to avoid H2O here."


def _verdict(first_half: Mapping[str, float], loss: Mapping[str, float]) -> Verdict:
    biased = first_half["h2o"] > 0.5 + BIASED
    gap = loss["h2o_avg"] - loss["h2o"]
    if biased and gap >= WORSE:
        return "agree"
    return "cannot tell" if biased and gap > -WORSE else "differ"
