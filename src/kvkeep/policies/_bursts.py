"""What the policies have in common that drop many tokens at once, and the sizes of Scissorhands' bursts."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvkeep.budget import between, column, smaller
from kvkeep.errors import BudgetError
from kvkeep.policies.base import Policy, option
from kvkeep.types import Budget, State, View


@dataclass(frozen=True, kw_only=True)
class Bursts(Policy):
    """Drops several tokens whenever a row is over budget, so that its sums are only needed in the rows before.

    Bursts are at least ``drop`` steps apart and the window is no longer than that. So it is known in advance in which
    row the next window begins, and one running sum per slot replaces a history of the window.
    """

    window: int | None = option(None, "rows of the history window; at most 100 and half of the budget if not given")
    recent: int | None = option(None, "newest tokens that are never dropped; 10, or a quarter of a small budget")
    drop: int | None = option(None, "tokens dropped at a time; half of the budget if not given")

    bursts: ClassVar[bool] = True

    def sizes(self, budget: Budget) -> tuple[Budget, Budget, Budget]:
        """``(window, recent, drop)`` under a budget."""
        half = between(1, budget // 2, None)
        drop = half if self.drop is None else self.drop
        window = between(1, smaller(half, drop), 100) if self.window is None else self.window
        recent = between(0, budget // 4, 10) if self.recent is None else self.recent
        return window, recent, drop

    def protected(self, budget: Budget) -> tuple[int, Budget]:
        """The recent window."""
        return 0, self.sizes(budget)[1]

    def check(self, budget: int) -> None:
        """Refuse sizes that do not fit each other.

        Raises:
            BudgetError: more is dropped at once than is unprotected, or the window is longer than a burst is wide.
        """
        super().check(budget)
        window, recent, drop = self.sizes(budget)
        if drop < 1 or window < 1 or drop + max(1, int(recent)) > budget + 1:
            raise BudgetError(
                f"{self} drops {drop} at a time and protects {recent}, too much for a budget of {budget}."
            )
        if window > drop:
            raise BudgetError(
                f"{self} looks back over {window} rows, but drops only {drop} tokens at a time; with a window of "
                f"at most {drop} the rows of one window are never needed for the next."
            )

    def stays(self, view: View, state: State) -> Budget:
        """After a burst, a multiple of ``drop`` fewer; never less than the recent window."""
        n, limit = held(view), column(view.budget, view.seen)
        _, recent, drop = (column(size, view.seen) for size in self.sizes(view.budget))
        goes = torch.minimum(drop * -(-(n - limit) // drop), n - recent.clamp(min=1))
        return torch.where(n > limit, n - goes, limit)[:, None]


def held(view: View) -> Int[Tensor, " B"]:
    """Tokens that each head of a row holds, the new ones included; all heads hold equally many."""
    return (view.positions[:, 0] >= 0).sum(dim=-1)


def is_over(view: View) -> Bool[Tensor, " B"]:
    """Which rows hold more than their budget, so that something has to go in this step."""
    return held(view) > column(view.budget, view.seen)


def when_outgrown(view: View, stay: Int[Tensor, "B Hk"]) -> Int[Tensor, "B Hk"]:
    """A number per head, at most the budget; all of the budget while a row has not seen more tokens than that."""
    limit = column(view.budget, view.seen)[:, None]
    return torch.where(view.seen[:, None] > limit, torch.minimum(stay, limit), limit)
