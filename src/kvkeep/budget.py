"""How many tokens each row keeps: the edge where ratios become tokens, and the checks on both."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import BudgetError
from kvkeep.types import Budget


def from_ratio(keep_ratio: float, tokens: int) -> int:
    """Turn a fraction of ``tokens`` into a budget: ``floor(keep_ratio * tokens)``, at least 1.

    Args:
        keep_ratio: fraction to keep, in (0, 1].
        tokens: real length of the prompt, padding not counted.

    Raises:
        BudgetError: the ratio is outside (0, 1] or there are no tokens.
    """
    if not 0.0 < keep_ratio <= 1.0:
        raise BudgetError(
            f"keep_ratio={keep_ratio} is outside (0, 1]. It is the fraction of the prompt's tokens that stay in "
            "the cache, e.g. 0.2 for a fifth; for an absolute number use the budget."
        )
    if tokens < 1:
        raise BudgetError("keep_ratio needs the length of a prompt, and this prompt has no tokens.")
    return max(1, math.floor(keep_ratio * tokens + 1e-9))


def check(budget: object) -> tuple[int, ...]:
    """Check a budget and return it as one number per row (a single entry: the same for all rows).

    Raises:
        BudgetError: a budget is not an integer or is below 1.
    """
    numbers = tuple(budget) if isinstance(budget, Sequence) and not isinstance(budget, str) else (budget,)
    if not numbers:
        raise BudgetError("The budget is an empty list; give one number of tokens, or one per row.")
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            raise BudgetError(
                f"budget={number!r} is not a whole number of tokens; for a fraction use budget_from_ratio."
            )
        if number < 1:
            raise BudgetError(f"budget={number} keeps no token; the smallest budget is 1.")
    return numbers


def per_row(numbers: Sequence[int], rows: int, device: torch.device) -> Budget:
    """Give budgets the shape that the cache computes with: an int, or ``(B, 1)`` when rows differ.

    Raises:
        BudgetError: there are several budgets, but not one for each row.
    """
    if len(set(numbers)) == 1 and len(numbers) in (1, rows):
        return numbers[0]
    if len(numbers) != rows:
        raise BudgetError(
            f"{len(numbers)} budgets were given for a batch of {rows} rows; give one number for all, or {rows}."
        )
    column: Int[Tensor, "B 1"] = torch.tensor(numbers, dtype=torch.int64, device=device)[:, None]
    return column
