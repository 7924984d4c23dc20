"""A12: heavy hitters among the hidden units of MLP blocks (H2O, Appendix C.10, Figures 11 and 12, Table 12).

A unit is active where its activation is above 0, as in the paper, which has ReLU. Smooth activations (SiLU, GELU) are
hardly ever 0. For them the share of units above 1 % of their layer's largest activation is reported as well; the order
of the units still counts activations above 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.evals import task
from kvkeep.evals.task import Options
from kvkeep_lab.analysis.groups import _ranks as stats
from kvkeep_lab.analysis.groups import _shared
from kvkeep_lab.analysis.groups._shared import Line, lines
from kvkeep_lab.analysis.measure import (
    AttentionRows,
    Axes,
    ClaimLine,
    Context,
    Measurement,
    Mlp,
    Progress,
    Reading,
    Result,
    Skipped,
    Subject,
    Verdict,
)
from kvkeep_lab.analysis.mlp_blocks import decoder_layers, is_activation
from kvkeep_lab.analysis.walk import walk

RELATIVE = 0.01
"""Share of a layer's largest activation that an active unit exceeds, where activations are never exactly 0."""

CALIBRATION = 128
"""Number of first tokens of a text that give each layer's largest activation."""


class Frequencies:
    """Counts, for each unit of each layer, the tokens in which it is active.

    Args:
        n_layers: number of layers.
        halves_at: number of tokens in the first half of the text.
    """

    def __init__(self, n_layers: int, *, halves_at: int) -> None:
        self._halves_at = halves_at
        self._waiting: list[list[Mlp]] = [[] for _ in range(n_layers)]
        self._limit: list[float | None] = [None] * n_layers
        self._tokens = torch.zeros(n_layers, 2, dtype=torch.float64)
        self._positive: list[Tensor | None] = [None] * n_layers
        self._large: list[Tensor | None] = [None] * n_layers
        self._zeros = self._seen = 0

    def rows(self, rows: AttentionRows) -> None:
        """Ignore attention."""

    def mlp(self, mlp: Mlp) -> None:
        """Count some tokens of a layer; the first ones wait until its largest activation is known.

        Raises:
            Skipped: the block has no activations of its own.
        """
        if mlp.units is None:
            raise Skipped("the MLP blocks of this model have no hidden activation for every token")
        if self._limit[mlp.layer] is None:
            self._waiting[mlp.layer].append(mlp)
            if mlp.first + len(mlp.units) >= CALIBRATION:
                self._settle(mlp.layer)
        else:
            self._count(mlp.layer, mlp.first, mlp.units)

    @property
    def has_zeros(self) -> bool:
        """Return whether more than 1 % of the activations are exactly 0, as with ReLU."""
        self._finish()
        return self._zeros > 0.01 * self._seen

    def positive(self) -> list[Float[Tensor, " u"]]:
        """Return, per layer and unit, the share of tokens with an activation above 0.

        Raises:
            Skipped: a layer was never shown.
        """
        self._finish()
        return [counts.sum(dim=0) / n.sum() for counts, n in zip(_all(self._positive), self._tokens, strict=True)]

    def large(self) -> list[Float[Tensor, " u"]]:
        """Return, per layer and unit, the share of tokens whose size is above 1 % of the layer's largest.

        The largest one is that of the first tokens.

        Raises:
            Skipped: a layer was never shown.
        """
        self._finish()
        return [counts.sum(dim=0) / n.sum() for counts, n in zip(_all(self._large), self._tokens, strict=True)]

    def halves(self) -> tuple[list[Float[Tensor, " u"]], list[Float[Tensor, " u"]]]:
        """Return the same as `positive`, for each half of the text alone; 0 for a half that has no token.

        Raises:
            Skipped: a layer was never shown.
        """
        self._finish()
        pairs = [counts / n.clamp(min=1)[:, None] for counts, n in zip(_all(self._positive), self._tokens, strict=True)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    def _finish(self) -> None:
        for layer, limit in enumerate(self._limit):
            if limit is None and self._waiting[layer]:
                self._settle(layer)

    def _settle(self, layer: int) -> None:
        waiting, self._waiting[layer] = self._waiting[layer], []
        units = torch.cat([mlp.units for mlp in waiting if mlp.units is not None])
        self._limit[layer] = RELATIVE * float(units[:CALIBRATION].abs().max())
        self._count(layer, waiting[0].first, units)

    def _count(self, layer: int, first: int, units: Float[Tensor, "R u"]) -> None:
        limit = self._limit[layer] or 0.0
        positive, large = self._positive[layer], self._large[layer]
        if positive is None or large is None:
            positive, large = (torch.zeros(2, units.shape[1], dtype=torch.float64) for _ in range(2))
            self._positive[layer], self._large[layer] = positive, large
        cut = min(max(self._halves_at - first, 0), len(units))
        for half, part in enumerate((units[:cut], units[cut:])):
            positive[half] += (part > 0).sum(dim=0)
            large[half] += (part.abs() > limit).sum(dim=0)
            self._tokens[layer, half] += len(part)
        self._zeros += int((units == 0).sum())
        self._seen += units.numel()


class Hushed:
    """A context in which some hidden units of a model are silent: their activation is 0.

    Args:
        model: the model.
        units: the silent units of each layer with attention.

    Raises:
        Skipped: a layer has no activation function of its own, or several.
    """

    def __init__(self, model: nn.Module, units: Sequence[Bool[Tensor, " u"]]):
        config: Any = model.config
        layers = decoder_layers(model)
        if layers is None:
            raise Skipped("the model's list of decoder layers was not found")
        numbers = BoundedCache(config, "local", budget=1).bounded_layers()
        self._places = [(_activation(layers[index]), silent) for index, silent in zip(numbers, units, strict=True)]
        self._handles: list[Any] = []

    def __enter__(self) -> Hushed:
        for module, silent in self._places:
            self._handles.append(module.register_forward_hook(_silencer(silent)))
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()


def _activation(layer: nn.Module) -> nn.Module:
    found = [module for module in layer.modules() if is_activation(module)]
    if len(found) != 1:
        raise Skipped(f"a decoder layer has {len(found)} activation functions, so its hidden units cannot be silenced")
    return found[0]


def _silencer(silent: Bool[Tensor, " u"]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], made: Tensor) -> Tensor:
        return made.masked_fill(silent.to(made.device), 0.0)

    return hook


def _all(counts: list[Tensor | None]) -> list[Tensor]:
    """Return the counts of every layer.

    Raises:
        Skipped: a layer was never shown.
    """
    if any(count is None for count in counts):
        raise Skipped("the MLP blocks of this model were not found")
    return [count for count in counts if count is not None]


OFTEN = 0.2
"""Units active for a larger share of the tokens are the paper's heavy hitters."""

ALWAYS = 0.99
"""Units active for a larger share of the tokens count as always active."""

PART = 0.1
"""Share of each layer's units that is silenced, in equal numbers for frequent, random and rare units."""

WINDOW, TEXTS, OTHER = 512, 2, 512
"""Tokens and number of windows for the loss, and tokens of the other text, the package's own sentences."""

HARM, TIMES = 0.1, 2.0
"""Silencing frequent units hurts if it costs so many nats, and so many times the cost of random ones."""

SAME = 0.5
"""Least rank correlation of frequencies over two texts at which the units count as the same."""

SETS = ("frequent", "random", "rare")


@final
class MlpUnits(Measurement):
    """Frequencies of hidden units, the cost of silencing them, and their overlap between two texts."""

    name: ClassVar[str] = "mlp_units"
    source: ClassVar[str] = "H2O, Figures 11 and 12, Table 12"
    title: ClassVar[str] = "MLP blocks have heavy hitters, too"
    reads: ClassVar[frozenset[str]] = frozenset({"mlp", "units", "model"})
    least_tokens: ClassVar[int] = 256
    effort: ClassVar[int] = 12

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._units = Frequencies(context.n_layers, halves_at=context.n_tokens // 2)

    def mlp(self, mlp: Mlp) -> None:
        """Count active units."""
        self._units.mlp(mlp)

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Measure losses with units silenced, and frequencies on the package's own sentences.

        Raises:
            Skipped: the units cannot be silenced, a layer was never shown, or the model has too few positions.
        """
        frequency = self._units.positive()
        ids, model = _shared.windows(subject, rows=TEXTS, length=WINDOW), subject.model
        self._losses = {"full": _shared.loss(model, ids)}
        sets = {**chosen(frequency, PART, subject.seed), "above": [layer > OFTEN for layer in frequency]}
        for number, (name, units) in enumerate(sets.items()):
            with Hushed(model, units):
                self._losses[name] = _shared.loss(model, ids)
            progress((number + 1) / (len(sets) + 1))
        checkpoint = subject.writer.checkpoint
        length = min(OTHER, checkpoint.position_limit or OTHER)
        (other,) = task.windows(checkpoint, Options(seed=subject.seed), rows=1, length=length)
        heard = Frequencies(self.context.n_layers, halves_at=len(other))
        walk(model, other, heard, reads=frozenset({"mlp"}))
        self._other = heard.positive()
        self._guessing = _shared.guesses(model)

    def result(self) -> Result:
        """Return frequencies per layer, losses, and the overlap of two halves and of two texts."""
        frequency = self._units.positive()
        places = stats.log_places(len(frequency[0]), most=40)
        return {
            "n_units": len(frequency[0]),
            "above_by_layer": [_share(layer > OFTEN) for layer in frequency],
            "always_by_layer": [_share(layer > ALWAYS) for layer in frequency],
            "median_by_layer": [float(layer.median()) for layer in frequency],
            "large_above_by_layer": [_share(layer > OFTEN) for layer in self._units.large()],
            "has_zeros": self._units.has_zeros,
            "curve": {
                "rank": places,
                "by_layer": [
                    stats.rounded(layer.sort(descending=True).values[torch.tensor(places) - 1], 4)
                    for layer in frequency
                ],
            },
            "silenced": PART,
            "loss": self._losses,
            "guessing": self._guessing,
            "halves": overlap(*self._units.halves()),
            "texts": overlap(frequency, self._other),
        }

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if all three claims do, and differs if one of them does."""
        found = cls.claims(result)
        verdicts = {claim.verdict for claim in found}
        return Reading(
            paper="Few units are active for nearly every token and most rarely; without the frequent ones a GPT-2 "
            "loses much (perplexity 19.32 to 31.78); they are the same over corpora.",
            here=" ".join(claim.here for claim in found),
            meaning="This says nothing about a cache's budget; it says whether the MLP weights of this model could be "
            "kept apart by how often they are used.",
            verdict="differ" if "differ" in verdicts else "agree" if verdicts == {"agree"} else "cannot tell",
        )

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return claims about distribution, pruning and overlap."""
        return _distribution(result), _pruning(result), _same_units(result)

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw sorted frequencies of the first, a middle and the last layer, with the paper's limit."""
        layers, ranks = result["curve"]["by_layer"], [float(rank) for rank in result["curve"]["rank"]]
        shown = sorted({0, len(layers) // 2, len(layers) - 1})
        drawn: dict[str, Line] = {f"layer {number}": (ranks, layers[number]) for number in shown}
        lines(axes, drawn, x="rank of the unit", y="active for this share of the tokens")
        axes.axhline(OFTEN, linestyle=":", color="0.4")
        axes.annotate("20 %, the paper's", (1, OFTEN), xytext=(2, 3), textcoords="offset points", fontsize=8)
        axes.set_ylim(0, 1.02)


def chosen(frequency: list[Float[Tensor, " u"]], share: float, seed: int) -> dict[str, list[Bool[Tensor, " u"]]]:
    """Return masks of equally many frequent, random and rare units of each layer, at least one each."""
    draw = torch.Generator().manual_seed(seed)
    order = {
        "frequent": [layer.argsort(descending=True, stable=True) for layer in frequency],
        "random": [torch.randperm(len(layer), generator=draw) for layer in frequency],
        "rare": [layer.argsort(stable=True) for layer in frequency],
    }
    return {name: [_first(units, share) for units in found] for name, found in order.items()}


def _first(order: Tensor, share: float) -> Bool[Tensor, " u"]:
    marks = torch.zeros(len(order), dtype=torch.bool)
    marks[order[: max(1, int(share * len(order)))]] = True
    return marks


def overlap(one: list[Float[Tensor, " u"]], other: list[Float[Tensor, " u"]]) -> dict[str, Any]:
    """Return, per layer, the rank correlation of frequencies and the Jaccard index of the most frequent tenths."""
    tops = ([_first(layer.argsort(descending=True, stable=True), PART) for layer in side] for side in (one, other))
    k = max(1, int(PART * len(one[0])))
    return {
        "spearman_by_layer": [stats.spearman(a, b) for a, b in zip(one, other, strict=True)],
        "jaccard_by_layer": [float(stats.jaccard(a, b)) for a, b in zip(*tops, strict=True)],
        "chance": stats.chance_jaccard(len(one[0]), k),
    }


def _share(units: Bool[Tensor, " u"]) -> float:
    return float(units.double().mean())


def _mean(values: list[float | None]) -> float:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else 0.0


def _distribution(result: Result) -> ClaimLine:
    """Return a claim that agrees if most layers have units that are always active while the median unit rarely is."""
    rows = list(zip(result["always_by_layer"], result["median_by_layer"], strict=True))
    skewed = sum(always > 0 and median < OFTEN for always, median in rows)
    smooth = "" if result["has_zeros"] else " (its activation is smooth; active means above 0)"
    return ClaimLine(
        text="A few hidden units are active for nearly all tokens, most for few",
        source="H2O, Figure 11",
        paper="The frequencies of OPT-6.7B's units follow a power law.",
        here=f"The median unit is active for {_mean(result['median_by_layer']):.0%} of the tokens and "
        f"{_mean(result['above_by_layer']):.0%} of the units for more than 20 %{smooth}.",
        verdict="agree" if skewed > len(rows) / 2 else "differ",
    )


def _pruning(result: Result) -> ClaimLine:
    loss = result["loss"]
    harm = {name: loss[name] - loss["full"] for name in (*SETS, "above")}
    times = {name: f"{math.exp(min(value, 50.0)):.3g}×" for name, value in harm.items()}
    verdict: Verdict = "agree" if harm["frequent"] >= max(HARM, TIMES * harm["random"]) else "differ"
    return ClaimLine(
        text="Silencing the frequent units costs far more than silencing others",
        source="H2O, Table 12",
        paper="Pruning units active for over 20 % of the tokens raises the perplexity of GPT-2 from 19.32 to 31.78.",
        here=f"Silencing a tenth of the units multiplies perplexity by {times['frequent']} for the frequent ones, "
        f"{times['random']} for random and {times['rare']} for rare ones; all above 20 %: {times['above']}.",
        verdict="cannot tell" if loss["full"] > result["guessing"] - HARM else verdict,
    )


def _same_units(result: Result) -> ClaimLine:
    found = result["texts"]
    same, top = _mean(found["spearman_by_layer"]), _mean(found["jaccard_by_layer"])
    return ClaimLine(
        text="The frequent units are the same over different texts",
        source="H2O, Figure 12",
        paper="The frequent units of OPT-1.3B largely coincide on WikiText-103, Penn Treebank and Amazon reviews.",
        here=f"Between this text and the package's own sentences the rank correlation is {same:.2f}, and the most "
        f"frequent tenths have a Jaccard index of {top:.2f} (chance {found['chance']:.2f}).",
        verdict="agree" if same >= SAME and top > 2 * found["chance"] else "differ",
    )
