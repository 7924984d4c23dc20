"""Keeps tokens whose values have a wide range, and a sample of the others by attention, for long generations.

Source: VaSE, arXiv:2606.03928; official code terarachang/VaSE, `cache_utils.py`, mode `range_sink_sample_attn`.
Differs: rows since the last burst count, by attention's probabilities (official: the newest 64 queries, by a softmax
  over tokens that may go); a prompt is cut as well, by its last rows; the buffer is part of the budget (official: not).
Fails when: what matters is neither attended to between two bursts nor large; a prompt's tokens compete (`keep_prompt`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.attention_stats import Mass, Statistic
from kvkeep.budget import between, table
from kvkeep.kv import ranking
from kvkeep.noise import gumbel
from kvkeep.policies._rounds import Rounds, left
from kvkeep.policies.base import option
from kvkeep.types import EMPTY, Budget, Phase, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class VaSE(Rounds):
    """The range of a value over its dims; for the rest ``ln(attention) + noise``."""

    sinks: int = option(4, "first tokens that are never evicted")
    recent: int = option(64, "newest tokens that are never evicted; at most half of the budget without the sinks")
    buffer: int = option(64, "tokens that go at once; at most half of the budget", within=(1, math.inf))
    large: float = option(0.25, "share of the budget for tokens with large values, sinks among them", within=(0, 1))
    kernel: int = option(5, "width of the pooling of attention, an odd number; 1 for none", odd=True)
    seed: int = option(0, "seed of the random numbers")

    slots: ClassVar[Mapping[str, float]] = {"mass": 0.0}
    stochastic: ClassVar[bool] = True
    bibtex: ClassVar[str] = """@article{chang2026value,
  title   = {Value-Aware Stochastic {KV} Cache Eviction for Reasoning Models},
  author  = {Ting-Yun Chang and Harvey Yiyun Fu and Deqing Fu and Chenghao Yang and Jesse Thomason and Robin Jia},
  journal = {arXiv preprint arXiv:2606.03928},
  year    = {2026},
}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, between(0, (budget - self.sinks) // 2, self.recent)

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: the mass of a generated token's row, or of a prompt's last rows."""
        return Mass() if view.is_decode else Mass(rows=self.recent or 1)  # without recent tokens, the last row

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: the mass of a prompt's last rows, to which generated tokens' rows are added until a burst;
        after it the sum begins anew. Probes change nothing.
        """
        if view.phase is Phase.PROBE:
            return state
        if not view.is_decode:
            return {"mass": torch.where(view.reads[:, None, None], report.mass, state["mass"])}
        recent, there = self.protected(view.budget)[1], view.positions >= 0
        held = ranking.protects(view.positions, view.seen, sinks=self.sinks, recent=recent, pins=view.pins) & there
        after = left(self, view).maximum(held.sum(dim=-1)) + 1  # what a burst leaves, and the first row after it
        goes_on = (there.sum(dim=-1) > after) | (view.new == 0)[:, None]  # a row may have no token now
        return {"mass": report.mass + state["mass"] * goes_on[:, :, None]}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return 1000 plus the range of its value for a token whose value is large (the share ``large`` of the budget,
        sinks first), and for all others the logarithm of their pooled attention plus Gumbel noise, which is below that.
        """
        recent = self.protected(view.budget)[1]
        older = (view.positions >= 0) & ~ranking.protects(view.positions, view.seen, recent=recent, pins=view.pins)
        width = (view.values.amax(dim=-1) - view.values.amin(dim=-1)).float()
        first = width.masked_fill(view.positions < self.sinks, torch.inf)
        n = (table(view.budget, view.seen) * self.large + 1e-9).long()  # 0.29 * 100 lies just below 29
        large = ranking.keep(first, view.positions.masked_fill(~older, EMPTY), n)
        attention = ranking.pooled(state["mass"], view.positions, older, kernel=self.kernel, kind="avg")
        heads = view.heads.numbers(view.positions.shape[1], view.positions.device)[:, None]
        keys = view.sequences[:, None, None], view.sequences.new_full((), view.layer), heads, view.positions
        noise = gumbel(self.seed, *keys, view.seen[:, None, None]).float()
        return torch.where(large, width + 1000.0, attention.clamp(min=1.2e-38).log() + noise)  # of 0 it is infinite
