"""Keeps SnapKV's tokens, with more slots for heads whose attention is spread out and fewer for the others.

Source: Feng et al., arXiv:2407.11550; official code FFY0/AdaKV, `adaptive_snapkv/monkeypatch/snapkv_utils.py`.
Differs: head budgets add up exactly (official: each is rounded); each layer has the slots that its largest head needs.
  Among equal scores, which max pooling often produces, the newest stay (official: as `topk` happens to order them).
Fails when: one head takes nearly all slots, so that the layer's block is large and mostly empty; see also SnapKV.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Int
from torch import Tensor

from kvkeep.policies._heads import by_score, largest
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
        """The largest budget of a head."""
        return largest(budget, heads, fixed=self.window + self.room, alpha=self.alpha)

    def heads(self, view: View, state: State) -> Int[Tensor, "B Hk"]:
        """The budget of each head."""
        return by_score(view, state["score"], window=self.window, room=self.room, alpha=self.alpha)

    spreads: ClassVar[HeadBudgets | None] = HeadBudgets(heads, most)
