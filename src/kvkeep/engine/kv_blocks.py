"""The slots of the engine's rows: one block for each layer of the model, shared by sequences of several policies.

Layers of equal shape lie one after the other in the rows of one block, a stack. So one operation per tensor copies,
empties or measures a row in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvkeep.budget import Number, by_head
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import handed, state_part
from kvkeep.cache.layer_block import reach, store_for
from kvkeep.errors import BudgetError, UnsupportedOperationError
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv.block import Block, add_state, lacks, shared
from kvkeep.kv.joint_block import JointBlock
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.kv.row_copy import RowCopy, check_row, check_rows, pin_row, put_row, put_rows, take_row, take_rows
from kvkeep.kv.slot_codec import KeyTransform
from kvkeep.models.checkpoint import Model
from kvkeep.models.device import device_of
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import Contents, StateCopy, check_together, put_states, take_states
from kvkeep.types import MemoryUsage, Slots, bytes_of


@dataclass(frozen=True)
class Stack:
    """Layers of equal shape in one block.

    Attributes:
        block: it has the rows of the first layer, then the rows of the second one, and so on. If the heads of all
            layers share a pool, it has the heads of all layers in each row.
        layers: the numbers of the layers, counted among those with slots.
        count: rows of each layer.
    """

    block: Block
    layers: Sequence[int]
    count: int

    @property
    def is_pool(self) -> bool:
        """Return whether the heads of this block share a pool: those of one layer, or of all."""
        return isinstance(self.block.store, PooledStore)

    def of(self, row: int) -> slice:
        """Return the slice of the block's rows that holds one row of the engine in all layers of the stack."""
        return slice(row, None, self.count)

    def parts(self) -> Iterator[tuple[int, Block]]:
        """Yield each layer's number and its part of the block, with all rows. The parts share the block's memory."""
        for place, layer in enumerate(self.layers):
            rows = place * self.count, (place + 1) * self.count
            yield layer, self.block.layer(place) if isinstance(self.block, JointBlock) else self.block.part(*rows)

    def under(self, policy: Policy) -> Stack:
        """Return the same layers as another policy sees them, with its per-slot state; see `Block.under`."""
        return replace(self, block=self.block.under(policy.slots, policy.summaries))

    def lost(self, row: int) -> Iterator[tuple[int, Tensor]]:
        """Yield each layer's number, and a copy of one row's sums of attention mass there, ``(heads, 4)``: lost and
        all, in prompts and in decoding.
        """
        # four sums for each head; a joint block has the heads of all layers in one row
        return zip(self.layers, self.block.lost[self.of(row)].clone().view(len(self.layers), -1, 4), strict=True)


class Blocks:
    """The blocks of all layers with slots, in order. There are none before `allocate`.

    Args:
        policies: the policy of each layer, which differ in how heads share a budget.
        like: slots of each layer, which show shapes, dtype and device.
        kv_bits: bits of keys and values in the slots, see `kvkeep.kv_bits.KV_BITS`; ``None``: the dtype of ``like``.
        among: which KV heads this process holds; by default all.
        transforms: of the keys of each layer before they are coded; by default only those that all keys have.

    Attributes:
        version: incremented before tensors are replaced or added.

    Raises:
        UnsupportedOperationError: layers whose heads share a budget differ in shape, dtype or device.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        like: Sequence[Slots],
        *,
        kv_bits: str | None = None,
        among: Heads = ALONE,
        transforms: Sequence[KeyTransform] = (),
    ) -> None:
        self._policies, self._like, self._kv_bits, self.version = policies, like, kv_bits, 0
        self._among, self._transforms = among, transforms
        if len({_kinds(slots) for slots, policy in zip(like, policies, strict=True) if policy.shares_layers}) > 1:
            raise UnsupportedOperationError(
                "`head_budget=global` needs layers with heads of one shape and dtype on one device, and those of this "
                "model differ. Use `head_budget=ada` or a profile."
            )
        self._stacks: list[Stack] = []
        self._blocks: list[Block] = []

    def __iter__(self) -> Iterator[Block]:
        return iter(self._blocks)

    def __getitem__(self, index: int) -> Block:
        return self._blocks[index]

    @property
    def pooled(self) -> bool:
        """Return whether any heads share a pool of slots."""
        return any(isinstance(block.store, PooledStore) for block in self._blocks)

    def row_bytes(self, budgets: Sequence[Number]) -> int:
        """Return the bytes of one row in all layers, counted on meta tensors, which have shapes but no memory."""
        blocks = [self._block(1, layers, budgets, device="meta") for layers in self._alike(budgets)]
        return bytes_of(tensor for block in blocks for tensor in block.per_row().values())

    def allocate(self, count: int, budgets: Sequence[Number]) -> None:
        """Replace all blocks by ``count`` empty rows with these budgets of the layers.

        The old memory is freed first.
        """
        self.version += 1
        self._blocks, self._stacks = [], []  # the old memory is freed before new memory is allocated
        for layers in self._alike(budgets):
            self._stacks.append(Stack(self._block(count, layers, budgets), layers, count))
        self._divide()
        self._transform_keys(slice(None))

    def _transform_keys(self, rows: slice) -> None:
        """Set, in all layers, what is done to the keys of empty rows before they are stored in few bits."""
        for block, transform in zip(self._blocks, self._transforms, strict=False):  # there may be none at all
            block.transform_keys(transform, rows)

    def _alike(self, budgets: Sequence[Number]) -> list[list[int]]:
        """Group the layers into stacks, and return the layer numbers of each: all layers that share a budget, layers of
        equal shape and budget, and each layer with a pool alone.
        """
        found: dict[object, list[int]] = {}
        for layer, (policy, budget, like) in enumerate(zip(self._policies, budgets, self._like, strict=True)):
            alone = issubclass(store_for(policy, [budget]), PooledStore)
            kind = "joint" if policy.shares_layers else (budget, *_kinds(like), layer if alone else None)
            found.setdefault(kind, []).append(layer)
        return list(found.values())

    def _divide(self) -> None:
        """Rebuild the list of per-layer blocks, after tensors of a stack were replaced or added."""
        found = dict(pair for stack in self._stacks for pair in stack.parts())
        self._blocks = [found[layer] for layer in sorted(found)]

    def _block(
        self, count: int, layers: Sequence[int], budgets: Sequence[Number], *, device: str | None = None
    ) -> Block:
        """Allocate one block of empty slots for ``count`` rows of a stack's layers, by default on the layers' device.

        Args:
            count: rows of each layer.
            layers: the numbers of the layers, which are alike.
            budgets: the budget of every layer of the model.
            device: another device, such as ``meta``.
        """
        policy, like, budget = self._policies[layers[0]], self._like[layers[0]], budgets[layers[0]]
        rows = count if policy.shares_layers else count * len(layers)
        # shapes, dtype and device are all that is asked of them, so nothing is allocated here
        keys, values = (x[:, :, :1].to(device).expand(rows, -1, -1, -1) for x in (like.keys, like.values))
        given: dict[str, Any] = {
            "numbers": [budget],
            # numbered instead of named, so that sequences of several policies use the same tensors
            "starts": {str(i): 0.0 for i in range(len(policy.slots))},  # a new token's state is written with it
            "heads": shared(policy.summaries),
            "store": store_for(policy, [budget], self._kv_bits),
        }
        if policy.shares_layers:
            return JointBlock(keys, values, layers=len(layers), **given)
        # where heads of all processes share a budget, most of it may come to those of this one
        block = Block(keys, values, room=self._among.ranks if policy.spreads else 1, **given)
        reach(block, policy, [budget], self._among)
        return block

    def lacks(self, policy: Policy) -> int:
        """Return how many bytes all rows together would grow by to hold the state of this policy; 0 if they have it."""
        return sum(lacks(stack.block, policy.slots, policy.summaries) for stack in self._stacks)

    def begin(self, row: int, policy: Policy, sequence: int) -> None:
        """Empty a row for a new sequence, and allocate the state that its policy needs and the rows lack."""
        if self.lacks(policy):
            self.version += 1
            for stack in self._stacks:
                add_state(stack.block, policy.slots, policy.summaries)
            self._divide()
        for stack in self._stacks:
            stack.block.sequences[stack.of(row)] = sequence
        self.clear(row)
        self._transform_keys(slice(row, row + 1))

    def clear(self, row: int) -> None:
        """Empty a row in all layers."""
        for stack in self._stacks:
            stack.block.clear_row(stack.of(row))

    def skip(self, row: int, tokens: int) -> None:
        """Let an empty row count its first ``tokens`` tokens as seen, although it holds none of them."""
        for stack in self._stacks if tokens else ():
            stack.block.seen[stack.of(row)] = tokens

    def move(self, source: int, target: int) -> None:
        """Copy the content of row ``source`` over row ``target``, in all layers."""
        for stack in self._stacks:
            stack.block.move_row(stack.of(source), stack.of(target))

    def pin(self, row: int, pins: Spans) -> None:
        """Protect spans of positions in a row from eviction; do nothing without spans."""
        # a row with more spans than any before it needs a wider table
        if pins and sum(pin_row(stack.block, stack.of(row), pins) for stack in self._stacks):
            self.version += 1
            self._divide()

    def limit(self, row: int, budgets: Sequence[Number]) -> None:
        """Set a row's budget in each layer. A row whose heads share a pool must be empty."""
        for stack in self._stacks:
            block, mine, rows = stack.block, [budgets[layer] for layer in stack.layers], stack.of(row)
            if isinstance(block.budget, int) and any(budget != block.budget for budget in mine):
                self.version += 1  # layers over parts of the block hold the budget as one number
                block.budget = block.seen.new_full((len(block.seen), 1), block.budget)
                self._divide()
            if isinstance(block.budget, Tensor):
                each = [[budget] if isinstance(budget, int) else budget for budget in mine]
                if isinstance(block, JointBlock):
                    per_layer = by_head(mine, block.lost.shape[1] // block.layers)
                    each = [[head_budget for layer in per_layer for head_budget in layer]]
                block.budget[rows] = block.budget.new_tensor(each)
                if isinstance(block.store, PooledStore):
                    # a head holds one token more than its budget until a step has evicted
                    block.store.divide(block.budget[rows] + 1, rows)

    def take(self, row: int, policy: Policy, device: torch.device | None) -> tuple[RowCopy, ...]:
        """Return copies of a row on a device, one for each layer in order, with the state of its sequence's policy.

        Args:
            row: the row's index.
            policy: its sequence's.
            device: where the copies are to be; ``None``: on the row's own device.
        """
        found: dict[int, RowCopy] = {}
        for stack in self._stacks:
            mine = stack.under(policy)
            if stack.is_pool:  # heads lie at places of their own, so the layers are copied one by one
                found |= {layer: take_row(block, row, device) for layer, block in mine.parts()}
            else:
                found |= zip(stack.layers, take_rows(mine.block, stack.of(row), device), strict=True)
        return tuple(found[layer] for layer in sorted(found))

    def check(self, copies: Sequence[RowCopy], policy: Policy) -> None:
        """Refuse copies of a row, one for each layer, that do not fit these blocks under a policy. Nothing is written.

        Raises:
            ShapeError: the copies belong to another model or policy.
            BudgetError: heads have budgets of their own, which the policy does not give them.
        """
        for stack in self._stacks:
            block, mine = stack.block.under(policy.slots, policy.summaries), [copies[layer] for layer in stack.layers]
            if stack.is_pool:
                blocks = [part for _, part in stack.under(policy).parts()]
                for part, copy in zip(blocks, mine, strict=True):
                    check_row(part, copy)
                check_together(blocks, mine)
                continue
            if any(isinstance(copy.budget, tuple) for copy in mine):
                raise BudgetError(
                    f"The memory has a budget for each KV head, and here, under {policy}, all heads of a layer "
                    "have the same. Use the policy and the rule for heads that the memory was made under, with a model "
                    "that is not split over processes, or read the text again."
                )
            check_rows(block, mine)

    def put(self, row: int, copies: Sequence[RowCopy], policy: Policy) -> None:
        """Overwrite a row with copies that `check` has accepted, budgets included; pins are left to `pin`."""
        self.limit(row, [copy.budget for copy in copies])
        for stack in self._stacks:
            if stack.is_pool:  # heads lie at places of their own, so the layers are copied one by one
                for layer, part in stack.under(policy).parts():
                    put_row(part, row, copies[layer])
            else:
                put_rows(stack.under(policy).block, stack.of(row), [copies[layer] for layer in stack.layers])

    def memory_of(self, row: int) -> MemoryUsage:
        """Return the memory usage of one row in all layers."""
        return sum((self._row(stack, row).memory() for stack in self._stacks), MemoryUsage())

    def lost_of(self, row: int) -> list[Tensor]:
        """Return copies of a row's sums of attention mass, one ``(heads, 4)`` per layer, with the heads of all
        processes: lost by eviction and all, in prompts and in decoding.
        """
        found: dict[int, Tensor] = {}
        for stack in self._stacks:
            found |= stack.lost(row)
        mine = [found[layer] for layer in sorted(found)]
        return mine if self._among == ALONE else list(self._among.all(torch.stack(mine)).unbind())

    def _row(self, stack: Stack, row: int) -> Block:
        """Return one row of all layers of a stack, as a block whose rows are the layers."""
        return stack.block.over({name: x[stack.of(row)] for name, x in stack.block.per_row().items()})


def _kinds(like: Slots) -> tuple[object, ...]:
    """Return a layer's head count, head dims, dtype and device, for keys and values. Layers with equal ones may share a
    block.
    """
    return tuple((tensor.shape[1], tensor.shape[3:], tensor.dtype, tensor.device) for tensor in like)


# The memory of one sequence beside its slots: layers with a state of fixed size.


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """Memory that belongs to one sequence and is released with it.

    Attributes:
        states: transformers' layers with a state (state-space, convolution), by their number in the model.
    """

    states: Mapping[int, Any]

    def take(self, device: torch.device | None) -> dict[int, StateCopy]:
        """Return copies of the states, by layer number, on ``device`` (default: their own device)."""
        return take_states(0, self.states, device)  # of the one row: a model with states runs one at a time

    def put(self, contents: Contents, like: Block | None) -> None:
        """Overwrite the states with those of contents, which must fit.

        Args:
            contents: the memory of the sequence.
            like: the block of the first layer with slots, if there is one.
        """
        put_states(contents, like, 0, self.states, rows=1)  # see `take`

    def memory(self) -> MemoryUsage:
        """Return the bytes of the states, also as those that a full cache would take: no cache could drop them."""
        held = bytes_of(tensor for layer in self.states.values() for tensor in _tensors(layer))
        return MemoryUsage(allocated_bytes=held, full_bytes=held)


def keeps_states(model: Model) -> bool:
    """Return whether a model has layers with a state. Such a model runs one row at a time, with whole prompts.

    Raises:
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """
    # any policy and budget will do: only the kinds of the layers count
    return bool(states_of(BoundedCache(model.config, "full", 1)))


def probed(model: Model) -> BoundedCache:
    """Run the model on one token with a new cache that keeps everything, and return the cache, whose tensors show the
    shapes of every layer.
    """
    cache = BoundedCache(model.config, "full", 1)  # the one token fits, so that the policy never has to choose
    with torch.inference_mode():
        model(input_ids=torch.zeros((1, 1), dtype=torch.long, device=device_of(model)), **handed(model, cache))
    return cache


def states_of(cache: BoundedCache) -> dict[int, Any]:
    """Return the states of a cache's layers, by layer number. Layers without a state are left out."""
    return {i: state for i, layer in enumerate(cache.layers) if (state := state_part(layer)) is not None}


def _tensors(layer: object) -> Iterator[Tensor]:
    """Yield the tensors of a layer's state. Some layers hold several of a kind in a dictionary."""
    for value in vars(layer).values():
        parts = value.values() if isinstance(value, dict) else [value]
        yield from (part for part in parts if isinstance(part, Tensor))
