"""Bases of policies that add up attention mass: heavy hitters, and the fixed patterns of sparse attention."""

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Mass, Nothing, Statistic
from kvkeep.budget import column
from kvkeep.kv import ranking
from kvkeep.policies._bursts import when_outgrown
from kvkeep.policies.base import Bursts, Policy, option
from kvkeep.types import EMPTY, Budget, Report, State, View


@dataclass(frozen=True, kw_only=True)
class HeavyHitters(Policy):
    """Adds up the mass of every step, and protects sinks and a recent window."""

    recent: int | None = option(
        None, "newest tokens that are never evicted; half of the budget if not given, 0 for heavy hitters alone"
    )
    sinks: int = option(0, "first tokens that are never evicted")

    statistic: ClassVar[Statistic] = Mass()
    slots: ClassVar[Mapping[str, float]] = {"mass": 0.0}

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, budget // 2 if self.recent is None else self.recent

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with this step's mass added."""
        return {"mass": state["mass"] + report.mass}


@dataclass(frozen=True, kw_only=True)
class Pattern(Policy):
    """Keeps a pattern of positions, and the heaviest tokens outside of it, once a text outgrows the budget.

    All other tokens are dropped at once. The share of the budget that heavy hitters do not get belongs to the pattern.
    """

    h2: float = option(0.0, "share of the budget for the largest accumulated mass", within=(0, 1))

    slots: ClassVar[Mapping[str, float]] = {"mass": 0.0}

    @abc.abstractmethod
    def local(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """Return a mask of the slots near the newest token that belong to the pattern: at most half of its share."""

    @abc.abstractmethod
    def marks(self, view: View, share: Int[Tensor, "B 1 1"]) -> Bool[Tensor, "B Hk S"]:
        """Return a mask of the slots further back that belong to the pattern. If they exceed the share, the oldest
        go.
        """

    def wants(self, view: View) -> Statistic:
        """Return the statistic that the policy needs: the mass of all rows if heavy hitters have a share."""
        return Mass() if self.h2 else Nothing()

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with this step's mass added; unchanged if heavy hitters have no share."""
        return {"mass": state["mass"] + report.mass} if self.h2 else state

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return 1 for tokens of the pattern and heavy hitters, 0 for others."""
        return self._members(view, state).float()

    def _stays(self, view: View, state: State) -> Int[Tensor, "B Hk"]:
        """Return how many tokens may stay: those of the pattern, heavy hitters and pinned ones, at most the budget; the
        whole budget in rows that have not outgrown it.
        """
        members = self._members(view, state)
        if view.pins is not None:
            members = members | ranking.pinned(view.positions, view.pins)
        return when_outgrown(view, members.sum(dim=-1))

    bursts: ClassVar[Bursts | None] = Bursts(_stays)

    def _members(self, view: View, state: State) -> Bool[Tensor, "B Hk S"]:
        """Return a mask of the slots that belong to the pattern or to the heavy hitters."""
        budget = column(view.budget, view.seen)[:, None, None]
        # 1e-9: a product such as 0.29 * 100 lies just below the whole number that is meant
        # - 1: the pattern keeps one slot, that of the newest token
        heavy = torch.minimum((self.h2 * budget.double() + 1e-9).long(), budget - 1)
        share = budget - heavy
        # the newest part of the pattern comes first, then its marks as far as there is room, then heavy hitters
        local = self.local(view, share) & (view.positions >= 0)
        marks = view.positions.masked_fill(local | ~self.marks(view, share), EMPTY)
        room = (share - local.sum(dim=-1, keepdim=True)).squeeze(-1)
        members = local | ranking.keep(view.positions.float(), marks, room)
        if self.h2:
            members |= ranking.keep(state["mass"], view.positions.masked_fill(members, EMPTY), heavy.squeeze(-1))
        return members
