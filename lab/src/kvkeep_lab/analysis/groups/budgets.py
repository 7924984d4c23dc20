"""The cost of a smaller cache on this very text: perplexity, and the advantage of a second reading of some passages.

The text is read in pieces through bounded caches, and after every piece the cache is cut to its budget. Then some
passages come again. A model that still holds their first occurrence predicts them much better than the first time. The
remaining part of that advantage measures how much of the far past a policy kept, which perplexity alone hardly shows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.errors import BudgetError, UnsupportedModelError, UnsupportedOperationError
from kvkeep.evals.forward import Drive
from kvkeep.evals.tasks.perplexity import feed_in_pieces
from kvkeep.policies.registry import parse
from kvkeep_lab.analysis.groups import budget_claims
from kvkeep_lab.analysis.measure import (
    Axes,
    ClaimLine,
    Context,
    Measurement,
    Progress,
    Reading,
    Result,
    Skipped,
    Subject,
)

POLICIES = ("local", "streaming_llm", "h2o", "scissorhands", "ahakv", "tova", "keydiff")
"""The three papers' policies, their baselines, and two that use the newest row alone or no attention at all."""

BUDGETS = (0.04, 0.1, 0.2, 0.5)
"""Shares of all tokens that are read."""

STRIDE = 64
"""Tokens of a piece."""

DEPTHS = (0.1, 0.3, 0.5, 0.7)
"""Where the repeated passages start, as shares of the text."""

PASSAGE = 64
"""Tokens of a passage."""

LEAD = 8
"""First tokens of a passage that do not count: they identify the passage."""

LONGEST = 2048
"""Most tokens to read; more would only take longer."""

_MARKS = ("o", "s", "^", "D", "v", "P", "X")
_DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True, eq=False)
class BudgetTexts:
    """The tokens to read.

    Attributes:
        tokens: the text, then the passages again.
        n_text: number of tokens of the text.
        starts: start of each passage in the text.
    """

    tokens: Int[Tensor, " n"]
    n_text: int
    starts: tuple[int, ...]

    @classmethod
    def of(cls, tokens: Int[Tensor, " n"], room: int) -> BudgetTexts:
        """Return as much of a text as ``room`` tokens allow, followed by passages of it."""
        n = min(len(tokens), room - PASSAGE * len(DEPTHS))
        starts = tuple(int(depth * n) for depth in DEPTHS)
        again = [tokens[start : start + PASSAGE] for start in starts]
        return cls(torch.cat([tokens[:n], *again]), n, starts)

    def first(self, losses: Float[Tensor, " m"]) -> Float[Tensor, "passages k"]:
        """Return the losses of the passages' counted tokens in the first reading.

        ``losses[i]`` is that of token ``i + 1``.
        """
        return torch.stack([losses[start + LEAD - 1 : start + PASSAGE - 1] for start in self.starts])

    def again(self, losses: Float[Tensor, " m"]) -> Float[Tensor, "passages k"]:
        """Return the losses of the same tokens in the second reading."""
        places = [self.n_text + number * PASSAGE for number in range(len(self.starts))]
        return torch.stack([losses[start + LEAD - 1 : start + PASSAGE - 1] for start in places])

    def text(self, losses: Float[Tensor, " m"]) -> Float[Tensor, " n"]:
        """Return the losses of the text itself."""
        return losses[: self.n_text - 1]


@final
class Budgets(Measurement):
    """Perplexity and the kept advantage of a second reading, per policy and budget."""

    name: ClassVar[str] = "budgets"
    source: ClassVar[str] = "H2O, Figure 4; Scissorhands, Figure 3; AhaKV, Figure 4"
    title: ClassVar[str] = "What a smaller cache costs on this text"
    reads: ClassVar[frozenset[str]] = frozenset({"model"})
    least_tokens: ClassVar[int] = 512
    effort: ClassVar[int] = 180
    panels: ClassVar[int] = 2

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._found: Result = {}

    def runs(self, subject: Subject, progress: Progress) -> None:
        """Read the text through every cache.

        Raises:
            Skipped: the model has too few positions for the text and its passages.
        """
        checkpoint = subject.writer.checkpoint
        limits = [LONGEST, checkpoint.position_limit or LONGEST, checkpoint.trained_length or LONGEST]
        if min(limits) < self.least_tokens:
            raise Skipped(f"The model is made for {min(limits)} tokens; this needs {self.least_tokens}.")
        plan = BudgetTexts.of(subject.tokens, min(limits))
        full = _losses(subject, "full", 1.0, plan.tokens)
        assert full is not None  # the full cache takes any budget
        policies: dict[str, Any] = {}
        for number, name in enumerate(POLICIES):
            found = []
            for column, share in enumerate(BUDGETS):
                progress((number + column / len(BUDGETS)) / len(POLICIES))
                found.append(compare(plan, full, _losses(subject, name, share, plan.tokens)))
            policies[name] = {key: [cell[key] for cell in found] for key in found[0]}
        self._found = {**summary(plan, full), "budgets": list(BUDGETS), "policies": policies}

    def result(self) -> Result:
        """Return the full cache's losses, and what each policy adds at each budget; ``None`` where it cannot run."""
        return self._found

    @classmethod
    def reading(cls, result: Result) -> Reading:
        """Return the reading: it agrees if H2O at a fifth costs next to nothing."""
        return budget_claims.reading(result)

    @classmethod
    def claims(cls, result: Result) -> tuple[ClaimLine, ...]:
        """Return one claim of each paper, and one against a window of recent tokens."""
        return budget_claims.claims(result)

    @classmethod
    def draw(cls, result: Result, axes: Axes) -> None:
        """Draw perplexity above, and below it the advantage of a second reading, with the full cache's."""
        above, below = axes
        shares = [100 * share for share in result["budgets"]]
        for number, (name, found) in enumerate(result["policies"].items()):
            style = {"marker": _MARKS[number % len(_MARKS)], "linestyle": _DASHES[number % len(_DASHES)], "label": name}
            style |= {"markersize": 5, "linewidth": 1.3, "color": f"{0.12 * (number % 6):.2f}"}
            costs = [None if cost is None else 100 * math.expm1(cost) for cost in found["excess"]]
            _line(above, shares, costs, style)
            _line(below, shares, [None if kept is None else kept * result["gain"] for kept in found["kept"]], style)
        for axis in axes:
            axes_of_budgets(axis, shares)
        above.set_ylabel("perplexity above the full cache's, %")
        below.set_ylabel("second reading easier by, nats")
        below.axhline(result["gain"], color="0.4", linewidth=1)
        place = (shares[0], result["gain"])
        below.annotate("full cache", place, xytext=(0, 3), textcoords="offset points", fontsize=8)
        above.legend(ncols=2)


def axes_of_budgets(axis: Axes, shares: Sequence[float]) -> None:
    """Make an axis logarithmic, with the budgets as its ticks."""
    axis.set_xscale("log")
    axis.set_xticks(list(shares), [f"{share:g} %" for share in shares])
    axis.set_xticks([], minor=True)
    axis.set_xlabel("budget, share of what was read")


def _line(axis: Axes, x: Sequence[float], y: Sequence[float | None], style: Mapping[str, Any]) -> None:
    places = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    axis.plot([a for a, _ in places], [b for _, b in places], **style)


def _losses(subject: Subject, name: str, share: float, tokens: Int[Tensor, " n"]) -> Float[Tensor, " m"] | None:
    """Return the loss of every token but the first.

    ``None`` if the policy cannot run on this model or with so small a budget.
    """
    try:
        drive = Drive(subject.writer, parse(name), [max(1, round(share * len(tokens)))], first=0)
    except (BudgetError, UnsupportedOperationError, UnsupportedModelError):
        return None
    return feed_in_pieces(drive, tokens[None], STRIDE)[0]


def summary(plan: BudgetTexts, full: Float[Tensor, " m"]) -> Result:
    """Return the full cache's losses in nats per token, with its perplexity and the advantage of a second reading."""
    text = plan.text(full).double().mean().item()
    first, again = plan.first(full).double().mean().item(), plan.again(full).double().mean().item()
    return {
        "n_text": plan.n_text,
        "n_tokens": len(plan.tokens),
        "nll": text,
        "perplexity": math.exp(min(text, 700.0)),
        "nll_first": first,
        "nll_again": again,
        "gain": first - again,
    }


def compare(plan: BudgetTexts, full: Float[Tensor, " m"], losses: Float[Tensor, " m"] | None) -> dict[str, Any]:
    """Return a bounded cache's additional loss, its standard error over tokens, and the kept share of the advantage.

    All are ``None`` without losses. The share is NaN or infinite if the full cache has no advantage.
    """
    if losses is None:
        return {"excess": None, "error": None, "kept": None, "kept_by_depth": None}
    more = (plan.text(losses) - plan.text(full)).double()
    first = plan.first(full).double().mean(dim=1)
    gain = first - plan.again(full).double().mean(dim=1)
    left = first - plan.again(losses).double().mean(dim=1)
    return {
        "excess": more.mean().item(),
        "error": more.std().item() / math.sqrt(len(more)),
        "kept": (left.sum() / gain.sum()).item(),
        "kept_by_depth": (left / gain).tolist(),
    }
