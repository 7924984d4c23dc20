"""Rules by which the KV heads of a layer share its budget, on top of any policy that rates each head's tokens."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.budget import table
from kvkeep.errors import BudgetError, UnsupportedOperationError
from kvkeep.head_profile import Profile
from kvkeep.kv import ranking
from kvkeep.policies.base import HeadBudgets, NearHeads, Policy
from kvkeep.types import EMPTY, Budget, View

RULES = {"uniform": "", "ada": "0.2", "global": "0.2"}
"""Rules that divide a budget among heads: name → default parameter."""

PROFILE = "profile"
"""The rule that takes budgets from a file, which is written ``profile:FILE``."""


def under(policy: Policy, rule: str | None) -> Policy:
    """Return a copy of the policy with a rule by which its heads divide their budget; the policy itself for ``None``.

    ``uniform`` and ``profile:FILE`` divide nothing by scores, so under them ``spreads`` is ``None``.

    Args:
        policy: the policy.
        rule: ``ada:0.2``, ``global:0.2``, ``uniform`` or ``profile:FILE``; ``None`` for the policy's own rule.

    Raises:
        BudgetError: there is no such rule.
        UnsupportedOperationError: the policy cannot have budgets per head.
    """
    if rule is None:
        return policy
    name, share = parsed(rule)
    if name != "uniform":
        _check(policy)
    # `spreads` is no option of the policy, so `dataclasses.replace` does not know it
    found = copy.copy(policy)
    object.__setattr__(found, "spreads", _SHARING[name](share) if name in _SHARING else None)
    return found


def beside(policy: Policy, profile: Profile | None, layers: Sequence[int]) -> Policy:
    """Return a copy of the policy that knows which heads a profile limits to their first and newest tokens; the policy
    itself if it knows already. Without a profile no head is limited.

    Args:
        policy: the policy.
        profile: the needs of all heads.
        layers: numbers of the layers with keys in the model.
    """
    near = None
    if profile is not None and any(map(any, limited := profile.limited())):
        # what the policy protects must fit into a head that keeps the ends only
        slots = max(policy.least, profile.least)
        near = NearHeads(dict(zip(layers, limited, strict=True)), min(profile.sinks, slots - 1), slots)  # one is newest
    if policy.near == near:
        return policy
    found = copy.copy(policy)  # as in `under`
    object.__setattr__(found, "near", near)
    return found


def parsed(rule: str) -> tuple[str, float]:
    """Split a rule such as ``ada:0.2`` into its name and its number: by default that of `RULES`, and 0 for ``uniform``
    and ``profile:FILE``, whose file is left out.

    Raises:
        BudgetError: there is no such rule, or its number is out of range.
    """
    name, colon, text = str(rule).partition(":")
    if name == PROFILE and text:
        return name, 0.0
    # a colon promises a number, which uniform does not take
    if name not in RULES or (colon and not (text and RULES[name])):
        raise BudgetError(f"Unknown head budget {rule!r:.80}; use uniform, ada:0.2, global:0.2 or profile:FILE.")
    try:
        share = float(text or RULES[name] or 0)
    except ValueError:
        raise BudgetError(
            f"{rule!r:.80}: {text!r:.40} is not a number; write for example {name}:{RULES[name]}."
        ) from None
    if not 0.0 <= share <= 1.0:
        raise BudgetError(f"{rule!r:.80} is out of range: the share that is divided equally lies between 0 and 1.")
    return name, share


def joint_refusal(*, windows: bool, chunk: bool, layer_budget: bool, split: bool) -> str | None:
    """Return why the heads of all layers cannot share one budget; ``None`` if they can.

    The reason ends a sentence of the caller's: "… does not go together with {reason}."

    Args:
        windows: all layers have sliding windows.
        chunk: a layer takes its prompt in chunks, before the next layer begins.
        layer_budget: the budget is spread over the layers by another rule.
        split: the model is split over processes.
    """
    reasons = {
        "a model all of whose layers have sliding windows: these keep budgets of their own, so there is nothing to "
        "share. Use `head_budget=ada` or a profile": windows,
        "`prefill_chunk` of a cache, whose layers read the prompt one after the other. Leave `prefill_chunk` out; "
        "chunks of an engine, and of generate's prefill_chunk_size, go through all layers": chunk,
        "`layer_budget`, since it divides the budget among the layers, too. Leave `layer_budget` out": layer_budget,
        "a model that is split over processes. Run it in one, or use `head_budget=ada`": split,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def refusal(policy: Policy) -> str | None:
    """Return the reason why a policy's heads cannot have different budgets; ``None`` if they can."""
    if policy.shares_heads:
        return "its heads decide together and hold the same tokens"
    if policy.bursts is not None:
        return "it drops tokens of all heads of a layer at once, and counts on equally many in each"
    return None if policy.evicts else "it never evicts"


def _check(policy: Policy) -> None:
    """Refuse a policy whose heads cannot have different budgets.

    Raises:
        UnsupportedOperationError: budgets per head mean nothing to the policy.
    """
    if why := refusal(policy):
        raise UnsupportedOperationError(
            f"{policy} cannot have budgets per head: {why}. Choose another policy, or uniform."
        )


def average(view: View, budget: Budget | None = None) -> Int[Tensor, "B 1"]:
    """Return the mean budget of each row's heads over all processes, rounded down.

    Args:
        view: the slots.
        budget: the budgets; ``None``: those of the view.
    """
    budget, (B, Hk, _) = view.budget if budget is None else budget, view.positions.shape
    each = table(budget, view.seen)
    if isinstance(budget, int):
        return each  # all heads have the same, so no other process is asked
    whole = view.heads.all(each.expand(B, Hk))
    return whole.sum(dim=1, keepdim=True) // whole.shape[1]


def ada(alpha: float) -> HeadBudgets:
    """Return Ada-KV's rule: the heads of a layer divide its budget by how many of the layer's best tokens each of
    them has.

    Source: Feng et al., arXiv:2407.11550.

    Args:
        alpha: share of the budget that is divided equally.
    """
    return HeadBudgets(functools.partial(_heads, alpha), functools.partial(_most, alpha))


def across(alpha: float) -> HeadBudgets:
    """Return Ada-KV's rule over all layers: all heads divide the budget of all layers.

    Args:
        alpha: share of the budget that is divided equally.
    """
    return replace(ada(alpha), ceilings=functools.partial(_ceilings, alpha))


_SHARING = {"ada": ada, "global": across}
"""Rules that divide a budget by scores."""


def _heads(alpha: float, policy: Policy, view: View, score: Float[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk"]:
    """Return each head's budget by Ada-KV's rule. The slots of protected tokens are not divided.

    Rows that read no prompt keep their budgets; budgets are equal if there is nothing to choose.
    """
    now, mean = table(view.budget, view.seen).expand(view.positions.shape[:2]), average(view)
    base, tokens = _older(policy, view, mean)
    # 1e-9: a product such as 0.29 * 100 lies just below the whole number that is meant
    own, Hk = (alpha * base.double() + 1e-9).long(), tokens.shape[1]
    best = _among_the_best(view, score, tokens, base * Hk)
    share = ranking.rounded(best.double() * (1.0 - alpha) + own, base * Hk)
    # where no head has more tokens than its equal share, all of them stay anyway
    crowded = (tokens >= 0).sum(dim=-1).amax(dim=1, keepdim=True) > base
    budgets = torch.where(crowded, share, base) + mean - base  # each head keeps what was not divided: mean - base
    return torch.where(view.reads[:, None], view.heads.mine(budgets), now)


def _older(
    policy: Policy, view: View, mean: Int[Tensor, "B 1"]
) -> tuple[Int[Tensor, "B 1"], Int[Tensor, "B heads slots"]]:
    """Return how many slots per head, on average, are to be divided, and the positions of the tokens that compete for
    them, neither first nor recent ones, in the heads of all processes; -1 in all other slots.
    """
    sinks, recent = policy.protected(mean)
    fixed = sinks + recent + (policy.grows.room if policy.grows else 0)
    first_recent = view.seen[:, None] - recent
    older = (view.positions >= sinks) & (view.positions < first_recent[:, :, None])
    return (mean - fixed).clamp(min=0), view.heads.all_slots(view.positions.masked_fill(~older, EMPTY), EMPTY)


def _among_the_best(
    view: View, score: Float[Tensor, "B Hk S"], tokens: Int[Tensor, "B heads slots"], n: Int[Tensor, "B 1"]
) -> Int[Tensor, "B heads"]:
    """Return how many of a row's ``n`` best tokens, taken over all heads together, belong to each head. Only ``tokens``
    compete: positions, -1 where there is none.
    """
    found = view.heads.all_slots(score.nan_to_num(nan=-torch.inf), -torch.inf)
    best = ranking.keep(found.flatten(1)[:, None], tokens.flatten(1)[:, None], n)
    return best.view(tokens.shape).sum(dim=-1)


def _ceilings(
    alpha: float, policy: Policy, view: View, score: Float[Tensor, "B Hk S"], heads: int
) -> Int[Tensor, "B Hk"]:
    """Return upper limits of the budgets that `_heads` will give to these heads, before the scores of the others of all
    ``heads`` are known.

    Tokens of other heads can only take places among the best. So a head gets at most the share that it would get now,
    and two slots more by rounding. All tokens that are counted among the best now are within the limit, too, because
    they may be counted in the end. A row that reads no prompt keeps all its tokens.
    """
    mean = average(view)
    base, tokens = _older(policy, view, mean)
    best = _among_the_best(view, score, tokens, base * heads)
    share = (best.double() * (1.0 - alpha) + alpha * base.double()).ceil().long() + 2
    most = torch.maximum(share, best) + mean - base
    return torch.where(view.reads[:, None], most.maximum(mean), view.positions.shape[-1])


def _most(alpha: float, policy: Policy, budget: int, heads: int) -> int:
    """Return the largest budget that one of ``heads`` can get where each has ``budget`` on average: its own, all that
    the other heads have to divide, and two more by rounding.
    """
    base = max(0, budget - sum(map(int, policy.protected(budget))) - (policy.grows.room if policy.grows else 0))
    return budget + math.ceil(base * (heads - 1) * (1.0 - alpha)) + 2
