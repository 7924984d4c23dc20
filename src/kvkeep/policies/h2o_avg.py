"""Keeps the tokens with the largest attention per query that could see them, and the recent ones.

Source: Zhang et al., arXiv:2306.14048, Appendix B.2, a negative result there; cf. kvpress `ObservedAttention`.
Differs: the count of queries is derived (tokens seen since the token came) instead of stored beside the sum.
Fails when: the average of a young token is dominated by its own, always large, first attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies.base import Policy, option
from kvkeep.policies.h2o import H2O
from kvkeep.statistic import Mass, Statistic
from kvkeep.types import Budget, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class H2OAvg(Policy):
    """Accumulated attention mass divided by the number of query rows."""

    recent: int | None = option(None, "newest tokens that are never evicted; half of the budget if not given")
    sinks: int = option(0, "first tokens that are never evicted")

    statistic: ClassVar[Statistic] = Mass()
    slots: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    bibtex: ClassVar[str] = H2O.bibtex

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The sinks and the recent window."""
        return self.sinks, budget // 2 if self.recent is None else self.recent

    def observe(self, state: State, view: View, report: Report) -> State:
        """Add this step's mass."""
        return {"mass": state["mass"] + report.mass}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Mass per row: a token at position p has been visible to ``seen - p`` rows."""
        rows = view.seen[:, None, None] - view.positions
        return state["mass"] / rows.clamp(min=1)
