"""`Snapshot`: one sequence's memory as an object."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.budget import by_head, check_rows
from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import Layout
from kvkeep.cache.token_history import rows_of
from kvkeep.errors import InputError, SnapshotError, UnsupportedOperationError
from kvkeep.kv.cascade import Cascade
from kvkeep.pins import Span, end, spans
from kvkeep.snapshot import file_io
from kvkeep.snapshot.contents import Contents
from kvkeep.snapshot.file_format import FileParts
from kvkeep.snapshot.fingerprint import Fingerprint, hash_of_config, rule


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One sequence's memory over all layers, at one moment. It shares no memory with a cache and never changes.

    Attributes:
        contents: the memory itself.
        fingerprint: the model and the settings that it belongs to.
        tokens: ids of the tokens that it stands for, without padding; ``None`` if they are not known.
        pending: tokens of a prompt that were announced and not fed yet.
        note: plain data of whoever took it, such as a session's messages; it is saved as JSON.
    """

    contents: Contents
    fingerprint: Fingerprint
    tokens: Int[Tensor, " n"] | None = None
    pending: int = 0
    note: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tokens is not None and len(self.tokens) != self.seen:
            raise SnapshotError(
                f"{len(self.tokens)} token ids were given for a sequence of {self.seen} tokens; give one for each."
            )

    @property
    def seen(self) -> int:
        """Tokens that the sequence has seen."""
        return self.contents.seen

    @property
    def nbytes(self) -> int:
        """Bytes of the memory and of the token ids."""
        return self.contents.nbytes + (0 if self.tokens is None else self.tokens.nbytes)

    def to(self, device: torch.device | str) -> Snapshot:
        """The same memory on a device. Token ids stay on the CPU."""
        return replace(self, contents=self.contents.to(device))

    def pinned(self, pins: Sequence[Span]) -> Snapshot:
        """The same memory with other pins: tokens that no head may drop from now on.

        A head that has dropped a token already does not get it back.

        Args:
            pins: spans of positions, such as ``((0, 120),)``, instead of those that the memory has; ``()`` pins none.

        Raises:
            InputError: they are no spans, or end beyond the tokens that the memory has seen.
        """
        found = spans(pins)
        if end(found) > self.seen:
            raise InputError(
                f"The pins end at position {end(found)}, and the memory has seen {self.seen} tokens. Pin those only."
            )
        return replace(self, contents=self.contents.pinned(found))

    def positions(self, layer: int = 0) -> Int[Tensor, "Hk used"]:
        """True positions of the tokens that a layer holds, -1 = empty. Layers without slots are not counted."""
        return self.contents.layers[layer].positions

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the memory to a file of safetensors. After a crash the file is the old one or the new one.

        Raises:
            SnapshotError: the file cannot be written; an older file of that name stays as it was.
        """
        file_io.save(FileParts(self.contents, self.fingerprint, self.tokens, self.pending, self.note), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, device: str | torch.device = "cpu") -> Snapshot:
        """Read a file that `save` wrote. Nothing is allocated before the file's own numbers are checked.

        Raises:
            SnapshotError: the file cannot be read, or is no whole file of a snapshot.
        """
        return cls(*file_io.load(path)).to(device)

    def __repr__(self) -> str:
        made = self.fingerprint
        return f"Snapshot({self.seen} tokens of {made.model}, policy='{made.policy}', budget={made.budget})"


# The arguments of a cache and of its methods, as snapshots need them.


@dataclass(frozen=True)
class CacheSettings:
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
    ) -> CacheSettings:
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
