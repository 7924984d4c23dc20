"""One row of a block: its pins, and the row as an object, copied out and put back into this block or another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep import pins as spans
from kvkeep.errors import ShapeError
from kvkeep.memory import bytes_of
from kvkeep.store.block import Block
from kvkeep.types import EMPTY

_NUMBERS = ("budget", "pins")
"""Tensors of `Block.per_row` that not every block has. A copy holds them as numbers."""


@dataclass(frozen=True, eq=False)
class RowCopy:
    """A copy of one row of a block. It shares no memory with the block.

    Every token keeps the index of its slot. The order of slots decides the order of sums, and the empty slots decide
    where the next token is written: only with both does the row go on bit for bit as before.

    Attributes:
        tensors: the tensors of `Block.per_row` without the axis of rows. Tensors with a slot axis end with the last
            occupied slot.
        cut: names of the tensors with a slot axis; it is their second axis.
        positions: true positions of the tokens up to the last occupied slot, ``-1`` = empty.
        capacity: slots per head of the block.
        budget: slots that may stay occupied, of all heads or of each head.
        pins: spans of positions that may not be evicted.
    """

    tensors: Mapping[str, Tensor]
    cut: frozenset[str]
    positions: Int[Tensor, "Hk used"]
    capacity: int
    budget: int | tuple[int, ...]
    pins: spans.Spans = ()

    @property
    def used(self) -> int:
        """The number of slots up to the last occupied one."""
        return self.positions.shape[1]

    @property
    def most(self) -> int:
        """The most slots of a head that may stay occupied."""
        return max(self.budget) if isinstance(self.budget, tuple) else self.budget

    @property
    def seen(self) -> int:
        """Tokens that the row has seen."""
        return int(self.tensors["seen"])

    @property
    def nbytes(self) -> int:
        """Bytes of the copy."""
        return bytes_of((*self.tensors.values(), self.positions))

    def to(self, device: torch.device | str) -> RowCopy:
        """The same row on a device; tensors that are there already are not copied."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, positions=self.positions.to(device))


def take_row(block: Block, row: int, device: torch.device | None = None) -> RowCopy:
    """Copy one row out of a block.

    Args:
        block: the block.
        row: which row.
        device: where the copy shall be; by default the block's device.
    """
    positions = block.store.positions[row]
    occupied = (positions >= 0).any(dim=0).nonzero()
    used = int(occupied[-1]) + 1 if len(occupied) else 0
    cut = block.per_slot()
    tensors = {
        name: _copied(tensor[row, :, :used] if name in cut else tensor[row], device)
        for name, tensor in block.per_row().items()
        if name not in _NUMBERS
    }
    held = _copied(positions[:, :used], device)
    return RowCopy(tensors, cut, held, block.store.capacity, _budget(block, row), _pins(block, row))


def put_row(block: Block, row: int, copy: RowCopy) -> None:
    """Overwrite one row of a block with a copy. Other rows stay as they are.

    Args:
        block: a block with at least as many slots as the copy uses.
        row: which row.
        copy: the row's new content.

    Raises:
        ShapeError: the copy does not fit; then nothing has changed.
    """
    check_row(block, copy)
    _set_budget(block, row, copy.budget)
    if copy.pins or block.pins is not None:
        pin_row(block, row, copy.pins)
    mine = block.per_row()
    for name, tensor in copy.tensors.items():
        target = mine[name][row]
        (target[:, : copy.used] if name in copy.cut else target).copy_(tensor)
    block.store.positions[row, :, copy.used :] = EMPTY


def pin_row(block: Block, row: int, pins: spans.Spans) -> bool:
    """Pin spans in an empty row. Return whether the block's table had to be replaced by a wider one."""
    held = block.pins
    if grows := held is None or held.shape[1] < 2 * len(pins):
        rows, device = len(block.seen), block.seen.device
        block.pins = spans.table([()] * rows, device, width=1 << (2 * len(pins) - 1).bit_length())
        if held is not None:
            block.pins[:, : held.shape[1]] = held
    assert block.pins is not None
    block.pins[row] = spans.table([pins], block.pins.device, width=block.pins.shape[1])[0]
    return grows


def check_row(block: Block, copy: RowCopy) -> None:
    """Refuse a copy that does not fit a block's rows.

    Raises:
        ShapeError: names, shapes, dtypes or the number of slots differ.
    """
    mine = {name: tensor for name, tensor in block.per_row().items() if name not in _NUMBERS}
    if mine.keys() != copy.tensors.keys() or block.per_slot() != copy.cut:
        other = sorted(mine.keys() ^ copy.tensors.keys())
        raise ShapeError(f"The row of another policy or store was given: {', '.join(other)} are not in both.")
    if copy.used > block.store.capacity:
        raise ShapeError(f"A row of {copy.used} slots was given to a block of {block.store.capacity} slots per head.")
    if copy.most >= block.store.capacity:  # one slot is for the next token
        raise ShapeError(f"A row with a budget of {copy.most} was given to a block of {block.store.capacity} slots.")
    heads = block.store.positions.shape[1]
    if isinstance(copy.budget, tuple) and len(copy.budget) != heads:
        raise ShapeError(f"{len(copy.budget)} budgets were given for {heads} KV heads.")
    for name, tensor in copy.tensors.items():
        target = mine[name][:, :, : copy.used] if name in copy.cut else mine[name]
        if (target.shape[1:], target.dtype) != (tensor.shape, tensor.dtype):
            raise ShapeError(
                f"{name} of a row has the shape {tuple(tensor.shape)} in {tensor.dtype}, and the block holds "
                f"{tuple(target.shape[1:])} in {target.dtype}: they belong to different models or dtypes."
            )


def _copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A contiguous copy that shares no memory with the tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device).copy_(tensor)


def _pins(block: Block, row: int) -> spans.Spans:
    """The pins of one row."""
    bounds = [] if block.pins is None else [bound for bound in block.pins[row].tolist() if bound != spans.LAST]
    return tuple(zip(bounds[::2], bounds[1::2], strict=True))


def _set_budget(block: Block, row: int, budget: int | Sequence[int]) -> None:
    """Set the budget of one row, for all heads or for each head. An existing tensor is changed in place."""
    held = block.budget
    if isinstance(held, int) and isinstance(budget, int) and (budget == held or len(block.seen) == 1):
        block.budget = budget
        return
    wanted = block.seen.new_tensor([budget] if isinstance(budget, int) else list(budget))
    held = held if isinstance(held, Tensor) else block.seen.new_full((len(block.seen), 1), held)
    if len(wanted) > held.shape[1]:
        held = held.repeat(1, len(wanted))
    held[row] = wanted
    block.budget = held


def _budget(block: Block, row: int) -> int | tuple[int, ...]:
    """The budget of one row."""
    if isinstance(block.budget, int):
        return block.budget
    numbers = tuple(block.budget[row].tolist())
    return numbers[0] if len(numbers) == 1 else numbers
