"""What is searched: policies with the options of their caches, each at a ladder of budgets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from kvkeep.errors import BudgetError, UnsupportedModelError, UnsupportedOperationError
from kvkeep.evals.drive import PLAIN, Setup
from kvkeep.policies import DEFAULT

Case: TypeAlias = Literal["later", "inside", "stream"]
"""When memory is asked: after the text was cut, at the end of the text, or not at all: the text goes on."""

CASES: tuple[Case, ...] = ("later", "inside", "stream")

POLICIES: dict[Case, tuple[str, ...]] = {
    "later": ("keydiff:document", "keydiff:recent=8,sinks=4", "leverage", "reread", "blend", "expected_attention"),
    "inside": (DEFAULT, "snapkv:late", "blend", "reread", "leverage", "tova", "keydiff:recent=8,sinks=4"),
    "stream": ("local", "streaming_llm", "h2o", DEFAULT, "tova", "leverage", "blend", "ahakv"),
}
"""The policies that are searched for each case, unless the user names others."""

SHARES = (0.03, 0.04, 0.06, 0.08, 0.11, 0.16, 0.23, 0.32, 0.45, 0.64, 0.9)
"""Budgets as shares of the text; each is about 1.4 times the one before."""


@dataclass(frozen=True)
class Arm:
    """Everything about a cache but its budget.

    Attributes:
        policy: the policy's string.
        setup: the other options of the cache.
        differences: options that differ from the policy's own, as text.
    """

    policy: str
    setup: Setup = PLAIN
    differences: str = ""

    @property
    def name(self) -> str:
        """The policy, and the options that differ from its own."""
        return f"{self.policy} ({self.differences})" if self.differences else self.policy


FULL = Arm("full")
"""The full cache."""


@dataclass(frozen=True)
class Candidate:
    """An arm at a budget.

    Attributes:
        arm: the policy and the options of its cache.
        budget: tokens kept per layer and head.
        row_bytes: memory of a row.
    """

    arm: Arm
    budget: int
    row_bytes: int

    def __str__(self) -> str:
        return f"{self.arm.name} at {self.budget}"


Ladder: TypeAlias = tuple[Candidate, ...]
"""The candidates of one arm, the smallest memory first."""


def budgets_of(length: int, shares: Sequence[float] = SHARES) -> list[int]:
    """Shares of a text as numbers of tokens, each once, the smallest first."""
    return sorted({max(1, round(share * length)) for share in shares})


def ladder(arm: Arm, budgets: Sequence[int], row_bytes: Callable[[Arm, int], int]) -> Ladder:
    """The candidates of an arm; budgets that its policy or the model refuses are left out.

    Args:
        arm: the arm.
        budgets: tokens per layer and head.
        row_bytes: returns the bytes of a row, or raises a `BudgetError` for a budget that is too small.
    """
    steps = []
    for budget in budgets:
        try:
            steps.append(Candidate(arm, budget, row_bytes(arm, budget)))
        except (BudgetError, UnsupportedModelError, UnsupportedOperationError):
            continue
    return tuple(sorted(steps, key=lambda step: step.row_bytes))
