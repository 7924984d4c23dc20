"""Keeps the tokens with the largest attention of the newest row, each head on its own.

Source: the row "Top-K" of H2O (arXiv:2306.14048), Table 8, which does not define it.
Differs: the newest token stays; `h2` gives a share of the budget to accumulated mass, the table's "w. H2".
Fails when: a token matters later but not to the query at hand.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import MassAndLast, Statistic
from kvkeep.kv import ranking
from kvkeep.policies._head_budgets import average
from kvkeep.policies.base import Policy, option
from kvkeep.policies.h2o import H2O
from kvkeep.types import Budget, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class TopK(Policy):
    """The current row, or half of it."""

    h2: float = option(0.0, "share of the budget for the largest accumulated mass", within=(0, 1))

    slots: ClassVar[Mapping[str, float]] = {"last": 0.0, "mass": 0.0}
    bibtex: ClassVar[str] = H2O.bibtex

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: 0, and 1."""
        return 0, 1

    def wants(self, view: View) -> Statistic:
        """Return the statistic that the policy needs: the mass of the newest row, and the mass of all rows."""
        return MassAndLast(last=view.seen - 1)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the mass from the newest row, and the sum of the mass from all rows."""
        return {"last": report.sums["last"], "mass": state["mass"] + report.mass}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the mass in the newest row. With ``h2``, return its rank, lifted above all others for the tokens that
        are the best by the newest row or by the sum of all rows, each in its share of the budget.
        """
        budget = average(view)
        # 1e-9: a product such as 0.29 * 100 lies just below the whole number that is meant
        heavy = (self.h2 * budget.double() + 1e-9).long()
        best = ranking.keep(state["last"], view.positions, budget - heavy)
        best |= ranking.keep(state["mass"], view.positions, heavy)
        lift = best * view.positions.shape[-1]  # more than any rank
        return (ranking.ranks(state["last"], view.positions) + lift).float() if self.h2 else state["last"]
