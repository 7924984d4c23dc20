"""The only place that fills slots, empties them or moves them: tokens come in, and the weakest are evicted."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import scores
from kvkeep.backends import Added, Backend, Limits
from kvkeep.errors import CapacityError, PolicyError
from kvkeep.policies.base import Policy
from kvkeep.store import Block
from kvkeep.types import EMPTY, AttentionOptions, Budget, Phase, Slots, State, View

_LATER = torch.iinfo(torch.int32).max


def check_room(
    policy: Policy, block: Block, coming: int | Int[Tensor, " B"], *, phase: Phase, window: int | None
) -> None:
    """Refuse new tokens for which a policy that does not evict has no room.

    Raises:
        CapacityError: a row would hold more tokens than its budget.
    """
    if not policy.evicts:
        _refuse(block.budget, (block.seen + coming)[:, None], window=window)
    elif policy.grows and phase is Phase.DECODE:
        more = torch.as_tensor(coming, device=block.seen.device).view(-1, 1)
        _refuse(block.budget, block.held() + more, window=window)


def _refuse(budget: Budget, needed: Int[Tensor, "B n"], *, window: int | None) -> None:
    """Refuse tokens for which there are no slots, under a policy that does not evict.

    Args:
        budget: slots that may stay occupied.
        needed: slots that each row would occupy in each head, or in all heads.
        window: sliding window of the layer. A budget that holds the whole window has room for any number of tokens.

    Raises:
        CapacityError: a row would hold more tokens than its budget.
    """
    if isinstance(budget, int) and bool((needed <= budget).all()):
        return  # the usual case, without the operators below
    room = torch.as_tensor(budget, device=needed.device).expand_as(needed)
    endless = torch.zeros_like(needed, dtype=torch.bool) if window is None else room >= window
    for row, head in (~endless & (needed > room)).nonzero()[:1].tolist():
        n, number = int(needed[row, head]), int(room[row, head])
        raise CapacityError(
            f"Row {row} has reached {n} tokens, its budget is {number}, and this policy "
            "never evicts here. Give a budget of at least the prompt plus its new tokens (under decode=grow: more "
            "room), or another policy."
        )


def in_chunks(
    step: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk T D"],
    values: Float[Tensor, "B Hk T E"],
    *,
    real: Bool[Tensor, "B T"] | None,
    size: int,
) -> Float[Tensor, "B Hq T E"]:
    """Run ``step`` on ``size`` real tokens of each row at a time, and put the outputs back in their columns.

    Chunks are cut in tokens, not in columns, so padding never moves a cut.

    Args:
        step: takes queries, keys, values and which of their columns are real (``None``: all); returns the output.
        query: queries.
        keys: keys.
        values: values.
        real: which columns are real; ``None``: all.
        size: tokens of a chunk.
    """
    T = query.shape[2]
    if size >= T:
        return step(query, keys, values, real)
    if real is None:
        parts = zip(*(x.split(size, dim=2) for x in (query, keys, values)), strict=True)
        return torch.cat([step(q, k, v, None) for q, k, v in parts], dim=2)
    order = real.int().argsort(dim=1, descending=True, stable=True)  # real tokens first, in their order
    front = [x.gather(2, order[:, None, :, None].expand_as(x)).split(size, dim=2) for x in (query, keys, values)]
    pieces = zip(*front, real.gather(1, order).split(size, dim=1), strict=True)
    out = torch.cat([step(q, k, v, r) for q, k, v, r in pieces], dim=2)
    return torch.empty_like(out).scatter_(2, order[:, None, :, None].expand_as(out), out)


def append(
    policy: Policy,
    block: Block,
    keys: Float[Tensor, "B Hk 1 D"],
    values: Float[Tensor, "B Hk 1 E"],
    positions: Int[Tensor, "B 1"],
    *,
    backend: Backend,
) -> None:
    """Put one token per row into an empty slot of each head, with the policy's state for a new token."""
    slot = backend.append(block.store.slots(), keys, values, positions)
    for name, start in policy.slots.items():
        block.state[name].scatter_(-1, slot, start)


def fuses(policy: Policy, backend: Backend) -> bool:
    """Whether `fused` may take a decode step of this policy."""
    rule = policy.sums
    if rule is None or not backend.fuses or not _is_told(type(policy)) or len(policy.slots) > 2:
        return False
    if policy.bursts is not None or policy.focuses is not None or policy.cascades is not None:
        return False
    if any(policy.slots.values()) or (rule.score is not None and rule.score not in policy.slots):
        return False  # the kernel starts every sum at 0
    return all(getattr(policy, name) == value for name, value in rule.only.items())


def fused(
    policy: Policy,
    block: Block,
    view: View,
    new: tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    positions: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    window: int | None,
    backend: Backend,
) -> Float[Tensor, "B Hq 1 E"] | None:
    """Append, attend, observe and evict in one call of the backend, in place.

    Args:
        policy: one that `fuses`.
        block: the slots, without the new token.
        view: the block's slots as the policy sees them.
        new: the query, key and value of each row's token.
        positions: position of each row's token, -1 for padding.
        options: what the model's attention asks for.
        window: sliding window of the layer.
        backend: does the work.

    Returns:
        The attention output; ``None`` if the backend cannot take this step, and then nothing has changed.
    """
    rule = policy.sums
    assert rule is not None
    names = sorted(policy.slots, key=lambda name: name != rule.score)
    sinks, recent = policy.protected(view.budget)
    return backend.step(
        new[0],
        Slots(view.keys, view.values, view.positions),
        new[1:],
        positions,
        statistic=policy.wants(view),
        options=options,
        added=Added(tuple(block.state[name] for name in names), rule.score is not None),
        limits=Limits(view.seen, sinks, recent, limit(policy, view, block.state, window=window), window),
    )


@functools.cache
def _is_told(kind: type[Policy]) -> bool:
    """Whether `sums` still describes the policy: no subclass has overridden the methods of which `sums` tells."""

    def owner(name: str) -> type:
        return next(base for base in kind.__mro__ if name in vars(base))

    return all(issubclass(owner("sums"), owner(name)) for name in ("observe", "score", "wants"))


def evict(policy: Policy, block: Block, view: View, *, window: int | None, backend: Backend) -> None:
    """After a decode step, empty slots of every row and head that holds too many tokens. No token moves.

    Args:
        policy: scores the slots and says how many stay.
        block: the slots, with the new token among them.
        view: the block's slots as the policy sees them.
        window: sliding window of the layer; expired slots are emptied first, see `scores.expire`.
        backend: does the work.
    """
    held = block.store.positions  # the view has the same tensor: a token that expires here has expired there, too
    if window is not None:
        backend.expire(held, block.seen, window)
    stays = limit(policy, view, block.state, window=window)
    at_hand = policy.slots and policy.bursts is None and not policy.stochastic  # a score that costs nothing
    if not at_hand and not backend.is_over(held, stays):
        return
    if policy.bursts is not None:
        held.masked_fill_(~scores.keep(_shielded(policy, view, block.state), held, stays), EMPTY)
        return
    sinks, recent = policy.protected(view.budget)
    backend.evict(held, _scores(policy, view, block.state), Limits(view.seen, sinks, recent, stays))


def cut(policy: Policy, block: Block, view: View, state: State, *, window: int | None) -> None:
    """After a chunk, move the best tokens of slots ∪ chunk, with their state, into the slots in position order.

    The state of the heads is written as it is.

    Args:
        policy: scores the tokens and says how many stay.
        block: the slots, which are overwritten.
        view: slots and chunk together; tokens that have left the sliding window are marked as empty.
        state: the policy's state for slots and chunk.
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
    block.remember({name: tensor for name, tensor in state.items() if name in block.heads})
    for name in state.keys() - block.heads:
        block.state[name][..., : order.shape[-1]] = state[name].gather(-1, order)


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
    """The policy's scores after `scores.protect`."""
    sinks, recent = policy.protected(view.budget)
    return scores.protect(_scores(policy, view, state), view.positions, view.seen, sinks=sinks, recent=recent)


def _scores(policy: Policy, view: View, state: State) -> Float[Tensor, "B Hk S"]:
    """The policy's scores.

    Raises:
        PolicyError: they are no floats, or not one for each slot.
    """
    found: object = policy.score(view, state)
    if isinstance(found, Tensor):
        if found.is_floating_point() and found.shape == view.positions.shape:
            return found
        kind = f"{str(found.dtype).removeprefix('torch.')} of the shape {tuple(found.shape)}"
    else:
        kind = f"an object of the type {type(found).__name__}"
    raise PolicyError(
        f"{type(policy).__name__}.score returned {kind}. It must return floats of the shape of view.positions, here "
        f"{tuple(view.positions.shape)}: for whole numbers add .float()."
    )
