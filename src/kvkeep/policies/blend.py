"""Keeps the tokens that a prompt's last rows attend to in one half of the budget, and outstanding keys in the other.

Source: kvkeep's own: `snapkv` with a narrow window and wide pooling, and `leverage`.
Differs: from each of the two by serving a question that ends the prompt as well as one that comes later.
Fails when: the budget is so small that half of it is too little for either; see also `leverage`, whose memory it needs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Nothing, Statistic
from kvkeep.budget import table
from kvkeep.kv import ranking
from kvkeep.policies._leverage import Leverages
from kvkeep.policies._prefill import SLIDING
from kvkeep.policies.base import MassSums, option
from kvkeep.types import EMPTY, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class Blend(Leverages):
    """Of the slots that are not protected, the first share goes by attention and the rest by leverage."""

    share: float = option(0.5, "share of the slots that goes by the attention of the last rows", within=(0, 1))
    window: int = option(8, "last rows of a prompt whose attention counts", within=(1, math.inf))
    kernel: int = option(13, "width of the pooling along the prompt, an odd number; 1 for none", odd=True)

    slots: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    sums: ClassVar[MassSums | None] = SLIDING

    def wants(self, view: View) -> Statistic:
        """Return the statistic that the policy needs: the mass of a prompt's last rows."""
        if view.is_decode:
            return Nothing()
        return Mass(rows=self.window * view.reads.long())

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with a prompt's keys added and the mass replaced; unchanged for generated tokens."""
        return super().observe(state, view, report) | ({} if view.is_decode else {"mass": report.mass})

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the leverage of a prompt's tokens, with infinity for those that its end attends to most: ``share`` of
        the slots that are not protected. In decode, where no row's attention is asked for, return an order by age.
        """
        if view.is_decode:
            return self.later(view)
        last = view.seen[:, None] - table(self.protected(view.budget)[1], view.seen)
        free = (view.positions >= self.sinks) & (view.positions < last[:, :, None])
        protected = ((view.positions >= 0) & ~free).sum(dim=-1)
        room = (table(view.budget, view.seen) - protected).clamp(min=0)
        # a key that stands out keeps its neighbours, which make sense of it; NaN would rank above every mass
        pooled = ranking.pooled(state["mass"], view.positions, free, kernel=self.kernel, kind="max").nan_to_num()
        # 1e-9: a product such as 0.29 * 100 lies just below the whole number that is meant
        number = (self.share * room.double() + 1e-9).long()
        attended = ranking.keep(pooled, view.positions.masked_fill(~free, EMPTY), number)
        return self.leverage(view, state).masked_fill(attended, torch.inf)
