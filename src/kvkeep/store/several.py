"""Several rows of a block as objects: copied out and put back with one operation for each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.store.block import Block
from kvkeep.store.row import NUMBERS, Pack, RowCopy, budgets_of, check_row, check_slots, copied, pins_of
from kvkeep.types import EMPTY

_DENSE = 0.95
"""Rows share tensors if they use at least this part of them; otherwise each has its own."""


def take_rows(block: Block, rows: slice, device: torch.device | None = None) -> tuple[RowCopy, ...]:
    """Copy several rows out of a block whose heads have equal slots, each as an object; arguments as for `take_row`."""
    positions = block.store.positions[rows]
    used, cut = _used(positions), block.per_slot()
    most, capacity = max(used), block.store.capacity
    if sum(used) < _DENSE * most * len(used):
        each = range(len(block.seen))[rows]
        return tuple(copy for row in each for copy in take_rows(block, slice(row, row + 1), device))
    tensors = {
        name: copied(tensor[rows, :, :most] if name in cut else tensor[rows], device)
        for name, tensor in block.per_row().items()
        if name not in NUMBERS
    }
    views = zip(*(tensor.unbind() for tensor in tensors.values()), strict=True)
    parts = tuple(
        {name: _first(x, n, most) if name in cut else x for name, x in zip(tensors, mine, strict=True)}
        for mine, n in zip(views, used, strict=True)
    )
    held = [_first(x, n, most) for x, n in zip(copied(positions[:, :, :most], device).unbind(), used, strict=True)]
    found, pack = zip(parts, held, budgets_of(block, rows), pins_of(block, rows), strict=True), Pack(tensors, parts)
    return tuple(RowCopy(mine, cut, at, capacity, budget, pins, pack) for mine, at, budget, pins in found)


def put_rows(block: Block, rows: slice, copies: Sequence[RowCopy]) -> None:
    """Overwrite several rows of a block with copies that fit, apart from their budgets and pins."""
    mine = {name: tensor[rows] for name, tensor in block.per_row().items()}
    pack = _pack_of(copies)
    if pack is None:
        for number, copy in enumerate(copies):
            for name, tensor in copy.tensors.items():
                target = mine[name][number]
                (target[:, : copy.used] if name in copy.cut else target).copy_(tensor)
            block.store.positions[rows][number, :, copy.used :] = EMPTY
        return
    for name, tensor in pack.tensors.items():
        cut = name in copies[0].cut
        (mine[name][:, :, : tensor.shape[2]] if cut else mine[name]).copy_(tensor)
    block.store.positions[rows][:, :, max(copy.used for copy in copies) :] = EMPTY


def check_rows(block: Block, copies: Sequence[RowCopy]) -> None:
    """Refuse copies of which one does not fit a block's rows.

    Raises:
        ShapeError: see `check_row`.
    """
    for copy in copies:
        check_slots(copy, block.store.capacity)
    for copy in copies if _pack_of(copies) is None else copies[:1]:
        check_row(block, copy)


def _pack_of(copies: Sequence[RowCopy]) -> Pack | None:
    """The pack of which copies are all parts, in order; ``None`` if there is none."""
    pack = copies[0].pack
    if pack is None or len(pack.parts) != len(copies):
        return None
    return pack if all(copy.tensors is part for copy, part in zip(copies, pack.parts, strict=True)) else None


def _used(positions: Int[Tensor, "B Hk capacity"]) -> list[int]:
    """The number of slots up to the last occupied one in each row."""
    places = torch.arange(1, positions.shape[-1] + 1, device=positions.device)
    found: list[int] = (places * (positions >= 0).any(dim=1)).amax(dim=1).tolist()
    return found


def _first(tensor: Tensor, n: int, of: int) -> Tensor:
    """The first of so many slots."""
    return tensor if n == of else tensor[:, :n]
