"""Memory of a model that is split over processes: a copy with all heads, and this process's heads of one.

A copy that leaves its rows has the heads of all processes, as if one process had made it. So it can go on in any number
of processes. All of them must take and put back copies together.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from kvkeep.head_sharding import Heads
from kvkeep.kv.row_copy import RowCopy
from kvkeep.snapshot.contents import Contents
from kvkeep.types import EMPTY


def whole(contents: Contents, heads: Heads) -> Contents:
    """Memory with all heads, from that of this process's heads.

    Args:
        contents: the memory.
        heads: which heads this process holds.
    """
    if heads.ranks == 1:
        return contents
    return replace(contents, layers=tuple(_whole(layer, heads) for layer in contents.layers))


def mine(contents: Contents, heads: Heads) -> Contents:
    """The memory of this process's heads, from that of all heads. Memory of another number of heads is left as it is.

    Args:
        contents: the memory.
        heads: which heads this process holds.
    """
    if heads.ranks == 1:
        return contents
    fits = all(len(layer.positions) == heads.count for layer in contents.layers)
    return replace(contents, layers=tuple(_mine(layer, heads) for layer in contents.layers)) if fits else contents


def _whole(copy: RowCopy, heads: Heads) -> RowCopy:
    device = copy.positions.device
    used = heads.most(copy.used, device)
    tensors = {name: x if x.ndim == 0 else _all(_long(x, copy, name, used), heads) for name, x in copy.tensors.items()}
    held = _all(torch.nn.functional.pad(copy.positions, (0, used - copy.used), value=EMPTY), heads)
    own = copy.budget if isinstance(copy.budget, tuple) else (copy.budget,) * len(copy.positions)
    budgets = _all(torch.tensor(own, dtype=torch.int64, device=device), heads).tolist()
    capacity = heads.most(copy.capacity, device)
    return replace(copy, tensors=tensors, positions=held, capacity=capacity, budget=_alike(budgets), pack=None)


def _mine(copy: RowCopy, heads: Heads) -> RowCopy:
    positions = _part(copy.positions, heads)
    occupied = (positions >= 0).any(dim=0).nonzero()
    used = int(occupied[-1]) + 1 if len(occupied) else 0
    tensors = {}
    for name, x in copy.tensors.items():
        own = x if x.ndim == 0 else _part(x, heads)
        tensors[name] = own[:, :used] if name in copy.cut else own
    budget = copy.budget
    if isinstance(budget, tuple):
        budget = _alike(_part(torch.tensor(budget), heads).tolist())
    return replace(copy, tensors=tensors, positions=positions[:, :used], budget=budget, pack=None)


def _long(x: Tensor, copy: RowCopy, name: str, used: int) -> Tensor:
    """A tensor of a row, with zeros for slots that other processes use; slots are its second axis."""
    if name not in copy.cut or used == copy.used:
        return x
    return torch.cat([x, x.new_zeros((len(x), used - copy.used, *x.shape[2:]))], dim=1)


def _all(x: Tensor, heads: Heads) -> Tensor:
    return heads.all(x[None])[0]


def _part(x: Tensor, heads: Heads) -> Tensor:
    return heads.mine(x[None])[0]


def _alike(budgets: list[int]) -> int | tuple[int, ...]:
    """One number where all heads have the same budget."""
    return budgets[0] if len(set(budgets)) == 1 else tuple(budgets)
