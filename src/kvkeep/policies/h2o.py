"""Keeps heavy hitters, the tokens with the largest accumulated attention, and the recent ones.

Source: Zhang et al., arXiv:2306.14048, Algorithm 1; official code FMInference/H2O, `utils_real_drop`, `h2o_flexgen`.
Differs: float32 sums (official: float16); group mean for GQA; `graduate=replace` is the ring of the FlexGen code.
Fails when: early tokens have collected mass for so long that a late, important one never catches up.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Statistic
from kvkeep.policies._mass import HeavyHitters
from kvkeep.policies.base import MassSums, option
from kvkeep.types import Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class H2O(HeavyHitters):
    """Accumulated attention mass."""

    graduate: Literal["compete", "replace"] = option(
        "compete", "a token that leaves the recent window competes with the heavy hitters, or replaces the weakest"
    )
    decay: float = option(1.0, "factor on the accumulated mass in every row; below 1 the past fades", within=(0, 1))

    sums: ClassVar[MassSums | None] = MassSums("mass", only={"graduate": "compete"}, steady={"decay": 1.0})
    bibtex: ClassVar[str] = """@inproceedings{zhang2023h2o,
  title  = {{H2O}: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models},
  author = {Zhenyu Zhang and Ying Sheng and Tianyi Zhou and Tianlong Chen and Lianmin Zheng and Ruisi Cai and
            Zhao Song and Yuandong Tian and Christopher R{\\'e} and Clark Barrett and Zhangyang Wang and Beidi Chen},
  booktitle = {Advances in Neural Information Processing Systems}, year = {2023}}"""

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: the mass of all rows. With decay, earlier rows of a prompt count for less."""
        return self.statistic if self.decay == 1.0 else Mass(decay=self.decay, last=view.seen - 1)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the past mass, reduced by the decay once for each new row, plus this step's mass."""
        past = state["mass"] if self.decay == 1.0 else state["mass"] * (self.decay**view.new)[:, None, None]
        return {"mass": past + report.mass}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the accumulated mass. Under ``replace``, the token that has just left the recent window gets the
        largest number, so that it stays.
        """
        if self.graduate == "compete":
            return state["mass"]
        _, recent = self.protected(view.budget)
        graduate = (view.seen[:, None] - recent - 1)[:, :, None]
        # not at the cut of a prompt, at which no single token leaves the window
        lifted = (view.positions == graduate) & view.writes[:, None, None]
        return state["mass"].masked_fill(lifted, torch.finfo(torch.float32).max)
