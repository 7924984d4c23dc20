"""Keeps the tokens that some row of a prompt's end attends to most, by the size of what they add to the output.

Source: Feng et al., Taming the Fragility of KV Cache Eviction (ICLR 2026); official code FFY0/DefensiveKV.
Differs: the window's own attention counts towards `first` (official: that of the last tokens before it); tokens that
  came in different pieces of a prompt are weighed by the sizes of their own piece. One budget per layer. Where the
  output projection cannot be read (quantised, fused, in another module), sizes are those of the values.
Fails when: no row of the window asks for the answer.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, final

from kvkeep.policies._head_budgets import ada
from kvkeep.policies._prefill import WorstCase
from kvkeep.policies.base import HeadBudgets, option


@final
@dataclass(frozen=True, kw_only=True)
class DefensiveKV(WorstCase):
    """The worst case under head budgets that follow the scores."""

    alpha: float = option(0.0, "share of the budget that is divided equally among the heads", within=(0, 1))

    bibtex: ClassVar[str] = """@inproceedings{feng2026defensivekv,
  title     = {Taming the Fragility of {KV} Cache Eviction in {LLM} Inference},
  author    = {Yuan Feng and Haoyu Guo and Junlin Lv and S. Kevin Zhou and Xike Xie},
  booktitle = {International Conference on Learning Representations},
  year      = {2026},
}"""

    @cached_property
    def spreads(self) -> HeadBudgets | None:  # type: ignore[override]  # depends on an option
        """Return Ada-KV's rule with this policy's share."""
        return ada(self.alpha)
