"""A5: do sums over past rows choose as well as sums over all rows, later ones included (H2O, Figure 2d)?

Three policies keep a fifth of the text: H2O with its sums so far, H2O with the sums of a first pass over the whole
text, and the newest tokens alone. All are replayed, token by token, on the same queries, keys and values of the full
cache. This shows which tokens they keep, and which part of the full cache's attention falls on them. Then each runs
freely, for its loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_probe import LayerTape, members, tapes
from kvkeep.cache.layer import Layer
from kvkeep.evals import task
from kvkeep.evals.forward import Drive
from kvkeep.evals.tasks.perplexity import feed_in_pieces
from kvkeep.models.tokenization import Writer
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse
from kvkeep_lab import hindsight
from kvkeep_lab.analysis.groups import _ranks as stats
from kvkeep_lab.analysis.groups import _shared
from kvkeep_lab.analysis.groups._shared import by_layer
from kvkeep_lab.analysis.measure import Axes, Measurement, Progress, Reading, Result, Subject, Verdict

BUDGET = 0.2
"""Kept share of the text, the paper's."""

WINDOW, TEXTS, STRIDE = 512, 2, 8
"""Tokens of a text, number of texts, and tokens fed at once in the free run, which may see up to so many more."""

EVERY = 16
"""Rows between two comparisons of the kept sets."""

MATTERS = 0.02
"""Least excess loss, in nats, of the newest tokens alone over the global sums; below it nothing can be told."""

NEAR = 0.25
"""Sums over the past are as good as global ones if they leave at most this part of the gap to the newest tokens."""

SURE = 2.0
"""Least difference of losses, in standard errors over the tokens, that counts as a difference."""


@final
class LocalGlobal(Measurement):
    """Kept sets, held attention and loss of sums over the past, sums over all rows, and the newest tokens."""

    name: ClassVar[str] = "local_global"
    source: ClassVar[str] = "H2O, Figure 2d"
    title: ClassVar[str] = "Sums over past rows choose as well as sums over all rows"
    reads: ClassVar[frozenset[str]] = frozenset({"model"})
    VERSION: ClassVar[int] = 2
    least_tokens: ClassVar[int] = 128
    effort: ClassVar[int] = 25
    slow: ClassVar[bool] = True

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Record the full cache, replay each policy on the record, and let each run freely."""
        ids, writer = _shared.windows(subject, rows=TEXTS, length=WINDOW), subject.writer
        length = ids.shape[1]
        budget = max(4, int(BUDGET * length))
        totals = hindsight.measure(subject.model, ids.to(subject.model.device))
        policies: dict[str, Policy] = {
            "past": parse("h2o"),
            "global": hindsight.H2OGlobal(totals=totals),
            "newest": parse("local"),
        }
        looks = rows_of_looks(budget, length)
        kept: dict[str, list[Kept]] = {name: [] for name in policies}
        layers = {name: _layers(writer, policy, budget, len(ids)) for name, policy in policies.items()}
        recorded = tapes(writer.model, ids)
        for done, (index, tape) in enumerate(recorded.items()):
            full = tape.weights(0).mean(dim=2).float()
            for name, own in layers.items():
                kept[name].append(replay(own[index], tape, full, budget, looks))
            progress((done + 1) / (2 * len(recorded)))
        losses = {}
        for number, (name, policy) in enumerate({**policies, "full": parse("full")}.items()):
            losses[name] = _run_freely(writer, policy, length if name == "full" else budget, ids)
            progress((number + 5) / 8)  # these four runs are the second half
        facts = {"window": length, "texts": len(ids), "budget": budget}
        self._found: Result = {**facts, **judged(losses), **compared(kept, budget, looks)}

    def result(self) -> Result:
        """Return the overlap with the global set beyond the recent window, held attention, and loss."""
        return self._found

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if the past closes three quarters of the gap to global sums in loss."""
        loss, held = result["loss"], {name: _mean(layers) for name, layers in result["held_by_layer"].items()}
        shared = _mean(result["jaccard_by_layer"]["past"])
        perplexity = {name: math.exp(min(value, 50.0)) for name, value in loss.items()}
        verdict = _verdict(result)
        return Reading(
            paper="At a budget of 20 % sums over the past do as well as sums that include later tokens, and far better "
            "than the newest tokens alone.",
            here=f"Perplexity {perplexity['past']:.3g} with the past, {perplexity['global']:.3g} with all rows, "
            f"{perplexity['newest']:.3g} with the newest tokens, {perplexity['full']:.3g} with everything; attention "
            f"held {held['past']:.0%}, {held['global']:.0%} and {held['newest']:.0%}; beyond the recent window past "
            f"and global sets have a Jaccard index of {shared:.2f} (chance {result['chance']:.2f}).",
            meaning=_MEANING[verdict],
            verdict=verdict,
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw held attention per layer."""
        names = {"past": "sums over the past", "global": "sums over all rows", "newest": "newest tokens"}
        held = {names[name]: [100 * share for share in layers] for name, layers in result["held_by_layer"].items()}
        by_layer(axes, held, y="attention held, %")


_MEANING: Mapping[Verdict, str] = {
    "agree": "H2O needs no look ahead: what it has seen is enough to choose by.",
    "differ": "What was heavy is not what will be: take a policy that looks at recent rows or lets old sums fade.",
    "cannot tell": "On this text the ways to choose are too close to tell apart; try another text or a smaller budget.",
}


@dataclass(frozen=True, eq=False)
class Kept:
    """The tokens that a layer kept of a record.

    Attributes:
        sets: the tokens that it held before some of the rows.
        share: part of the full cache's attention on the held tokens and the row's own, over all rows from the budget
            on.
    """

    sets: Bool[Tensor, "N Hk K T"]
    share: float


def rows_of_looks(budget: int, length: int) -> list[int]:
    """Return the rows before which the kept sets are compared; something was evicted before the first."""
    return list(range(min(budget + EVERY, length - 1), length, EVERY))


@torch.inference_mode()
def replay(layer: Layer, tape: LayerTape, full: Float[Tensor, "N Hk T T"], budget: int, looks: Sequence[int]) -> Kept:
    """Replay a record in one layer, token by token from where its budget is full.

    Args:
        layer: an unused one.
        tape: the record.
        full: the full cache's attention, averaged over the query heads of a group.
        budget: tokens that the layer keeps.
        looks: rows before which the kept set is remembered.
    """
    sets, shares = [], []
    tape.feed(layer, 0, budget)  # nothing is dropped before
    for row in range(budget, tape.length):
        positions, p = layer.store.positions, full[:, :, row]
        shares.append(task.held(p, positions) + p[..., row])
        if row in looks:
            sets.append(members(positions, tape.length).cpu())
        tape.feed(layer, row, row + 1)
    return Kept(torch.stack(sets, dim=2), float(torch.stack(shares).double().mean()))


def overlap(
    one: Bool[Tensor, "N Hk K T"], other: Bool[Tensor, "N Hk K T"], looks: Sequence[int], *, recent: int
) -> float:
    """Return the mean Jaccard index of two policies' tokens beyond the ``recent`` newest, which both hold."""
    older = torch.arange(one.shape[-1]) < torch.tensor(looks)[:, None] - recent
    return float(stats.jaccard(one & older, other & older).mean())


def compared(kept: Mapping[str, Sequence[Kept]], budget: int, looks: Sequence[int]) -> Result:
    """Return the attention that the policies hold, and their overlap with the global sums, per layer."""
    shared = {
        name: [
            overlap(one.sets, other.sets, looks, recent=budget // 2)
            for one, other in zip(kept[name], kept["global"], strict=True)
        ]
        for name in ("past", "newest")
    }
    held = {name: [layer.share for layer in found] for name, found in kept.items()}
    means = {f"{name}_mass": _mean(layers) for name, layers in held.items()}
    return {**means, "held_by_layer": held, "jaccard_by_layer": shared, "chance": chance(budget, looks)}


def chance(budget: int, looks: Sequence[int]) -> float:
    """Return the expected overlap of random choices beyond the recent window."""
    recent = budget // 2
    return sum(stats.chance_jaccard(row - recent, budget - recent) for row in looks) / len(looks)


def _layers(writer: Writer, policy: Policy, budget: int, texts: int) -> dict[int, Layer]:
    return Drive(writer, policy, [budget] * texts).cache.bounded_layers()


def _run_freely(writer: Writer, policy: Policy, budget: int, ids: Int[Tensor, "N T"]) -> Float[Tensor, " n"]:
    drive = Drive(writer, policy, [budget] * len(ids))
    return feed_in_pieces(drive, ids, STRIDE).double().flatten()


def judged(losses: Mapping[str, Float[Tensor, " n"]]) -> Result:
    """Return mean losses, the gap between newest tokens and global sums, and the past's part of it beyond `NEAR`."""
    gap = losses["newest"] - losses["global"]
    left = losses["past"] - losses["global"] - NEAR * gap
    means = {name: float(values.mean()) for name, values in losses.items()}
    return {"loss": means, "gap": _with_error(gap), "left": _with_error(left)}


def _with_error(values: Float[Tensor, " n"]) -> dict[str, float]:
    return {"mean": float(values.mean()), "error": float(values.std() / len(values) ** 0.5)}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _verdict(result: Result) -> Verdict:
    gap, left = result["gap"], result["left"]
    if gap["mean"] < max(MATTERS, SURE * gap["error"]):
        return "cannot tell"
    if left["mean"] <= 0:
        return "agree"
    return "differ" if left["mean"] > SURE * left["error"] else "cannot tell"
