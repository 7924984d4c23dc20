"""Pure functions over scores: what is protected, what is kept, what goes first.

The total order is the same everywhere: the slot with the smallest ``(score, position)`` goes first, so among
equal scores the older token goes. Nothing depends on the order of the slots or on how a sort breaks ties.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.types import EMPTY, Budget

_LATER = torch.iinfo(torch.int32).max


def protect(
    scores: Float[Tensor, "B Hk S"],
    positions: Int[Tensor, "B Hk S"],
    seen: Int[Tensor, " B"],
    *,
    sinks: int = 0,
    recent: Budget = 0,
) -> Float[Tensor, "B Hk S"]:
    """Give the first ``sinks`` and the newest ``recent`` positions of every row an infinite score.

    Args:
        scores: higher = keep.
        positions: true positions, ``-1`` = empty.
        seen: tokens seen per row; positions ``>= seen - recent`` are recent.
        sinks: number of first tokens to protect.
        recent: number of newest tokens to protect, one number or one per row.

    Returns:
        New scores; the input is not changed. NaN, which has no order, becomes the lowest score: what a broken step
        has touched goes first, and the protected tokens stay.
    """
    first_recent = seen[:, None] - recent
    shielded = positions >= first_recent[:, :, None]
    if sinks:
        shielded = shielded | (positions < sinks)
    return scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).masked_fill_(shielded, torch.inf)


def keep(
    scores: Float[Tensor, "B Hk S"],
    positions: Int[Tensor, "B Hk S"],
    n: int | Int[Tensor, "B #Hk"],
) -> Bool[Tensor, "B Hk S"]:
    """Mark the ``n`` occupied slots of each row and head that stay.

    Args:
        scores: higher = keep.
        positions: true positions, ``-1`` = empty; an empty slot is never kept.
        n: how many stay, one number or one per row (and head).

    Returns:
        A mask with ``min(n, occupied)`` true entries per row and head.
    """
    S = positions.shape[-1]
    by_age = positions.argsort(dim=-1)
    occupied = positions >= 0
    ranked = scores.masked_fill(~occupied, -torch.inf).gather(-1, by_age).argsort(dim=-1, stable=True)
    order = by_age.gather(-1, ranked)  # slots from the first to go to the last
    threshold = S - n if isinstance(n, int) else (S - n)[:, :, None]
    stays = (torch.arange(S, device=scores.device) >= threshold).expand(order.shape)
    return torch.zeros_like(occupied).scatter(-1, order, stays) & occupied


def weakest(scores: Float[Tensor, "B Hk S"], positions: Int[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk 1"]:
    """The one occupied slot that goes first: the complement of ``keep(..., occupied - 1)``, without a sort.

    The decode step evicts one token per head, and a sort of all slots would cost more than attention's report.
    A row and head with no occupied slot gets slot 0; callers decide whether anything has to go.
    """
    occupied_scores = scores.masked_fill(positions < 0, torch.inf)
    lowest = occupied_scores.amin(dim=-1, keepdim=True)
    tied = (occupied_scores == lowest) & (positions >= 0)
    return positions.masked_fill(~tied, _LATER).argmin(dim=-1, keepdim=True)


def expire(positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> Int[Tensor, "B Hk S"]:
    """Empty the slots that no later query can see through a sliding window of ``window`` tokens."""
    return positions.masked_fill(positions <= (seen - window)[:, None, None], EMPTY)
