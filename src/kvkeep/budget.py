"""Budgets: from ratios to tokens, checks, one number per row, and the spread of a budget over layers."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TypeAlias

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import BudgetError
from kvkeep.types import Budget

Number: TypeAlias = int | tuple[int, ...]
"""The budget of a row: of each of its KV heads, or one number for all of them."""

MOST = 2**50
"""Upper limit of a number of tokens, rows or bytes: no machine has more bytes, and no text more tokens."""

RULES = {"uniform": "0", "ramp": "0.2", "pyramid": "20", "taper": "0.5", "sliding": "0.25"}
"""Rules that spread a budget over layers: name → default parameter. See `per_layer`."""


def from_ratio(keep_ratio: float, tokens: int) -> int:
    """Return the budget for a fraction of ``tokens``: ``floor(keep_ratio * tokens)``, at least 1.

    Args:
        keep_ratio: fraction to keep, in (0, 1].
        tokens: real length of the prompt, padding not counted.

    Raises:
        BudgetError: the ratio is outside (0, 1] or there are no tokens.
    """
    if not 0.0 < keep_ratio <= 1.0:
        raise BudgetError(
            f"keep_ratio={keep_ratio} is outside (0, 1]. It is the fraction of the prompt's tokens that stay in "
            "the cache, e.g. 0.2 for a fifth; for an absolute number use `budget`."
        )
    if tokens < 1:
        raise BudgetError("keep_ratio needs the length of a prompt, and this prompt has no tokens.")
    return max(1, math.floor(keep_ratio * tokens + 1e-9))  # 0.29 * 100 is 28.999999999999996 in floats


def check(budget: object) -> tuple[Number, ...]:
    """Return a budget, checked, as a tuple with one number per row, or with a single number for all rows.

    A row may have a tuple of numbers instead, one for each of its KV heads.

    Raises:
        BudgetError: a budget is not an integer, is below 1, or is more than any memory holds; or the list is empty.
    """
    numbers = tuple(budget) if isinstance(budget, Sequence) and not isinstance(budget, str) else (budget,)
    if not numbers:
        raise BudgetError("The budget is an empty list; give one number of tokens, or one per row.")
    found = tuple(tuple(map(_whole, number)) if isinstance(number, tuple) else _whole(number) for number in numbers)
    for number in (head for row in found for head in (row if isinstance(row, tuple) else (row,))):
        if number < 1:
            raise BudgetError(f"budget={number} keeps no token; the smallest budget is 1.")
        if number > MOST:  # its bits, since Python writes no number of thousands of digits
            raise BudgetError(
                f"budget is a number of {number.bit_length()} bits, and no machine has memory for so much."
            )
    return found


def _whole(number: object, name: str = "budget") -> int:
    """Return a whole number of any library as Python's own. Its range is not checked.

    Args:
        number: the number.
        name: the argument's name, for the error.

    Raises:
        BudgetError: the value is no whole number.
    """
    try:
        if isinstance(number, bool):  # an int to Python
            raise TypeError
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        advice = "; for a fraction use budget_from_ratio." if name == "budget" else "."
        raise BudgetError(f"{name}={number!r:.80} is not a whole number{advice}") from None


def check_one(number: object, name: str = "budget") -> int:
    """Return a number of tokens, rows or bytes as an int, after a check of its range. NumPy's integers pass, too.

    Args:
        number: the number.
        name: the argument's name, for the error.

    Raises:
        BudgetError: the value is not an integer, is below 1, or is more than any memory holds.
    """
    found = _whole(number, name)
    if found < 1:
        raise BudgetError(f"{name} is below 1; give 1 or more.")
    if found > MOST:
        raise BudgetError(f"{name} is a number of {found.bit_length()} bits, and no machine has memory for so much.")
    return found


def by_head(numbers: Sequence[Number], heads: int) -> list[tuple[int, ...]]:
    """Return each row's budget as a tuple with one number for each of ``heads`` KV heads: a single one is repeated.

    Raises:
        BudgetError: a row has budgets for another number of heads.
    """
    found = [number if isinstance(number, tuple) else (number,) * heads for number in numbers]
    if wrong := [row for row in found if len(row) != heads]:
        raise BudgetError(f"{len(wrong[0])} budgets were given for {heads} KV heads.")
    return found


def largest(numbers: Sequence[Number]) -> int:
    """Return the largest budget of any row and head."""
    return max(max(number) if isinstance(number, tuple) else number for number in numbers)


def smallest(number: Number) -> int:
    """Return the smallest budget of a row's heads."""
    return min(number) if isinstance(number, tuple) else number


def at_most(number: Number, most: int | None) -> Number:
    """Return a row's budget, limited head by head to ``most`` tokens; ``None``: no limit."""
    if most is None:
        return number
    return tuple(min(head, most) for head in number) if isinstance(number, tuple) else min(number, most)


def per_head(numbers: Sequence[Number], rows: int, heads: int, device: torch.device) -> Int[Tensor, "B Hk"]:
    """Return the budgets as a tensor with one number for each row and KV head. A single budget counts for all rows.

    Raises:
        BudgetError: there are several budgets, but not one for each row, or for another number of heads.
    """
    found = by_head(numbers, heads)
    if len(found) not in (1, rows):
        raise BudgetError(
            f"{len(found)} budgets were given for a batch of {rows} rows; give one number for all, or {rows}."
        )
    table = torch.tensor(found if len(found) == rows else found * rows, dtype=torch.int64, device=device)
    return table.view(rows, heads)


def check_rows(budget: object) -> tuple[int, ...]:
    """Return a budget, checked as by `check`, as a tuple of one number per row or one for all.

    Heads cannot have their own.

    Raises:
        BudgetError: see `check`; or a row has several numbers.
    """
    found = tuple(number for number in check(budget) if isinstance(number, int))
    if len(found) < len(check(budget)):
        raise BudgetError("A budget is one number, or one per row; heads get theirs by `head_budget`.")
    return found


def per_row(numbers: Sequence[Number], rows: int, device: torch.device) -> Budget:
    """Return the rows' budgets as the cache needs them: an int if all are equal, or a ``(B, 1)`` tensor.

    Args:
        numbers: one budget for all rows, or one for each; heads have none of their own.
        rows: number of rows.
        device: of the tensor.

    Raises:
        BudgetError: there are several budgets, but not one for each row.
    """
    if isinstance(first := numbers[0], int) and len(set(numbers)) == 1 and len(numbers) in (1, rows):
        return first
    if len(numbers) != rows:
        raise BudgetError(
            f"{len(numbers)} budgets were given for a batch of {rows} rows; give one number for all, or {rows}."
        )
    column: Int[Tensor, "B 1"] = torch.tensor(numbers, dtype=torch.int64, device=device)[:, None]
    return column


def column(budget: Budget, seen: Int[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Return one budget per row, where heads differ their mean, rounded down. The result may be an expanded view.

    Args:
        budget: an int, one number per row, or one per row and head.
        seen: any number per row, for the number of rows and the device.
    """
    number = budget if isinstance(budget, Tensor) else seen.new_full((1,), budget)
    if number.ndim == 2 and number.shape[1] > 1:
        number = number.sum(dim=1) // number.shape[1]
    return number.view(-1).expand(len(seen))


def table(budget: Budget, seen: Int[Tensor, " B"]) -> Int[Tensor, "B #Hk"]:
    """Return budgets as a line for each row: one column, or one for each head where the budgets are by head.

    Args:
        budget: an int, one number per row, or one per row and head.
        seen: any number per row, for the number of rows and the device.
    """
    if isinstance(budget, Tensor) and budget.ndim == 2:
        return budget.expand(len(seen), -1)
    return column(budget, seen)[:, None]


def between(low: int, budget: Budget, high: int | None) -> Budget:
    """Return a budget limited to the range from ``low`` to ``high`` (``None``: no upper limit).

    Budgets may differ by row.
    """
    if isinstance(budget, Tensor):
        return budget.clamp(min=low, max=high)
    return max(low, budget if high is None else min(high, budget))


def smaller(one: Budget, other: Budget) -> Budget:
    """Return the smaller of two budgets, row by row (and head by head): an int if both are, else a tensor."""
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    return torch.minimum(torch.as_tensor(one), torch.as_tensor(other))


def per_layer(
    how: str | Sequence[float], budget: int, layers: int, *, least: int = 1, windows: Sequence[int | None] = ()
) -> list[int]:
    """Return the budget of each layer. Under all rules but ``sliding`` they add up to ``layers * budget`` exactly.

    Args:
        how: one of these rules, or one weight per layer, e.g. from `calibrated`.
            ``uniform``: the same for all layers.
            ``ramp:0.2``: a line from 20 % below the budget in the first layer to 20 % above it in the last
            (Scissorhands: later layers need more). A negative number reverses it.
            ``pyramid:20``: a line from nearly twice the budget down to a 20th of it (PyramidKV).
            ``taper:0.5``: a line from half above the budget to half below it (SpAtten).
            ``sliding:0.25``: a quarter for layers with a sliding window, but no more than the window, and what they
            leave for the others in equal parts. From a budget of four windows on they lose nothing. The sum is at most
            that of equal budgets.
        budget: tokens per layer on average.
        layers: number of layers.
        least: slots that every layer gets before the rest is spread. ``taper`` spreads everything, and every layer must
            end up with this many.
        windows: sliding window of each layer, ``None`` for a layer without one; empty if none has one.

    Raises:
        BudgetError: an unknown rule, a parameter out of range, not one weight per layer, or less than `least` to give.
    """
    weights = _weights(how, layers)
    if budget < least:
        raise BudgetError(
            f"A budget of {budget} is below the {least} slots that every layer needs; raise it to {least}."
        )
    # where all layers have windows or none has, nobody can take what others leave: all get the same
    if isinstance(how, str) and how.startswith("sliding") and any(windows) and not all(windows):
        return _beside_windows(weights[0], budget, windows, least)
    first, total = 0 if isinstance(how, str) and how.startswith("taper") else least, sum(weights)
    shares = _round([first + (budget - first) * layers * weight / total for weight in weights], layers * budget)
    if min(shares) < least:
        raise BudgetError(
            f"{how!r} leaves a layer {min(shares)} of {budget} slots, and every layer needs {least}. "
            "Raise the budget, or let it fall less."
        )
    return shares


def _beside_windows(share: float, budget: int, windows: Sequence[int | None], least: int) -> list[int]:
    """Return the budget of each layer: where a window slides, a share, but no more than the window and no less than
    ``least``; elsewhere the whole budget and, in equal parts, what the sliding layers leave.
    """
    held = [min(budget, window) for window in windows if window is not None]
    narrow = [max(least, min(round(share * budget), number)) for number in held]
    others = len(windows) - len(held)
    # a window smaller than `least` is all that its layer takes, however large its budget is
    taken = map(min, narrow, held)
    wide, sizes = budget + (sum(held) - sum(taken)) // others, iter(narrow)
    return [wide if window is None else next(sizes) for window in windows]


def calibrated(persistence: Sequence[float], *, floor: float = 0.1) -> list[float]:
    """Return layer weights from measured persistence ratios. Layers where importance persists get fewer slots.

    Args:
        persistence: share of the tokens that stay important, in [0, 1], per layer (Scissorhands, Section 3).
        floor: weight of a layer in which everything persists; above 0, as weights have to be.
    """
    return [floor + 1.0 - ratio for ratio in persistence]


def _weights(how: str | Sequence[float], layers: int) -> list[float]:
    """Return the weight of each layer, a positive number; for the rule ``sliding`` its share, once for each layer.

    Raises:
        BudgetError: the rule or the weights cannot be used.
    """
    if not isinstance(how, str):
        try:
            weights = list(map(float, how))
        except (TypeError, ValueError):
            raise BudgetError(
                f"layer_budget={how!r:.60} is neither a rule such as ramp:0.2 nor a list of numbers."
            ) from None
        if len(weights) != layers or not all(0 < weight < math.inf for weight in weights):
            raise BudgetError(
                f"{len(weights)} layer weights were given for {layers} layers; give one above 0 for each."
            )
        return weights
    name, _, text = how.partition(":")
    if name not in RULES:
        raise BudgetError(
            f"Unknown layer budget {how!r}; use uniform, ramp:0.2, pyramid:20, taper:0.5, sliding:0.25 or weights."
        )
    try:
        number = float(text or RULES[name])
    except ValueError:
        raise BudgetError(f"{how!r}: {text!r} is not a number; write for example {name}:{RULES[name]}.") from None
    if name == "sliding":
        if not 0.0 < number <= 1.0:
            raise BudgetError(f"{how!r} is out of range: layers with a sliding window take a share above 0, at most 1.")
        return [number] * layers
    if (name in ("ramp", "taper") and not -1.0 < number < 1.0) or (name == "pyramid" and not number >= 1.0):
        raise BudgetError(
            f"{how!r} is out of range: a ramp or taper takes a number between -1 and 1, a pyramid 1 or more."
        )
    # a pyramid's last layer gets 1/number of the average; the numbers of other rules, which may be 0, are not meant
    slope = {"uniform": 0.0, "ramp": number, "taper": -number, "pyramid": 1.0 / max(number, 1.0) - 1.0}[name]
    middle = max(1, layers - 1) / 2
    return [1.0 + slope * (layer - middle) / middle if layers > 1 else 1.0 for layer in range(layers)]


def _round(shares: Sequence[float], total: int) -> list[int]:
    """Return the shares as whole numbers that add up to the total.

    The largest remainders go up; among equal ones, the first.
    """
    whole = [math.floor(share + 1e-9) for share in shares]  # a whole share may be a little less in floats
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - shares[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole
