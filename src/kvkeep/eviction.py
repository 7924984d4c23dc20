"""What goes and what stays: the only place that empties slots or moves them."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep import scores
from kvkeep.native import ops
from kvkeep.policies.base import Policy
from kvkeep.store import Block
from kvkeep.types import EMPTY, Budget, State, View

_LATER = torch.iinfo(torch.int32).max


def evict(policy: Policy, block: Block, view: View, *, window: int | None) -> None:
    """After one token: empty slots of every row and head that holds too much. Nothing moves.

    Args:
        policy: scores the slots and says how many stay.
        block: the slots, with the new token among them.
        view: the same as the policy sees it.
        window: sliding window of the layer; what no later query can see goes first.
    """
    held = block.store.positions  # the view's own: what expires here has expired for the policy, too
    if window is not None and not ops.expire(held, block.seen, window):
        held.copy_(scores.expire(held, block.seen, window))
    limit = _limit(policy, view, block.state, window)
    if _nothing_is_over(held, limit):
        return
    if policy.bursts:
        held.masked_fill_(~scores.keep(_shielded(policy, view, block.state), held, limit), EMPTY)
        return
    sinks, recent = policy.protected(view.budget)
    score = policy.score(view, block.state)
    if ops.evict(held, score, view.seen, sinks=sinks, recent=recent, limit=limit):
        return
    over = _held(held) > (limit if isinstance(limit, int) else limit[:, :, None])
    victim = scores.weakest(scores.protect(score, held, view.seen, sinks=sinks, recent=recent), held)
    held.scatter_(-1, victim, held.gather(-1, victim).masked_fill(over, EMPTY))


def cut(policy: Policy, block: Block, view: View, state: State, *, window: int | None) -> None:
    """After many tokens: move the best of slots and chunk, with their state, into the slots in position order.

    Args:
        policy: scores the tokens and says how many stay.
        block: the slots, which are overwritten.
        view: slots and chunk together; what a sliding window has passed is empty.
        state: the policy's state for these.
        window: sliding window of the layer.
    """
    if policy.spreads:
        block.spread(policy.heads(view, state))
        view = replace(view, budget=block.budget)
    positions = view.positions
    stays = scores.keep(_shielded(policy, view, state), positions, _limit(policy, view, state, window))
    order = positions.masked_fill(~stays, _LATER).argsort(dim=-1)[..., : block.store.capacity]
    kept = positions.gather(-1, order).masked_fill(~stays.gather(-1, order), EMPTY)
    index = order[..., None]
    block.store.fill(
        view.keys.gather(2, index.expand(-1, -1, -1, view.keys.shape[-1])),
        view.values.gather(2, index.expand(-1, -1, -1, view.values.shape[-1])),
        kept,
    )
    for name, tensor in state.items():
        block.state[name][..., : order.shape[-1]] = tensor.gather(-1, order)


def _nothing_is_over(positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
    """Whether no head holds more than its limit; on a GPU the question would cost more than it saves."""
    if positions.device.type != "cpu":
        return False
    count = ops.count_over(positions, limit)
    if count is None:
        return not bool((_held(positions) > (limit if isinstance(limit, int) else limit[:, :, None])).any())
    return count == 0


def _held(positions: Int[Tensor, "B Hk S"]) -> Int[Tensor, "B Hk 1"]:
    return (positions >= 0).sum(dim=-1, keepdim=True)


def _limit(policy: Policy, view: View, state: State, window: int | None) -> Budget:
    """How many slots stay; all of them in a row whose budget holds the whole sliding window."""
    stays = policy.stays(view, state)
    if window is None:
        return stays
    if isinstance(view.budget, int):
        return view.budget if view.budget >= window else stays
    return torch.where(view.budget >= window, view.budget, torch.as_tensor(stays, device=view.budget.device))


def _shielded(policy: Policy, view: View, state: State) -> Float[Tensor, "B Hk S"]:
    """The policy's scores with the protected tokens out of reach."""
    sinks, recent = policy.protected(view.budget)
    score = policy.score(view, state)
    return scores.protect(score, view.positions, view.seen, sinks=sinks, recent=recent)
