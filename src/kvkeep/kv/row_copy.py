"""One row of a block: its pins, and the row as an object, copied out and put back into this block or another one."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvkeep import pins as spans
from kvkeep.budget import Number, by_head
from kvkeep.errors import ShapeError
from kvkeep.kv.block import Block
from kvkeep.kv.pooled_store import OpenedPool, PooledStore
from kvkeep.kv.ranking import pinned
from kvkeep.types import EMPTY, bytes_of

NUMBERS = ("budget", "pins")
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
        pack: the tensors of all copies that were taken together with this one.
    """

    tensors: Mapping[str, Tensor]
    cut: frozenset[str]
    positions: Int[Tensor, "Hk used"]
    capacity: int
    budget: int | tuple[int, ...]
    pins: spans.Spans = ()
    pack: Pack | None = None

    @property
    def used(self) -> int:
        """Return the number of slots up to the last one that is occupied in any head."""
        return self.positions.shape[1]

    @property
    def most(self) -> int:
        """Return the largest budget of a head."""
        return max(self.budget) if isinstance(self.budget, tuple) else self.budget

    @property
    def seen(self) -> int:
        """Return the number of tokens that the row has seen."""
        return int(self.tensors["seen"])

    @property
    def nbytes(self) -> int:
        """Return the bytes of the copy."""
        return bytes_of((*self.tensors.values(), self.positions))

    def shortest(self, window: int | None, dropped: spans.Spans = ()) -> int | None:
        """Return the fewest tokens to which `cut_back` can bring the row: 0, or `seen` if it cannot be shortened;
        ``None`` if some token was evicted.

        State that a policy keeps for a head as a whole depends on all tokens seen, so it allows no fewer. Nor do tokens
        that the window has passed and that are gone, since a shorter row would see them again.

        Args:
            window: sliding window of the layer. Tokens that it has passed do not count as evicted.
            dropped: spans of positions that were dropped on request, which do not count as evicted either.
        """
        # the first position that the next token will see: it is one of the window itself
        oldest = 0 if window is None else max(0, self.seen - window + 1)
        kept = self.seen - spans.count(dropped)
        passed = spans.count(spans.without(((0, oldest),), dropped))
        held = (self.positions >= oldest).sum(dim=1)
        if bool((held < kept - passed).any()):
            return None
        if any(name.startswith("state.") and name not in self.cut for name in self.tensors):
            return self.seen
        # a shorter row would see tokens again that the window has passed: all of them must still be there
        whole = bool(((self.positions >= 0).sum(dim=1) == kept).all())
        return 0 if whole or window is None else self.seen

    def cut_back(self, tokens: int) -> RowCopy:
        """Return a copy of the row as if only its first tokens had been seen; they then lie in the order of their
        positions. If all stay, return this row, with its order.

        Pins behind them are cut off. Scores of the policy keep what later tokens have added to them.

        Args:
            tokens: number of tokens seen after the cut, dropped ones included: positions below it stay. `shortest` or
                more.
        """
        if tokens == self.seen:
            return self
        # sorted behind all others: empty slots and the tokens that go
        places = self.positions.masked_fill((self.positions < 0) | (self.positions >= tokens), spans.LAST)
        ordered, order = places.sort(dim=1)
        used = int((ordered[0] < spans.LAST).sum())  # `shortest`: every head holds all tokens that stay
        order = order[:, :used]
        tensors = {name: x[_heads_of(order), order] if name in self.cut else x for name, x in self.tensors.items()}
        tensors["seen"] = torch.full_like(self.tensors["seen"], tokens)
        tensors["prompt"] = self.tensors["prompt"].clamp(max=tokens)
        pins = spans.within(self.pins, tokens)
        return replace(self, tensors=tensors, positions=ordered[:, :used], pins=pins, pack=None)

    def without(self, dropped: spans.Spans) -> RowCopy:
        """Return the row as it is once the tokens at some positions are evicted from every head, pinned ones too; this
        row itself if it holds none of them.

        The tokens that stay keep their positions and their order, and move up into the first slots of their head.
        """
        gone = pinned(self.positions[None], spans.table([dropped], self.positions.device))[0]
        stays = (self.positions >= 0) & ~gone
        if bool((stays == (self.positions >= 0)).all()):
            return self
        order = (~stays).int().argsort(dim=1, stable=True)[:, : int(stays.sum(dim=1).max())]
        positions = self.positions.masked_fill(~stays, EMPTY).gather(1, order)
        tensors = {name: x[_heads_of(order), order] if name in self.cut else x for name, x in self.tensors.items()}
        # gathered with the others, they would still show the tokens that are gone
        if "store.positions" in tensors:
            tensors["store.positions"] = positions.clone()
        return replace(self, tensors=tensors, positions=positions, pack=None)

    def to(self, device: torch.device | str) -> RowCopy:
        """Return the same row on a device, without its pack. Tensors that are on the device already are not copied."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, tensors=tensors, positions=self.positions.to(device), pack=None)


def _heads_of(order: Int[Tensor, "Hk used"]) -> Int[Tensor, "Hk 1"]:
    """Return the numbers of the heads as a column: ``x[_heads_of(order), order]`` takes slots in each head's order."""
    return torch.arange(len(order), device=order.device)[:, None]


@dataclass(frozen=True, eq=False)
class Pack:
    """Tensors that several copies share, so that one operation per tensor puts all of them back.

    Attributes:
        tensors: by name; the first axis is the copies.
        parts: `RowCopy.tensors` of each copy, which are views.
    """

    tensors: Mapping[str, Tensor]
    parts: tuple[Mapping[str, Tensor], ...]


def take_row(block: Block, row: int, device: torch.device | None = None) -> RowCopy:
    """Copy one row out of a block, budget and pins included.

    Args:
        block: the block.
        row: the row's index.
        device: where the copy shall be; by default the block's device.
    """
    block = block.part(row, row + 1).opened(in_place=True)
    positions = block.store.positions[0]
    occupied = (positions >= 0).any(dim=0).nonzero()
    used = int(occupied[-1]) + 1 if len(occupied) else 0
    cut = block.per_slot()
    tensors = {
        name: copied(tensor[0, :, :used] if name in cut else tensor[0], device)
        for name, tensor in block.per_row().items()
        if name not in NUMBERS
    }
    held = copied(positions[:, :used], device)
    return RowCopy(
        tensors, cut, held, block.store.capacity, budgets_of(block, slice(0, 1))[0], pins_of(block, slice(0, 1))[0]
    )


def put_row(block: Block, row: int, copy: RowCopy) -> None:
    """Overwrite one row of a block with a copy, its budget and pins included. Other rows stay as they are.

    Args:
        block: a block with at least as many slots as the copy uses.
        row: the row's index.
        copy: the row's new content.

    Raises:
        ShapeError: the copy does not fit; then nothing has changed.
    """
    check_row(block, copy)
    _set_budget(block, row, copy.budget)
    if copy.pins or block.pins is not None:  # a block without pins needs no table for a row without
        pin_row(block, row, copy.pins)
    mine = block.part(row, row + 1)
    if isinstance(mine.store, PooledStore):
        mine.divide()  # by the budget that was set above
    opened = mine.opened(in_place=True)
    if isinstance(opened.store, OpenedPool):
        _put_in_pool(opened, opened.store, copy)
    else:
        _put(opened, copy)
        opened.store.positions[:, :, copy.used :] = EMPTY
    mine.close(opened)


def _put(block: Block, copy: RowCopy, but: Collection[str] = ()) -> None:
    """Overwrite the tensors of a one-row block, whose slots lie side by side, with those of a copy, up to its last
    slot; leave out the tensors named in ``but``.
    """
    for name, held in block.per_row().items():
        if name in copy.tensors and name not in but:
            (held[:, :, : copy.used] if name in copy.cut else held).copy_(copy.tensors[name][None])


def _put_in_pool(block: Block, store: OpenedPool, copy: RowCopy) -> None:
    """Overwrite an opened one-row block, whose heads share a pool, with a copy.

    Args:
        block: the opened block.
        store: its store.
        copy: the row's new content.
    """
    stored = {name: x[None] for name, x in copy.tensors.items() if name.startswith("store.")}
    vectors = store.pool.vectors.over({name.removeprefix("store."): x for name, x in stored.items()})
    store.put(vectors, None, copy.positions[None])  # None: what could not be stored has no position in the copy
    _put(block, copy, [name for name in stored if name in copy.cut])


def pin_row(block: Block, row: int | slice, pins: spans.Spans) -> bool:
    """Set the pinned spans of a row, or the same ones of several. Return whether the block got a new table of pins,
    because it had none or one that was too narrow.
    """
    held = block.pins
    if grows := held is None or held.shape[1] < 2 * len(pins):
        # a power of two, so that it is rarely replaced: whatever holds the table is then made anew
        rows, device = len(block.seen), block.seen.device
        block.pins = spans.table([()] * rows, device, width=1 << (2 * len(pins) - 1).bit_length())
        if held is not None:
            block.pins[:, : held.shape[1]] = held
    assert block.pins is not None
    block.pins[row] = spans.table([pins], block.pins.device, width=block.pins.shape[1])[0]
    return grows


def check_row(block: Block, copy: RowCopy) -> None:
    """Refuse a copy that does not fit into a row of the block.

    Raises:
        ShapeError: names, shapes or dtypes of tensors differ, the copy has budgets for another number of heads, or the
            block has too few slots.
    """
    pooled = block.store if isinstance(block.store, PooledStore) else None  # once opened, a block shows no pool
    block = block.part(0, 1).opened()
    mine = {name: tensor for name, tensor in block.per_row().items() if name not in NUMBERS}
    if mine.keys() != copy.tensors.keys() or block.per_slot() != copy.cut:
        other = sorted(mine.keys() ^ copy.tensors.keys())
        raise ShapeError(f"The row of another policy or store was given: {', '.join(other)} are not in both.")
    heads = block.store.positions.shape[1]
    if isinstance(copy.budget, tuple) and len(copy.budget) != heads:
        raise ShapeError(f"{len(copy.budget)} budgets were given for {heads} KV heads.")
    if pooled is None:
        check_slots(copy, block.store.capacity)
    else:
        _check_pool(copy, pooled)
    for name, tensor in copy.tensors.items():
        target = mine[name].shape[1:]
        shape = (target[0], copy.used, *target[2:]) if name in copy.cut else tuple(target)
        if (shape, mine[name].dtype) != (tuple(tensor.shape), tensor.dtype):
            raise ShapeError(
                f"{name} of a row has the shape {tuple(tensor.shape)} in {tensor.dtype}, and the block holds "
                f"{shape} in {mine[name].dtype}: they belong to different models or dtypes."
            )


def check_slots(copy: RowCopy, capacity: int) -> None:
    """Refuse a copy whose occupied slots do not fit into ``capacity`` slots per head, or whose budget leaves none of
    them for the next token.

    Raises:
        ShapeError: the block has too few slots.
    """
    if copy.used > capacity:
        raise ShapeError(f"A row of {copy.used} slots was given to a block of {capacity} slots per head.")
    if copy.most >= capacity:  # one slot is for the next token
        raise ShapeError(f"A row with a budget of {copy.most} was given to a block of {capacity} slots.")


def _check_pool(copy: RowCopy, store: PooledStore) -> None:
    """Refuse a copy that does not fit into a row's pool, or in which a head uses more slots than its budget plus one.

    Raises:
        ShapeError: the copy does not fit.
    """
    heads, room = store.sizes.shape[1], store.entries.shape[1] - 1
    (budgets,) = by_head([copy.budget], heads)
    if (needed := sum(budgets) + heads) > room:  # of each head, one slot is for the next token
        raise ShapeError(f"A row of {needed} slots was given to a block with {room} slots for all heads of a row.")
    at = torch.arange(1, copy.used + 1, device=copy.positions.device)
    # padded, since an empty row has nothing of which there is a largest
    last = nn.functional.pad(at * (copy.positions >= 0), (1, 0)).amax(dim=-1)
    for head, (used, budget) in enumerate(zip(last.tolist(), budgets, strict=True)):
        if used > budget + 1:
            raise ShapeError(f"A row uses {used} slots of head {head}, and its budget has {budget + 1}.")


def has_room(block: Block, budget: Number, apart: bool) -> bool:
    """Return whether a row, once empty, could hold a sequence with this budget.

    Args:
        block: the block.
        budget: the budget.
        apart: whether heads will get different parts of the budget, which takes a pool.
    """
    if isinstance(block.store, PooledStore):
        heads = block.store.sizes.shape[1]
        # of each head one slot is for the next token, and the pool's last entry belongs to no head
        return sum(by_head([budget], heads)[0]) + heads < block.store.entries.shape[1]
    return isinstance(budget, int) and not apart and budget < block.store.capacity


def copied(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a contiguous copy on a device (``None``: the tensor's own) that shares no memory with the tensor."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device or tensor.device).copy_(tensor)


def pins_of(block: Block, rows: slice) -> list[spans.Spans]:
    """Return the pinned spans of each of these rows; ``()`` for a row without pins."""
    if block.pins is None:
        return [()] * len(block.seen[rows])
    found = ([bound for bound in bounds if bound != spans.LAST] for bounds in block.pins[rows].tolist())
    return [tuple(zip(bounds[::2], bounds[1::2], strict=True)) for bounds in found]


def _set_budget(block: Block, row: int, budget: int | Sequence[int]) -> None:
    """Set the budget of one row: one number, or one per head.

    An existing tensor is changed in place if it is wide enough.
    """
    held = block.budget
    # one number holds for all rows
    if isinstance(held, int) and isinstance(budget, int) and (budget == held or len(block.seen) == 1):
        block.budget = budget
        return
    wanted = block.seen.new_tensor([budget] if isinstance(budget, int) else list(budget))
    held = held if isinstance(held, Tensor) else block.seen.new_full((len(block.seen), 1), held)
    if len(wanted) > held.shape[1]:
        held = held.repeat(1, len(wanted))
    held[row] = wanted
    block.budget = held


def budgets_of(block: Block, rows: slice) -> list[int | tuple[int, ...]]:
    """Return the budget of a head in each of these rows: one number if all heads of the row have the same, else one per
    head.

    A policy without budgets per head may have run in a pool, and its rows must also fit a block without one.
    """
    if isinstance(block.budget, int):
        return [block.budget] * len(block.seen[rows])
    return [numbers[0] if len(set(numbers)) == 1 else tuple(numbers) for numbers in block.budget[rows].tolist()]


# Several rows of a block as objects: copied out and put back with one operation for each tensor.

_DENSE = 0.95
"""Rows share tensors if they use at least this part of them; otherwise each has its own."""


def take_rows(block: Block, rows: slice, device: torch.device | None = None) -> tuple[RowCopy, ...]:
    """Copy several rows, one or more, out of a block without a pool, each as a `RowCopy`; budgets and pins included.

    They are copied with one operation per tensor and share a `Pack`, unless they would leave too much of it unused:
    then each row is copied alone.
    """
    positions = block.store.positions[rows]
    used, cut = _used(positions), block.per_slot()
    most, capacity = max(used), block.store.capacity
    # together each row would take the slots of the longest one
    if sum(used) < _DENSE * most * len(used):
        each = range(len(block.seen))[rows]
        return tuple(copy for row in each for copy in take_rows(block, slice(row, row + 1), device))
    # all up to the last slot of the longest row; shorter rows are views of their first slots
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
    """Overwrite rows of a block without a pool with copies that fit (see `check_rows`), with one operation per tensor
    if they were taken together. Budgets and pins stay as they are.
    """
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
    # up to here the pack has the positions
    block.store.positions[rows][:, :, max(copy.used for copy in copies) :] = EMPTY


def check_rows(block: Block, copies: Sequence[RowCopy]) -> None:
    """Refuse copies of which one does not fit into a row of the block.

    Raises:
        ShapeError: see `check_row`.
    """
    for copy in copies:
        check_slots(copy, block.store.capacity)
    # copies that share tensors have the same names, shapes and dtypes
    for copy in copies if _pack_of(copies) is None else copies[:1]:
        check_row(block, copy)


def _pack_of(copies: Sequence[RowCopy]) -> Pack | None:
    """Return the tensors that these copies share, if they were taken together and are complete and in order; else
    ``None``.
    """
    pack = copies[0].pack
    if pack is None or len(pack.parts) != len(copies):
        return None
    return pack if all(copy.tensors is part for copy, part in zip(copies, pack.parts, strict=True)) else None


def _used(positions: Int[Tensor, "B Hk capacity"]) -> list[int]:
    """Return for each row the number of slots up to the last occupied one."""
    places = torch.arange(1, positions.shape[-1] + 1, device=positions.device)
    found: list[int] = (places * (positions >= 0).any(dim=1)).amax(dim=1).tolist()
    return found


def _first(tensor: Tensor, n: int, of: int) -> Tensor:
    """Return the first ``n`` slots of a tensor of ``of`` slots; the tensor itself if that is all."""
    return tensor if n == of else tensor[:, :n]
