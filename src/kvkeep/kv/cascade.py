"""The table that the layers of a model share under a policy that prunes through them (SpAtten)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.head_sharding import ALONE, Heads
from kvkeep.types import Report, bytes_of

_LATER = torch.iinfo(torch.int64).max
_TABLES = (("tokens", _LATER, torch.int64), ("importance", 0, torch.float32), ("held", _LATER, torch.int64))
"""Name, value of an empty entry, and dtype of each table."""


class Cascade:
    """The importance that tokens have collected in all layers and steps, and the tokens that the last layer held.

    A token that one layer drops is dropped by all later ones. The table therefore has one entry for each token of the
    first layer, in position order, and never grows beyond that layer's slots and one chunk.

    Args:
        first: index of the first layer.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self._tokens: Int[Tensor, "B N"] | None = None
        self._importance: Float[Tensor, "B N"] | None = None
        self._held: Int[Tensor, "B M"] | None = None

    def clear(self) -> None:
        """Forget everything."""
        self._tokens = self._importance = self._held = None

    def select_rows(self, layer: int, index: Int[Tensor, " n"]) -> None:
        """Row ``i`` becomes the former row ``index[i]``. Only the call for the first layer has an effect."""
        for name in () if layer != self.first else ("_tokens", "_importance", "_held"):
            tensor = getattr(self, name)
            setattr(self, name, None if tensor is None else tensor.index_select(0, index.to(tensor.device)))

    def take_row(self, row: int) -> dict[str, Tensor]:
        """Copy one row's tables, without the entries of empty slots. Nothing before the first step."""
        if self._tokens is None or self._importance is None or self._held is None:
            return {}
        n, m = (int((table[row] < _LATER).sum()) for table in (self._tokens, self._held))
        rows = {"tokens": self._tokens[row, :n], "importance": self._importance[row, :n], "held": self._held[row, :m]}
        return {name: table.clone() for name, table in rows.items()}

    def put_row(self, row: int, rows: int, width: int, tables: Mapping[str, Tensor], device: torch.device) -> None:
        """Overwrite one row's tables with those of `take_row`.

        Args:
            row: which row.
            rows: rows of the batch.
            width: slots of the first layer.
            tables: the row's tables; empty ones forget the row.
            device: device of the slots.
        """
        for name, empty, dtype in _TABLES:
            table, held = tables.get(name, torch.empty(0, dtype=dtype)), getattr(self, f"_{name}")
            if held is None:
                held = torch.full((rows, width), empty, dtype=dtype, device=device)
            if (missing := len(table) - held.shape[1]) > 0:
                held = torch.nn.functional.pad(held, (0, missing), value=empty)
            held[row] = empty
            held[row, : len(table)] = table
            setattr(self, f"_{name}", held)

    @staticmethod
    def fits(tables: Mapping[str, Tensor]) -> bool:
        """Tell whether tables have the names, dtypes and lengths that `take_row` gives them."""
        kinds = {name: dtype for name, _, dtype in _TABLES}
        if tables.keys() != kinds.keys() or any(table.ndim != 1 for table in tables.values()):
            return False
        same = tables["tokens"].shape == tables["importance"].shape
        return same and all(table.dtype == kinds[name] for name, table in tables.items())

    def enter(self, layer: int, positions: Int[Tensor, "B S"]) -> tuple[Float[Tensor, "B S"], Bool[Tensor, "B S"]]:
        """Begin a layer's step with these tokens, -1 = empty. Return their importance so far, and which are alive."""
        if layer == self.first:
            self._open(positions)
        return self.importance(positions), self.is_alive(positions)

    def _open(self, positions: Int[Tensor, "B S"]) -> None:
        """Keep the first layer's tokens in the table, and no others."""
        past = self.importance(positions)
        tokens = positions.long().masked_fill(positions < 0, _LATER)
        self._tokens, order = tokens.sort(dim=1)
        self._importance = past.gather(1, order)
        self._held = None

    def importance(self, positions: Int[Tensor, "B S"]) -> Float[Tensor, "B S"]:
        """Return the importance that each token has collected, which is 0 for a new one."""
        if self._tokens is None or self._importance is None:
            return torch.zeros(positions.shape, dtype=torch.float32, device=positions.device)
        index, found = _look_up(self._tokens, positions)
        return self._importance.gather(1, index) * found

    def is_alive(self, positions: Int[Tensor, "B S"]) -> Bool[Tensor, "B S"]:
        """Tell whether the layer before holds each token. In the first layer all tokens are alive."""
        if self._held is None:
            return positions >= 0
        return _look_up(self._held, positions)[1]

    def add(self, positions: Int[Tensor, "B S"], report: Report, heads: Heads = ALONE) -> None:
        """Add the attention mass that a layer's tokens received, summed over all heads."""
        mass = heads.all(report.mass).sum(dim=1).float()
        assert self._tokens is not None
        assert self._importance is not None
        index, found = _look_up(self._tokens, positions)
        self._importance.scatter_add_(1, index, mass * found)

    def bytes(self, layer: int) -> int:
        """Size of the tables, counted with the first layer."""
        if layer != self.first:
            return 0
        return bytes_of(tensor for tensor in (self._tokens, self._importance, self._held) if tensor is not None)

    def leave(self, layer: int, positions: Int[Tensor, "B S"]) -> None:
        """End a layer's step with these tokens. Tokens that the first layer has dropped leave the table."""
        if layer == self.first:
            self._open(positions)
        self._held = positions.long().masked_fill(positions < 0, _LATER).sort(dim=1).values


class NoCascade:
    """A `Cascade` that holds nothing, for layers that share nothing."""

    def __init__(self) -> None:
        self._nothing: tuple[Tensor, Tensor] | None = None

    def clear(self) -> None:
        """Do nothing."""

    def select_rows(self, layer: int, index: Int[Tensor, " n"]) -> None:
        """Do nothing."""

    def enter(self, layer: int, positions: Int[Tensor, "B S"]) -> tuple[Float[Tensor, "B 0"], Bool[Tensor, "B 0"]]:
        """Return tensors without tokens. Every step gets the same ones while the number of rows does not change."""
        shape = (positions.shape[0], 0)
        if self._nothing is None or self._nothing[0].shape != shape:
            self._nothing = (
                positions.new_empty(shape, dtype=torch.float32),
                positions.new_empty(shape, dtype=torch.bool),
            )
        return self._nothing

    def add(self, positions: Int[Tensor, "B S"], report: Report, heads: Heads = ALONE) -> None:
        """Do nothing."""

    def bytes(self, layer: int) -> int:
        """Return 0."""
        return 0

    def leave(self, layer: int, positions: Int[Tensor, "B S"]) -> None:
        """Do nothing."""


def _look_up(tokens: Int[Tensor, "B N"], positions: Int[Tensor, "B S"]) -> tuple[Tensor, Bool[Tensor, "B S"]]:
    """Return the index of each position in a sorted table, and whether the position is in it."""
    wanted = positions.long().contiguous()
    index = torch.searchsorted(tokens, wanted).clamp(max=tokens.shape[1] - 1)
    return index, (tokens.gather(1, index) == wanted) & (positions >= 0)
