"""One sequence's memory over all layers, taken out of rows and put back into rows.

`BoundedCache` and the engine's rows hold their blocks in different ways. Both hand them to `take` and `put`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvkeep.errors import ShapeError
from kvkeep.kv.block import Block
from kvkeep.kv.cascade import Cascade
from kvkeep.kv.joint_block import check_together, make_room
from kvkeep.kv.memory_usage import bytes_of
from kvkeep.kv.row_copy import Pack, RowCopy, check_row, put_row, take_row
from kvkeep.kv.store import inference
from kvkeep.pins import Spans
from kvkeep.snapshot.states import StateCopy, check_state, put_state, take_state


@dataclass(frozen=True, eq=False)
class Contents:
    """One sequence's memory over all layers. It shares no memory with the rows that it was taken from.

    Attributes:
        layers: the row of each layer with slots.
        shared: the row's tables under a policy that prunes through the layers; otherwise empty.
        states: the state of each layer that has one, by the layer's number in the model.
    """

    layers: tuple[RowCopy, ...]
    shared: Mapping[str, Tensor] = field(default_factory=dict)
    states: Mapping[int, StateCopy] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """Tokens that the sequence has seen."""
        return self.layers[0].seen if self.layers else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all copies."""
        states = sum(state.nbytes for state in self.states.values())
        return sum(layer.nbytes for layer in self.layers) + states + bytes_of(self.shared.values())

    def to(self, device: torch.device | str) -> Contents:
        """The same memory on a device; tensors that are there already are not copied."""
        shared = {name: table.to(device) for name, table in self.shared.items()}
        states = {number: state.to(device) for number, state in self.states.items()}
        return Contents(tuple(layer.to(device) for layer in self.layers), shared, states)

    def each(self, tensor: Callable[[Tensor], Tensor]) -> Contents:
        """The same memory with other tensors. Copies that share tensors still do, see `Pack`.

        Args:
            tensor: returns what stands for a tensor. It is called in the same order for all contents of a structure.
        """
        packs: dict[int, Pack] = {}
        layers = tuple(_each(layer, tensor, packs) for layer in self.layers)
        shared = {name: tensor(table) for name, table in self.shared.items()}
        return Contents(layers, shared, {number: state.each(tensor) for number, state in self.states.items()})

    def pinned(self, pins: Spans) -> Contents:
        """The same memory with other pins."""
        return replace(self, layers=tuple(replace(layer, pins=pins) for layer in self.layers))


def _each(copy: RowCopy, tensor: Callable[[Tensor], Tensor], packs: dict[int, Pack]) -> RowCopy:
    """A copy of a row with other tensors, and its pack, which is made anew when its first copy comes."""
    pack, tensors = copy.pack, None
    if pack is not None:
        if id(pack) not in packs:
            parts = tuple({name: tensor(x) for name, x in part.items()} for part in pack.parts)
            packs[id(pack)] = Pack({name: tensor(x) for name, x in pack.tensors.items()}, parts)
        found = packs[id(pack)]
        tensors = next((new for old, new in zip(pack.parts, found.parts, strict=True) if old is copy.tensors), None)
        pack = None if tensors is None else found
    if tensors is None:
        tensors = {name: tensor(x) for name, x in copy.tensors.items()}
    return replace(copy, tensors=tensors, positions=tensor(copy.positions), pack=pack)


@inference
def take(
    blocks: Sequence[Block],
    row: int,
    *,
    cascade: Cascade | None = None,
    states: Mapping[int, object] | None = None,
) -> Contents:
    """Copy one row out of all layers. The row can go on; nothing that happens to it changes the copy.

    Args:
        blocks: the block of each layer with slots.
        row: which row.
        cascade: the tables that the layers share.
        states: transformers' layers with a state, by their number in the model.
    """
    layers = tuple(take_row(block, row) for block in blocks)
    return Contents(layers, *take_beside(row, cascade=cascade, states=states))


def take_beside(
    row: int,
    *,
    cascade: Cascade | None = None,
    states: Mapping[int, object] | None = None,
    device: torch.device | None = None,
) -> tuple[dict[str, Tensor], dict[int, StateCopy]]:
    """Copy the memory of one row beside its slots: `Contents.shared` and `Contents.states`.

    Args:
        row: the row's number in tables and states.
        cascade: the tables that the layers share.
        states: transformers' layers with a state, by their number in the model.
        device: where the copies shall be; by default the tables' and states' own.
    """
    tables = {} if cascade is None else cascade.take_row(row)
    shared = {name: table.to(device or table.device) for name, table in tables.items()}
    return shared, {number: take_state(layer, row, device) for number, layer in (states or {}).items()}


@inference
def put(
    contents: Contents,
    blocks: Sequence[Block],
    row: int,
    *,
    cascade: Cascade | None = None,
    states: Mapping[int, object] | None = None,
) -> None:
    """Overwrite one row of all layers. If the contents do not fit, nothing changes.

    The row goes on bit for bit as the original would have done, if the blocks have as many slots and rows as the
    original's blocks.

    Args:
        contents: the row's new memory; it stays as it is and can be put back any number of times.
        blocks: see `take`. Each must have as many slots as the contents use; `Block.widen` adds some.
        row: which row.
        cascade: the tables that the layers share.
        states: transformers' layers with a state; they may be new.

    Raises:
        ShapeError: the contents belong to another kind of layers.
    """
    states = states or {}
    check(contents, blocks, states)
    make_room(blocks, row, contents.layers)
    for block, copy in zip(blocks, contents.layers, strict=True):
        put_row(block, row, copy)
    put_beside(contents, blocks[0] if blocks else None, row, cascade=cascade, states=states)


def put_beside(
    contents: Contents,
    like: Block | None,
    row: int,
    *,
    rows: int | None = None,
    cascade: Cascade | None = None,
    states: Mapping[int, object],
) -> None:
    """Overwrite the memory of one row beside its slots with contents that fit.

    Args:
        contents: the row's new memory.
        like: the block of the first layer with slots, if there is one.
        row: the row's number in tables and states.
        rows: rows of tables and states; by default those of the block.
        cascade: the tables that the layers share.
        states: transformers' layers with a state; they may be new.
    """
    device = torch.device("cpu") if like is None else like.seen.device
    count = rows or (1 if like is None else len(like.seen))
    if cascade is not None:
        assert like is not None
        cascade.put_row(row, count, like.store.capacity, contents.shared, device)
    for number, state in contents.states.items():
        put_state(states[number], row, count, state, device)


def check(contents: Contents, blocks: Sequence[Block], states: Mapping[int, object]) -> None:
    """Refuse contents that do not fit the layers.

    Raises:
        ShapeError: the number of layers, or a tensor's name, shape or dtype differs.
    """
    check_beside(contents, len(blocks), states)
    for block, copy in zip(blocks, contents.layers, strict=True):
        check_row(block, copy)
    check_together(blocks, contents.layers)


def check_beside(contents: Contents, layers: int, states: Mapping[int, object]) -> None:
    """Refuse contents of another number of layers, or whose states do not fit.

    Raises:
        ShapeError: see `check`.
    """
    if len(contents.layers) != layers or contents.states.keys() != states.keys():
        raise ShapeError(
            f"The memory of {len(contents.layers)} layers with slots and {len(contents.states)} with a state was given "
            f"to {layers} and {len(states)}: it belongs to another model."
        )
    for number, state in contents.states.items():
        check_state(states[number], state)
