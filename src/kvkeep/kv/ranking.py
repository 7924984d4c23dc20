"""Pure functions over scores: protect tokens, choose the slots that stay, rank and pool.

All functions use the same total order. The slot with the smallest ``(score, position)`` goes first, so among equal
scores the older token goes. Results depend neither on the order of the slots nor on how a sort breaks ties.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import avg_pool1d, max_pool1d

from kvkeep.types import EMPTY, Budget, Top

_LATER = torch.iinfo(torch.int32).max
"""A position behind all others."""


def protect(
    scores: Float[Tensor, "B Hk S"],
    positions: Int[Tensor, "B Hk S"],
    seen: Int[Tensor, " B"],
    *,
    sinks: int = 0,
    recent: Budget = 0,
    pins: Int[Tensor, "B bounds"] | None = None,
) -> Float[Tensor, "B Hk S"]:
    """Return the scores with infinity at the tokens that may not go: the first ``sinks``, the newest ``recent`` and
    the pinned ones.

    Args:
        scores: higher = keep.
        positions: true positions, ``-1`` = empty.
        seen: tokens seen per row; positions ``>= seen - recent`` are recent.
        sinks: number of first tokens to protect.
        recent: number of newest tokens to protect, one number or one per row.
        pins: bounds of the pinned spans, see `pinned`; ``None``: none.

    Returns:
        New scores; the input is not changed. NaN, which has no order, becomes the lowest score, so that slots with NaN
        go first and protected tokens stay.
    """
    shielded = protects(positions, seen, sinks=sinks, recent=recent, pins=pins)
    below = torch.finfo(scores.dtype).max  # a policy's own infinity never competes with a protected token
    return scores.nan_to_num(nan=-torch.inf, posinf=below, neginf=-torch.inf).masked_fill_(shielded, torch.inf)


def above_all(scores: Float[Tensor, "B Hk S"], chosen: Bool[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk S"]:
    """Return new scores in which the chosen slots have the largest finite number, and no other slot has more than the
    number just below it.

    So the chosen slots go after all others, and before what `protect` sets to infinity.
    """
    most = torch.full((), torch.finfo(scores.dtype).max, dtype=scores.dtype)
    below = most.nextafter(torch.zeros_like(most)).item()
    return scores.clamp(max=below).masked_fill(chosen, most.item())


def chosen_last(
    scores: Float[Tensor, "B Hk S"], positions: Int[Tensor, "B Hk S"], before: Int[Tensor, "B #Hk"]
) -> Float[Tensor, "B Hk S"]:
    """Return new scores in which the tokens at positions below ``before`` have the largest finite number, so that they
    go after all others; among each other the oldest goes first. Other scores stay, and must be below that number, as
    positions are.
    """
    return scores.masked_fill(positions < before[:, :, None], torch.finfo(scores.dtype).max)


def protects(
    positions: Int[Tensor, "B Hk S"],
    seen: Int[Tensor, " B"],
    *,
    sinks: int = 0,
    recent: Budget = 0,
    pins: Int[Tensor, "B bounds"] | None = None,
) -> Bool[Tensor, "B Hk S"]:
    """Return a mask of the slots whose token is protected. The arguments are those of `protect`.

    For an empty slot the result means nothing.
    """
    first_recent = seen[:, None] - recent
    shielded = positions >= first_recent[:, :, None]
    if sinks:
        shielded = shielded | (positions < sinks)
    return shielded if pins is None else shielded | pinned(positions, pins)


def pinned(positions: Int[Tensor, "B Hk S"], bounds: Int[Tensor, "B bounds"]) -> Bool[Tensor, "B Hk S"]:
    """Return whether each position lies in a pinned span. An empty slot does not.

    Args:
        positions: true positions, ``-1`` = empty.
        bounds: of each row the spans' starts and stops in order; a position lies in a span if the number of bounds that
            are not above it is odd.
    """
    if bounds.shape[1] == 2:  # the usual case, without a search
        return (positions >= bounds[:, :1, None]) & (positions < bounds[:, 1:, None])
    flat = positions.flatten(1).to(bounds.dtype).contiguous()  # searchsorted warns of others, and copies them
    return (torch.searchsorted(bounds, flat, right=True) % 2 == 1).view(positions.shape)


def keep(
    scores: Float[Tensor, "B Hk S"],
    positions: Int[Tensor, "B Hk S"],
    n: int | Int[Tensor, "B #Hk"],
) -> Bool[Tensor, "B Hk S"]:
    """Return a mask of the slots that stay: the ``n`` best occupied ones of each row and head.

    Args:
        scores: higher = keep.
        positions: true positions, ``-1`` = empty; an empty slot is never kept.
        n: number of slots that stay, one number or one per row (and head).

    Returns:
        A mask with ``min(n, occupied)`` true entries per row and head.
    """
    S = positions.shape[-1]
    # sorted by age first, so that the stable sort by score breaks ties in favour of newer tokens
    by_age = positions.argsort(dim=-1, stable=True)
    occupied = positions >= 0
    ranked = scores.masked_fill(~occupied, -torch.inf).gather(-1, by_age).argsort(dim=-1, stable=True)
    order = by_age.gather(-1, ranked)  # slots from the first to go to the last
    threshold = S - n if isinstance(n, int) else (S - n)[:, :, None]
    stays = (torch.arange(S, device=scores.device) >= threshold).expand(order.shape)
    return torch.zeros_like(occupied).scatter(-1, order, stays) & occupied


def weakest(scores: Float[Tensor, "B Hk S"], positions: Int[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk 1"]:
    """Return the slot that goes first in each row and head: the lowest score, and among equal ones the oldest token.

    A decode step evicts one token per head. Sorting all slots for that would cost more than attention's report.
    Where no slot is occupied the result is slot 0: callers decide whether a token has to go.
    """
    occupied_scores = scores.masked_fill(positions < 0, torch.inf)
    lowest = occupied_scores.amin(dim=-1, keepdim=True)
    tied = (occupied_scores == lowest) & (positions >= 0)
    return positions.masked_fill(~tied, _LATER).argmin(dim=-1, keepdim=True)


def ranks(scores: Float[Tensor, "B Hk S"], positions: Int[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk S"]:
    """Return the rank of each slot among all slots of its head, from 0 for the lowest score; among equal scores the
    older token has the lower rank. Empty slots take part, with their score and position -1.
    """
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
    """Pool values over neighbours, the slots that count in the order of their positions, with stride 1. Return one
    value per slot, in the order of the slots. Gaps between positions do not matter.

    Args:
        values: one value per slot.
        positions: true positions, ``-1`` = empty.
        counts: slots that take part. The others are skipped and get 0.
        kernel: width, an odd number.
        kind: ``max`` takes the largest neighbour. At the borders ``avg`` divides by the kernel, and ``mean`` by the
            number of neighbours.
    """
    # what does not count goes to the front, so that the others are neighbours of each other
    order = positions.masked_fill(~counts, EMPTY).argsort(dim=-1, stable=True)
    ordered, inside = values.gather(-1, order), counts.gather(-1, order)
    if kind == "max":
        found = max_pool1d(ordered.masked_fill(~inside, -torch.inf), kernel, stride=1, padding=kernel // 2)
    else:
        found = avg_pool1d(ordered.masked_fill(~inside, 0.0), kernel, stride=1, padding=kernel // 2)
        if kind == "mean":
            share = avg_pool1d(inside.to(values.dtype), kernel, stride=1, padding=kernel // 2)
            # half of the smallest share there is: nothing is divided by 0 where no value counts
            found = found / share.clamp(min=0.5 / kernel)
    return torch.empty_like(values).scatter_(-1, order, found.masked_fill(~inside, 0.0))


def rounded(shares: Float[Tensor, "B n"], total: Int[Tensor, "B 1"]) -> Int[Tensor, "B n"]:
    """Round shares to integers that add up to the total, by largest remainders.

    The largest remainders go up; among equal ones, the first. Shares that do not add up to the total first grow or
    shrink by the same whole number.
    """
    # 1e-9: a share that is a whole number may have come out just below it
    whole = (shares + 1e-9).floor().long()
    missing = total - whole.sum(dim=1, keepdim=True)
    n = shares.shape[1]
    order = ((whole - shares) * 1e6).round().argsort(dim=1, stable=True)  # equal remainders tie whatever their last bit
    goes_up = torch.arange(n, device=shares.device) < missing % n
    return whole + missing // n + torch.zeros_like(whole).scatter_(1, order, goes_up.long().expand_as(whole))


def value_prior(
    values: Float[Tensor, "B Hk S E"], positions: Int[Tensor, "B Hk S"], kernel: int
) -> Float[Tensor, "B Hk S"]:
    """Return the squared norm of each slot's value, averaged over neighbours as by `pooled` and divided by the largest
    of the head (AhaKV, Eq. 13-14); 0 for empty slots.
    """
    sizes = values.to(torch.promote_types(values.dtype, torch.float32)).square().sum(dim=-1)
    smooth = pooled(sizes, positions, positions >= 0, kernel=kernel, kind="mean")
    # a head whose values are all 0 gets 0, not NaN
    return smooth / smooth.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)


def only_top(p: Float[Tensor, "B Hk G 1 S"], newest: Bool[Tensor, "B #Hk S"], top: Top) -> Float[Tensor, "B Hk G 1 S"]:
    """Return attention probabilities in which only the newest token and the ``top.n`` largest others of each query
    head are not 0; equal ones at the limit all stay.

    With ``top.renormalise`` they add up to 1 again. A row that sees no key stays 0.
    """
    lifted = p.masked_fill(newest[:, :, None, None], torch.inf)
    # the newest token comes first in the sorted row, so index `n` is the last of the `n` others
    place = top.n.clamp(min=0, max=p.shape[-1] - 1).view(-1, 1, 1, 1, 1).expand(*p.shape[:-1], 1)
    least = lifted.sort(dim=-1, descending=True).values.gather(-1, place)
    used = p.masked_fill(lifted < least, 0.0)
    if not top.renormalise:
        return used
    return used / used.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)


def expire(positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> Int[Tensor, "B Hk S"]:
    """Return the positions, with -1 for tokens that the sliding window has passed: no later query sees them."""
    return positions.masked_fill(positions <= (seen - window)[:, None, None], EMPTY)
