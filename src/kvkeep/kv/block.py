"""The memory that one layer allocates: slots, the policy's per-slot state, and the counters of each row."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from kvkeep import budget as budgets
from kvkeep import pins as spans
from kvkeep.errors import PolicyError, ShapeError
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.kv.slot_codec import Beside, KeyTransform, LazySlots, LazyView, Tokens
from kvkeep.kv.store import DenseStore, Store
from kvkeep.kv_bits import TRANSFORMS
from kvkeep.types import EMPTY, Budget, Earlier, MemoryUsage, Phase, Slots, State, Turning, View, bytes_of

# A policy's state of each head: one tensor for all of a head's slots, and for the tokens that have left them.


def empty(axes: Mapping[str, str], keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> State:
    """Return the states of heads that have seen no token: float32 zeros of the shape (B, Hk, then each of the axes).

    Args:
        axes: the policy's `summaries`, name → axes: "D", "E", both with a space between, or "" for none.
        keys: keys of the heads.
        values: values of the heads.

    Raises:
        PolicyError: an axis is neither the keys' nor the values'.
    """
    sizes = {"D": keys.shape[-1], "E": values.shape[-1]}
    found = {}
    for name, letters in axes.items():
        if unknown := set(letters.split()) - sizes.keys():
            raise PolicyError(
                f"A summary of the policy has the axes {letters!r}, and a head has no {min(unknown)!r}. An axis is D, "
                "the head dim of keys, or E, that of values, with spaces between: 'D E'."
            )
        shape = (*keys.shape[:2], *(sizes[axis] for axis in letters.split()))
        found[name] = keys.new_zeros(shape, dtype=torch.float32)
    return found


def places(axes: Mapping[str, str]) -> dict[str, str]:
    """Return, for each head state that a policy declares, its name in a block that several policies share: its axes,
    ``#`` and a number from 0. ``{"query": "D"}`` gives ``{"query": "D#0"}``.

    The n-th state with some axes has the same name in every policy, so different policies use the same tensor.
    """
    found: dict[str, str] = {}
    for name, letters in axes.items():
        found[name] = f"{letters}#{sum(place.partition('#')[0] == letters for place in found.values())}"
    return found


def shared(axes: Mapping[str, str]) -> dict[str, str]:
    """Return a policy's head states under their names in a shared block, see `places`: ``{"query": "D"}`` becomes
    ``{"D#0": "D"}``. The axes stay.
    """
    return {place: axes[name] for name, place in places(axes).items()}


def numbers(axes: Mapping[str, str], *, key_dim: int, value_dim: int) -> int:
    """Count the numbers in all states that one head of one row has with these axes, see `empty`."""
    # only shapes are counted: on the meta device nothing is allocated
    keys, values = (torch.empty((1, 1, 0, dim), device="meta") for dim in (key_dim, value_dim))
    return sum(tensor.numel() for tensor in empty(axes, keys, values).values())


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
        lost: attention mass of each head, see `kvkeep.kv.lost_mass`.
        budget: slots that may stay occupied, one number or one per row.
        pins: bounds of each row's pinned spans, see `kvkeep.kv.ranking.pinned`; ``None`` if no row has any.
        lead: how many first positions stay in every row, if pins and `keep_prompt` protect no others; 0: they may
            protect others, or none.

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
    lead: int = 0

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
            # + 1: a new token is written and attended before another one is evicted
            self.store = store(keys, values, capacity=budgets.largest(numbers) + 1)
        self.state = {name: self.store.numbers(start) for name, start in starts.items()}
        self.state |= empty(heads, keys, values)
        self.heads = frozenset(heads)
        self.seen = torch.zeros(B, dtype=torch.int64, device=device)
        self.prompt = torch.zeros(B, dtype=torch.int64, device=device)
        self.sequences = torch.tensor(sequences or [0] * B, dtype=torch.int64, device=device)
        self.lost = torch.zeros((B, Hk, 4), dtype=torch.float32, device=device)

    def clear(self) -> None:
        """Empty every slot, and reset counters and states of heads. Budgets and pins stay.

        States of slots are left: a new token overwrites them.
        """
        for name in self.heads:
            self.state[name].zero_()
        self.store.clear(slice(None))
        for counter in (self.seen, self.prompt, self.lost):
            counter.zero_()

    def clear_row(self, row: int | slice) -> None:
        """Empty one row, or several: slots, states of heads, counters and pins. The budget stays.

        States of slots are left: a new token overwrites them.
        """
        for name in self.heads:
            self.state[name][row] = 0.0
        self.store.clear(row)
        self.seen[row] = self.prompt[row] = self.lost[row] = 0
        if self.pins is not None:
            self.pins[row] = spans.LAST  # bounds beyond all positions pin nothing

    def transform_keys(self, transform: KeyTransform | None, rows: Bool[Tensor, " B"] | slice) -> None:
        """Set what is done to the keys of empty rows before they are coded; ``None``: nothing but `hadamard`.

        Do nothing if the store's keys have no exponents and normals, see `KeyTransform`.

        Args:
            transform: that of one row, which all of these get.
            rows: rows without tokens: codes that are held already could not be decoded any more.
        """
        held, new = self.store.per_row(), {} if transform is None else transform.of_rows
        for name in held.keys() & set(TRANSFORMS):
            # exponents and normals of 0 leave keys as they are
            held[name][rows] = new[name].to(held[name].device) if name in new else 0

    def following(self, T: int, real: Bool[Tensor, "B T"] | None) -> Int[Tensor, "B T"]:
        """Return the positions that the next ``T`` tokens of each row will have, -1 for padding. Nothing is counted.

        They go on from the number of tokens seen, and padding takes none. Without ``real`` no token is padding.
        """
        if real is None:
            # for one token an operation less, in every layer of a decode step
            return self.seen[:, None] + (torch.arange(T, device=self.seen.device) if T > 1 else 0)
        return (self.seen[:, None] + real.cumsum(dim=1) - 1).masked_fill(~real, EMPTY)

    def advance(self, T: int, real: Bool[Tensor, "B T"] | None, phase: Phase) -> Int[Tensor, "B T"]:
        """Count the new tokens of each row as seen. Return their positions, -1 for padding.

        In a prefill, also set where the prompt of each row that got a token ends.
        """
        positions = self.following(T, real)
        coming = T if real is None else real.sum(dim=1)
        self.seen.add_(coming)  # in place: recorded steps read it at its address
        if phase is Phase.PREFILL:
            # a row of padding alone has read nothing: its prompt ends where it did
            self.prompt.copy_(self.seen if isinstance(coming, int) else torch.where(coming > 0, self.seen, self.prompt))
        return positions

    def opened(self, *, in_place: bool = False) -> Block:
        """Return the block as a step works on it, with slots and state side by side. Without a pool this is the block
        itself.

        `close` writes back what the step changes.

        Args:
            in_place: whether the step leaves the heads' budgets as they are. Then nothing is copied where slots and
                state can be used where they lie.
        """
        if not isinstance(self.store, PooledStore):
            return self
        other, view = copy.copy(self), self.store.even() if in_place else None
        if view is None:
            other.store = self.store.opened()
            own = {name: other.store.side_by_side(held) for name, held in self.of_slots().items()}
        else:
            other.store = self.store.seen_by(view)
            own = {name: view.of(held) for name, held in self.of_slots().items()}
        other.state = self.state | own
        return other

    def close(self, opened: Block) -> None:
        """Write the slots and the state of an opened block back into this one. If both are the same, do nothing."""
        if opened is self:
            return
        opened.store.close()
        for name, held in self.of_slots().items():
            opened.store.put_back(held, opened.state[name])

    def remember(self, state: State) -> None:
        """Copy a policy's new state into the block's tensors, in place."""
        for name, tensor in state.items():
            if tensor is not self.state[name]:  # a policy may return the tensor that it was given
                self.state[name].copy_(tensor)

    def spread(self, budget: Int[Tensor, "B Hk"]) -> None:
        """Set a budget for each head, and give the heads slots for it.

        The slots lose their content in a pool, and wherever their number grows: the caller must be about to fill them.

        Raises:
            ShapeError: the pool of a row has too few slots (checked on a CPU only).
        """
        if isinstance(self.budget, Tensor) and self.budget.shape == budget.shape:
            self.budget.copy_(budget)  # in place, for blocks that share this memory
        else:  # until now the heads of a row had one number
            self.budget = budget
        # + 1: a new token is written and attended before another one is evicted
        before, self.store = self.store.capacity, self.store.divided(budget + 1)
        if self.store.capacity != before:
            self._pad(self.store.capacity - before)

    def pin(self, rows: Sequence[spans.Spans]) -> None:
        """Replace the pinned spans of all rows."""
        self.pins = spans.table(rows, self.seen.device)

    def equal_budgets(self) -> Int[Tensor, "B 1"] | None:
        """Return the budget of one head in each row if in every row all heads have the same one, otherwise ``None``.

        Of a `JointBlock` these are the heads of all layers.
        """
        budget = budgets.table(self.budget, self.sequences)  # of which each row has one, also in a `JointBlock`
        return budget[:, :1] if bool((budget == budget[:, :1]).all()) else None

    def divide(self) -> None:
        """Give each head as many slots of the pool as its budget, and one more. The slots lose their content."""
        assert isinstance(self.store, PooledStore)
        assert isinstance(self.budget, Tensor)
        self.store.divide(self.budget + 1)

    def held(self) -> Int[Tensor, "B Hk"]:
        """Return the number of occupied slots of each row and head."""
        return (self.store.positions >= 0).sum(dim=-1)

    def budget_of(self, row: int) -> int:
        """Return the budget of a row, summed over its heads."""
        heads, held = self.lost.shape[1], self.budget
        # a table of one column holds for each head
        return held * heads if isinstance(held, int) else int(held[row].sum()) * heads // held.shape[1]

    def of_slots(self) -> State:
        """Return the state tensors that have one number for each slot, by name: all but those of heads. Not copied."""
        return {name: tensor for name, tensor in self.state.items() if name not in self.heads}

    def per_row(self) -> dict[str, Tensor]:
        """Return every tensor of the block by name. The first axis of each tensor is the rows. The budget and the pins
        are among them where they are tensors.

        Moving, copying and selecting rows, and counting bytes, are all based on this list.
        """
        store = {f"store.{name}": tensor for name, tensor in self.store.per_row().items()}
        state = {f"state.{name}": tensor for name, tensor in self.state.items()}
        own = {name: getattr(self, name) for name in ("seen", "prompt", "sequences", "lost")}
        some = {name: getattr(self, name) for name in ("budget", "pins") if isinstance(getattr(self, name), Tensor)}
        return {**store, **state, **own, **some}

    def per_slot(self) -> frozenset[str]:
        """Return the names of the tensors of `per_row` whose third axis is the slots. The others belong to the row
        as a whole.

        A pool has no such tensors.
        """
        if isinstance(self.store, PooledStore):
            return frozenset()  # state, too, has one axis for the entries of all heads
        store, state = self.store.per_slot(), self.of_slots()
        return frozenset((*(f"store.{name}" for name in store), *(f"state.{name}" for name in state)))

    def widen(self, capacity: int) -> None:
        """Give every head at least ``capacity`` slots, and keep the content. If there were fewer, the tensors are
        replaced.
        """
        missing = capacity - self.store.capacity
        if missing > 0:
            self.store = self.store.widened(capacity)
            self._pad(missing)

    def _pad(self, missing: int) -> None:
        """Replace the state of slots by tensors with ``missing`` more slots; if negative, with so many fewer."""
        # filled with anything: a new token overwrites it
        wider = {name: nn.functional.pad(tensor, (0, missing)) for name, tensor in self.of_slots().items()}
        self.state = self.state | wider

    def over(self: _Block, tensors: Mapping[str, Tensor]) -> _Block:
        """Return a block of the same kind over other tensors, named as in `per_row`."""
        other = copy.copy(self)
        other._take(tensors)
        return other

    def part(self: _Block, start: int, stop: int) -> _Block:
        """Return the rows from ``start`` to ``stop`` as a block that shares this one's memory."""
        return self.over({name: tensor[start:stop] for name, tensor in self.per_row().items()})

    def move_row(self, source: int | slice, target: int | slice) -> None:
        """Copy the content of row ``source`` over row ``target``; or several rows over as many others."""
        for tensor in self.per_row().values():
            tensor[target] = tensor[source]

    def under(self: _Block, starts: Mapping[str, float], heads: Mapping[str, str]) -> _Block:
        """Return a block over the same tensors whose state has another policy's names; state that it lacks is left out.

        Args:
            starts: the policy's state of slots: its i-th name stands for this block's i-th state of slots.
            heads: the policy's state of heads; this block has it under the names of `places`.
        """
        other = copy.copy(self)
        # not strict: another policy of the same block may have more states
        other.state = dict(zip(starts, self.of_slots().values(), strict=False))
        other.state |= {name: self.state[place] for name, place in places(heads).items()}
        other.heads = frozenset(heads)
        return other

    def select_rows(self, index: Int[Tensor, " n"]) -> None:
        """Replace row ``i`` by the former row ``index[i]``.

        The tensors are replaced only if the number of rows changes.
        """
        found = {}
        for name, held in self.per_row().items():
            selected = held.index_select(0, index.to(held.device))
            found[name] = held.copy_(selected) if len(selected) == len(held) else selected
        self._take(found)

    def memory(self) -> MemoryUsage:
        """Return the memory usage of all rows, in bytes; zeros without rows. ``docs/layouts.md`` has the formula."""
        if not self.store.room:
            return MemoryUsage()  # no rows
        everything = bytes_of(self.per_row().values())
        # transforms belong to rows: no slot takes a part of them
        slots = bytes_of(tensor for name, tensor in self.store.per_row().items() if name not in TRANSFORMS)
        per_slot = (slots + bytes_of(self.of_slots().values())) // self.store.room
        return MemoryUsage(
            allocated_bytes=everything,
            occupied_bytes=per_slot * self.store.n_tokens,
            state_bytes=everything - slots,
            full_bytes=self.full_bytes(),
        )

    def full_bytes(self) -> int:
        """Return the bytes that keys and values of all tokens seen, evicted ones too, have in the model's dtype."""
        return int(self.seen.sum()) * self.store.token_bytes

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace the block's tensors by others, named as in `per_row`. A budget or pins that are missing stay."""
        self.store = self.store.over({name: tensors[f"store.{name}"] for name in self.store.per_row()})
        self.state = {name: tensors[f"state.{name}"] for name in self.state}
        self.seen, self.prompt, self.sequences = (tensors[name] for name in ("seen", "prompt", "sequences"))
        self.lost = tensors["lost"]
        self.budget, self.pins = tensors.get("budget", self.budget), tensors.get("pins", self.pins)


# State for several policies in one block: the rows of an engine belong to sequences under different policies.


def lacks(block: Block, starts: Mapping[str, float], heads: Mapping[str, str]) -> int:
    """Return how many bytes `add_state` would allocate for a policy; 0 if the block has all that it needs.

    Args:
        block: a block whose state has general names: numbers for slots, `places` for heads.
        starts: the policy's state of slots.
        heads: the policy's state of heads.
    """
    missing = max(0, len(starts) - len(block.of_slots())) * 4 * block.store.room  # states are float32
    return missing + bytes_of(_missing(block, heads, "meta").values())


def add_state(block: Block, starts: Mapping[str, float], heads: Mapping[str, str]) -> None:
    """Add the state tensors that a policy needs and the block lacks. The arguments are those of `lacks`.

    Existing tensors stay the same objects.
    """
    for i in range(len(block.of_slots()), len(starts)):
        block.state[str(i)] = block.store.numbers(0.0)  # any number: a new token's state is written with it
    block.state |= _missing(block, heads)
    block.heads = block.heads.union(shared(heads))


def _missing(block: Block, heads: Mapping[str, str], device: str | None = None) -> State:
    """Return zeros for the head states that a policy needs and a block lacks, by their names of `places`.

    Args:
        block: the block.
        heads: the policy's state of heads.
        device: where the zeros are made: by default on the block's device, and on ``meta`` without memory, to be
            counted.
    """
    missing = {place: axes for place, axes in shared(heads).items() if place not in block.heads}
    if not missing:
        return {}
    keys, values = (x.to(device) for x in block.store.no_token())
    return empty(missing, keys, values)


# A block's slots as a policy sees them.


def view_of(  # noqa: PLR0913  the attributes of a view
    block: Block,
    slots: Slots,
    *,
    new: Int[Tensor, " B"],
    phase: Phase,
    layer: int,
    earlier: Earlier | None = None,
    rotation: Turning | None = None,
    turned: bool = True,
    heads: Heads = ALONE,
    pins: Int[Tensor, "B bounds"] | None = None,
) -> View:
    """Return slots, alone or with a chunk behind them, as the view that a policy gets. The counters are the block's
    own tensors.

    Args:
        block: the block.
        slots: keys, values and positions.
        new: real tokens that each row received.
        phase: the kind of these tokens.
        layer: index of the layer in the model.
        earlier: see `View`.
        rotation: see `View`.
        turned: see `View`.
        heads: see `View`.
        pins: see `View`; by default those of the block.
    """
    others: dict[str, Any] = {
        "seen": block.seen,
        "budget": block.budget,
        "new": new,
        "prompt": block.prompt,
        "phase": phase,
        "layer": layer,
        "sequences": block.sequences,
        "earlier": earlier,
        "pins": block.pins if pins is None else pins,
        "rotation": rotation,
        "turned": turned,
        "heads": heads,
    }
    if isinstance(slots, LazySlots):
        return LazyView.of(slots, **others)
    return View(slots.positions, slots.keys, slots.values, **others)


# A chunk of a prompt beside the slots of a block: what is attended to, and where the tokens go that stay.

_Index: TypeAlias = tuple[slice | Tensor, ...]

_ALL = slice(None), slice(None)
"""An index of all rows and heads."""


def beside(block: Block, new: Slots, *, starts: Mapping[str, float], used: int) -> tuple[Slots, State]:
    """Return the first ``used`` slots followed by new tokens, and the policy's state of both.

    Keys and values of slots are not copied where the store can show them in place.

    Args:
        block: the slots.
        new: the new tokens.
        starts: the state of a new token.
        used: number of slots; 0 if all are empty.
    """
    # the positions of a chunk are the same in all heads, and may come once for all
    new = new._replace(positions=new.positions.expand(new.keys.shape[:3]))
    state = {name: block.state[name].new_full(new.positions.shape, start) for name, start in starts.items()}
    heads = {name: block.state[name] for name in block.heads}
    if not used:
        return new, state | heads
    found = {name: _joined(block.state[name], chunk, used) for name, chunk in state.items()} | heads
    # attention reads such slots where they lie, so they are not copied in front of the chunk
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
    """Store the outcome of an eviction: empty the slots of the tokens that go, and put the chunk's tokens that stay
    into the first empty slots.

    The ``n`` tokens of a head then lie in its first ``n`` slots: a token beyond them goes into an empty slot before the
    chunk's. No other token is moved. The slot of a token depends on its own row and head only.

    Args:
        block: the slots, which have room for all tokens that stay.
        view: the block's first slots, followed by the chunk; or other slots.
        stays: whether each token stays.
        state: the policy's state of slots, for these tokens.
        used: number of slots among the tokens.
        chunk: the chunk; ``None``: none of the tokens has a slot in the block any more.
        tokens: what `Store.tokens` has returned for these tokens; ``None``: call it now.
    """
    # slots that need no copy have stayed in place, so only what changes is written
    if chunk is not None and block.store.lying(used) is not None:
        _add(block, chunk, stays, state)
        return
    capacity = block.store.capacity
    index = _sources(stays, 0 if chunk is None else used, capacity)
    # -1 marks a slot that stays empty, and becomes 0 only so that it can be read
    there, index = index >= 0, index.clamp(min=0)
    kept = view.positions.gather(-1, index).masked_fill(~there, EMPTY)
    block.store.take(tokens or block.store.tokens(view, used=used), kept, index)
    for name, numbers in state.items():
        block.state[name][..., :capacity] = numbers.gather(-1, index)


def _add(block: Block, chunk: Slots, stays: Bool[Tensor, "B Hk S"], state: State) -> None:
    """Do what `settle` does where slots lie side by side: tokens that stay in their slots are not copied, and each of
    the chunk's tokens is written once.
    """
    slots, used = block.store.slots(), stays.shape[-1] - chunk.positions.shape[-1]
    held, coming = stays[..., :used], stays[..., used:]
    slots.positions[..., :used].masked_fill_(~held, EMPTY)
    slots.positions[..., used:] = EMPTY
    for name, numbers in state.items():
        block.state[name][..., :used] = numbers[..., :used]
    # a head that keeps fewer tokens than others has its last ones beyond the slots that stay in use
    _close_gaps(block, stays.sum(dim=-1, keepdim=True), state)
    at, of = _pairs(slots.positions < 0, coming, used)
    slots.keys[at] = chunk.keys[of]
    slots.values[at] = chunk.values[of]
    slots.positions[at] = chunk.positions.expand(coming.shape)[of].to(slots.positions.dtype)
    for name, numbers in state.items():
        block.state[name][at] = numbers[..., used:][of].to(block.state[name].dtype)


def _close_gaps(block: Block, n: Int[Tensor, "B Hk 1"], state: State) -> None:
    """Move tokens that lie beyond the first ``n`` slots of their head into its first empty slots."""
    slots = block.store.slots()
    beyond = (slots.positions >= 0) & (torch.arange(block.store.capacity, device=n.device) >= n)
    if not beyond.any():
        return
    at, of = _pairs(slots.positions < 0, beyond, block.store.capacity)
    for tensor in (*slots, *(block.state[name] for name in state)):
        tensor[at] = tensor[of]
    slots.positions[of] = EMPTY


def _pairs(free: Bool[Tensor, "B Hk capacity"], coming: Bool[Tensor, "B Hk T"], used: int) -> tuple[_Index, _Index]:
    """Return two matching indices: the first empty slots of each head, and the tokens that go there, in their order.

    Args:
        free: whether each slot is empty.
        coming: whether each token needs a slot.
        used: where new tokens go if all of them come and no slot before is empty.
    """
    stop = used + coming.shape[-1]
    # the usual case, a first prompt within the budget: slices copy faster than indices
    if stop <= free.shape[-1] and not free[..., :used].any() and coming.all():
        return (*_ALL, slice(used, stop)), _ALL
    chosen = free & (free.cumsum(dim=-1) <= coming.sum(dim=-1, keepdim=True))
    return chosen.nonzero(as_tuple=True), coming.nonzero(as_tuple=True)


def _sources(stays: Bool[Tensor, "B Hk S"], used: int, capacity: int) -> Int[Tensor, "B Hk capacity"]:
    """Return for each slot the index of the token that it will hold, among the first ``used`` slots and the chunk
    behind them; -1 for an empty slot.
    """
    (S, device), n = (stays.shape[-1], stays.device), stays.sum(dim=-1, keepdim=True)
    places = torch.arange(max(capacity, S), device=device)
    held = nn.functional.pad(stays[..., :used], (0, capacity - used)) & (places[:capacity] < n)
    coming = stays & ~nn.functional.pad(held[..., :used], (0, S - used))
    free = held.int().argsort(dim=-1, stable=True)  # the empty slots first
    # clamped for tokens that are not coming: they go to a slot behind the last one, which is cut off below
    nth = (coming.cumsum(dim=-1) - 1).clamp(min=0, max=capacity - 1)
    target = free.gather(-1, nth).masked_fill(~coming, capacity)
    found = nn.functional.pad(torch.where(held, places[:capacity], -1), (0, 1))
    return found.scatter(-1, target, places[:S].expand_as(target))[..., :capacity]


def _joined(slots: Tensor, chunk: Tensor, used: int) -> Tensor:
    """Return per-slot numbers of the first ``used`` slots, followed by those of a chunk."""
    return torch.cat([slots[:, :, :used], chunk], dim=2)
