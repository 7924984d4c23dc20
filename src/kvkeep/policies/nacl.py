"""Keeps the tokens that the end of a prompt attends to, and a random sample of the others, drawn by their scores.

Source: Chen et al., arXiv:2408.03675; official code PaddlePaddle/Research, `ACL2024-NACL`, `llama_nacl_patch.py`.
Differs: proxy rows are causal; sinks and recent are numbers (official: shares, broken below 25 600 tokens).
Fails when: an important token is neither attended to at the end of the prompt nor drawn.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kvkeep.kv import ranking
from kvkeep.noise import gumbel
from kvkeep.policies._head_budgets import average
from kvkeep.policies._prefill import PrefillOnly
from kvkeep.policies.base import option
from kvkeep.types import EMPTY, Budget, State, View


@final
@dataclass(frozen=True, kw_only=True)
class NACL(PrefillOnly):
    """Proxy-token scores and random sampling."""

    proxies: float = option(0.1, "share of a prompt's tokens, its last ones, whose attention counts", within=(0, 1))
    random: float = option(7 / 19, "share of the free slots whose tokens are drawn at random", within=(0, 1))
    temperature: float = option(1.0, "temperature of the drawing; higher is closer to uniform", within=(1e-3, math.inf))
    sinks: int = option(4, "first tokens that are never evicted")
    recent: int | None = option(None, "newest tokens that are never evicted; an eighth of the budget if not given")
    seed: int = option(0, "seed of the random numbers")

    stochastic: ClassVar[bool] = True

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent tokens."""
        return self.sinks, budget // 8 if self.recent is None else self.recent

    def rows(self, view: View) -> Tensor:
        """Return how many of the step's last tokens are proxies: a share of its tokens, rounded down, at least 1."""
        # 1e-9: a product such as 0.29 * 100 lies just below the whole number that is meant
        return (self.proxies * view.new.double() + 1e-9).long().clamp(min=1)

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Return the mass of the proxy tokens' rows, unchanged."""
        return mass

    def choose(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return a score under which the tokens with the best ratings stay, and the share ``random`` of the free slots
        goes to tokens sampled from a softmax of the ratings (Gumbel noise).
        """
        sinks, recent = self.protected(view.budget)
        free = average(view, (self.grows.stays(view) if self.grows else view.budget) - sinks - recent)
        # 1e-9: a product such as 0.29 * 100 lies just below the whole number that is meant
        best = free - (self.random * free.double() + 1e-9).long()
        fixed = (view.positions < sinks) | (view.positions >= (view.seen[:, None] - recent)[:, :, None])
        top = ranking.keep(state["score"], view.positions.masked_fill(fixed, EMPTY), best)
        heads = view.heads.numbers(view.positions.shape[1], view.positions.device)[:, None]
        keys = (view.sequences[:, None, None], view.sequences.new_full((), view.layer), heads, view.positions)
        drawn = state["score"] / self.temperature + gumbel(self.seed, *keys).float()
        return drawn.masked_fill(top, torch.finfo(torch.float32).max)
