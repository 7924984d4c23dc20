"""One sequence's memory over all layers, taken out of rows and put back into rows.

A cache and the engine's rows hold their blocks in different ways. Both hand them to `take` and `put`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import by_head
from kvkeep.errors import ShapeError, UnsupportedOperationError
from kvkeep.head_sharding import Heads
from kvkeep.kv.block import Block
from kvkeep.kv.joint_block import PartBlock, divide, store_of
from kvkeep.kv.row_copy import Pack, RowCopy, check_row, pin_row, put_row, take_row
from kvkeep.kv.store import inference
from kvkeep.pins import Spans
from kvkeep.snapshot.file_format import Flag, Place
from kvkeep.types import EMPTY, bytes_of

# One row of the layers that have a state of fixed size (state-space, convolution), as transformers stores them.

_TENSORS = {"conv_states": "is_conv_states_initialized", "recurrent_states": "is_recurrent_states_initialized"}
"""Tensors of a layer, and the setting that says whether there is one. Later versions of transformers keep several."""
_SIZE = "conv_kernel_size"
"""The setting that holds the length of a convolution's state."""
_FLAGS = (*_TENSORS.values(), "has_previous_state", _SIZE)


@dataclass(frozen=True, eq=False)
class StateCopy:
    """A copy of one row of a layer with a state. It shares no memory with the layer.

    Attributes:
        tensors: the layer's tensors without the axis of rows.
        flags: the settings that say which tensors are in use.
    """

    tensors: Mapping[Place, Tensor]
    flags: Mapping[Place, Flag]

    @property
    def nbytes(self) -> int:
        """Return the size of the copy in bytes."""
        return bytes_of(self.tensors.values())

    def to(self, device: torch.device | str) -> StateCopy:
        """Return the same state on a device."""
        return self.each(lambda tensor: tensor.to(device))

    def each(self, tensor: Callable[[Tensor], Tensor]) -> StateCopy:
        """Return the same state with each tensor replaced by ``tensor(x)``."""
        return StateCopy({place: tensor(x) for place, x in self.tensors.items()}, self.flags)


def take_state(layer: object, row: int, device: torch.device | None = None) -> StateCopy:
    """Return a copy of one row of a layer with a state.

    Args:
        layer: the layer.
        row: the row's index.
        device: where the copy shall be; by default the tensors' own.

    Raises:
        UnsupportedOperationError: the layer has tensors of a kind that kvkeep does not know.
    """
    if strange := [name for name, held in vars(layer).items() if isinstance(held, Tensor) and name not in _TENSORS]:
        raise UnsupportedOperationError(
            f"A {type(layer).__name__} of this version of transformers keeps {strange[0]}, which kvkeep cannot copy."
        )
    tensors = {place: held for place, held in _entries(layer, _TENSORS) if isinstance(held, Tensor)}
    copies = {place: held[row].detach().clone().to(device or held.device) for place, held in tensors.items()}
    return StateCopy(copies, dict(_entries(layer, _FLAGS)))


def put_state(layer: object, row: int, rows: int, copy: StateCopy, device: torch.device) -> None:
    """Overwrite one row of a layer with a copied state; tensors that the layer lacks are allocated for ``rows`` rows on
    ``device``, with zeros in the other rows. The settings, which all rows share, become those of the copy.

    Raises:
        ShapeError: see `check_state`. Nothing was changed.
    """
    check_state(layer, copy)
    for place, flag in copy.flags.items():
        _assign(layer, place, flag)
    for place, tensor in copy.tensors.items():
        held = dict(_entries(layer, _TENSORS))[place]
        if not isinstance(held, Tensor):
            held = torch.zeros((rows, *tensor.shape), dtype=tensor.dtype, device=device)
        elif held.is_inference():  # cannot be written outside of inference mode: a copy takes its place
            held = held.clone()
        held[row] = tensor
        _assign(layer, place, held)
    if copy.tensors and getattr(layer, "device", None) is None:  # what transformers sets with the first tensor
        vars(layer).update(device=device, dtype=next(iter(copy.tensors.values())).dtype)


def check_state(layer: object, copy: StateCopy) -> None:
    """Refuse a state that does not fit a layer.

    Raises:
        ShapeError: the copy has attributes that the layer does not have, its tensors have other shapes or dtypes, or
            its settings say something else than its tensors.
    """
    known, flags = dict(_entries(layer, _TENSORS)), dict(_entries(layer, _FLAGS))
    if strange := sorted(str(place[0]) for place in (copy.tensors.keys() - known) | (copy.flags.keys() - flags)):
        raise ShapeError(f"A state of another kind of layer was given: this one has no {strange[0]!r:.40}.")
    for (name, key), flag in copy.flags.items():
        # a flag must say what transformers would have noted for these tensors
        conv = copy.tensors.get(("conv_states", key))
        wanted = (None if conv is None else conv.shape[-1],) if name == _SIZE else (False, True)
        if name in _TENSORS.values():
            wanted = (any(place[1] == key and _TENSORS[place[0]] == name for place in copy.tensors),)
        if flag not in wanted:
            raise ShapeError(f"A state says {name}={flag!r:.40}, which does not fit its tensors.")
    for place, tensor in copy.tensors.items():
        held = known[place]
        if isinstance(held, Tensor) and (held.shape[1:], held.dtype) != (tensor.shape, tensor.dtype):
            raise ShapeError(
                f"A state has the shape {tuple(tensor.shape)} in {tensor.dtype}, and the layer holds "
                f"{tuple(held.shape[1:])} in {held.dtype}: they belong to different models or dtypes."
            )


def _entries(layer: object, names: Iterable[str]) -> Iterator[tuple[Place, Any]]:
    """Yield the attributes of a layer under these names, as place and value; a dictionary gives one entry for each
    key.
    """
    for name in names:
        value = vars(layer).get(name)
        if isinstance(value, dict):
            yield from (((name, key), part) for key, part in value.items())
        else:
            yield (name, None), value


def _assign(layer: object, place: Place, value: Any) -> None:
    """Set an attribute of a layer, or, if ``place`` has a key, this entry of the dictionary that the attribute is."""
    name, key = place
    if key is None:
        setattr(layer, name, value)
    else:
        vars(layer)[name][key] = value


# A sequence's memory over all layers.

STATEFUL = (
    "Layers of this model keep a state into which all tokens have gone, so it cannot forget some of them. Begin a new "
    "conversation without these messages."
)
"""Why a memory of such a model has no `Contents.without`."""


@dataclass(frozen=True, eq=False)
class Contents:
    """One sequence's memory over all layers. It shares no memory with the rows that it was taken from.

    Attributes:
        layers: the row of each layer with slots.
        states: the state of each layer that has one, by the layer's number in the model.
    """

    layers: tuple[RowCopy, ...]
    states: Mapping[int, StateCopy] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """Return how many tokens the sequence has seen."""
        return self.layers[0].seen if self.layers else 0

    @property
    def nbytes(self) -> int:
        """Return the size of all copies in bytes."""
        states = sum(state.nbytes for state in self.states.values())
        return sum(layer.nbytes for layer in self.layers) + states

    def to(self, device: torch.device | str) -> Contents:
        """Return the same contents on a device. Tensors that are on the device already are not copied."""
        states = {number: state.to(device) for number, state in self.states.items()}
        return Contents(tuple(layer.to(device) for layer in self.layers), states)

    def each(self, tensor: Callable[[Tensor], Tensor]) -> Contents:
        """Return the same contents with each tensor replaced. Copies that share tensors still do, see `Pack`.

        Args:
            tensor: returns the replacement of a tensor. The calls come in the same order for all contents that have the
                same layers and names of tensors, and share the same of them.
        """
        packs: dict[int, Pack] = {}
        layers = tuple(_each(layer, tensor, packs) for layer in self.layers)
        return Contents(layers, {number: state.each(tensor) for number, state in self.states.items()})

    def shortest(self, windows: Sequence[int | None], dropped: Spans = ()) -> int | None:
        """Return the fewest tokens to which `cut_back` can bring the memory; ``None`` if some token was evicted.

        Args:
            windows: sliding window of each layer with slots.
            dropped: spans of positions that `without` has left out, which do not count as evicted.
        """
        found = [layer.shortest(window, dropped) for layer, window in zip(self.layers, windows, strict=True)]
        if None in found or not found:
            return None if found else self.seen  # without slots there is only state, which cannot forget
        return self.seen if self.states else max(filter(None, found), default=0)  # `filter` for types: none is None

    def cut_back(self, tokens: int) -> Contents:
        """Return the memory of the first tokens alone: keys, values and positions are those that it had then. The
        contents themselves if these are all tokens.

        Args:
            tokens: how many; `shortest` or more.
        """
        if tokens == self.seen:
            return self
        # there are no states: with one, `shortest` is all tokens
        return Contents(tuple(layer.cut_back(tokens) for layer in self.layers))

    def without(self, dropped: Spans) -> Contents:
        """Return a memory from which the tokens at ``dropped`` positions were evicted in all layers and heads.

        Raises:
            UnsupportedOperationError: a layer has a state that all tokens have gone into.
        """
        if self.states:
            raise UnsupportedOperationError(STATEFUL)
        return replace(self, layers=tuple(layer.without(dropped) for layer in self.layers))

    def pinned(self, pins: Spans) -> Contents:
        """Return the same contents with other pins, which replace those of all layers."""
        return replace(self, layers=tuple(replace(layer, pins=pins) for layer in self.layers))


def _each(copy: RowCopy, tensor: Callable[[Tensor], Tensor], packs: dict[int, Pack]) -> RowCopy:
    """Return a copy of a row with each tensor replaced. Tensors that several copies share are replaced once."""
    pack, tensors = copy.pack, None
    if pack is not None:
        if id(pack) not in packs:
            parts = tuple({name: tensor(x) for name, x in part.items()} for part in pack.parts)
            packs[id(pack)] = Pack({name: tensor(x) for name, x in pack.tensors.items()}, parts)
        found = packs[id(pack)]
        # by identity: the tensors of a copy that was changed are no part of the pack any more
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
    states: Mapping[int, object] | None = None,
) -> Contents:
    """Return a copy of one row of all layers. Nothing that happens to the row later changes the copy.

    Args:
        blocks: the block of each layer with slots.
        row: the row's index.
        states: transformers' layers with a state, by their number in the model.
    """
    layers = tuple(take_row(block, row) for block in blocks)
    return Contents(layers, take_states(row, states))


def take_states(
    row: int, states: Mapping[int, object] | None, device: torch.device | None = None
) -> dict[int, StateCopy]:
    """Return copies of one row of each layer with a state, by layer number, as `Contents.states` holds them.

    Args:
        row: the row's number in the states.
        states: transformers' layers with a state, by their number in the model.
        device: where the copies shall be; by default the states' own.
    """
    return {number: take_state(layer, row, device) for number, layer in (states or {}).items()}


@inference
def put(
    contents: Contents,
    blocks: Sequence[Block],
    row: int,
    *,
    states: Mapping[int, object] | None = None,
) -> None:
    """Overwrite one row of all layers. If the contents do not fit, nothing changes.

    The row goes on bit for bit as the original would have done, if the blocks have as many slots and rows as the
    original's blocks.

    Args:
        contents: the row's new memory, which is not changed and can be put back any number of times.
        blocks: see `take`. Each must have as many slots as the contents use; `Block.widen` adds some.
        row: the row's index.
        states: transformers' layers with a state; they may be new.

    Raises:
        ShapeError: the contents belong to another kind of layers.
    """
    states = states or {}
    check(contents, blocks, states)
    make_room(blocks, row, contents.layers)
    for block, copy in zip(blocks, contents.layers, strict=True):
        put_row(block, row, copy)
    put_states(contents, blocks[0] if blocks else None, row, states)


def put_states(
    contents: Contents, like: Block | None, row: int, states: Mapping[int, object], *, rows: int | None = None
) -> None:
    """Overwrite one row of the layers with a state. The contents must fit.

    Args:
        contents: the row's new memory.
        like: the block of the first layer with slots, if there is one.
        row: the row's number in the states.
        states: transformers' layers with a state; they may be new.
        rows: rows of the states; by default those of the block.
    """
    device = torch.device("cpu") if like is None else like.seen.device
    count = rows or (1 if like is None else len(like.seen))
    for number, state in contents.states.items():
        put_state(states[number], row, count, state, device)


def check(contents: Contents, blocks: Sequence[Block], states: Mapping[int, object]) -> None:
    """Refuse contents that do not fit these layers. Nothing is written.

    Raises:
        ShapeError: the number of layers, or a tensor's name, shape or dtype differs.
    """
    check_beside(contents, len(blocks), states)
    for block, copy in zip(blocks, contents.layers, strict=True):
        check_row(block, copy)
    check_together(blocks, contents.layers)


def check_beside(contents: Contents, layers: int, states: Mapping[int, object]) -> None:
    """Refuse contents with another number of layers, or with states that do not fit.

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


# Layers whose heads share one pool of slots: their copies must fit into it together.


def make_room(blocks: Sequence[Block], row: int, copies: Sequence[RowCopy]) -> None:
    """Prepare a row whose layers share a pool for these copies: divide the pool by their budgets, and set their pins.

    Do nothing if no layers share a pool.
    """
    parts, copies = _sharing(blocks, copies)
    if not parts:
        return
    whole, pins = parts[0].whole, copies[0].pins
    # a table of pins that had to grow is another tensor, and the parts hold the old one
    if (pins or whole.pins is not None) and pin_row(whole, row, pins):
        for part in parts:
            part.renew()
    divide(parts, whole.seen.new_tensor([_budgets(parts, copies)]), slice(row, row + 1))


def check_together(blocks: Sequence[Block], copies: Sequence[RowCopy]) -> None:
    """Refuse copies that together need more slots than the pool that their layers share. Other layers are not looked
    at.

    Raises:
        ShapeError: the pool has fewer slots than the copies need.
    """
    parts, copies = _sharing(blocks, copies)
    if not parts:
        return
    # - 1: the last entry of a pool belongs to no head
    numbers, room = _budgets(parts, copies), store_of(parts[0]).entries.shape[1] - 1
    if (needed := sum(numbers) + len(numbers)) > room:  # of each head, one slot is for the next token
        raise ShapeError(f"A row of {needed} slots in all layers was given to a block that has {room} for them.")


def _sharing(blocks: Sequence[Block], copies: Sequence[RowCopy]) -> tuple[list[PartBlock], list[RowCopy]]:
    """Return the layers that share a pool, and their copies. Other layers are left out."""
    pairs = [(block, copy) for block, copy in zip(blocks, copies, strict=True) if isinstance(block, PartBlock)]
    return [part for part, _ in pairs], [copy for _, copy in pairs]


def _budgets(blocks: Sequence[Block], copies: Sequence[RowCopy]) -> list[int]:
    """Return the budgets that the copies have, of all heads of all layers, layer by layer."""
    heads = blocks[0].lost.shape[1]  # one number for each head, whatever its slots
    return [number for each in by_head([copy.budget for copy in copies], heads) for number in each]


# Memory of a model that is split over processes: a copy with all heads, and this process's heads of one.
#
# A copy that leaves its rows has the heads of all processes, as if one process had made it. So it can go on in any
# number of processes. All of them must take and put back copies together.


def whole(contents: Contents, heads: Heads) -> Contents:
    """Gather the contents of a row from all processes, so that they have all heads.

    Args:
        contents: the memory of this process's heads.
        heads: which heads this process holds.
    """
    if heads.ranks == 1:
        return contents
    return replace(contents, layers=tuple(_whole(layer, heads) for layer in contents.layers))


def mine(contents: Contents, heads: Heads) -> Contents:
    """Return the part of contents that belongs to this process's heads; the contents as they are if they have another
    number of heads than the model, so that `check` refuses them.

    Args:
        contents: the memory.
        heads: which heads this process holds.
    """
    if heads.ranks == 1:
        return contents
    fits = all(len(layer.positions) == heads.count for layer in contents.layers)
    return replace(contents, layers=tuple(_mine(layer, heads) for layer in contents.layers)) if fits else contents


def _whole(copy: RowCopy, heads: Heads) -> RowCopy:
    """Return one layer's row with the heads of all processes, and as many slots as the fullest of them uses."""
    device = copy.positions.device
    used = heads.most(copy.used, device)
    tensors = {name: x if x.ndim == 0 else _all(_long(x, copy, name, used), heads) for name, x in copy.tensors.items()}
    held = _all(torch.nn.functional.pad(copy.positions, (0, used - copy.used), value=EMPTY), heads)
    own = copy.budget if isinstance(copy.budget, tuple) else (copy.budget,) * len(copy.positions)
    budgets = _all(torch.tensor(own, dtype=torch.int64, device=device), heads).tolist()
    capacity = heads.most(copy.capacity, device)
    return replace(copy, tensors=tensors, positions=held, capacity=capacity, budget=_alike(budgets), pack=None)


def _mine(copy: RowCopy, heads: Heads) -> RowCopy:
    """Return one layer's row with this process's heads alone, cut to the slots that these use."""
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
    """Return a tensor of a row, padded to ``used`` slots if it has slots: those of the fullest process, since only
    tensors of one shape can be gathered.
    """
    if name not in copy.cut or used == copy.used:
        return x
    return torch.cat([x, x.new_zeros((len(x), used - copy.used, *x.shape[2:]))], dim=1)


def _all(x: Tensor, heads: Heads) -> Tensor:
    """Gather a tensor of heads from all processes."""
    return heads.all(x[None])[0]


def _part(x: Tensor, heads: Heads) -> Tensor:
    """Return this process's heads of a tensor."""
    return heads.mine(x[None])[0]


def _alike(budgets: list[int]) -> int | tuple[int, ...]:
    """Return the common budget if all heads have the same, else a tuple of them."""
    return budgets[0] if len(set(budgets)) == 1 else tuple(budgets)
