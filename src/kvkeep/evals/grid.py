"""The grid of policies, budgets and tasks, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvkeep import budget as ratios
from kvkeep.errors import BudgetError
from kvkeep.evals.arms import PolicyArm
from kvkeep.evals.forward import PLAIN, Setup
from kvkeep.evals.task import Task
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import spec


@dataclass(frozen=True)
class RequestedBudget:
    """A budget as the user asked for it: a share of each row's text, or a number of tokens.

    Attributes:
        ratio: share of the tokens to keep, in (0, 1]; ``None`` if a number was given.
        tokens: number of tokens to keep; ``None`` if a share was given.

    Raises:
        BudgetError: the share or the number is out of range.
    """

    ratio: float | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        """Check the range of the number if there is one, else that there is a share in (0, 1]."""
        if self.tokens is not None:
            ratios.check(self.tokens)
        elif self.ratio is None or not 0 < self.ratio <= 1:
            shown = "nothing" if self.ratio is None else f"{self.ratio:.4%}"
            raise BudgetError(f"A budget of {shown} of the text is outside 0 … 100%; write e.g. 20%, or tokens as 512.")

    def __str__(self) -> str:
        return f"{self.ratio * 100:.6g}%" if self.ratio is not None else str(self.tokens)

    def of(self, length: int) -> int:
        """Return the budget in tokens for a text of ``length`` tokens: the share of it, rounded down but at least 1, or
        the number that was given.

        Raises:
            BudgetError: a share of an empty text.
        """
        # never 0: without a share there is a number, which a type checker cannot know
        return ratios.from_ratio(self.ratio, length) if self.ratio is not None else int(self.tokens or 0)


EVERYTHING = RequestedBudget(ratio=1.0)
"""The budget under which a policy that never evicts is listed."""


@dataclass(frozen=True, kw_only=True)
class GridArguments:
    """A request: every policy at every budget.

    Attributes:
        arms: the policies.
        budgets: the budgets.
        setup: how caches are made, where an arm says nothing else; of a policy that never evicts, only the bits count.
    """

    arms: Sequence[PolicyArm]
    budgets: Sequence[RequestedBudget]
    setup: Setup = PLAIN

    def pairs(self) -> list[tuple[Policy, RequestedBudget, Setup]]:
        """Return what is to be run: policy, budget and setup, policy by policy.

        A policy that never evicts comes once, with `EVERYTHING`, as it keeps all tokens anyway.
        """
        combinations = []
        for arm in self.arms:
            setup, budgets = arm.over(self.setup), list(dict.fromkeys(self.budgets))
            if not arm.policy.evicts:  # no rule about budgets or positions changes what it holds
                setup, budgets = replace(PLAIN, kv_bits=setup.kv_bits), [EVERYTHING]
            combinations += [(arm.policy, budget, setup) for budget in budgets]
        return combinations


@dataclass(frozen=True)
class Cell:
    """The key of one row of results. Equal cells are the same measurement.

    Attributes:
        task: the task.
        case: the part of the task.
        policy: the policy.
        budget: the budget as the user asked for it.
        seed: the seed of the data.
        setup: differences from the policy's own way to make a cache.
    """

    task: str
    case: str
    policy: str
    budget: str
    seed: int
    setup: str = ""

    def __str__(self) -> str:
        setup = f" ({self.setup})" if self.setup else ""
        return f"{self.task} {self.case}: {self.policy}{setup} at {self.budget}"


@dataclass(frozen=True)
class Planned:
    """A cell with everything that its run needs.

    Attributes:
        cell: the cell.
        policy: the policy.
        setup: how its caches are made.
        budgets: tokens per layer and head, one number per row.
        lengths: tokens of the rows, which shares refer to.
        new_tokens: tokens that follow in each row.
    """

    cell: Cell
    policy: Policy
    setup: Setup
    budgets: tuple[int, ...]
    lengths: tuple[int, ...]
    new_tokens: int = 0

    @property
    def evicts(self) -> bool:
        """Return whether tokens may be evicted: the policy evicts, and a row gets longer than its budget, or a layer or
        head may get less than the budget.
        """
        rows = zip(self.budgets, self.lengths, strict=True)
        uneven = (self.setup.layer_budget or self.policy.defaults.layer_budget) != "uniform"
        uneven |= self.setup.head_budget is not None
        return self.policy.evicts and (uneven or any(budget < length + self.new_tokens for budget, length in rows))


def grid(checkpoint: Checkpoint, task: Task, wanted: GridArguments, seed: int) -> list[Planned]:
    """Return all cells of a task with data of one seed, each once, checked and ready to run.

    Raises:
        BudgetError: a cache of this model would refuse a budget, for example since the policy protects more tokens; or
            a policy that keeps all new tokens has too little room for them.
        UnsupportedModelError: slot positions were requested, and the model cannot have them.
    """
    planned: dict[Cell, Planned] = {}
    for case, lengths in task.cases().items():
        for policy, budget, setup in wanted.pairs():
            differences = setup.differences(checkpoint, policy)
            cell = Cell(task.name, case, spec(policy), str(budget), seed, differences)
            if cell in planned:  # arms may say the same in other words: h2o, h2o@16
                continue
            budgets = _numbers(task, policy, budget, lengths)
            planned[cell] = Planned(cell, policy, setup, budgets, tuple(lengths), task.new_tokens)
            _check(checkpoint, planned[cell], task.new_tokens)
    return list(planned.values())


def _numbers(task: Task, policy: Policy, budget: RequestedBudget, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the budget of each row in tokens; one that holds all tokens if nothing is evicted."""
    return tuple(budget.of(length) if policy.evicts else length + task.new_tokens for length in lengths)


def _check(checkpoint: Checkpoint, plan: Planned, new_tokens: int) -> None:
    """Refuse a cell that a cache of this model could not run, without allocating anything.

    Raises:
        BudgetError: the cache refuses the budget, or the policy keeps every new token and has room for fewer than
            ``new_tokens``. The message names the cell.
    """
    cell = plan.cell
    # a cache learns of the new tokens only when they come
    if plan.policy.grows and plan.policy.grows.room < new_tokens:
        raise BudgetError(
            f"{cell.task} {cell.case}: {cell.policy} keeps every new token, and up to {new_tokens} follow the text. "
            f"Give it room={new_tokens} or more, or another decode mode."
        )
    try:
        # a cache that was never used has no slots yet
        plan.setup.cache(checkpoint, plan.policy, plan.budgets)
    except BudgetError as error:
        raise BudgetError(
            f"{cell.task} {cell.case}: {cell.policy} cannot run at {cell.budget} of {min(plan.lengths)} tokens. {error}"
        ) from error


def notes(planned: Sequence[Planned]) -> list[str]:
    """Return a note for each case and budget at which a policy that could evict has nothing to; sorted, each once."""
    texts = {
        f"{plan.cell.task} {plan.cell.case}: nothing is evicted at {plan.cell.budget}: the budget of "
        f"{max(plan.budgets)} is not smaller than the {max(plan.lengths)} tokens of the text."
        for plan in planned
        if plan.policy.evicts and not plan.evicts
    }
    return sorted(texts)
