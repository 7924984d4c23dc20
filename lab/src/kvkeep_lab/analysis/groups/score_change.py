"""The change of attention scores when Scissorhands evicts two of three tokens: (bounded - full) / full for every key.

There are two versions. *forced*: each layer's bounded cache gets the inputs of the full cache's layer, so a kept key
can only gain from the absence of others. *free*: the model runs on its bounded cache, so inputs differ from the second
layer on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_probe import LayerTape, TapeRecorder, tapes, wrap_layers
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import handed
from kvkeep.cache.layer import Layer
from kvkeep.policies.registry import parse
from kvkeep_lab.analysis.groups._shared import lines, mean, percent, show
from kvkeep_lab.analysis.measure import (
    Axes,
    ClaimLine,
    Context,
    Measurement,
    Progress,
    Reading,
    Result,
    Subject,
    Verdict,
)

POLICY = "scissorhands"
COMPRESSION = 3
"""As in Figure 4: the budget, which bounds the peak, is a third of the tokens; on average 3/4 of it is used."""

LENGTH = 768
"""Most tokens of the text to use."""

ROWS = 128
"""Number of rows whose scores are compared, at most a quarter of the text."""

NEGLIGIBLE = 1e-8
"""Smaller scores of the full cache are left out: their ratio is noise."""

EDGES = [-1.0 + 0.1 * step for step in range(31)]
"""Edges of the histogram of kept keys, from -1 to 2."""

CENTRED = 0.1
"""Largest median change of kept keys that counts as almost no change; Figure 4's axis does not show less."""

LOST = 0.1
"""Largest lost attention that counts as small."""


def change(full: Float[Tensor, "heads R n"], bounded: Float[Tensor, "heads R n"]) -> Result:
    """Compare scores of the same rows and keys.

    Args:
        full: probabilities under the full cache.
        bounded: probabilities under a bounded one; exactly 0 for keys that are not held.

    Returns:
        ``lost_mass``: the full cache's attention on dropped keys, per row. ``dropped``: share of the keys. ``median``
            and quantiles of the change of kept keys. ``l1``: sum of the absolute differences per row, which is twice
            the lost mass if the inputs are the same. ``histogram``: kept keys between `EDGES`, as shares; the last bin
            includes those above the last edge. Without a kept key median and quantiles are ``None``.
    """
    counts = full >= NEGLIGIBLE
    gone = counts & (bounded == 0.0)
    kept = counts & ~gone
    ratio = ((bounded - full) / full)[kept].double()
    quantiles = _quantiles(ratio, (0.05, 0.25, 0.5, 0.75, 0.95))
    clipped = ratio.clamp(max=EDGES[-1] - 1e-9)  # histc leaves out what lies beyond its edges
    histogram = torch.histc(clipped.float(), len(EDGES) - 1, EDGES[0], EDGES[-1])
    return {
        "lost_mass": (full * gone).sum(dim=-1).mean().item(),
        "dropped": gone.sum().item() / max(1, counts.sum().item()),
        "median": quantiles[2],
        "quantiles": quantiles,
        "l1": (full - bounded).abs().sum(dim=-1).mean().item(),
        "histogram": (histogram / histogram.sum().clamp(min=1)).tolist(),
    }


def _quantiles(values: Float[Tensor, " m"], at: tuple[float, ...]) -> list[float | None]:
    """Return quantiles as values that occur, since ``torch.quantile`` refuses large inputs; ``None`` without values."""
    if not len(values):
        return [None] * len(at)
    ranked = values.sort().values
    return [ranked[round(share * (len(ranked) - 1))].item() for share in at]


@final
class ScoreChange(Measurement):
    """The change of attention scores under Scissorhands at threefold compression."""

    name: ClassVar[str] = "score_change"
    source: ClassVar[str] = "Scissorhands, Figure 4"
    title: ClassVar[str] = "Attention scores hardly change at threefold compression"
    reads: ClassVar[frozenset[str]] = frozenset({"model"})
    least_tokens: ClassVar[int] = 256
    effort: ClassVar[int] = 7

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: Result = {}

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Run the text under the full cache, replay it layer by layer, and run it under the bounded cache."""
        ids = subject.tokens[None, :LENGTH]
        n = ids.shape[1]
        prompt, budget = n - min(ROWS, n // 4), n // COMPRESSION
        recorded = tapes(subject.model, ids)
        progress(0.2)
        full = [_by_head(tape.weights(prompt)) for tape in recorded.values()]
        forced = [_replay(tape, prompt, budget, index) for index, tape in recorded.items()]
        progress(0.4)
        free = _run(subject.model, ids, prompt, budget)
        progress(1.0)
        self._found = {
            "tokens": n,
            "rows": n - prompt,
            "budget": budget,
            "edges": EDGES,
            "forced": _summary(full, forced),
            "free": _summary(full, free),
        }

    def result(self) -> Result:
        """Return the numbers of both versions: over all layers, and per layer."""
        return self._found

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Compare the median change of kept keys with `CENTRED` and the lost attention with `LOST`."""
        free, forced = result["free"], result["forced"]
        return Reading(
            paper="For OPT-13B on C4 the change of scores is centred at 0, with a small part at -1 for dropped keys "
            "(Figure 4).",
            here=f"The median change of kept keys is {show(free['median'])}, half of them lie between "
            f"{show(free['quantiles'][1])} and {show(free['quantiles'][3])}; dropped keys had "
            f"{percent(free['lost_mass'])} of the attention (same inputs: {show(forced['median'])} and "
            f"{percent(forced['lost_mass'])}).",
            meaning=_meaning(free["lost_mass"]),
            verdict=_verdict(free["median"], free["lost_mass"]),
        )

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return claims that kept keys hardly change, and that dropped keys were small."""
        free = result["free"]
        return (
            ClaimLine(
                "The scores of kept keys hardly change",
                cls.source,
                "Centred at 0 for OPT-13B at threefold compression.",
                f"Median {show(free['median'])} of the score; with the same inputs {show(result['forced']['median'])}.",
                _verdict(free["median"], 0.0),
            ),
            ClaimLine(
                "Dropped keys had little attention",
                cls.source,
                "A small part of the keys at -1.",
                f"{percent(free['dropped'])} of the keys, with {percent(free['lost_mass'])} of the attention.",
                "agree" if free["lost_mass"] <= LOST else "differ",
            ),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw the histogram of the change of kept keys, in both versions."""
        middles = [(low + high) / 2 for low, high in pairwise(result["edges"])]
        series = {
            f"{text}: {percent(result[way]['lost_mass'])} of attention lost": (middles, result[way]["histogram"])
            for way, text in (("free", "on the bounded cache"), ("forced", "same inputs"))
        }
        lines(axes, series, x="(bounded - full) / full of kept keys; last point: 1.9 and above", y="share of kept keys")
        axes.axvline(0.0, color="0.6", linewidth=0.8)


def _replay(tape: LayerTape, prompt: int, budget: int, index: int) -> Float[Tensor, "Hq R n"]:
    """Return the attention of a bounded layer that gets the full cache's inputs: the prompt, then row by row."""
    recorder = TapeRecorder(Layer(parse(POLICY), budget, index=index, window=tape.options.window))
    for start, stop in pairwise([0, *range(prompt, tape.length + 1)]):
        tape.feed(recorder, start, stop)
    return _by_head(recorder.tape().bounded())


@torch.inference_mode()
def _run(model: Any, ids: Tensor, prompt: int, budget: int) -> list[Float[Tensor, "Hq R n"]]:
    """Return the attention of all layers when the model itself runs on a bounded cache."""
    cache = BoundedCache(model.config, POLICY, budget)
    recorders = wrap_layers(cache, TapeRecorder)
    for piece in [ids[:, :prompt], *ids[:, prompt:].split(1, dim=1)]:
        model(input_ids=piece.to(model.device), **handed(model, cache), use_cache=True, logits_to_keep=1)
    return [_by_head(recorder.tape().bounded()) for recorder in recorders.values()]


def _by_head(weights: Float[Tensor, "1 Hk G R n"]) -> Float[Tensor, "Hq R n"]:
    """Return the attention of the one text."""
    return weights[0].flatten(0, 1).cpu()


def _summary(full: list[Float[Tensor, "Hq R n"]], bounded: list[Float[Tensor, "Hq R n"]]) -> Result:
    """Return the numbers of all layers together, and the main numbers of each."""
    layers = [change(exact, other) for exact, other in zip(full, bounded, strict=True)]
    whole = change(torch.cat(full), torch.cat(bounded))
    by_layer = {key: [layer[key] for layer in layers] for key in ("lost_mass", "dropped", "median", "l1")}
    return {**whole, "by_layer": by_layer, "median_of_layers": mean(by_layer["median"])}


def _verdict(median: float | None, lost: float) -> Verdict:
    if median is None:
        return "cannot tell"
    return "agree" if abs(median) <= CENTRED and lost <= LOST else "differ"


def _meaning(lost: float) -> str:
    if lost <= LOST:
        return (
            "A third of the tokens holds most of what rows look at, on average; whether it holds the one fact that a "
            "question asks for, only recall shows."
        )
    return f"A third of the tokens misses {percent(lost)} of the attention: use a larger budget than a third here."
