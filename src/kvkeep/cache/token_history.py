"""The token ids that a cache stands for. The next turn of a chat is compared with them before it is fed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvkeep.errors import InputError, ShapeError

_MOST_PIECES = 256
"""Pieces of a history before they are joined: a token per step would make a list of very many."""

_SHOWN_TOKENS = 6
"""Tokens on either side of a difference that a message shows."""

Ids: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]
"""Token ids: of one row, of several rows, or a tokenizer's output with ``input_ids``."""


@runtime_checkable
class Decodes(Protocol):
    """A tokenizer, as far as errors need one."""

    def decode(self, token_ids: list[int]) -> Any:
        """Return the text of tokens."""


class TokenHistory:
    """Token ids of a batch, column by column, padding included.

    Attributes:
        columns: number of columns that were told.
        records: whether ids are recorded.
        prompt_columns: number of columns after which the announced prompt ends.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Forget all ids, and stop recording."""
        self._pieces: list[tuple[Tensor, Tensor]] = []
        self.columns, self.prompt_columns, self.records = 0, 0, False

    def begin_again(self, rows: Sequence[Tensor] | None, *, columns: int, device: torch.device) -> None:
        """Replace the recorded ids by those of restored rows. If they are unknown, stop recording.

        Args:
            rows: the ids of each row without padding, which then stands on the left; ``None``: they are not known.
            columns: columns that the cache has now.
            device: where the ids shall be.
        """
        self.clear()
        if rows is not None:
            ids, real = padded([torch.empty(columns), *rows])  # a row as long as the columns, so that others are padded
            self.add(ids[1:].to(device), real[1:].to(device), held=0)
            self.records = True

    def add(self, ids: Int[Tensor, "B T"], real: Bool[Tensor, "B T"], *, held: int) -> None:
        """Append the ids of columns that are about to be fed. Ids noted for columns that were never fed are dropped
        first.

        Args:
            ids: the token ids.
            real: which of them are no padding.
            held: columns that the cache holds.
        """
        self.forget_after(held)
        # copies, since the tensors belong to whoever feeds them
        self._pieces.append((ids.to(torch.int32, copy=True), real.clone()))
        self.columns += ids.shape[1]
        if len(self._pieces) > _MOST_PIECES:
            self._pieces = [self.table()]

    def forget_after(self, columns: int) -> None:
        """Drop the ids beyond the first ``columns`` columns, whose tokens were never fed; do nothing if there are
        none.
        """
        if columns < self.columns:
            self._pieces = [(ids[:, :columns], real[:, :columns]) for ids, real in [self.table()]] if columns else []
            self.columns = columns

    def table(self) -> tuple[Int[Tensor, "B columns"], Bool[Tensor, "B columns"]]:
        """Return all recorded ids, and a mask of those that are no padding. Fail if nothing is recorded."""
        ids, real = zip(*self._pieces, strict=True)
        return torch.cat(ids, dim=1), torch.cat(real, dim=1)

    def select_rows(self, index: Int[Tensor, " n"]) -> None:
        """Replace row ``i`` by what row ``index[i]`` was, for all rows; do nothing before ids are recorded."""
        if self._pieces:
            self._pieces = [(ids[index.to(ids.device)], real[index.to(ids.device)]) for ids, real in [self.table()]]

    @property
    def rows(self) -> int | None:
        """Return the number of rows, or ``None`` before any tokens were recorded."""
        return len(self._pieces[0][0]) if self._pieces else None

    def rest_of(self, rows: Sequence[Tensor], tokenizer: Decodes | None) -> list[Tensor]:
        """Return what follows the recorded tokens in each row of ids; refuse rows that do not begin with these. All of
        each row if nothing is recorded.

        Args:
            rows: the ids of each row's whole text, without padding.
            tokenizer: decodes the text around the first difference, for the error; ``None``: ids are shown alone.

        Raises:
            InputError: a row does not begin with the recorded tokens, or has no token beyond them.
            ShapeError: there is another number of rows.
        """
        if not self._pieces:
            return list(rows)
        if len(rows) != self.rows:
            raise ShapeError(
                f"The cache holds {self.rows} rows, and there are {len(rows)} texts. Call reset() for another batch."
            )
        ids, real = self.table()
        told = [row[mask].cpu() for row, mask in zip(ids, real, strict=True)]
        name = "The text" if len(rows) == 1 else "Text {}"
        for i, (old, new) in enumerate(zip(told, rows, strict=True)):
            _check_begins(old, new, name.format(i), tokenizer)
        return [new[len(old) :] for old, new in zip(told, rows, strict=True)]


def _check_begins(old: Int[Tensor, " n"], new: Int[Tensor, " m"], name: str, tokenizer: Decodes | None) -> None:
    """Refuse a text ``new`` that does not begin with the tokens ``old``, which the cache has seen, or that adds none.
    ``name`` is what the error calls it.

    Raises:
        InputError: the text does not begin with these tokens, or has no token beyond them.
    """
    n = min(len(old), len(new))
    parts = (old[:n] != new[:n]).nonzero()
    if not len(parts) and len(new) > len(old):
        return
    remedy = "Call reset() and feed the whole text, or use a chat template that leaves earlier turns as they are."
    if not len(parts):
        same = len(new) == len(old)
        why = "so there is nothing to feed" if same else "which cannot be taken back"
        raise InputError(f"{name} has {len(new)} tokens, and the cache holds {len(old)}, {why}. {remedy}")
    at = int(parts[0])
    raise InputError(
        f"{name} and the cache part at token {at} of {len(old)}: the cache has {_shown(old, at, tokenizer)}, the text "
        f"{_shown(new, at, tokenizer)}. {remedy}"
    )


def _shown(ids: Int[Tensor, " n"], at: int, tokenizer: Decodes | None) -> str:
    """Format the token at index ``at`` for an error: its id, and with a tokenizer the text before and after it."""
    number = int(ids[at])
    if tokenizer is None:
        return str(number)
    before = str(tokenizer.decode(ids[max(0, at - _SHOWN_TOKENS) : at].tolist()))
    after = str(tokenizer.decode(ids[at : at + _SHOWN_TOKENS].tolist()))
    return f"{number} ({before!r} ▸ {after!r})"


def rows_of(ids: Ids, mask: Tensor | None) -> list[Tensor]:
    """Return the token ids of each row without padding, on the CPU.

    Args:
        ids: token ids of one row or several; a tokenizer's output brings its own mask.
        mask: 1 where a token is real; ``None``: everywhere.

    Raises:
        InputError: there are no token ids, or the mask has another shape.
    """
    if isinstance(ids, Mapping):
        fields: Mapping[str, Any] = ids
        ids, mask = fields.get("input_ids", ()), fields.get("attention_mask") if mask is None else mask
    try:
        # `index` refuses fractions, which torch would cut down to whole numbers
        rows = [torch.tensor(list(map(index, row)), dtype=torch.long) for row in _nested(ids)]
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputError(
            "continue_with takes token ids of the whole conversation, for example "
            "tokenizer.apply_chat_template(messages, add_generation_prompt=True)."
        ) from None
    if mask is not None:
        rows = [row[shown] for row, shown in zip(rows, _shown_in(mask, rows), strict=True)]
    if not all(map(len, rows)):
        raise InputError("A text has no tokens.")
    return rows


def _nested(given: object) -> list[list[Any]]:
    """Return a tensor, an array or a list as a list of rows; a single row becomes a list of one."""
    rows = _as_list(given)
    return [_as_list(row) for row in rows] if rows and getattr(rows[0], "__len__", None) else [rows]


def _as_list(given: Any) -> list[Any]:
    """Return a tensor, an array or an iterable as a list."""
    return given.tolist() if hasattr(given, "tolist") else list(given)


def _shown_in(mask: object, rows: Sequence[Tensor]) -> list[Bool[Tensor, " n"]]:
    """Return an attention mask as one boolean tensor per row, after checking that it fits the rows.

    Raises:
        InputError: the mask does not have the rows' lengths.
    """
    try:
        shown = [torch.tensor(row).bool() for row in _nested(mask)]
    except (TypeError, ValueError, RuntimeError):
        shown = []
    if [row_mask.shape for row_mask in shown] != [row.shape for row in rows]:
        raise InputError("The attention mask has another shape than the token ids; it covers them alone.")
    return shown


def device_of(ids: Ids, otherwise: torch.device) -> torch.device:
    """Return the device of token ids; ``otherwise`` for lists, which have none."""
    tensor: Any = ids["input_ids"] if isinstance(ids, Mapping) else ids
    return tensor.device if isinstance(tensor, Tensor) else otherwise


def padded(rows: Sequence[Tensor]) -> tuple[Int[Tensor, "B T"], Bool[Tensor, "B T"]]:
    """Return rows as one tensor on the CPU with zeros in front of the shorter ones, and a mask of the real tokens."""
    T = max(map(len, rows))
    ids, real = torch.zeros(len(rows), T, dtype=torch.long), torch.zeros(len(rows), T, dtype=torch.bool)
    for i, row in enumerate(rows):
        ids[i, T - len(row) :], real[i, T - len(row) :] = row, True
    return ids, real
