"""Positions of the tokens that policies keep of a prompt, and the dependence of scores on position (AhaKV).

Under iid logits the expected accumulated attention of token ``j`` of ``n`` is H_n - H_{j-1} (H: harmonic numbers). This
curve falls although no token is worth more than another. It is drawn with the measured ones. In a layer with a sliding
window it falls over the first and the last window alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.attention_stats import ProbabilityRows as Block
from kvkeep.attention_stats import Statistic
from kvkeep.cache.eviction import limit
from kvkeep.kv import ranking
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse
from kvkeep.types import Phase, Report, View
from kvkeep_lab.analysis.groups._ranks import uniform_mass
from kvkeep_lab.analysis.groups._shared import in_bins, lines, percent, show
from kvkeep_lab.analysis.measure import AttentionRows, Axes, ClaimLine, Context, Measurement, Reading, Result, Verdict

RECENT_ONLY = "ahakv:sg_softmax=false,value_prior=false"
POLICIES = ("h2o", "h2o_avg", RECENT_ONLY, "ahakv", "scissorhands", "tova", "snapkv")
"""The policies of Figure 2 and Table 2, and similar ones. None of them uses keys."""

KEEP_RATIO = 0.2
"""Figure 2: 720 of 3600 tokens."""

LATE = 1500 / 3600
"""Figure 2: beyond this part of the prompt H2O keeps hardly anything."""

BINS = 20
CURVE_BINS = 40

BIASED = 0.75
"""Late tokens that H2O chooses, relative to an even spread; below this H2O is biased."""

EVENER = 0.05
"""Least lead of AhaKV in the Kolmogorov-Smirnov distance from an even spread at which it counts as less biased."""


def spread(counts: Float[Tensor, " n"]) -> dict[str, float]:
    """Return the evenness of chosen tokens over ``n`` positions; NaN if none was chosen.

    Args:
        counts: how often each position was chosen.

    Returns:
        ``ks``: largest distance between the cumulative shares and those of an even spread. ``entropy``: that of the
            histogram over `BINS` bins, 1 if even. ``late``: tokens chosen beyond `LATE`, relative to an even spread.
    """
    n = len(counts)
    share = counts.double() / counts.sum()
    even = torch.arange(1, n + 1).double() / n
    bins = in_bins(share, BINS)
    bins = bins / bins.sum()
    start = round(LATE * n)
    return {
        "ks": (share.cumsum(dim=0) - even).abs().max().item(),
        "entropy": (torch.special.entr(bins).sum() / torch.log(torch.tensor(float(BINS)))).item(),
        "late": (share[start:].sum() / (1.0 - start / n)).item(),
    }


@final
class Retained(Measurement):
    """Tokens of the text that each policy keeps if the text is a prompt, and the scores of H2O and AhaKV."""

    name: ClassVar[str] = "retained"
    source: ClassVar[str] = "AhaKV, Figures 2a-c, 5 and 6"
    title: ClassVar[str] = "Accumulated scores keep the beginning of a prompt"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    VERSION: ClassVar[int] = 2
    least_tokens: ClassVar[int] = 256
    panels: ClassVar[int] = 2

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._budget = budgets.from_ratio(KEEP_RATIO, context.n_tokens)
        self._prompts = {
            name: [LayerPrompt(parse(name), context, self._budget, layer) for layer in range(context.n_layers)]
            for name in POLICIES
        }

    def rows(self, rows: AttentionRows) -> None:
        """Show the rows to every policy."""
        for prompts in self._prompts.values():
            prompts[rows.layer].add(rows)

    def result(self) -> Result:
        """Return histograms of kept positions, the evenness of the chosen ones, and score curves with a mean of 1."""
        return {
            "budget": self._budget,
            "policies": {name: self._kept(prompts) for name, prompts in self._prompts.items()},
            "curves": self._curves(),
        }

    def _kept(self, prompts: list[LayerPrompt]) -> dict[str, Any]:
        """Return the numbers of one policy. The protected newest tokens are in the histogram, but were not chosen."""
        kept = torch.stack([prompt.kept() for prompt in prompts])
        counts = kept.double().sum(dim=(0, 1))
        chosen = counts[: len(counts) - prompts[0].recent]
        histogram = in_bins(counts, BINS)
        return {"histogram": (histogram / histogram.sum()).tolist(), "recent": prompts[0].recent, **spread(chosen)}

    def _curves(self) -> dict[str, list[float]]:
        """Return scores by position, each with a mean of 1: means over heads and layers, one head, and iid logits."""
        n, middle = self.context.n_tokens, self.context.n_layers // 2
        curves = {
            name: torch.stack([prompt.score() for prompt in self._prompts[name]]).double().mean(dim=(0, 1))
            for name in ("h2o", "ahakv")
        }
        curves["h2o, one head"] = self._prompts["h2o"][middle].score()[0].double()
        curves["iid logits"] = uniform_mass(n, self.context.windows).mean(dim=0)
        return {name: in_bins(curve / curve.mean(), min(CURVE_BINS, n)).tolist() for name, curve in curves.items()}

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Compare the late choices of H2O and AhaKV with an even spread."""
        h2o, ahakv = result["policies"]["h2o"], result["policies"]["ahakv"]
        return Reading(
            paper="Of 3 600 tokens H2O keeps hardly any beyond position 1 500 except the recent ones; those of "
            "AhaKV are spread over the whole prompt (Figure 2c).",
            here=f"In the last {percent(1 - LATE)} of the text before its recent tokens H2O chooses "
            f"{show(h2o['late'])} times as many tokens as an even spread would, AhaKV {show(ahakv['late'])} times; the "
            f"distances from an even spread are {show(h2o['ks'])} and {show(ahakv['ks'])}.",
            meaning=_meaning(result["policies"]),
            verdict=_verdict(h2o, ahakv),
        )

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return claims about the bias of accumulated scores, and about its absence under AhaKV."""
        policies = result["policies"]
        h2o, ahakv, averaged = (policies[name] for name in ("h2o", "ahakv", "h2o_avg"))
        gap = h2o["ks"] - ahakv["ks"]
        return (
            ClaimLine(
                "Accumulated attention keeps early tokens",
                "AhaKV, Figures 2a, 2c, 5 and 6; Equation 4",
                "Hardly any token beyond position 1 500 of 3 600, except the recent ones.",
                f"{show(h2o['late'])} times as many beyond that part as an even spread has; averaged over rows, "
                f"{show(averaged['late'])} times.",
                "agree" if h2o["late"] < BIASED else "differ",
            ),
            ClaimLine(
                "AhaKV keeps tokens from the whole prompt",
                "AhaKV, Figures 2b, 2c, 5 and 6",
                "More evenly spread than H2O's.",
                f"Distance from an even spread {show(ahakv['ks'])}, H2O's {show(h2o['ks'])}.",
                "agree" if gap >= EVENER else "differ" if gap <= -EVENER else "cannot tell",
            ),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw score curves with that of iid logits, and below them the kept positions of four policies."""
        scores, kept = axes
        curves = {
            name: ([(number + 0.5) / len(curve) for number in range(len(curve))], curve)
            for name, curve in result["curves"].items()
        }
        lines(scores, curves, x="position, as a share of the text", y="score, its mean is 1")
        scores.set_yscale("log")
        names = {"h2o": "h2o", "h2o_avg": "h2o_avg", RECENT_ONLY: "recent accumulation only", "ahakv": "ahakv"}
        middles = [(number + 0.5) / BINS for number in range(BINS)]
        series = {text: (middles, result["policies"][name]["histogram"]) for name, text in names.items()}
        lines(kept, series, x="position, as a share of the text", y="share of the kept tokens")
        kept.axhline(1 / BINS, color="0.6", linewidth=0.8)


def _verdict(h2o: dict[str, Any], ahakv: dict[str, Any]) -> Verdict:
    biased, evener = h2o["late"] < BIASED, ahakv["ks"] <= h2o["ks"] - EVENER
    if biased and evener:
        return "agree"
    return "cannot tell" if biased or evener else "differ"


def _meaning(policies: dict[str, dict[str, Any]]) -> str:
    evenest = min(policies, key=lambda name: policies[name]["ks"])
    if policies["h2o"]["late"] < BIASED:
        return (
            f"With long prompts whose later parts matter, prefer a policy that is not biased to the beginning; here "
            f"{evenest} spreads its choice most evenly."
        )
    return "H2O is not biased to the beginning on this text; position is no reason against it."


# -- what a policy keeps of a prompt -----------------------------------------------------------------------------------


class LayerPrompt:
    """One policy on one layer at the end of a prompt, with its own statistic, state and score.

    A prompt attends to everything before anything is evicted. So the walk sees the very rows from which a policy
    chooses, and the kept set is that of a `BoundedCache` that gets the whole prompt at once. In layers with a sliding
    window the cache also evicts tokens that have left the window.

    Args:
        policy: a policy that does not use keys, which the walk does not show.
        context: the text, which is the prompt.
        budget: tokens kept per head.
        layer: number of the layer.
    """

    def __init__(self, policy: Policy, context: Context, budget: int, layer: int):
        n = context.n_tokens
        policy.check(budget)
        self.policy, self.budget = policy, budget
        self._view = _view(context, budget, layer)
        self.statistic: Statistic = policy.wants(self._view)
        self._selected = self.statistic.selects(torch.arange(n)[None])
        self._sums = {name: torch.zeros(1, context.n_kv_heads, n) for name in self.statistic.fields}

    def add(self, rows: AttentionRows) -> None:
        """Reduce the policy's statistic over a block of rows; at the last block, take the values."""
        R, S = rows.weights.shape[1:]
        last = rows.first + R
        if last == self._view.positions.shape[-1]:
            self._view = replace(self._view, values=rows.values[None])
        at = self._selected[0, rows.first : last].nonzero().flatten()
        if not len(at):
            return
        p = rows.weights[:, at] if len(at) < R else rows.weights
        queries = (rows.first + at)[None]
        grouped = p.unflatten(0, (self._view.positions.shape[1], -1))[None]
        block = Block(grouped, torch.ones_like(queries, dtype=torch.bool), queries, torch.arange(S)[None, None])
        for name, part in self.statistic.reduce(block).items():
            self.statistic.join(self._sums[name][:, :, :S], part, name)

    def score(self) -> Float[Tensor, "Hk n"]:
        """Return the policy's score of every token after the last row; higher = keep."""
        return self.policy.score(self._view, self._state())[0]

    def kept(self) -> Bool[Tensor, "Hk n"]:
        """Return which tokens of the prompt are kept."""
        view, state = self._view, self._state()
        sinks, recent = self.policy.protected(self.budget)
        score = ranking.protect(self.policy.score(view, state), view.positions, view.seen, sinks=sinks, recent=recent)
        return ranking.keep(score, view.positions, limit(self.policy, view, state))[0]

    @property
    def recent(self) -> int:
        """Return the number of newest tokens that are always kept."""
        return int(self.policy.protected(self.budget)[1])

    def _state(self) -> dict[str, Tensor]:
        positions = self._view.positions
        start = {name: torch.full(positions.shape, value) for name, value in self.policy.slots.items()}
        return self.policy.observe(start, self._view, Report(self._sums))


def _view(context: Context, budget: int, layer: int) -> View:
    n, heads = context.n_tokens, context.n_kv_heads
    positions: Int[Tensor, "1 Hk n"] = torch.arange(n, dtype=torch.int32).expand(1, heads, n)
    nothing = torch.zeros(1, heads, n, 0)
    return View(
        positions=positions,
        keys=nothing,
        values=nothing,
        seen=torch.tensor([n]),
        budget=budget,
        new=torch.tensor([n]),
        prompt=torch.tensor([n]),
        phase=Phase.PREFILL,
        layer=layer,
        sequences=torch.zeros(1, dtype=torch.int64),
    )
