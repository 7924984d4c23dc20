"""Keeps the newest tokens: a sliding window, "Local" in the papers.

Source: baseline of H2O (arXiv:2306.14048, §5) and Scissorhands (arXiv:2305.17118); no official policy code.
Differs: nothing; keys stay rotated at their true positions.
Fails when: the answer is older than the budget, or the first tokens are attention sinks of the model.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from jaxtyping import Float
from torch import Tensor

from kvkeep.policies.base import MassSums, Policy
from kvkeep.types import State, View


@final
@dataclass(frozen=True, kw_only=True)
class Local(Policy):
    """The position is the score."""

    sums: ClassVar[MassSums | None] = MassSums(steady={})

    def score(self, view: View, state: State) -> Float[Tensor, "B Hk S"]:
        """Return the position: newer tokens are worth more."""
        return view.positions.float()
