"""Keeps SnapKV's tokens, with more slots for heads whose attention is spread out and fewer for the others.

Source: Feng et al., arXiv:2407.11550; official code FFY0/AdaKV, `adaptive_snapkv/monkeypatch/snapkv_utils.py`.
Differs: head budgets add up exactly (official: each is rounded); each layer has the slots that its largest head needs.
  Among equal scores, which max pooling often produces, the newest stay (official: as `topk` happens to order them).
Fails when: one head takes nearly all slots, so that the layer's block is large and mostly empty; see also SnapKV.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep import scores
from kvkeep.policies._prefill import ObservationWindow
from kvkeep.policies.abilities import HeadBudgets
from kvkeep.policies.base import option
from kvkeep.types import State, View


@final
@dataclass(frozen=True, kw_only=True)
class AdaKV(ObservationWindow):
    """SnapKV under head budgets that follow the scores."""

    alpha: float = option(0.2, "share of the budget that is divided equally among the heads", within=(0, 1))

    bibtex: ClassVar[str] = """@article{feng2024adakv,
  title   = {{Ada-KV}: Optimizing {KV} Cache Eviction by Adaptive Budget Allocation for Efficient {LLM} Inference},
  author  = {Yuan Feng and Junlin Lv and Yukun Cao and Xike Xie and S. Kevin Zhou},
  journal = {arXiv preprint arXiv:2407.11550},
  year    = {2024},
}"""

    def most(self, budget: int, heads: int) -> int:
        """The largest budget of a head: its own part, all that is shared out, and two more for rounding."""
        base = max(0, budget - self.window - self.room)
        return budget + math.ceil(base * (heads - 1) * (1.0 - self.alpha)) + 2

    def heads(self, view: View, state: State) -> Int[Tensor, "B Hk"]:
        """The budget of each head: its tokens among the best of all heads. Equal if there is nothing to choose."""
        B, Hk, S = view.positions.shape
        fixed = self.window + self.room
        now = torch.as_tensor(view.budget, device=view.seen.device).expand(B, Hk)
        base = now.sum(dim=1) // Hk - fixed
        older = (view.positions >= 0) & (view.positions < (view.seen - self.window)[:, None, None])
        flat = view.positions.masked_fill(~older, -1).view(B, 1, Hk * S)
        best = scores.keep(state["score"].view(B, 1, Hk * S), flat, (base * Hk)[:, None]).view(B, Hk, S).sum(dim=-1)
        own = (self.alpha * base.double() + 1e-9).long()[:, None]
        share = scores.rounded(best.double() * (1.0 - self.alpha) + own, (base * Hk)[:, None])
        crowded = (older.sum(dim=-1).amax(dim=1) > base)[:, None]
        budgets = torch.where(crowded, share, base[:, None]) + fixed
        return torch.where(view.reads[:, None], budgets, now)

    spreads: ClassVar[HeadBudgets | None] = HeadBudgets(heads, most)
