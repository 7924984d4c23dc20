"""Keeps the tokens that a second reading of the prompt would attend to, worked out from the first one's queries.

Source: kvkeep's own; it computes without a second pass what KVzip (arXiv:2505.23416) measures with one.
Differs: queries are those of the first reading, turned ahead by the prompt's length; one budget for all heads. With
  chunks, each chunk rereads what is held and itself, and a token's score is the largest so far.
Fails when: nothing in the prompt resembles the question; a chunk dropped the answer before it could be reread; or a
  later question has more tokens than `recent`. It costs one more product of all queries and all keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.budget import between
from kvkeep.policies._prefill import slide
from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, Phase, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class Reread(Policy):
    """The largest share of attention that a token would receive from any query of the second reading."""

    sinks: int = option(4, "first tokens that are never evicted")
    recent: int = option(24, "newest tokens that are never evicted; at most half of the budget without the sinks")

    slots: ClassVar[Mapping[str, float]] = {"again": 0.0}
    rereads: ClassVar[bool] = True

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the larger of a token's score so far and of its share in this chunk; unchanged for generated
        tokens.
        """
        if view.phase is not Phase.PREFILL:
            return state
        return {"again": torch.maximum(state["again"], report.sums["again"].to(state["again"].dtype))}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the largest share in a prompt; for generated tokens an order that keeps the chosen tokens."""
        return slide(view, self.protected(view.budget)[1]) if view.is_decode else state["again"]
