"""What the policies that accumulate attention mass have in common: the sum, the sinks and the recent window."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from kvkeep.policies.base import Policy, option
from kvkeep.statistic import Mass, Statistic
from kvkeep.types import Budget, Report, State, View


@dataclass(frozen=True, kw_only=True)
class HeavyHitters(Policy):
    """Adds up the mass of every step."""

    recent: int | None = option(
        None, "newest tokens that are never evicted; half of the budget if not given, 0 for heavy hitters alone"
    )
    sinks: int = option(0, "first tokens that are never evicted")

    statistic: ClassVar[Statistic] = Mass()
    slots: ClassVar[Mapping[str, float]] = {"mass": 0.0}

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The sinks and the recent window."""
        return self.sinks, budget // 2 if self.recent is None else self.recent

    def observe(self, state: State, view: View, report: Report) -> State:
        """Add this step's mass."""
        return {"mass": state["mass"] + report.mass}
