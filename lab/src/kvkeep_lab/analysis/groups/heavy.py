"""A2: a few tokens, and a few words, receive most of the attention (H2O, Figures 2b and 10)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep_lab.analysis.groups import _ranks as stats
from kvkeep_lab.analysis.groups._ranks import ColumnSums, by_kind
from kvkeep_lab.analysis.measure import AttentionRows, Axes, Context, Measurement, Reading, Result, Verdict

SHARES = {"1%": 0.01, "5%": 0.05, "20%": 0.2}
"""Shares of the tokens whose part of the mass is reported."""

HELD = (0.8, 0.9, 0.95)
"""Parts of the mass; the smallest share of the tokens that holds each part is reported."""

STRAIGHT = 0.9
"""Least R² at which points on two logarithmic axes count as a line. An exponential over 300 ranks stays below it."""

CLEAR = 0.1
"""Least excess of the heaviest fifth's mass over that under uniform attention, which by itself favours early tokens."""

FEWEST_KINDS = 100
"""Fewer kinds of tokens span less than one decade of ranks from the tenth on, too few for a power law."""

_NAMED = 10


@final
class MassByRank(Measurement):
    """Accumulated attention by rank: of tokens in each layer, and of kinds of tokens over the text."""

    name: ClassVar[str] = "heavy_hitters"
    source: ClassVar[str] = "H2O, Figures 2b and 10"
    title: ClassVar[str] = "A few heavy hitters collect most of the attention"
    reads: ClassVar[frozenset[str]] = frozenset({"attention"})
    VERSION: ClassVar[int] = 2
    least_tokens: ClassVar[int] = 64

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._columns = ColumnSums(context)

    def rows(self, rows: AttentionRows) -> None:
        """Add the attention that each key receives."""
        self._columns.add(rows)

    def result(self) -> Result:
        """Return the shares of the heaviest tokens per layer, and the law over kinds of tokens.

        Both are there with and without the first token.
        """
        tokens, sums = self.context.tokens, self._columns.sums
        kinds, _, counts = by_kind(sums.sum(dim=1), tokens)
        later, _, _ = by_kind(sums[..., 1:].sum(dim=1), tokens[1:])
        total = kinds.sum(dim=0)
        places = stats.log_places(len(counts))
        shares = _shares(sums)
        return {
            "top_5_percent": sum(shares["5%"]) / len(shares["5%"]),
            "tokens": shares,
            "tokens_but_first": _shares(sums[..., 1:]),
            "uniform": _shares(stats.uniform_mass(len(tokens), self.context.windows)[:, None]),
            "kinds": _law(total),
            "kinds_but_first": _law(later.sum(dim=0)),
            "kinds_by_layer": [_law(layer) for layer in kinds],
            "counts": _law(counts.double()),
            "n_kinds": len(counts),
            "curve": {
                "rank": places,
                "mass": _at(total, places),
                "count": _at(counts.double(), places),
            },
            "heaviest": self._named(total),
        }

    def _named(self, mass: Float[Tensor, " V"]) -> list[dict[str, Any]]:
        """Return the heaviest kinds of tokens, in words."""
        _, where = self.context.tokens.unique(sorted=True, return_inverse=True)
        found = []
        for index in mass.argsort(descending=True)[:_NAMED].tolist():
            places: Int[Tensor, " n"] = (where == index).nonzero()[:, 0]
            share = float(mass[index] / mass.sum())
            found.append({"word": self.context.words[int(places[0])], "count": len(places), "share": share})
        return found

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if the line is straight and the heaviest fifth clearly stands out.

        It does if in most layers it holds clearly more than under uniform attention.
        """
        law, held, even = result["kinds"], result["tokens"]["20%"], result["uniform"]["20%"]
        mean, level, need = sum(held) / len(held), sum(even) / len(even), result["tokens"]["for"]["90%"]
        slope = (
            "no line could be fitted"
            if law["fit"] is None
            else (
                f"over kinds of tokens the mass falls with rank to the power {law['fit']['slope']:.2f} "
                f"(R² {law['fit']['r2']:.2f})"
            )
        )
        return Reading(
            paper="Accumulated attention over the vocabulary follows a power law, and a small set of tokens leads it.",
            here=f"The heaviest fifth of the tokens receives {mean:.0%} of the mass ({level:.0%} if attention were "
            f"uniform); {slope}.",
            meaning=f"With hindsight {sum(need) / len(need):.0%} of the tokens would hold 90 % of the mass, on average "
            "over layers; a budget far below that drops attention whatever the policy.",
            verdict=_verdict(result),
        )

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw mass and counts by rank on logarithmic axes."""
        curve = result["curve"]
        for key, mark, label in (("mass", "o", "attention received"), ("count", "x", "occurrences")):
            axes.plot(curve["rank"], curve[key], mark, markersize=4, color="black", label=label)
        axes.legend(fontsize=8)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("rank of the kind of token")
        axes.set_ylabel("share of the whole")


def _verdict(result: Result) -> Verdict:
    fit, held, even = result["kinds"]["fit"], result["tokens"]["20%"], result["uniform"]["20%"]
    if result["n_kinds"] < FEWEST_KINDS or fit is None:
        return "cannot tell"
    clear = sum(share > level + CLEAR for share, level in zip(held, even, strict=True)) > len(held) / 2
    return "agree" if clear and fit["r2"] >= STRAIGHT else "differ"


def _shares(sums: Float[Tensor, "L Hq T"]) -> dict[str, Any]:
    """Return the heaviest tokens' mass, and the share of tokens that holds a part of it: means over heads per layer."""
    found: dict[str, Any] = {name: stats.top_share(sums, share).mean(dim=-1).tolist() for name, share in SHARES.items()}
    part = sums.sort(dim=-1, descending=True).values.cumsum(dim=-1)
    part = part / part[..., -1:].clamp(min=1e-300)
    n = sums.shape[-1]
    found["for"] = {
        f"{held:.0%}": (((part < held - 1e-12).sum(dim=-1) + 1).double().mean(dim=-1) / n).tolist() for held in HELD
    }
    return found


def _law(values: Float[Tensor, " V"]) -> dict[str, Any]:
    """Return the power law over ranks, ``None`` where it has no fit, and the mass of the heaviest kinds."""
    fit = stats.power_law(values)
    return {
        "fit": None if fit is None else asdict(fit),
        "hill": stats.hill(values),
        "top": {name: float(stats.top_share(values, share)) for name, share in SHARES.items()},
    }


def _at(values: Float[Tensor, " V"], places: list[int]) -> list[float]:
    """Return shares of the total at some ranks."""
    ordered = values.sort(descending=True).values / values.sum()
    return stats.rounded(ordered[torch.tensor(places) - 1])
