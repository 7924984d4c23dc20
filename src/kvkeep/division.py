"""Budgets of heads from the scores of their tokens: the policy's rule, and what pins need beside it."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.kv import ranking
from kvkeep.policies.base import Policy
from kvkeep.types import View


def divided(policy: Policy, view: View, score: Float[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk"]:
    """The budgets that a policy gives to heads. Where pins need more, heads with more give of what they have above it.

    The sum over a row's heads stays the same.
    """
    assert policy.spreads is not None
    found = policy.spreads.heads(policy, view, score)
    if view.pins is None:
        return found
    found = view.heads.all(found)
    held = _needed(policy, view, found.sum(dim=-1, keepdim=True) // found.shape[1])
    above = (found - held).clamp(min=0)
    free = (found - held).sum(dim=-1, keepdim=True).clamp(min=0)
    shares = above.double() * free / above.sum(dim=-1, keepdim=True).clamp(min=1)
    budgets = torch.where((found < held).any(dim=-1, keepdim=True), held + ranking.rounded(shares, free), found)
    return view.heads.mine(budgets)


def may_stay(
    policy: Policy, view: View, score: Float[Tensor, "B Hk S"], mean: Int[Tensor, "B 1"], *, heads: int
) -> Bool[Tensor, "B Hk S"]:
    """Whether each token may stay when other heads will join the division; the others go, whatever these hold.

    Args:
        policy: its heads share a budget over the layers.
        view: the heads that have come so far.
        score: of their tokens.
        mean: budget of a head on average.
        heads: number of heads that will share the budget.
    """
    assert policy.spreads is not None
    assert policy.spreads.ceilings is not None
    view = replace(view, budget=mean)
    most = policy.spreads.ceilings(policy, view, score, heads)
    if view.pins is not None:
        most = most.maximum(_needed(policy, view, mean)) + 2  # what `divided` may round up
    best = ranking.keep(score.nan_to_num(nan=-torch.inf), view.positions, most)
    return (best | protected_slots(policy, replace(view, budget=most))) & (view.positions >= 0)


def _needed(policy: Policy, view: View, mean: Int[Tensor, "B 1"]) -> Int[Tensor, "B heads"]:
    """The slots that each head needs for pinned tokens, and those that an equal share of the budget protects."""
    pins = view.pins
    assert pins is not None
    view = replace(view, budget=mean)
    coming = (pins[:, 1::2] - pins[:, ::2]).sum(dim=-1, keepdim=True) + policy.protected(mean)[1]
    return view.heads.all(protected_slots(policy, view).sum(dim=-1)).maximum(coming)  # generated tokens may be, too


def protected_slots(policy: Policy, view: View) -> Bool[Tensor, "B Hk S"]:
    """Whether each slot holds a token that may not be evicted: a sink, a recent one or a pinned one."""
    sinks, recent = policy.protected(view.budget)
    held = ranking.protects(view.positions, view.seen, sinks=sinks, recent=recent, pins=view.pins)
    return held & (view.positions >= 0)
