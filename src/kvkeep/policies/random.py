"""Keeps random tokens: the control that every method has to beat.

Source: none; the control of kvpress and of many tables.
Differs: counter-based randomness keyed by (seed, sequence, layer, head, position), so batching changes nothing.
Fails when: always; that is what it is for.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.noise import uniform
from kvkeep.policies.base import Policy, option
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
    recent: int = option(0, "newest tokens that are never evicted")
    sinks: int = option(0, "first tokens that are never evicted")

    stochastic: ClassVar[bool] = True

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """Return how many first and newest tokens are never evicted: the sinks, and the recent window."""
        return self.sinks, self.recent

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return a random number, drawn once per token (``reservoir``) or again in every step (``victim``)."""
        heads = view.heads.numbers(view.positions.shape[1], view.positions.device)[:, None]
        keys = [view.sequences[:, None, None], view.sequences.new_full((), view.layer), heads, view.positions]
        if self.mode == "victim":
            keys.append(view.seen[:, None, None])
        return uniform(self.seed, *keys)
