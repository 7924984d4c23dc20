"""Keeps the tokens that some row of a recent window gave one of its highest probabilities, and the newest ones.

Source: the released code of Scissorhands (arXiv:2305.17118), lzcemma/Scissorhands, `hf_opt_dropkv.py`; not Algorithm 2.
Differs: a prompt is attended in full before anything goes (official: masked row by row); the budget is a hard limit;
  the quantile is over the tokens so far (official: over all columns of the prompt, zeros of the future included, of the
  row before it is masked). Hence 99 % of the sets differ; ours is what a cache that cannot see the future can do.
Fails when: a token rests for longer than the window before it matters.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_stats import LastHit, Statistic
from kvkeep.budget import between
from kvkeep.kv import ranking
from kvkeep.policies._bursts import when_outgrown
from kvkeep.policies.base import Bursts, Policy, option
from kvkeep.policies.scissorhands import Scissorhands
from kvkeep.types import Budget, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class ScissorhandsRelease(Policy):
    """Hit by one of the last rows, or gone."""

    quantile: float = option(0.9, "a row hits the tokens above this quantile of its probabilities", within=(0, 0.999))
    window: int = option(100, "rows after which a hit is forgotten")
    recent: int | None = option(None, "newest tokens that are never dropped; 10, or a quarter of a small budget")
    slots: ClassVar[Mapping[str, float]] = {"hit": 0.0}
    bibtex: ClassVar[str] = Scissorhands.bibtex

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: 0, and the recent window."""
        return 0, between(0, budget // 4, 10) if self.recent is None else self.recent

    def wants(self, view: View) -> Statistic:
        """Return the statistic that the policy needs: the newest row that hit each token."""
        return LastHit(quantile=self.quantile)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state with the newest hit of each token."""
        return {"hit": state["hit"].maximum(report.hit)}

    def stays(self, view: View, state: State) -> Int[Tensor, "B Hk"]:
        """Return how many tokens are hit within the window or protected; the budget until the text has outgrown it."""
        recent, floor = self.protected(view.budget)[1], (view.seen - self.window)[:, None, None]
        kept = (state["hit"] > floor) | ranking.protects(view.positions, view.seen, recent=recent, pins=view.pins)
        return when_outgrown(view, (kept & (view.positions >= 0)).sum(dim=-1))

    bursts: ClassVar[Bursts | None] = Bursts(stays)

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the newest row that hit each token."""
        return state["hit"]
