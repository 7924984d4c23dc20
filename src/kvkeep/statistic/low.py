"""Statistics that count the rows in which a key received less than its share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.statistic.base import Rows, Statistic
from kvkeep.statistic.bits import ring, word_names
from kvkeep.types import EMPTY


@dataclass(frozen=True, eq=False)
class Low(Statistic):
    """The number of rows in which a key received less than its share, ``1 / (theta · n)``, and the key's mass.

    Attributes:
        theta: divisor of the threshold. Above 1, fewer rows are low.
        live: whether ``n`` is the number of keys that the row sees. If not, ``n`` is the row's number, from 1.
    """

    fields: ClassVar[tuple[str, ...]] = ("mass", "low")

    theta: float = 1.0
    live: bool = False

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Average over the group, compare with the threshold, sum over the selected rows."""
        p, low = self._compared(rows)
        counts = rows.selected[:, None, :, None]
        return {"mass": (p * counts).sum(dim=2), "low": (low & counts).sum(dim=2).to(p.dtype)}

    def _compared(self, rows: Rows) -> tuple[Float[Tensor, "B Hk T S"], Bool[Tensor, "B Hk T S"]]:
        """The mean over the group, and whether it is below the threshold, for keys that the row sees."""
        p = rows.probabilities.mean(dim=2)
        visible = rows.visible
        n = visible.sum(dim=-1, keepdim=True) if self.live else (rows.queries + 1)[:, None, :, None]
        return p, (p * n * self.theta < 1.0) & visible


@dataclass(frozen=True, eq=False)
class LowRows(Low):
    """Low for each selected row, as one bit of a ring (see `kvkeep.statistic.bits`), and two sums of mass.

    The field ``mass`` is the sum over all selected rows, the field ``due`` over the last ``due`` rows.

    Attributes:
        words: number of floats that hold the ring.
        last: the newest position of each row of the batch.
        due: number of rows in the field ``due``.
    """

    words: int = 1
    last: Int[Tensor, " B"] | int = 0
    due: Int[Tensor, " B"] | int = 0

    @property
    def fields(self) -> tuple[str, ...]:  # type: ignore[override]  # their number depends on the window
        """The names of the two sums and of the ring's words."""
        return ("mass", "due", *word_names(self.words))

    def weights(self, selected: Bool[Tensor, "B T"], queries: Int[Tensor, "B T"]) -> dict[str, Float[Tensor, "B T"]]:
        """The weight of each row in each field: of its mass in the sums, of its low bit in the words."""
        last, due = (torch.as_tensor(n, device=queries.device).view(-1, 1) for n in (self.last, self.due))
        bits = ring(queries.masked_fill(~selected, EMPTY), self.words).float().unbind(dim=-1)
        sums = {"mass": selected.float(), "due": (selected & (queries > last - due)).float()}
        return sums | dict(zip(word_names(self.words), bits, strict=True))

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Average over the group, compare with the threshold, set the bit of each selected row."""
        p, low = self._compared(rows)
        sums = {"mass": p, "due": p}
        weights = self.weights(rows.selected, rows.queries)
        return {
            name: (sums.get(name, low) * weight[:, None, :, None]).sum(dim=2).to(p.dtype)
            for name, weight in weights.items()
        }
