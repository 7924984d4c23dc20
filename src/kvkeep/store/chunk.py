"""A chunk of a prompt beside the slots of a block: what is attended to, and where the tokens go that stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from kvkeep.copies import Beside
from kvkeep.store.block import Block
from kvkeep.types import EMPTY, Slots, State, View
from kvkeep.vectors import Tokens

_Index: TypeAlias = tuple[slice | Tensor, ...]

_ALL = slice(None), slice(None)
"""An index of all rows and heads."""


def beside(block: Block, new: Slots, *, starts: Mapping[str, float], used: int) -> tuple[Slots, State]:
    """The first ``used`` slots, followed by new tokens, and the policy's state of both and of the heads.

    Keys and values of slots are not copied where the store shows them in place.

    Args:
        block: the slots.
        new: the new tokens.
        starts: the state of a new token.
        used: number of slots; 0 if all are empty.
    """
    new = new._replace(positions=new.positions.expand(new.keys.shape[:3]))
    state = {name: block.state[name].new_full(new.positions.shape, start) for name, start in starts.items()}
    heads = {name: block.state[name] for name in block.heads}
    if not used:
        return new, state | heads
    found = {name: _joined(block.state[name], chunk, used) for name, chunk in state.items()} | heads
    if (held := block.store.lying(used)) is not None:
        return Beside.of(held, new), found
    copies = block.store.beside(new.keys, new.values, used=used)
    return Slots(*copies, _joined(block.store.positions, new.positions, used)), found


def settle(
    block: Block,
    view: View | Slots,
    stays: Bool[Tensor, "B Hk S"],
    state: State,
    *,
    used: int,
    chunk: Slots | None,
    tokens: Tokens | None = None,
) -> None:
    """Empty the slots whose tokens go, and put the tokens of a chunk that stay into the first empty slots, in order.

    The ``n`` tokens of a head then lie in its first ``n`` slots: a token beyond them goes into an empty slot before the
    chunk's. No other token is moved. The slot of a token depends on its own row and head only.

    Args:
        block: the slots, which have room for all tokens that stay.
        view: the block's first slots, followed by the chunk; or other slots.
        stays: whether each token stays.
        state: the policy's state of slots, for these tokens.
        used: number of slots among the tokens.
        chunk: the chunk; ``None``: none of the tokens has a slot in the block any more.
        tokens: what `Store.tokens` has returned for them; ``None``: it is asked now.
    """
    if chunk is not None and block.store.lying(used) is not None:
        _add(block, chunk, stays, state)
        return
    capacity = block.store.capacity
    index = _sources(stays, 0 if chunk is None else used, capacity)
    there, index = index >= 0, index.clamp(min=0)
    kept = view.positions.gather(-1, index).masked_fill(~there, EMPTY)
    block.store.take(tokens or block.store.tokens(view, used=used), kept, index)
    for name, numbers in state.items():
        block.state[name][..., :capacity] = numbers.gather(-1, index)


def _add(block: Block, chunk: Slots, stays: Bool[Tensor, "B Hk S"], state: State) -> None:
    """`settle` in place."""
    slots, used = block.store.slots(), stays.shape[-1] - chunk.positions.shape[-1]
    held, coming = stays[..., :used], stays[..., used:]
    slots.positions[..., :used].masked_fill_(~held, EMPTY)
    slots.positions[..., used:] = EMPTY
    for name, numbers in state.items():
        block.state[name][..., :used] = numbers[..., :used]
    _close_gaps(block, stays.sum(dim=-1, keepdim=True), state)
    at, of = _pairs(slots.positions < 0, coming, used)
    slots.keys[at] = chunk.keys[of]
    slots.values[at] = chunk.values[of]
    slots.positions[at] = chunk.positions.expand(coming.shape)[of].to(slots.positions.dtype)
    for name, numbers in state.items():
        block.state[name][at] = numbers[..., used:][of].to(block.state[name].dtype)


def _close_gaps(block: Block, n: Int[Tensor, "B Hk 1"], state: State) -> None:
    """Move tokens that lie beyond the first ``n`` slots of their head into the first empty ones, in order."""
    slots = block.store.slots()
    beyond = (slots.positions >= 0) & (torch.arange(block.store.capacity, device=n.device) >= n)
    if not beyond.any():
        return
    at, of = _pairs(slots.positions < 0, beyond, block.store.capacity)
    for tensor in (*slots, *(block.state[name] for name in state)):
        tensor[at] = tensor[of]
    slots.positions[of] = EMPTY


def _pairs(free: Bool[Tensor, "B Hk capacity"], coming: Bool[Tensor, "B Hk T"], used: int) -> tuple[_Index, _Index]:
    """The slots that tokens of a chunk get, and these tokens, as two indices that belong together."""
    stop = used + coming.shape[-1]
    if stop <= free.shape[-1] and not free[..., :used].any() and coming.all():
        return (*_ALL, slice(used, stop)), _ALL
    chosen = free & (free.cumsum(dim=-1) <= coming.sum(dim=-1, keepdim=True))
    return chosen.nonzero(as_tuple=True), coming.nonzero(as_tuple=True)


def _sources(stays: Bool[Tensor, "B Hk S"], used: int, capacity: int) -> Int[Tensor, "B Hk capacity"]:
    """The place of each slot's token among the first ``used`` slots and the chunk behind them; -1: none."""
    (S, device), n = (stays.shape[-1], stays.device), stays.sum(dim=-1, keepdim=True)
    places = torch.arange(max(capacity, S), device=device)
    held = nn.functional.pad(stays[..., :used], (0, capacity - used)) & (places[:capacity] < n)
    coming = stays & ~nn.functional.pad(held[..., :used], (0, S - used))
    free = held.int().argsort(dim=-1, stable=True)  # the empty slots first
    nth = (coming.cumsum(dim=-1) - 1).clamp(min=0, max=capacity - 1)
    target = free.gather(-1, nth).masked_fill(~coming, capacity)
    found = nn.functional.pad(torch.where(held, places[:capacity], -1), (0, 1))
    return found.scatter(-1, target, places[:S].expand_as(target))[..., :capacity]


def _joined(slots: Tensor, chunk: Tensor, used: int) -> Tensor:
    """The numbers of the first ``used`` slots, followed by the numbers of a chunk."""
    return torch.cat([slots[:, :, :used], chunk], dim=2)
