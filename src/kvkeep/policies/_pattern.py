"""What the fixed patterns of sparse attention have in common, without and with a share for heavy hitters."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import scores
from kvkeep.budget import column
from kvkeep.policies._bursts import when_outgrown
from kvkeep.policies.base import Policy, option
from kvkeep.statistic import Mass, Nothing, Statistic
from kvkeep.types import EMPTY, Report, State, View


@dataclass(frozen=True, kw_only=True)
class Pattern(Policy):
    """Once a text outgrows the budget: the pattern stays, and the heaviest of the others; the rest goes at once."""

    h2: float = option(0.0, "share of the budget for the largest accumulated mass", within=(0, 1))

    slots: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    bursts: ClassVar[bool] = True

    @abc.abstractmethod
    def local(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """The slots near the newest token that are in the pattern, of at most half of its share."""

    @abc.abstractmethod
    def marks(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """The slots further back that are in the pattern; the oldest of them go if the share is too small."""

    def wants(self, view: View) -> Statistic:
        """All rows, if heavy hitters have a share."""
        return Mass() if self.h2 else Nothing()

    def observe(self, state: State, view: View, report: Report) -> State:
        """Add this step's mass."""
        return {"mass": state["mass"] + report.mass} if self.h2 else state

    def stays(self, view: View, state: State) -> Int[Tensor, "B Hk"]:
        """As many as belong to the pattern or are heavy."""
        return when_outgrown(view, self._members(view, state).sum(dim=-1))

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """1 for those, 0 for the others."""
        return self._members(view, state).float()

    def _members(self, view: View, state: State) -> Bool[Tensor, "B Hk S"]:
        budget = column(view.budget, view.seen)[:, None, None]
        heavy = torch.minimum((self.h2 * budget.double() + 1e-9).long(), budget - 1)
        share = budget - heavy
        local = self.local(view, share) & (view.positions >= 0)
        marks = view.positions.masked_fill(local | ~self.marks(view, share), EMPTY)
        room = (share - local.sum(dim=-1, keepdim=True)).squeeze(-1)
        members = local | scores.keep(view.positions.float(), marks, room)
        if self.h2:
            members |= scores.keep(state["mass"], view.positions.masked_fill(members, EMPTY), heavy.squeeze(-1))
        return members
