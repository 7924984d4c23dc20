"""Drops, many at a time, the tokens that most rows of a recent window found insignificant.

Source: Liu et al., arXiv:2305.17118, Algorithms 1 and 2; the released code has another rule (`scissorhands_release`).
Differs: recent tokens are protected, as the text says (Algorithm 2 zeroes the others); row i has the threshold 1/i
  (Algorithm 2: 1/t for all rows); a prompt is cut once, at its end; ties go by the window's mass, after a piece of a
  prompt that is shorter than the window by the mass of more rows.
Fails when: a token rests for longer than the window before it matters.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Low, LowRows, Statistic
from kvkeep.budget import column
from kvkeep.kv import ranking
from kvkeep.policies._bursts import BurstPolicy
from kvkeep.policies.base import Tally, option
from kvkeep.types import State, View


@final
@dataclass(frozen=True, kw_only=True)
class Scissorhands(BurstPolicy):
    """Persistence of importance."""

    theta: float = option(1.0, "a row finds a token insignificant below 1 / (theta * n)", within=(1e-3, 1e3))
    threshold: Literal["row", "live"] = option("row", "n is the row's number, or the number of tokens that it sees")
    literal_ties: bool = option(False, "among equal counts the newest go first, as in a stable sort")

    tally: ClassVar[Tally | None] = Tally(BurstPolicy._ring)
    bibtex: ClassVar[str] = """@inproceedings{liu2023scissorhands,
  title     = {Scissorhands: Exploiting the Persistence of Importance Hypothesis for {LLM} {KV} Cache Compression at
               Test Time},
  author    = {Zichang Liu and Aditya Desai and Fangshuo Liao and Weitao Wang and Victor Xie and Zhaozhuo Xu and
               Anastasios Kyrillidis and Anshumali Shrivastava},
  booktitle = {Advances in Neural Information Processing Systems},
  year      = {2023},
}"""

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: which tokens each of a prompt's rows in the window, or a generated token's row,
        finds insignificant.
        """
        live = self.threshold == "live"
        if view.is_decode:
            return Low(theta=self.theta, live=live)
        window = column(self.sizes(view.budget)[0], view.seen)
        return LowRows(window, self.theta, live, words=self.words, last=view.seen - 1, due=self.due(view))

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return a score that is highest for the tokens that the fewest rows of the window found insignificant; among
        equal ones for those with the most mass in it, or under ``literal_ties`` for the oldest.
        """
        second = -view.positions.float() if self.literal_ties else state["mass"]
        # ranks are below the number of slots: they decide among equal counts alone
        return ranking.ranks(second, view.positions).float() - self.low(view, state) * view.positions.shape[-1]
