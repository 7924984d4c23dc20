"""Budgets of KV heads that follow the scores of their tokens."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep import scores
from kvkeep.types import View


def largest(budget: int, heads: int, *, fixed: int, alpha: float) -> int:
    """The largest budget of a head: its own part, all that is shared out, and two more for rounding.

    Args:
        budget: budget of a layer per head.
        heads: number of heads.
        fixed: slots of each head that are not shared out.
        alpha: share of the rest that is divided equally.
    """
    return budget + math.ceil(max(0, budget - fixed) * (heads - 1) * (1.0 - alpha)) + 2


def average(view: View) -> Int[Tensor, " B"]:
    """The budget of each row, the mean over its heads."""
    B, Hk, _ = view.positions.shape
    return torch.as_tensor(view.budget, device=view.seen.device).expand(B, Hk).sum(dim=1) // Hk


def by_score(
    view: View, rating: Float[Tensor, "B Hk S"], *, window: int, room: int, alpha: float
) -> Int[Tensor, "B Hk"]:
    """The budget of each head: its tokens among the best of all heads. Equal if there is nothing to choose.

    Args:
        view: the slots at the end of a prompt.
        rating: scores that can be compared between heads.
        window: newest tokens that every head keeps.
        room: slots that every head leaves free.
        alpha: share of the rest that is divided equally.
    """
    B, Hk, S = view.positions.shape
    now = torch.as_tensor(view.budget, device=view.seen.device).expand(B, Hk)
    base = average(view) - window - room
    older = (view.positions >= 0) & (view.positions < (view.seen - window)[:, None, None])
    flat = view.positions.masked_fill(~older, -1).view(B, 1, Hk * S)
    best = scores.keep(rating.view(B, 1, Hk * S), flat, (base * Hk)[:, None]).view(B, Hk, S).sum(dim=-1)
    own = (alpha * base.double() + 1e-9).long()[:, None]
    share = scores.rounded(best.double() * (1.0 - alpha) + own, (base * Hk)[:, None])
    crowded = (older.sum(dim=-1).amax(dim=1) > base)[:, None]
    budgets = torch.where(crowded, share, base[:, None]) + window + room
    return torch.where(view.reads[:, None], budgets, now)
