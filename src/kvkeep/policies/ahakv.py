"""Keeps the tokens that recent rows attend to under a sharpened softmax, weighted by the size of their values.

Source: Gu et al., "AhaKV: Adaptive Holistic Attention-Driven KV Cache Eviction", Algorithm 1; no public code.
Differs: lambda replaces 1/sqrt(d): one gain for a prompt, at least 1, frozen in decode; pooling ignores the borders.
Fails when: sinks lose their weight, because their values are small; or the prompt's end attends to something else.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor, where

from kvkeep.attention_stats import Mass, Statistic
from kvkeep.kv.ranking import value_prior
from kvkeep.policies._head_budgets import average
from kvkeep.policies.base import MassSums, Policy, option
from kvkeep.types import Budget, Report, State, View


@final
@dataclass(frozen=True, kw_only=True)
class AhaKV(Policy):
    """Recent accumulation, step-gain softmax and a value prior."""

    recent: int = option(32, "newest tokens that are never evicted, and number of a prompt's rows that count")
    sinks: int = option(0, "first tokens that are never evicted; 4 is the safe preset")
    kernel: int = option(5, "width of the average over the values' sizes, an odd number", odd=True)
    recent_accumulation: bool = option(True, "count only the last rows of a prompt")
    sg_softmax: bool = option(True, "sharpen the softmax with the length of the prompt")
    value_prior: bool = option(True, "weight a prompt's tokens by the size of their values")
    clamp: bool = option(True, "a gain of at least 1; the paper's is undefined for a prompt within the budget")
    slots: ClassVar[dict[str, float]] = {"mass": 0.0, "raw": 0.0}  # raw: mass that no value has weighted
    sums: ClassVar[MassSums | None] = MassSums("mass", steady={})
    bibtex: ClassVar[str] = """@article{gu2025ahakv,
  title = {{AhaKV}: Adaptive Holistic Attention-Driven {KV} Cache Eviction for Efficient Inference of {LLMs}},
  author = {Yifeng Gu and Zicong Jiang and Jianxiu Jin and Kailing Guo and Ziyang Zhang and Xiangmin Xu}}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, self.recent

    @property
    def end_rows(self) -> int | None:  # type: ignore[override]  # depends on an option
        """Return how many of a prompt's last rows rate its tokens: ``recent``, at least 1; ``None`` if all rows do."""
        return max(1, self.recent) if self.recent_accumulation else None

    def wants(self, view: View) -> Statistic:
        """Return the statistic needed: the mass of a prompt's recent rows or a generated token's row, under a softmax
        that is sharpened by how many times the budget the prompt is long, if ``sg_softmax``.
        """
        ratio = (view.prompt / average(view)[:, 0]).clamp(min=1.0).float()
        gain = (2.0 * ratio.log()).sqrt().clamp(min=float(self.clamp)) if self.sg_softmax else 1.0
        # 1: without recent tokens, the last row
        return Mass(rows=max(1, self.recent) if self.recent_accumulation else -1, gain=gain)

    def observe(self, state: State, view: View, report: Report) -> State:
        """Return the state: a prompt's mass as it is (``raw``) and weighted by the sizes of values (``mass``); a
        generated token's mass is added to both.
        """
        prompts = view.reads[:, None, None]
        # each piece of a prompt is judged by its own last rows alone
        raw = report.mass + state["raw"].masked_fill(prompts & self.recent_accumulation, 0.0)
        use = self.value_prior and not view.is_decode
        weighted = raw * value_prior(view.values, view.positions, self.kernel) if use else raw
        return {"raw": raw, "mass": where(prompts, weighted, state["mass"] + report.mass)}

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the weighted mass."""
        return state["mass"]
