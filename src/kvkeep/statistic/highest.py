"""Statistics that look at the highest probabilities of a key or of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d

from kvkeep.statistic.base import Rows, Statistic
from kvkeep.types import EMPTY


@dataclass(frozen=True, eq=False)
class Peak(Statistic):
    """The largest attention probability that each key received from any row and any query head of the group."""

    fields: ClassVar[tuple[str, ...]] = ("peak",)

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """The maximum over the group and the selected rows."""
        counts = rows.selected[:, None, None, :, None]
        return {"peak": rows.probabilities.masked_fill(~counts, 0.0).amax(dim=(2, 3))}

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Take the larger one, in place."""
        torch.maximum(total, part, out=total)


@dataclass(frozen=True, eq=False)
class LastHit(Statistic):
    """The position, plus 1, of the newest row in which a key had one of the highest probabilities; 0 for none.

    A row's threshold is the ``quantile`` of its probabilities over all tokens seen so far, evicted ones counted as 0.

    Attributes:
        quantile: in [0, 1). With 0.9, a row hits about a tenth of the tokens.
    """

    fields: ClassVar[tuple[str, ...]] = ("hit",)

    quantile: float = 0.9

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Average over the group, compare with the quantile, take the newest selected row above it."""
        p = rows.probabilities.mean(dim=2)
        S = p.shape[-1]
        length = rows.queries + 1
        above = length - (self.quantile * length.double() + 1e-9).long()  # values from the quantile's own upwards
        ranked = p.sort(dim=-1, descending=True).values
        place = (above - 1).clamp(min=0)[:, None, :, None].expand(*p.shape[:3], 1)
        threshold = ranked.gather(-1, place.clamp(max=S - 1)).masked_fill(place >= S, 0.0)
        hit = (p > threshold) & rows.visible & rows.selected[:, None, :, None]
        return {"hit": (hit * length[:, None, :, None]).amax(dim=2).to(p.dtype)}

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Take the newer row, in place."""
        torch.maximum(total, part, out=total)


@dataclass(frozen=True, eq=False)
class Worst(Statistic):
    """The largest probability that each older key received from any row and query head, and the mass.

    Each row's probabilities over the older keys are first averaged along the positions, as if zeros stood beyond the
    ends, and scaled to the sum that they had. Other keys get 0. ``mass`` is that of older keys, not averaged.

    Attributes:
        before: the position of each row of the batch below which keys are older ones.
        kernel: width of the average, an odd number.
    """

    fields: ClassVar[tuple[str, ...]] = ("mass", "worst")

    before: Int[Tensor, " B"] | int = 0
    kernel: int = 5

    def reduce(self, rows: Rows) -> dict[str, Float[Tensor, "B Hk S"]]:
        """Average along the positions, take the maximum over the group and the selected rows."""
        before = torch.as_tensor(self.before, device=rows.keys.device).view(-1, 1, 1)
        older = (rows.keys >= 0) & (rows.keys < before)
        p = rows.probabilities.masked_fill(~(older[:, :, None, None] & rows.selected[:, None, None, :, None]), 0.0)
        order = rows.keys.masked_fill(~older, EMPTY).argsort(dim=-1, stable=True)
        place = order[:, :, None, None].expand(p.shape)
        smooth = avg_pool1d(p.gather(-1, place).flatten(0, 3)[:, None], self.kernel, 1, self.kernel // 2)
        smooth = smooth.view(p.shape).masked_fill(~older.gather(-1, order)[:, :, None, None], 0.0)
        smooth *= p.sum(dim=-1, keepdim=True) / smooth.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
        highest = smooth.amax(dim=(2, 3))
        worst = torch.zeros_like(highest).scatter_(-1, order.expand(highest.shape), highest)
        return {"mass": p.mean(dim=2).sum(dim=2), "worst": worst}

    def join(self, total: Float[Tensor, "B Hk S"], part: Float[Tensor, "B Hk S"], name: str) -> None:
        """Add the mass; of the largest probabilities take the larger one."""
        if name == "mass":
            total.add_(part)
        else:
            torch.maximum(total, part, out=total)
