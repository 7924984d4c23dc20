"""Drops, many at a time, the tokens that most rows of a recent window found insignificant.

Source: Liu et al., arXiv:2305.17118, Algorithms 1 and 2; the released code has another rule (`scissorhands_release`).
Differs: recent tokens are protected, as the text says (Algorithm 2 zeroes the others); ties go by the window's mass.
Fails when: a token rests for longer than the window before it matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep import scores
from kvkeep.budget import column
from kvkeep.policies._bursts import Bursts, held, is_over
from kvkeep.policies.base import option
from kvkeep.statistic import Low, Statistic
from kvkeep.types import Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class Scissorhands(Bursts):
    """Persistence of importance."""

    theta: float = option(1.0, "a row finds a token insignificant below 1 / (theta * n)", within=(1e-3, 1e3))
    threshold: Literal["row", "live"] = option("row", "n is the row's number, or how many tokens it sees")
    literal_ties: bool = option(False, "among equal counts the newest go first, as in a stable sort")

    slots: ClassVar[Mapping[str, float]] = {"low": 0.0, "mass": 0.0}
    bibtex: ClassVar[str] = """@inproceedings{liu2023scissorhands,
  title     = {Scissorhands: Exploiting the Persistence of Importance Hypothesis for {LLM} {KV} Cache Compression at
               Test Time},
  author    = {Zichang Liu and Aditya Desai and Fangshuo Liao and Weitao Wang and Victor Xie and Zhaozhuo Xu and
               Anastasios Kyrillidis and Anshumali Shrivastava},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023},
}"""

    def wants(self, view: View) -> Statistic:
        """The rows of the window: the last ones before a burst, known in advance."""
        window = column(self.sizes(view.budget)[0], view.seen)
        ahead = held(view) - column(view.budget, view.seen) - 1
        rows = torch.where(is_over(view), window, (ahead + window).clamp(min=0))
        return Low(rows, self.theta, self.threshold == "live")

    def observe(self, state: State, view: View, report: Report) -> State:
        """Add to the window's sums; those of a burst become negative: they are spent and start again from zero."""
        over = is_over(view)
        whole = over & (view.new >= column(self.sizes(view.budget)[0], view.seen))  # the window lies within this step
        past, sign = (~whole).float()[:, None, None], torch.where(over, -1.0, 1.0)[:, None, None]
        return {name: sign * (past * state[name].clamp(min=0.0) + report.sums[name]) for name in self.slots}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Few insignificant rows first; then the larger mass of the window, or the older token."""
        second = -view.positions.float() if self.literal_ties else state["mass"].abs()
        return scores.ranks(second, view.positions).float() - state["low"].abs() * view.positions.shape[-1]
