"""The memory that one layer allocates: slots, the policy's per-slot state, and the counters of each row."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvkeep import budget as budgets
from kvkeep import pins as spans
from kvkeep.errors import ShapeError
from kvkeep.memory import Memory, bytes_of
from kvkeep.store.dense import DenseStore
from kvkeep.store.heads import empty, places
from kvkeep.store.pooled import PooledStore
from kvkeep.store.protocol import Store
from kvkeep.types import EMPTY, Budget, Phase, State

_Block = TypeVar("_Block", bound="Block")


class Block:
    """The constant block of a layer, allocated once for a batch.

    Args:
        keys: keys that give the block its rows, heads, head dim, dtype and device.
        values: values that give the block its head dim of values.
        numbers: the budget, one number or one per row; or as many numbers as heads, for all rows or for each.
        starts: the policy's per-slot state: name → value of an empty slot.
        heads: the policy's state of each head: name → axes.
        sequences: identity of each row for randomness; all 0 if not given.
        store: the class of the store that holds the slots.
        pins: spans that no policy may evict, one entry for all rows or one per row.
        room: size of a pool that heads share, as a multiple of their budgets.

    Attributes:
        store: keys, values and positions.
        state: the policy's state, of each slot or of each head.
        heads: names of the state that each head has once, for all of its slots; zeros in an empty row.
        seen: real tokens seen per row.
        prompt: tokens seen at the end of the last piece of the row's prompt.
        sequences: identity of each row.
        lost: attention mass of each head, see `kvkeep.loss`.
        budget: slots that may stay occupied, one number or one per row.
        pins: bounds of each row's pinned spans, see `kvkeep.scores.pinned`; ``None`` if no row has any.

    Raises:
        BudgetError: there are several budgets, but not one for each row.
        ShapeError: there are sequence ids or pins, but not for each row.
    """

    store: Store
    state: State
    heads: frozenset[str]
    seen: Int[Tensor, " B"]
    prompt: Int[Tensor, " B"]
    sequences: Int[Tensor, " B"]
    lost: Float[Tensor, "B Hk 4"]
    budget: Budget
    pins: Int[Tensor, "B bounds"] | None

    def __init__(  # noqa: PLR0913  a block is told everything at once
        self,
        keys: Float[Tensor, "B Hk _ D"],
        values: Float[Tensor, "B Hk _ E"],
        *,
        numbers: Sequence[budgets.Number],
        starts: Mapping[str, float],
        heads: Mapping[str, str] = MappingProxyType({}),
        sequences: Sequence[int] | None = None,
        store: type[Store] = DenseStore,
        pins: Sequence[spans.Spans] = (),
        room: int = 1,
    ):
        B, Hk = keys.shape[:2]
        if sequences is not None and len(sequences) != B:
            raise ShapeError(f"{len(sequences)} sequence ids were given for a batch of {B} rows; give one per row.")
        device = keys.device
        self.pins = spans.table(spans.for_rows(pins, B), device) if any(pins) else None
        if issubclass(store, PooledStore):
            self.budget = budgets.per_head(numbers, B, Hk, device)
            self.store = store.for_heads(keys, values, budgets.by_head(numbers, Hk), room=room)
            self.divide()
        else:
            self.budget = budgets.per_row(numbers, B, device)
            self.store = store(keys, values, capacity=budgets.largest(numbers) + 1)
        self.state = {name: self.store.numbers(start) for name, start in starts.items()}
        self.state |= empty(heads, keys, values)
        self.heads = frozenset(heads)
        self.seen = torch.zeros(B, dtype=torch.int64, device=device)
        self.prompt = torch.zeros(B, dtype=torch.int64, device=device)
        self.sequences = torch.tensor(sequences or [0] * B, dtype=torch.int64, device=device)
        self.lost = torch.zeros((B, Hk, 4), dtype=torch.float32, device=device)

    def clear(self) -> None:
        """Empty every slot, reset counters and heads. State of slots needs no clearing: a new token overwrites it."""
        for name in self.heads:
            self.state[name].zero_()
        self.store.clear(slice(None))
        for counter in (self.seen, self.prompt, self.lost):
            counter.zero_()

    def clear_row(self, row: int | slice) -> None:
        """Empty one row, or several."""
        for name in self.heads:
            self.state[name][row] = 0.0
        self.store.clear(row)
        self.seen[row] = self.prompt[row] = self.lost[row] = 0
        if self.pins is not None:
            self.pins[row] = spans.LAST

    def following(self, T: int, real: Bool[Tensor, "B T"] | None) -> Int[Tensor, "B T"]:
        """The positions of the next ``T`` tokens of each row, -1 for padding."""
        if real is None:
            return self.seen[:, None] + (torch.arange(T, device=self.seen.device) if T > 1 else 0)
        return (self.seen[:, None] + real.cumsum(dim=1) - 1).masked_fill(~real, EMPTY)

    def advance(self, T: int, real: Bool[Tensor, "B T"] | None, phase: Phase) -> Int[Tensor, "B T"]:
        """Count the new tokens of each row. Return their positions, -1 for padding."""
        positions = self.following(T, real)
        coming = T if real is None else real.sum(dim=1)
        self.seen.add_(coming)
        if phase is Phase.PREFILL:
            self.prompt.copy_(self.seen if isinstance(coming, int) else torch.where(coming > 0, self.seen, self.prompt))
        return positions

    def opened(self) -> Block:
        """The block as a step works on it, with slots and state side by side. What it writes is kept by `close`."""
        store = self.store.opened()
        if store is self.store:
            return self
        other = copy.copy(self)
        other.store = store
        other.state = self.state | {name: store.side_by_side(held) for name, held in self.of_slots().items()}
        return other

    def close(self, opened: Block) -> None:
        """Write slots and state of an opened block to where they lie in memory."""
        if opened is self:
            return
        opened.store.close()
        for name, held in self.of_slots().items():
            opened.store.put_back(held, opened.state[name])

    def remember(self, state: State) -> None:
        """Write the policy's state in place."""
        for name, tensor in state.items():
            if tensor is not self.state[name]:
                self.state[name].copy_(tensor)

    def spread(self, budget: Int[Tensor, "B Hk"]) -> None:
        """Give every head a budget of its own, and the layer as many slots as its largest head needs.

        The slots lose their content if their number grows. The caller must be about to fill them.
        """
        if isinstance(self.budget, Tensor) and self.budget.shape == budget.shape:
            self.budget.copy_(budget)  # in place, for blocks that share this memory
        else:
            self.budget = budget
        before, self.store = self.store.capacity, self.store.divided(budget + 1)
        if self.store.capacity != before:
            self._pad(self.store.capacity - before)

    def divide(self) -> None:
        """Give the heads, which share a pool, ranges for their budgets. The slots lose their content."""
        assert isinstance(self.store, PooledStore)
        assert isinstance(self.budget, Tensor)
        self.store.divide(self.budget + 1)

    def held(self) -> Int[Tensor, "B Hk"]:
        """The number of occupied slots of each head."""
        return (self.store.positions >= 0).sum(dim=-1)

    def budget_of(self, row: int) -> int:
        """The budget of a row, the sum over its heads."""
        heads, held = self.lost.shape[1], self.budget
        return held * heads if isinstance(held, int) else int(held[row].sum()) * heads // held.shape[1]

    def of_slots(self) -> State:
        """The policy's state of each slot."""
        return {name: tensor for name, tensor in self.state.items() if name not in self.heads}

    def per_row(self) -> dict[str, Tensor]:
        """Every tensor of the block by name. The first axis of each tensor is the rows.

        Moving, copying and selecting rows, and counting bytes, are all based on this list.
        """
        store = {f"store.{name}": tensor for name, tensor in self.store.per_row().items()}
        state = {f"state.{name}": tensor for name, tensor in self.state.items()}
        own = {name: getattr(self, name) for name in ("seen", "prompt", "sequences", "lost")}
        some = {name: getattr(self, name) for name in ("budget", "pins") if isinstance(getattr(self, name), Tensor)}
        return {**store, **state, **own, **some}

    def per_slot(self) -> frozenset[str]:
        """Names of the tensors of `per_row` whose third axis is the slots. The others belong to the row as a whole."""
        if isinstance(self.store, PooledStore):
            return frozenset()
        store, state = self.store.per_slot(), self.of_slots()
        return frozenset((*(f"store.{name}" for name in store), *(f"state.{name}" for name in state)))

    def widen(self, capacity: int) -> None:
        """Give every head more slots, and keep the content. The tensors are replaced."""
        missing = capacity - self.store.capacity
        if missing > 0:
            self.store = self.store.widened(capacity)
            self._pad(missing)

    def _pad(self, missing: int) -> None:
        """Replace the state of slots by tensors with more of them."""
        wider = {name: nn.functional.pad(tensor, (0, missing)) for name, tensor in self.of_slots().items()}
        self.state = self.state | wider

    def over(self: _Block, tensors: Mapping[str, Tensor]) -> _Block:
        """A block over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        other._take(tensors)
        return other

    def part(self: _Block, start: int, stop: int) -> _Block:
        """A range of rows as a block that shares this one's memory, and its budgets if these differ by row."""
        return self.over({name: tensor[start:stop] for name, tensor in self.per_row().items()})

    def move_row(self, source: int | slice, target: int | slice) -> None:
        """Copy one row over another, or several over as many others."""
        for tensor in self.per_row().values():
            tensor[target] = tensor[source]

    def under(self: _Block, starts: Mapping[str, float], heads: Mapping[str, str]) -> _Block:
        """The same slots for another policy, which uses the first of this block's state tensors.

        Args:
            starts: the policy's state of slots.
            heads: the policy's state of heads; this block has it under the names of `places`.
        """
        other = copy.copy(self)
        other.state = dict(zip(starts, self.of_slots().values(), strict=False))
        other.state |= {name: self.state[place] for name, place in places(heads).items()}
        other.heads = frozenset(heads)
        return other

    def select_rows(self, index: Int[Tensor, " n"]) -> None:
        """Row ``i`` becomes the former row ``index[i]``. Works in place if the number of rows stays the same."""
        found = {}
        for name, held in self.per_row().items():
            selected = held.index_select(0, index.to(held.device))
            found[name] = held.copy_(selected) if len(selected) == len(held) else selected
        self._take(found)

    def memory(self) -> Memory:
        """Bytes, summed over the tensors. The formula is in ``docs/layouts.md``."""
        if not self.store.room:
            return Memory()  # no rows
        everything, slots = bytes_of(self.per_row().values()), bytes_of(self.store.per_row().values())
        per_slot = (slots + bytes_of(self.of_slots().values())) // self.store.room
        return Memory(
            allocated_bytes=everything,
            occupied_bytes=per_slot * self.store.n_tokens,
            state_bytes=everything - slots,
            full_bytes=self.full_bytes(),
        )

    def full_bytes(self) -> int:
        """Bytes of keys and values of all tokens seen."""
        return int(self.seen.sum()) * self.store.token_bytes

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the block's tensors."""
        self.store = self.store.over({name: tensors[f"store.{name}"] for name in self.store.per_row()})
        self.state = {name: tensors[f"state.{name}"] for name in self.state}
        self.seen, self.prompt, self.sequences = (tensors[name] for name in ("seen", "prompt", "sequences"))
        self.lost = tensors["lost"]
        self.budget, self.pins = tensors.get("budget", self.budget), tensors.get("pins", self.pins)
