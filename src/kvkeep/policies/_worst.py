"""Base of policies that go by the worst case of a prompt's last rows, and by what a token adds to the output."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.attention_stats import Statistic, Worst
from kvkeep.kv import ranking
from kvkeep.policies._heads import average
from kvkeep.policies._output import sizes
from kvkeep.policies._prefill import PrefillOnly
from kvkeep.policies.abilities import Sums
from kvkeep.policies.base import option
from kvkeep.types import EMPTY, Budget, Phase, Report, State, View


@dataclass(frozen=True, kw_only=True)
class WorstCase(PrefillOnly):
    """The worst case over the window's rows, at least the mean, times the token's share of all heads' sizes."""

    window: int = option(32, "last tokens of a prompt, which stay and rate the others", within=(1, math.inf))
    kernel: int = option(5, "width of the average along the prompt, an odd number; 1 for none", odd=True)
    first: float = option(0.9, "share of the mean attention that chooses tokens before sizes count", within=(0, 1))

    slots: ClassVar[Mapping[str, float]] = {"score": 0.0, "size": 0.0}
    sums: ClassVar[Sums | None] = None
    projects: ClassVar[bool] = True
    rates_by_budget: ClassVar[bool] = True

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The window."""
        return 0, self.window

    def rows(self, view: View) -> int:
        """The window."""
        return self.window

    def wants(self, view: View) -> Statistic:
        """The worst case of a prompt's last rows; the mass of a generated token's row."""
        if view.is_decode:
            return super().wants(view)
        return Worst(rows=self.window * view.reads.long(), before=view.seen - self.window, kernel=self.kernel)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Rate a prompt; add the mass of a generated token's row."""
        if view.phase is not Phase.PREFILL:
            return state if view.phase is Phase.PROBE else state | super().observe(state, view, report)
        size, reads = self._sizes(state, view), view.reads[:, None, None]
        found = self.rate(view, report.mass)
        worst = report.sums["worst"]
        older = self._older(view)
        number = older.sum(dim=-1, keepdim=True).clamp(min=1)
        worst = worst.maximum(worst.sum(dim=-1, keepdim=True) / number) * size
        rating = torch.where(found > 0, 1.0 + found, worst).masked_fill(~older, 0.0)
        return {"score": torch.where(reads, rating, state["score"]), "size": size}

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """The mean attention of the tokens that go first, and 0 for the others."""
        number = view.new.clamp(min=1, max=self.window)[:, None, None]
        mean, older = mass / number, self._older(view)
        order = ranking.ranks(mean.masked_fill(~older, -1.0), view.positions).argsort(dim=-1, descending=True)
        so_far = mean.masked_fill(~older, 0.0).gather(-1, order).cumsum(dim=-1)
        own = (1.0 - so_far[..., -1:]).clamp(min=0.0)
        early = torch.zeros_like(older).scatter_(-1, order, so_far + own < self.first) & older
        room = (average(view) - self.window - self.room).clamp(min=0)
        chosen = ranking.keep(mean, view.positions.masked_fill(~early, EMPTY), room)
        return mean.masked_fill(~chosen, 0.0)

    def _sizes(self, state: State, view: View) -> Float[Tensor, "B Hk S"]:
        """Each token's share of all heads' sizes, worked out when it comes; of a generated token an equal share."""
        first = (view.seen - view.new)[:, None, None]
        found = sizes(view, view.values.masked_fill((view.positions < 0)[..., None], 0.0))
        everything = view.heads.all_slots(found, 0.0)
        total = everything.sum(dim=1, keepdim=True)[..., -found.shape[-1] :]
        shares = found / total.clamp(min=torch.finfo(found.dtype).tiny)
        old = state["size"].masked_fill(state["size"] == 0.0, 1.0 / everything.shape[1])
        return torch.where(view.positions >= first, shares.to(old.dtype), old)

    def _older(self, view: View) -> Bool[Tensor, "B Hk S"]:
        """Whether a slot holds a token from before the window."""
        return (view.positions >= 0) & (view.positions < (view.seen - self.window)[:, None, None])
