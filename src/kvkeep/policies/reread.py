"""Keeps the tokens that a second reading of the prompt would attend to, worked out from the first one's queries.

Source: kvkeep's own; it computes without a second pass what KVzip (arXiv:2505.23416) measures with one.
Differs: queries are those of the first reading, turned ahead by the prompt's length; one budget for all heads. With
  chunks, each chunk rereads what is held and itself, and a token's score is the largest so far.
  With `equal` below 1, budgets are divided among the heads of all layers, unless a cache cannot do so (chunks of a
  cache, another rule for layers than `sliding`, a model split over processes, sliding windows everywhere).
Fails when: nothing in the prompt resembles the question; a chunk dropped the answer before it could be reread; or a
  later question has more tokens than `recent`. It costs one more product of all queries and all keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.budget import between
from kvkeep.policies._head_budgets import across
from kvkeep.policies._prefill import slide
from kvkeep.policies.base import Defaults, HeadBudgets, Policy, option
from kvkeep.types import Budget, Phase, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class Reread(Policy):
    """The largest share of attention that a token would receive from any query of the second reading."""

    sinks: int = option(4, "first tokens that are never evicted")
    recent: int = option(24, "newest tokens that are never evicted; at most half of the budget without the sinks")
    equal: float = option(
        1.0, "share of the budget that all heads get alike; scores divide the rest among all layers", within=(0, 1)
    )

    presets: ClassVar[Mapping[str, str]] = {"later": "equal=0.2"}
    slots: ClassVar[Mapping[str, float]] = {"again": 0.0}
    rereads: ClassVar[bool] = True

    @cached_property
    def spreads(self) -> HeadBudgets | None:  # type: ignore[override]  # depends on an option
        """Return the rule ``global`` with the share of ``equal``; ``None`` for equal heads."""
        return across(self.equal) if self.equal < 1 else None

    @property
    def defaults(self) -> Defaults:  # type: ignore[override]  # depends on an option
        """Return that layers with sliding windows get less, unless heads are equal: they see no later question."""
        return Defaults() if self.spreads is None else Defaults(layer_budget="sliding:0.25")

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the larger of a token's score so far and its share in this chunk; unchanged for generated tokens."""
        if view.phase is not Phase.PREFILL:
            return state
        return {"again": torch.maximum(state["again"], report.sums["again"].to(state["again"].dtype))}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the largest share in a prompt; for generated tokens an order that keeps the chosen tokens.

        Where heads share the budget, shares are multiplied with the mean length of the head's values: a head adds to
        the output in proportion to it.
        """
        if view.is_decode:
            return slide(view, self.protected(view.budget)[1])
        if self.spreads is None:
            return state["again"]
        held = (view.positions >= 0).float()
        lengths: Tensor = (view.values.float().norm(dim=-1) * held).sum(dim=-1, keepdim=True)
        return state["again"] * (lengths / held.sum(dim=-1, keepdim=True).clamp(min=1))
