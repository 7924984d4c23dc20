"""The arguments of a cache and of its methods, as snapshots need them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import by_head, check_rows
from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import Layout
from kvkeep.cache.token_history import rows_of
from kvkeep.errors import InputError, UnsupportedOperationError
from kvkeep.kv.cascade import Cascade
from kvkeep.snapshot.fingerprint import hash_of_config, rule
from kvkeep.snapshot.snapshot import Snapshot


@dataclass(frozen=True)
class Settings:
    """The arguments that a cache was made with, as far as its snapshots need them.

    Attributes:
        config: the model's configuration.
        budgets: one number, or one per row.
        layer_budget: rule by which the budget is spread over the layers, or one weight per layer.
        head_budget: rule by which heads share a layer's budget; ``None``: the policy's own.
        chunk: tokens of the prompt that are taken at once.
        kv_bits: bits of keys and values in the slots; ``None``: the model's dtype.
        cascade: the tables that the layers share.
    """

    config: Any
    budgets: tuple[int, ...]
    layer_budget: str | tuple[float, ...]
    head_budget: str | None
    chunk: int | None
    kv_bits: str | None
    cascade: Cascade | None

    @functools.cached_property
    def config_hash(self) -> str:
        """The hash of the configuration, computed when it is first needed."""
        return hash_of_config(self.config)

    @classmethod
    def of(
        cls,
        config: Any,
        budget: int | Sequence[int],
        layout: Layout,
        chunk: int | None,
        cascade: Cascade | None,
    ) -> Settings:
        """The settings, with numbers of other libraries as Python's own."""
        rules, size = (rule(layout.layer_budget), layout.head_budget), None if chunk is None else int(chunk)
        return cls(config, check_rows(budget), *rules, size, layout.kv_bits, cascade)

    def budget_of(self, layer: Layer, row: int) -> int:
        """The budget of a row, also after rows were selected.

        Args:
            layer: the cache's first layer.
            row: which row.

        Raises:
            UnsupportedOperationError: rows with budgets of their own were selected, and it is not clear which is whose.
        """
        if len(set(self.budgets)) == 1:
            return self.budgets[0]
        if not layer.moves:
            return self.budgets[row]
        heads, mine = layer.store.positions.shape[1], layer.block.budget_of(row)
        each = map(sum, by_head(layer.budgets, heads))
        found = {one for one, number in zip(self.budgets, each, strict=True) if number == mine}
        if len(found) != 1:
            raise UnsupportedOperationError(
                "Rows with budgets of their own were selected, and it is not known any more which budget this row has."
            )
        return found.pop()


def ids_of_row(tokens: Any) -> Tensor:
    """The token ids of one row.

    Raises:
        InputError: they are not, or are no ids.
    """
    try:
        (row,) = rows_of(tokens, None)
    except (InputError, ValueError):
        row = torch.tensor([-1])
    if bool(((row < 0) | (row >= 2**31)).any()):
        raise InputError(f"tokens={tokens!r:.60} are not the token ids of one row.")
    return row.int()


def check_kind(snapshots: Sequence[object]) -> None:
    """Refuse what is no snapshot.

    Raises:
        InputError: there is something else.
    """
    for one in snapshots:
        if not isinstance(one, Snapshot):
            raise InputError(f"{type(one).__name__} is no Snapshot; cache.snapshot and Snapshot.load return one.")


def identities(sequences: Sequence[int]) -> list[int]:
    """Return the identity of each row as a list of Python's numbers.

    Raises:
        InputError: they are no whole numbers of 64 bits.
    """
    try:
        found = list(map(operator.index, sequences))
    except TypeError:
        found = [2**63]
    if not all(-(2**63) <= number < 2**63 for number in found):
        raise InputError(f"sequences={sequences!r:.60} is no list of whole numbers below 2^63, one per row.")
    return found


def checked_row(row: object, rows: int) -> int:
    """The number of a row.

    Raises:
        InputError: there is no such row.
    """
    try:
        number = operator.index(row)  # type: ignore[arg-type]
    except TypeError:
        number = -1
    if not 0 <= number < rows:
        raise InputError(f"row={row!r:.40} is not one of the cache's rows, 0 to {rows - 1}.")
    return number
