"""`keep_prompt`: a prompt stays in its slots while its answer is generated, and generated tokens compete for the rest.

It is an option of the cache. `Policy.keep_prompt` only carries it, so that memories, requests and files name it as they
name the policy's own options; no policy reads it.

With 1, every token that was read as a prompt is pinned: the first prompt, and in a conversation each later turn's,
but no answer between them. A prompt that leaves no room is refused. With a share below 1, the policy cuts all that came
before the answer (of earlier turns, too, read or generated) to this share of the budget, and what it leaves stays until
the next prompt.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.errors import BudgetError, InputError, PolicyError
from kvkeep.pins import LAST, Spans, count
from kvkeep.policies.base import Policy, share_kept, smallest_budget
from kvkeep.types import Budget, View

_P = TypeVar("_P", bound=Policy)


def keeping(policy: _P, keep_prompt: object, default: bool | float | None = None) -> _P:
    """Return the policy with a share of the budget that prompts keep; the policy itself if that changes nothing.

    Args:
        policy: the policy; its own share counts if ``keep_prompt`` is ``None``.
        keep_prompt: ``True``, ``False`` (none) or a share above 0.
        default: what holds if neither says anything.

    Raises:
        InputError: ``keep_prompt`` is no share.
    """
    asked: Any = next(
        (x for x in (checked_keep_prompt(keep_prompt), policy.keep_prompt, default) if x is not None), None
    )
    share = share_kept(asked)
    return policy if share == policy.keep_prompt else replace(policy, keep_prompt=share)


def checked_keep_prompt(value: object) -> bool | float | None:
    """Return a value of ``keep_prompt``, after checking that it is true, false, ``None`` or a share.

    Raises:
        InputError: the value has another type, or is out of range.
    """
    if value is not None and not isinstance(value, bool | int | float):
        raise InputError(f"keep_prompt={value!r:.60} is neither true, false nor a share of the budget such as 0.5.")
    try:
        share_kept(value)
    except PolicyError as error:
        raise InputError(str(error)) from error
    return value if value is None or isinstance(value, bool) else float(value)


def keeps_whole(policy: Policy) -> bool:
    """Return whether prompts stay whole under a policy. One that never evicts needs no such rule."""
    return policy.evicts and policy.keep_prompt == 1.0


def keeps_share(policy: Policy) -> bool:
    """Return whether prompts are cut to a share of the budget, which then stays."""
    return policy.evicts and policy.keep_prompt is not None and policy.keep_prompt < 1.0


def share_of(policy: Policy, budget: Budget) -> Budget:
    """Return how many slots of a budget prompts keep under a policy that `keeps_share`, rounded down, at least 1."""
    assert policy.keep_prompt is not None
    if isinstance(budget, int):
        return max(1, int(policy.keep_prompt * budget + 1e-9))  # a product such as 0.29 * 100 lies just below 29
    return (budget.double() * policy.keep_prompt + 1e-9).to(budget.dtype).clamp(min=1)


# What is refused: a prompt that leaves no room for new tokens.


def check_budget(policy: Policy, budget: int) -> None:
    """Refuse a budget that is too small for the policy; under one that `keeps_share`, also one of which a prompt's
    share is too small for the policy, or leaves no room beside it for the tokens that the policy protects and a new
    one.

    Raises:
        BudgetError: the budget or the share is too small, or the share too large.
    """
    policy.check(budget)
    if not keeps_share(policy):
        return
    kept, own = int(share_of(policy, budget)), replace(policy, keep_prompt=None)
    try:
        own.check(kept)
    except BudgetError as error:
        raise BudgetError(
            f"keep_prompt={policy.keep_prompt} leaves a prompt {kept} of {budget} slots. {error}"
        ) from error
    if (needed := own.needed(budget, ((0, kept),))) > budget:
        raise BudgetError(
            f"keep_prompt={policy.keep_prompt} keeps {kept} of {budget} slots for prompts, and {own} needs others "
            f"beside them, together {needed}. Give a smaller share, or a larger budget."
        )


def check_read(policy: Policy, budget: int, pins: Spans, *, window: int | None = None) -> None:
    """Refuse tokens that are all to stay, because the policy `keeps_whole`, and leave no room in the budget for a new
    one and those that the policy protects. For other policies do nothing.

    Args:
        policy: the eviction policy.
        budget: of a head.
        pins: all tokens that would have been read, and other pins.
        window: sliding window of the layer. Where the budget holds all of it, no token has to go before it expires.

    Raises:
        BudgetError: there is no room. The message names the smallest budget that would do, if there is one.
    """
    if not keeps_whole(policy) or (window is not None and budget >= window):
        return
    own = replace(policy, keep_prompt=None)
    if (needed := own.needed(budget, pins)) <= budget:
        return
    least = smallest_budget(lambda larger: own.needed(larger, pins), needed)
    remedy = f"Raise the budget to at least {least}, or let" if least else "Let"
    raise BudgetError(
        f"keep_prompt keeps all {count(pins)} tokens that were read, and {own} needs slots for new ones beside them: "
        f"more than the budget of {budget}. {remedy} the prompt be cut first: keep_prompt=0.5 cuts it to half of the "
        "budget."
    )


# While a layer steps: the tokens that stay, as a budget and as pins.


def reading(policy: Policy, view: View, *, window: int | None) -> View:
    """Return the view of a prompt's step under a policy that `keeps_share`: rows that read have that share of their
    budgets, unless a budget holds all of the sliding window.
    """
    if not keeps_share(policy):
        return view
    whole = torch.as_tensor(view.budget, device=view.seen.device)
    cut = view.reads[:, None] if window is None else view.reads[:, None] & (whole < window)
    share = torch.as_tensor(share_of(policy, view.budget), device=whole.device)
    return replace(view, budget=torch.where(cut, share, whole))


def with_prompt(pins: Int[Tensor, "B bounds"] | None, prompt: Int[Tensor, " B"]) -> Int[Tensor, "B more"]:
    """Return the bounds of spans that cover the pinned positions and all before ``prompt``, of each row, in order and
    as `kvkeep.kv.ranking.pinned` reads them.
    """
    end = prompt[:, None].to(torch.int32)
    if pins is None:
        return torch.cat([torch.zeros_like(end), end], dim=1)
    inside = (pins <= end).sum(dim=1, keepdim=True) % 2 == 1  # the span that goes on behind it keeps its own end
    # a row without a prompt gets no span: bounds of `LAST` pin nothing
    first = torch.zeros_like(end).masked_fill(end == 0, LAST)
    last = end.masked_fill(inside | (end == 0), LAST)
    rest = pins.masked_fill((pins <= end) & (end > 0), LAST)
    return torch.cat([first, last, rest], dim=1).sort(dim=1).values
