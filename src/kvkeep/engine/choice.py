"""The choice of a budget at the end of a prompt: the smallest one at which the prompt's cut loses little attention.

Which budgets there are, and for which policies; `kvkeep.engine.trial` tries them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import Number
from kvkeep.cache.layer_layout import Layout
from kvkeep.engine.generation import Generation
from kvkeep.engine.rows import Rows
from kvkeep.errors import BudgetError, InputError, one_line
from kvkeep.kv import lost_mass
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.types import Phase, View

SHARES = (4, 2)
"""Divisors of a budget that give the smaller ones."""


def refusal(policy: Policy, levels: Sequence[int]) -> str | None:
    """Return why no budget can be chosen for a policy at the end of a prompt, or ``None`` if one can be."""
    if not policy.evicts:
        return "it keeps every token"
    if policy.bursts or policy.grows or policy.cascades:
        return "its cuts are no plain choice of the best tokens of each head"
    if policy.rates_by_budget:
        return "how it rates tokens depends on the budget"
    try:
        asked = [policy.wants(_end_of_prompt(10 * max(levels), level)) for level in levels]
    except Exception as error:  # a policy of other code
        return f"what it asks of attention cannot be told beforehand ({one_line(error)})"
    if "mass" not in asked[0].fields:
        return "its statistic shows no attention mass"
    if not all(_same(asked[0], one) for one in asked[1:]):
        return "what it asks of attention depends on the budget"
    return None


def _end_of_prompt(tokens: int, budget: int) -> View:
    """The view that a policy gets of a prompt at its end; its slots hold nothing of interest."""
    seen, nothing = torch.tensor([tokens]), torch.zeros(1, 1, 1, 1)
    return View(
        positions=torch.zeros(1, 1, 1, dtype=torch.int32),
        keys=nothing,
        values=nothing,
        seen=seen,
        budget=budget,
        new=seen,
        prompt=seen,
        phase=Phase.PREFILL,
        layer=0,
        sequences=torch.zeros(1, dtype=torch.int64),
        past=torch.zeros(1, 0),
        alive=torch.zeros(1, 0, dtype=torch.bool),
    )


def _same(one: Any, other: Any) -> bool:
    """Whether two statistics, or parts of them, are equal."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return bool(torch.equal(torch.as_tensor(one), torch.as_tensor(other)))
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one) is type(other) and all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


def measure(one: Generation, rows: Rows, row: int) -> None:
    """Note the memory of a request, and the attention that its evicted tokens carried, as its row shows them."""
    one.memory, one.lost = rows.memory_of(row), lost_mass.mean(rows.lost_of(row))


def levels(layout: Layout, budget: int, pins: Spans) -> tuple[int, ...]:
    """Return the budgets among which a request chooses, in order: those that hold what is protected and pinned.

    Raises:
        InputError: no budget can be chosen for the policy.
    """
    found = []
    for share in SHARES:
        number = max(1, budget // share)
        with suppress(BudgetError):
            layout.check_pins(number, pins)
            found.append(number)
    found = sorted({*found, budget})
    reason = "its heads have budgets of their own" if layout.profile else refusal(layout.policy, found)
    if reason:
        raise InputError(
            f"`guard` chooses a budget by the attention that a prompt's cut loses, which fails under {layout.policy}: "
            f"{reason}. Leave `guard` out, or give another policy, such as h2o or snapkv."
        )
    return tuple(found)


def chosen(layout: Layout, budget: int, held: Sequence[Number]) -> int:
    """Return the budget of a memory: the one that it was asked for, or a smaller one that a guard has chosen.

    Args:
        layout: the memory's policy, and how budgets are spread over the layers.
        budget: the budget that it was asked for.
        held: the budgets of its layers.
    """
    for number in (budget, *(max(1, budget // share) for share in SHARES)):
        with suppress(BudgetError):
            if _totals(layout, held) == _totals(layout, layout.slots(number)):
                return number
    return budget


def _totals(layout: Layout, budgets: Sequence[Number]) -> list[Fraction]:
    """What the heads of each layer have on average; of all layers that share a budget, where some do."""
    each = [Fraction(number) if isinstance(number, int) else Fraction(sum(number), len(number)) for number in budgets]
    shares = [own.shares_layers for own in layout.policies]
    pairs = list(zip(each, shares, strict=False))  # a memory of another model has other layers
    joint = sum((number for number, joint in pairs if joint), Fraction())
    return [joint, *(number for number, joint in pairs if not joint)]
