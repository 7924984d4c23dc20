"""Keeps random tokens: the control that every method has to beat, and in bursts a method for long answers.

Source: none; the control of kvpress and of many tables. `bursts` is after Random Attention, arXiv:2609.03430, code
  SalesforceAIResearch/Random-Attention, mode `random_pp`: per head, among tokens older than 64, many at a time.
Differs: counter-based randomness keyed by (seed, sequence, layer, head, position), so batching changes nothing.
  The prompt competes (official: it stays, with `keep_prompt`), in the prompt's own cut as well (official: none).
  The buffer is part of the budget (official: beside it), and a burst comes as soon as the budget is full.
Fails when: a fact is told once, and the text does not repeat it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.budget import between
from kvkeep.noise import uniform
from kvkeep.policies._rounds import ROUNDS
from kvkeep.policies.base import Bursts, Policy, option
from kvkeep.types import Budget, State, View


@final
@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """A uniform number per slot."""

    mode: Literal["victim", "reservoir"] = option(
        "victim",
        "a random victim each step (ages become geometric), or a uniform sample of the whole history",
    )
    seed: int = option(0, "seed of the random numbers")
    recent: int = option(0, "newest tokens that are never evicted; in bursts at most half of the budget")
    sinks: int = option(0, "first tokens that are never evicted")
    buffer: int = option(1, "tokens that go at once; at most half of the budget", within=(1, math.inf))

    presets: ClassVar[Mapping[str, str]] = {"bursts": "recent=64,buffer=64"}
    stochastic: ClassVar[bool] = True
    bibtex: ClassVar[str] = """@article{wang2026random,
  title   = {Random Attention: Rethinking {KV} Cache Eviction for Efficient Reasoning},
  author  = {Heng Wang and Jielin Qiu and Wenting Zhao and Cheng Qian and Liangwei Yang and Jiawei Han and Heng Ji and
             Silvio Savarese and Shelby Heinecke and Huan Wang},
  journal = {arXiv preprint arXiv:2609.03430},
  year    = {2026},
}"""

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, self.recent if self.buffer == 1 else between(0, (budget - self.sinks) // 2, self.recent)

    @property
    def bursts(self) -> Bursts | None:  # type: ignore[override]  # without a buffer, one token goes in each step
        """Return the rule by which several tokens go at once; ``None`` without a buffer."""
        return None if self.buffer == 1 else ROUNDS

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return a random number for each slot, drawn once per token (``reservoir``) or again in every step
        (``victim``).

        It depends on the seed, the row's identity, the layer, the head and the position; under ``victim`` also on how
        many tokens the row has seen.
        """
        heads = view.heads.numbers(view.positions.shape[1], view.positions.device)[:, None]
        keys = [view.sequences[:, None, None], view.sequences.new_full((), view.layer), heads, view.positions]
        if self.mode == "victim":
            keys.append(view.seen[:, None, None])
        return uniform(self.seed, *keys)
