"""Keeps SnapKV's tokens, with more slots for heads whose attention is spread out and fewer for the others.

Source: Feng et al., arXiv:2407.11550; official code FFY0/AdaKV, `adaptive_snapkv/monkeypatch/snapkv_utils.py`.
Differs: head budgets add up exactly (official: each is rounded). It is `snapkv` under `head_budget="ada"`.
  Among equal scores, which max pooling often produces, the newest stay (official: as `topk` happens to order them).
Fails when: the heads' scores are alike, so that it does what SnapKV does, and more slowly; see also SnapKV.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

from kvkeep.policies._head_budgets import ada
from kvkeep.policies._prefill import ObservationWindow
from kvkeep.policies.base import HeadBudgets, option


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

    @cached_property
    def spreads(self) -> HeadBudgets | None:  # type: ignore[override]  # depends on an option
        """Return Ada-KV's rule with this policy's share."""
        return ada(self.alpha)
