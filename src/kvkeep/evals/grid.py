"""The grid of policies, budgets and tasks, checked before anything runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvkeep import budget as ratios
from kvkeep.errors import BudgetError, InputError, PolicyError
from kvkeep.evals.forward import PLAIN, Setup
from kvkeep.evals.task import Task
from kvkeep.kv.slot_codec import check_bits
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.policies import _head_budgets
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse, spec


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
        if self.tokens is not None:
            ratios.check(self.tokens)
        elif self.ratio is None or not 0 < self.ratio <= 1:
            shown = "nothing" if self.ratio is None else f"{self.ratio:.4%}"
            raise BudgetError(f"A budget of {shown} of the text is outside 0 … 100%; write e.g. 20%, or tokens as 512.")

    def __str__(self) -> str:
        return f"{self.ratio * 100:.6g}%" if self.ratio is not None else str(self.tokens)

    def of(self, length: int) -> int:
        """Return the budget in tokens for a text of ``length`` tokens.

        Raises:
            BudgetError: a share of an empty text.
        """
        return ratios.from_ratio(self.ratio, length) if self.ratio is not None else int(self.tokens or 0)


EVERYTHING = RequestedBudget(ratio=1.0)
"""The budget under which a policy that never evicts is listed."""


class PolicyArm(NamedTuple):
    """A policy of a list, and what the list says about its caches.

    Attributes:
        policy: the policy.
        kv_bits: bits of keys and values, see `KV_BITS`, or ``"16"``; ``None`` where the list names none.
        head_budget: how the budget is divided among heads; ``None`` where the list names no rule.
    """

    policy: Policy
    kv_bits: str | None = None
    head_budget: str | None = None

    def over(self, setup: Setup) -> Setup:
        """Return a setup with what the list names in place of its own."""
        return replace(
            setup,
            kv_bits=check_bits(self.kv_bits or setup.kv_bits),
            head_budget=self.head_budget or setup.head_budget,
        )


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
        """Return the combinations to run. A policy that never evicts runs once, as it keeps all tokens anyway."""
        combinations = []
        for arm in self.arms:
            setup, budgets = arm.over(self.setup), list(dict.fromkeys(self.budgets))
            if not arm.policy.evicts:
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
        """Return whether the policy evicts, and a row gets longer than its budget, or a layer or head may get less
        than the budget.
        """
        rows = zip(self.budgets, self.lengths, strict=True)
        uneven = (self.setup.layer_budget or self.policy.defaults.layer_budget) != "uniform"
        uneven |= self.setup.head_budget is not None
        return self.policy.evicts and (uneven or any(budget < length + self.new_tokens for budget, length in rows))


def split_policies(text: str) -> list[Policy]:
    """Return the policies of `split_arms`, which must name nothing else.

    Raises:
        PolicyError: the list is empty, or a policy in it is wrong or names bits or a rule for heads.
    """
    arms = split_arms(text)
    for policy, *named in arms:
        if any(named):
            words = "".join(f"@{word}" for word in named if word)
            raise PolicyError(f"{policy}{words} names {words[1:]}, which has no effect here. Write {policy}.")
    return [arm.policy for arm in arms]


def split_arms(text: str) -> list[PolicyArm]:
    """Return the policies of a list, each with what it names beside the policy, each once.

    A bare ``option=value`` continues a policy, so ``h2o:recent=32,sinks=4,local`` has two. ``h2o@4bit`` or ``h2o@4``
    names bits, see `kvkeep.kv.slot_codec.check_bits`; ``h2o@global:0.2`` a rule by which heads share the budget, see
    `kvkeep.cache.BoundedCache`; ``h2o@ada@8`` both.

    Raises:
        PolicyError: the list is empty, or a policy in it is wrong.
        InputError: slots cannot have that number of bits.
        BudgetError: a rule's number is out of range.
    """
    pieces: list[str] = []
    for piece in filter(None, (part.strip() for part in text.split(","))):
        if "=" in piece and ":" not in piece and pieces:
            pieces[-1] += ("," if "=" in pieces[-1] else ":") + piece
        else:
            pieces.append(piece)
    if not pieces:
        raise PolicyError("The list of policies is empty; write e.g. full,local,h2o:recent=32,tova.")
    return list(dict.fromkeys(map(_arm, pieces)))


def _arm(text: str) -> PolicyArm:
    """Return what ``POLICY@BITS@RULE`` says; bits and rule are ``None`` if none are named."""
    policy, *words = (word.strip() for word in text.split("@"))
    named: dict[str, str] = {}
    for word in words:
        if word.partition(":")[0] in (*_head_budgets.RULES, _head_budgets.PROFILE):
            _head_budgets.parsed(word)
            kind, value = "head_budget", word
        else:
            kind, value = "kv_bits", _bits(text, word)
        if kind in named:
            raise PolicyError(f"{text!r:.80} names {kind} twice; write {policy}@{named[kind]} or {policy}@{value}.")
        named[kind] = value
    return PolicyArm(parse(policy), **named)


def _bits(text: str, word: str) -> str:
    """Return the bits that a word of an arm says.

    Raises:
        InputError: slots cannot have that number of bits, or the word is meant for a rule that does not exist.
    """
    try:
        # `check_bits` returns nothing for 16, and here nothing means that no bits were named
        return check_bits(word.removesuffix("bit")) or "16"
    except InputError as error:
        rules = ", ".join(_head_budgets.RULES)
        raise InputError(
            f"{text!r:.80}: {word!r:.40} after @ is neither a number of bits (8, 4, k8v4, 16) nor a rule for heads "
            f"({rules} or {_head_budgets.PROFILE}:FILE)."
        ) from error


def grid(checkpoint: Checkpoint, task: Task, wanted: GridArguments, seed: int) -> list[Planned]:
    """Return all cells of a task with data of one seed, each checked and ready to run.

    Raises:
        BudgetError: a budget is smaller than the tokens that a policy protects.
        UnsupportedModelError: slot positions were requested, and the model cannot have them.
    """
    planned = []
    for case, lengths in task.cases().items():
        for policy, budget, setup in wanted.pairs():
            differences = setup.differences(checkpoint, policy)
            cell = Cell(task.name, case, spec(policy), str(budget), seed, differences)
            budgets = _numbers(task, policy, budget, lengths)
            planned.append(Planned(cell, policy, setup, budgets, tuple(lengths), task.new_tokens))
            _check(checkpoint, planned[-1], task.new_tokens)
    return planned


def _numbers(task: Task, policy: Policy, budget: RequestedBudget, lengths: Sequence[int]) -> tuple[int, ...]:
    """Return the budget of each row in tokens; one that holds all tokens if nothing is evicted."""
    return tuple(budget.of(length) if policy.evicts else length + task.new_tokens for length in lengths)


def _check(checkpoint: Checkpoint, plan: Planned, new_tokens: int) -> None:
    """Refuse a budget that a cache of this model would refuse, without allocating anything.

    Raises:
        BudgetError: the budget is refused.
    """
    cell = plan.cell
    if plan.policy.grows and plan.policy.grows.room < new_tokens:
        raise BudgetError(
            f"{cell.task} {cell.case}: {cell.policy} keeps every new token, and up to {new_tokens} follow the text. "
            f"Give it room={new_tokens} or more, or another decode mode."
        )
    try:
        plan.setup.cache(checkpoint, plan.policy, plan.budgets)
    except BudgetError as error:
        raise BudgetError(
            f"{cell.task} {cell.case}: {cell.policy} cannot run at {cell.budget} of {min(plan.lengths)} tokens. {error}"
        ) from error


def notes(planned: Sequence[Planned]) -> list[str]:
    """Return notes about budgets under which nothing is evicted."""
    texts = {
        f"{plan.cell.task} {plan.cell.case}: nothing is evicted at {plan.cell.budget}: the budget of "
        f"{max(plan.budgets)} is not smaller than the {max(plan.lengths)} tokens of the text."
        for plan in planned
        if plan.policy.evicts and not plan.evicts
    }
    return sorted(texts)
