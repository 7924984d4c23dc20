"""The rating of SnapKV and its kin: mass of the last rows, pooled along the prompt."""

import math
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from kvkeep import scores
from kvkeep.policies._prefill import PrefillOnly
from kvkeep.policies.base import option
from kvkeep.types import Budget, View


@dataclass(frozen=True, kw_only=True)
class ObservationWindow(PrefillOnly):
    """The last ``window`` tokens of a prompt stay and choose the others."""

    window: int = option(32, "last tokens of a prompt; they stay, and their rows rate the others", within=(1, math.inf))
    kernel: int = option(7, "width of the pooling along the prompt, an odd number; 1 for none", odd=True)
    pool: Literal["max", "avg"] = option("max", "pooling: the largest mass around a token, or the average")

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The observation window."""
        return 0, self.window

    def rows(self, view: View) -> int:
        """The observation window."""
        return self.window

    def rate(self, view: View, mass: Float[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
        """Pool over the tokens before the window, in the order of their positions."""
        older = (view.positions >= 0) & (view.positions < (view.seen - self.window)[:, None, None])
        return scores.pooled(mass, view.positions, older, kernel=self.kernel, kind=self.pool)
