"""Keeps the tokens with the most attention over heads, layers and steps; tokens that one layer drops leave later ones.

Source: Wang, Zhang and Han, arXiv:2012.09852, cascade token pruning; mit-han-lab/spatten, hardware workload traces.
Differs: no pruning of heads and values; the newest token always stays. The official chat demo has another rule: logits
  of the last pass alone, before mask and softmax, for each head and layer; 150 such and 150 recent tokens per turn.
Fails when: a token matters only to the last layers, which no longer have it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import Mass, Statistic
from kvkeep.budget import column
from kvkeep.policies.base import Bursts, Defaults, Policy, option
from kvkeep.types import Budget, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class SpAtten(Policy):
    """Cumulative importance, nested sets."""

    delta: float = option(0.0, "layer budgets fall in a line from 1 + delta to 1 - delta of the mean", within=(0, 0.95))
    recent: int = option(1, "newest tokens that are never evicted, at least one", within=(1, 2**31))

    statistic: ClassVar[Statistic] = Mass()
    slots: ClassVar[Mapping[str, float]] = {"importance": 0.0}
    cascades: ClassVar[bool] = True
    bibtex: ClassVar[str] = """@inproceedings{wang2021spatten,
  title = {{SpAtten}: Efficient Sparse Attention Architecture with Cascade Token and Head Pruning},
  author = {Hanrui Wang and Zhekai Zhang and Song Han}, booktitle = {HPCA}, year = {2021}}"""

    @property
    def defaults(self) -> Defaults:  # type: ignore[override]  # depends on an option
        """Return equal layer budgets, or with ``delta`` budgets that fall along a line."""
        return Defaults(layer_budget=f"taper:{self.delta}" if self.delta else "uniform")

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: 0, and the recent tokens."""
        return 0, self.recent

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state, the same in all heads: this layer's mass, summed over them, added to the sum over all
        earlier layers and steps.
        """
        past = state["importance"][:, 0] if view.earlier is None else view.earlier.state["importance"]
        return {"importance": (past + view.heads.all(report.mass).sum(dim=1))[:, None].expand_as(report.mass)}

    def stays(self, view: View, state: State) -> Int[Tensor, "B 1"]:
        """Return how many of each row's tokens may stay: those that the layer before still holds (in the first layer
        all that it holds itself), at most the budget.
        """
        return _alive(view).sum(dim=1).minimum(column(view.budget, view.seen))[:, None]

    bursts: ClassVar[Bursts | None] = Bursts(stays)

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the importance. Tokens that the layer before has evicted go first."""
        return state["importance"].masked_fill(~_alive(view)[:, None], -1.0)


def _alive(view: View) -> Bool[Tensor, "B S"]:
    """Return a mask of the tokens that the previous layer still holds; in the first layer, of the occupied slots."""
    return view.positions[:, 0] >= 0 if view.earlier is None else view.earlier.alive
