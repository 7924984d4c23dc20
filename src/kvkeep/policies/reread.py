"""Keeps the tokens that a second reading of the prompt would attend to, worked out from the first one's queries.

Source: kvkeep's own; it computes without a second pass what KVzip (arXiv:2505.23416) measures with one.
Differs: queries are those of the first reading, turned ahead by the prompt's length; one budget for all heads. With
  chunks, each chunk rereads what is held and itself, and a token's score is the largest so far.
  With `equal` below 1, the heads of all layers divide the budget, unless a cache cannot do so (its own chunks, another
  rule for layers than `sliding` or `uniform`, a model split over processes, sliding windows everywhere).
Fails when: nothing in the prompt resembles the question; a chunk dropped the answer before; or a later question has
  more tokens than `recent`. It costs one more product of all queries and all keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Nothing, Statistic
from kvkeep.budget import between
from kvkeep.policies._head_budgets import across
from kvkeep.policies._prefill import slide, sums_of
from kvkeep.policies.base import Defaults, HeadBudgets, Policy, option
from kvkeep.types import Budget, Phase, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class Reread(Policy):
    """The largest share of attention that a token would receive from any query of the second reading."""

    sinks: int = option(4, "first tokens that are never evicted")
    recent: int = option(24, "newest tokens that are never evicted; at most half of the budget without the sinks")
    equal: float = option(1.0, "share of the budget that heads get alike; scores divide the rest", within=(0, 1))
    decode: Literal["local", "score"] = option("local", "generated tokens: slide, or compete by their mass")

    presets: ClassVar[Mapping[str, str]] = {"later": "equal=0.2", "chat": "recent=64,equal=0.2,decode=score"}
    slots: ClassVar[Mapping[str, float]] = {"again": 0.0}
    rereads: ClassVar[bool] = True
    end_rows: ClassVar[int] = 1  # shares of earlier rows stay in the state
    sums = property(sums_of("again"))  # depends on an option

    @cached_property
    def spreads(self) -> HeadBudgets | None:  # type: ignore[override]  # depends on an option
        """Return the rule ``global`` with the share of ``equal``; ``None`` for equal heads."""
        return across(self.equal) if self.equal < 1 else None

    @property
    def defaults(self) -> Defaults:  # type: ignore[override]  # depends on an option
        """Return that layers with sliding windows, which see no later question, get less, unless heads are equal."""
        rule = "sliding:0.25" if self.decode == "local" else "sliding:0.5"  # long answers need them
        return Defaults() if self.spreads is None else Defaults(layer_budget=rule)

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: the mass of a generated token's row if these compete; nothing otherwise."""
        # a row that reads no prompt: the last row of a probe counts as a generated token's row would
        return Mass(rows=1 if view.is_decode else (~view.reads).long()) if self.decode == "score" else Nothing()

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the larger of a token's number so far and the largest share that a query of this chunk's
        second reading gives it; plus a generated token's mass, if these compete.
        """
        again = state["again"]
        if view.phase is Phase.PREFILL:
            again = torch.where(view.reads[:, None, None], again.maximum(report.sums["again"].to(again.dtype)), again)
        return {"again": again + report.mass if self.decode == "score" else again}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the largest share that any query has given a token, times the mean length of the head's values where
        heads share the budget. For generated tokens return it plain, or an order that keeps the chosen tokens.
        """
        if view.is_decode and self.decode == "local":
            return slide(view, self.protected(view.budget)[1])
        if view.is_decode or self.spreads is None:
            return state["again"]
        # heads that share the budget add to the output in proportion to the mean length of their values
        held = (view.positions >= 0).float()
        lengths: Tensor = (view.values.float().norm(dim=-1) * held).sum(-1, True) / held.sum(-1, True).clamp(min=1)
        return state["again"] * lengths
