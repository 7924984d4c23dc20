"""Pure functions over scores: what is protected (`protect`), what is kept (`keep`), what goes first.

The order of eviction is the same everywhere: the occupied slot with the smallest ``(score, position)`` goes first, so
among equal scores the older token goes. Nothing depends on the order of the slots or on how a sort breaks ties.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvkeep.types import EMPTY, Budget, Top

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
        New scores; the input is not changed. NaN, which has no order, becomes the lowest score, so tokens that a broken
        step has touched go first and protected tokens stay.
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
    by_age = positions.argsort(dim=-1, stable=True)
    occupied = positions >= 0
    ranked = scores.masked_fill(~occupied, -torch.inf).gather(-1, by_age).argsort(dim=-1, stable=True)
    order = by_age.gather(-1, ranked)  # slots from the first to go to the last
    threshold = S - n if isinstance(n, int) else (S - n)[:, :, None]
    stays = (torch.arange(S, device=scores.device) >= threshold).expand(order.shape)
    return torch.zeros_like(occupied).scatter(-1, order, stays) & occupied


def weakest(scores: Float[Tensor, "B Hk S"], positions: Int[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk 1"]:
    """The one slot of each row and head that goes first: the complement of ``keep(..., occupied - 1)``, without a sort.

    A decode step evicts one token per head, and a sort of all slots would cost more than attention's report.
    A row and head with no occupied slot gets slot 0; callers decide whether a slot has to go.
    """
    occupied_scores = scores.masked_fill(positions < 0, torch.inf)
    lowest = occupied_scores.amin(dim=-1, keepdim=True)
    tied = (occupied_scores == lowest) & (positions >= 0)
    return positions.masked_fill(~tied, _LATER).argmin(dim=-1, keepdim=True)


def ranks(scores: Float[Tensor, "B Hk S"], positions: Int[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk S"]:
    """Each slot's place in the order of ``(score, position)``, from 0; empty slots take part as position -1."""
    by_age = positions.argsort(dim=-1)
    order = by_age.gather(-1, scores.gather(-1, by_age).argsort(dim=-1, stable=True))
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def pooled(
    values: Float[Tensor, "B Hk S"],
    positions: Int[Tensor, "B Hk S"],
    counts: Bool[Tensor, "B Hk S"],
    *,
    kernel: int,
    kind: Literal["max", "avg", "mean"],
) -> Float[Tensor, "B Hk S"]:
    """Pool over neighbours in the order of positions, stride 1, as many values as before.

    Args:
        values: what is pooled.
        positions: true positions, ``-1`` = empty.
        counts: the slots that take part; the others are no neighbours and get 0.
        kernel: width, an odd number.
        kind: the largest neighbour; ``avg`` divides by the kernel at the borders too, ``mean`` by the neighbours there.
    """
    order = positions.masked_fill(~counts, EMPTY).argsort(dim=-1, stable=True)
    ordered, inside = values.gather(-1, order), counts.gather(-1, order)
    if kind == "max":
        found = max_pool1d(ordered.masked_fill(~inside, -torch.inf), kernel, stride=1, padding=kernel // 2)
    else:
        found = avg_pool1d(ordered.masked_fill(~inside, 0.0), kernel, stride=1, padding=kernel // 2)
        if kind == "mean":
            share = avg_pool1d(inside.to(values.dtype), kernel, stride=1, padding=kernel // 2)
            found = found / share.clamp(min=0.5 / kernel)
    return torch.empty_like(values).scatter_(-1, order, found.masked_fill(~inside, 0.0))


def rounded(shares: Float[Tensor, "B n"], total: Int[Tensor, "B 1"]) -> Int[Tensor, "B n"]:
    """Whole numbers near the shares that add up to the total: the largest remainders go up, the first of equals."""
    whole = (shares + 1e-9).floor().long()
    missing = total - whole.sum(dim=1, keepdim=True)
    n = shares.shape[1]
    order = ((whole - shares) * 1e6).round().argsort(dim=1, stable=True)  # equal remainders tie whatever their last bit
    goes_up = torch.arange(n, device=shares.device) < missing % n
    return whole + missing // n + torch.zeros_like(whole).scatter_(1, order, goes_up.long().expand_as(whole))


def value_prior(
    values: Float[Tensor, "B Hk S E"], positions: Int[Tensor, "B Hk S"], kernel: int
) -> Float[Tensor, "B Hk S"]:
    """Squared norms of the values, averaged over neighbours, as a share of the largest (AhaKV, Eq. 13-14)."""
    sizes = values.to(torch.promote_types(values.dtype, torch.float32)).square().sum(dim=-1)
    smooth = pooled(sizes, positions, positions >= 0, kernel=kernel, kind="mean")
    return smooth / smooth.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def only_top(p: Float[Tensor, "B Hk G 1 S"], newest: Bool[Tensor, "B #Hk S"], top: Top) -> Float[Tensor, "B Hk G 1 S"]:
    """The largest ``top.n`` probabilities of each row and the newest token's; the others become 0.

    A row that sees nothing stays 0.
    """
    lifted = p.masked_fill(newest[:, :, None, None], torch.inf)
    place = top.n.clamp(min=0, max=p.shape[-1] - 1).view(-1, 1, 1, 1, 1).expand(*p.shape[:-1], 1)
    least = lifted.sort(dim=-1, descending=True).values.gather(-1, place)
    used = p.masked_fill(lifted < least, 0.0)
    if not top.renormalise:
        return used
    return used / used.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


def expire(positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> Int[Tensor, "B Hk S"]:
    """Empty the slots that no later query can see through a sliding window of ``window`` tokens."""
    return positions.masked_fill(positions <= (seen - window)[:, None, None], EMPTY)
