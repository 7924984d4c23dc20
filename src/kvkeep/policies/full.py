"""Keeps every token: the dense baseline, in a block that is sized once.

Source: none; the cache of every engine, the reference of every comparison.
Differs: the block is allocated up front (budget = longest sequence) and never grows.
Fails when: a sequence is longer than the budget: an error, not silent growth.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies.base import MassSums, Policy
from kvkeep.types import State, View


@final
@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """No statistic, no eviction."""

    evicts: ClassVar[bool] = False
    sums: ClassVar[MassSums | None] = MassSums(steady={})

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the position. It decides nothing, because nothing is evicted."""
        return view.positions.float()
