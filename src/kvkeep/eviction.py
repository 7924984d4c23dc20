"""What comes, what goes and what stays: the only place that fills slots, empties them or moves them."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep import scores
from kvkeep.backends import Added, Backend, Limits
from kvkeep.policies.base import Policy
from kvkeep.store import Block
from kvkeep.types import EMPTY, AttentionOptions, Budget, Phase, State, View

_LATER = torch.iinfo(torch.int32).max


def check_room(
    policy: Policy, block: Block, coming: int | Int[Tensor, " B"], *, phase: Phase, window: int | None
) -> None:
    """Refuse new tokens that a policy which does not evict them has no room for.

    Raises:
        CapacityError: a row would hold more tokens than its budget.
    """
    if not policy.evicts:
        block.check_room((block.seen + coming)[:, None], window=window)
    elif policy.grows and phase is Phase.DECODE:
        more = torch.as_tensor(coming, device=block.seen.device).view(-1, 1)
        block.check_room(block.held() + more, window=window)


def append(
    policy: Policy,
    block: Block,
    keys: Float[Tensor, "B Hk 1 D"],
    values: Float[Tensor, "B Hk 1 E"],
    positions: Int[Tensor, "B 1"],
    *,
    backend: Backend,
) -> None:
    """Put one token per row into an empty slot of each head, with the state that a new token starts with."""
    slot = backend.append(block.store.slots(), keys, values, positions)
    for name, start in policy.slots.items():
        block.state[name].scatter_(-1, slot, start)


def fuses(policy: Policy, backend: Backend) -> bool:
    """Whether `fused` may be able to do a decode step of this policy."""
    rule = policy.sums
    if rule is None or not backend.fuses or not _is_told(type(policy)) or len(policy.slots) > 2:
        return False
    if policy.bursts is not None or policy.focuses is not None:
        return False
    return all(getattr(policy, name) == value for name, value in rule.only.items())


def fused(
    policy: Policy,
    block: Block,
    view: View,
    new: tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    positions: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    backend: Backend,
) -> Float[Tensor, "B Hq 1 E"] | None:
    """Append, attend, observe and evict in one go, in place; ``None``, and nothing is done, where that cannot be.

    Args:
        policy: one that `fuses`.
        block: the slots, without the new token.
        view: what the policy may look at; its slots are those of the block.
        new: the token's query, key and value.
        positions: its position, -1 for padding.
        options: of the model's attention.
        backend: does it.
    """
    rule = policy.sums
    assert rule is not None
    names = sorted(policy.slots, key=lambda name: name != rule.score)
    sinks, recent = policy.protected(view.budget)
    return backend.step(
        new[0],
        block.store.slots(),
        new[1:],
        positions,
        statistic=policy.wants(view),
        options=options,
        added=Added(tuple(block.state[name] for name in names), rule.score is not None),
        limits=Limits(
            view.seen, sinks, recent, limit(policy, view, block.state, window=options.window), options.window
        ),
    )


@functools.cache
def _is_told(kind: type[Policy]) -> bool:
    """Whether the class that says `sums` is the one that wrote the methods which these stand for, or a later one."""

    def owner(name: str) -> type:
        return next(base for base in kind.__mro__ if name in vars(base))

    return all(issubclass(owner("sums"), owner(name)) for name in ("observe", "score"))


def evict(policy: Policy, block: Block, view: View, *, window: int | None, backend: Backend) -> None:
    """After one token: empty slots of every row and head that holds too much. Nothing moves.

    Args:
        policy: scores the slots and says how many stay.
        block: the slots, with the new token among them.
        view: the same as the policy sees it.
        window: sliding window of the layer; what no later query can see goes first.
        backend: does it.
    """
    held = block.store.positions  # the view's own: what expires here has expired for the policy, too
    if window is not None:
        backend.expire(held, block.seen, window)
    stays = limit(policy, view, block.state, window=window)
    if not backend.is_over(held, stays):
        return
    if policy.bursts is not None:
        held.masked_fill_(~scores.keep(_shielded(policy, view, block.state), held, stays), EMPTY)
        return
    sinks, recent = policy.protected(view.budget)
    backend.evict(held, policy.score(view, block.state), Limits(view.seen, sinks, recent, stays))


def cut(policy: Policy, block: Block, view: View, state: State, *, window: int | None) -> None:
    """After many tokens: move the best of slots and chunk, with their state, into the slots in position order.

    Args:
        policy: scores the tokens and says how many stay.
        block: the slots, which are overwritten.
        view: slots and chunk together; what a sliding window has passed is empty.
        state: the policy's state for these.
        window: sliding window of the layer.
    """
    if policy.spreads is not None:
        block.spread(policy.spreads.heads(policy, view, state))
        view = replace(view, budget=block.budget)
    positions = view.positions
    stays = scores.keep(_shielded(policy, view, state), positions, limit(policy, view, state, window=window))
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


def limit(policy: Policy, view: View, state: State, *, window: int | None = None) -> Budget:
    """The number of slots that stay occupied; all of the budget in a row whose budget holds the whole sliding window.

    Args:
        policy: may leave a part of the budget free.
        view: what the policy may look at.
        state: the policy's state.
        window: sliding window of the layer.
    """
    if policy.bursts is not None:
        stays: Budget = policy.bursts.stays(policy, view, state)
    elif policy.grows is not None:
        stays = policy.grows.stays(view)
    else:
        return view.budget
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
