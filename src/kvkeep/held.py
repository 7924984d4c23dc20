"""The block that a layer holds between its steps: allocated, handed over, selected from, forgotten and counted.

A step that is like the last one but for its tokens is made here, too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.asked import Asked
from kvkeep.backends import Backend, Repeat, choose, in_codes, in_pool
from kvkeep.budget import Number, by_head
from kvkeep.capacity import check_room
from kvkeep.errors import ShapeError
from kvkeep.eviction import fuses
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv.block import Block
from kvkeep.kv.cascade import Alone, Cascade
from kvkeep.kv.memory_usage import Memory
from kvkeep.kv.pooled_store import PooledStore, kind_of
from kvkeep.kv.row_copy import RowCopy
from kvkeep.kv.store import Store, inference
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.repeating import Repeating
from kvkeep.rotary import Rotation
from kvkeep.together import Together
from kvkeep.types import AttentionOptions, Phase, State

_Layer = TypeVar("_Layer", bound="Held")


class Held:
    """A policy and the block of one layer.

    Args:
        policy: the eviction policy.
        index: the layer's number in the model.
        rotation: the model's rotary embedding, for slot positions.
        cascade: the tables that this layer shares with others under a policy that prunes through the layers.
        together: the layers that share their budget with this one.
        sequences: identity of each row for randomness.
        pins: spans that the policy may not evict.
        kv_bits: bits of keys and values in the slots, a name of `kvkeep.kv.slot_codec.KV_BITS`; ``None``: the model's
        dtype.

    Attributes: see `kvkeep.Layer`.
    """

    block: Block
    budgets: tuple[Number, ...]
    window: int | None
    rotary: Rotation | None = None
    heads: Heads = ALONE
    _together: Together | None = None
    _repeating: Repeating | None = None
    _backend: Backend
    _kind: type[Store]

    def __init__(
        self,
        policy: Policy,
        *,
        index: int,
        rotation: Rotation | None,
        cascade: Cascade | None,
        together: Together | None,
        sequences: Sequence[int] | None,
        pins: Sequence[Spans],
        kv_bits: str | None,
    ):
        self.policy, self._asked = policy, Asked(policy)
        self.columns, self.moves, self.allocated, self.broken, self._made = 0, 0, False, False, False
        self._index, self._rotation, self._sequences, self._pins = index, rotation, sequences, pins
        self._shared = (cascade or policy.cascades(index)) if policy.cascades else Alone()
        self._kind = store_for(policy, self.budgets, kv_bits)
        self._together = together

    def reset(self) -> None:
        """Forget everything. The memory stays allocated, unless rows were selected or restored, or heads differ."""
        self.columns, self.moves, self.broken, moves, self._repeating = 0, 0, False, self.moves, None
        self._shared.clear()
        if self._together is not None:
            self._together.clear()
        self.allocated &= self._made and not moves and not self.policy.spreads  # else budgets or pins may be others now
        if self.allocated:
            self.block.clear()

    def mend(self, moves: int) -> None:
        """Forget steps that have not ended, after the block was filled anew; ``moves``: those of the first layer."""
        self.broken, self.moves = False, moves
        if self._together is not None:
            self._together.clear()

    @inference
    def select_rows(self, index: Int[Tensor, " n"]) -> None:
        """Row ``i`` becomes what row ``index[i]`` was; the number of rows may change."""
        if self.allocated:
            self.moves += 1
            broken, self.broken = self.broken, True  # until all rows have moved
            self.block.select_rows(index)
            self._shared.select_rows(self._index, index)
            self.broken = broken

    def over(
        self: _Layer,
        block: Block,
        *,
        columns: int,
        cascade: Cascade | None = None,
        together: Together | None = None,
    ) -> _Layer:
        """A copy of this layer over a block that somebody else owns and that has seen ``columns`` columns."""
        other = copy.copy(self)
        other.hold(block, columns=columns)
        other._together = together
        other._shared, other._asked = cascade or Alone(), Asked(self.policy)
        return other

    def memory(self) -> Memory:
        """Bytes of this layer; zeros before the first step."""
        if not self.allocated:
            return Memory()
        shared = self._shared.bytes(self._index)
        return self.block.memory() + Memory(allocated_bytes=shared, state_bytes=shared)

    @property
    def store(self) -> Store:
        """Keys, values and positions."""
        return self.block.store

    @property
    def state(self) -> State:
        """The policy's state, of slots and of heads. A copy where heads share a pool."""
        return self.block.opened().state

    @property
    def seen(self) -> Int[Tensor, " B"]:
        """Real tokens seen per row."""
        return self.block.seen

    def new_block(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> Block:
        """An empty block for such keys and values. It is not yet the layer's own."""
        given: dict[str, Any] = {
            "numbers": self.budgets,
            "starts": self.policy.slots,
            "heads": self.policy.summaries,
            "sequences": self._sequences,
            "pins": self._pins,
            "store": self._kind,
        }
        if self._together is not None:
            return self._together.block(self._index, keys, values, **given)
        room = self.heads.ranks if self.policy.spreads else 1
        block = Block(keys, values, room=room, **given)
        reach(block, self.policy, self.budgets, self.heads)
        return block

    def like(self, copy: RowCopy, dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
        """Keys and values of no token, of a row of this layer; arguments as for `Store.like`."""
        held = {name.removeprefix("store."): x[None] for name, x in copy.tensors.items() if name.startswith("store.")}
        return self._kind.like(held, dtype)

    def hold(self, block: Block, *, columns: int, own: bool = False) -> None:
        """Use a block that has seen ``columns`` columns; ``own``: with the layer's budgets and pins."""
        self.block, self.columns, self._kind = block, columns, type(block.store)
        self.allocated, self._made, self._repeating = True, own, None
        pooled, turned = isinstance(block.store, PooledStore), self._rotation is not None
        backend = choose(block.seen.device, block.store.dtype)
        backend = backend if self._rotation is None else backend.at_ranks(self._rotation)
        if block.store.bits is not None:
            backend = in_codes(backend, turned=turned)
        self._backend = in_pool(backend) if pooled else backend
        self._fuses = fuses(self.policy, self._backend, window=self.window, even=not pooled)

    def _open(self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"]) -> None:
        """Allocate the block on the first step; later, check that the tensors fit it."""
        if keys.shape[2] == 0:
            raise ShapeError("There are no tokens: the prompt is empty.")
        if not self.allocated or not (self.columns or self.store.fits(keys, values)):
            self.heads.check(keys.shape[1])
            self.hold(self.new_block(keys, values), columns=self.columns, own=True)
        self.store.check_fit(keys, values)

    def repeat(
        self, options: AttentionOptions, run: Callable[[Repeat], Float[Tensor, "*n"] | None]
    ) -> Float[Tensor, "*n"] | None:
        """Let somebody else make a decode step that differs from the last one in its tokens alone.

        Args:
            options: what the model's attention asks for.
            run: makes the step and adds each row's token to `Block.seen`; if it returns ``None``, nothing has changed.

        Returns:
            What ``run`` returned; ``None`` if there is no such step, or if it could not be made.

        Raises:
            CapacityError: the policy does not evict and the budget is exhausted.
        """
        repeating = self._repeating
        if repeating is None or not self._may_go_on(repeating, options):
            return None
        return self._made_again(repeating, lambda: run(repeating.call))

    def _again(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """A decode step like the last one; ``None`` if it is another one, and then nothing has changed."""
        repeating, block, self._repeating = self._repeating, self.block, None
        if repeating is None or not self._may_go_on(repeating, options):
            return None
        if not repeating.call.takes(query, keys, values):
            return None

        def run() -> Tensor | None:
            out = repeating.call(query, keys, values, block.advance(1, None, Phase.DECODE))
            if out is None:
                block.seen.sub_(1)
            return out

        return self._made_again(repeating, run)

    def _may_go_on(self, repeating: Repeating, options: AttentionOptions) -> bool:
        """Whether a step that has these options may be the last one for other tokens."""
        if self.broken or torch.is_grad_enabled() or torch.compiler.is_compiling():  # a trace has no addresses
            return False
        return self._asked.remembers(self.block.prompt, self.block.budget) and repeating.is_same(self.block, options)

    def _made_again(self, repeating: Repeating, run: Callable[[], Tensor | None]) -> Tensor | None:
        """What ``run`` returns, which makes the step; ``None`` if it could not, and then nothing has changed."""
        self._repeating = None
        check_room(self.policy, self.block, 1, None, phase=Phase.DECODE, window=self.window)
        self.broken = True  # until the step has ended
        out = run()
        if out is not None:
            self.columns, self._repeating = self.columns + 1, repeating
        self.broken = False
        return out

    def _may_repeat(self) -> bool:
        """Whether the next step may be like this one but for its tokens."""
        block = self.block
        if self._together is not None or not block.store.in_place or isinstance(block.budget, Tensor):
            return False
        return not torch.compiler.is_compiling() and self._asked.remembers(block.prompt, block.budget)


def store_for(policy: Policy, numbers: Sequence[Number], kv_bits: str | None = None) -> type[Store]:
    """The kind of store for a policy under these budgets of rows: a pool where heads have budgets of their own.

    Args:
        policy: the policy.
        numbers: the budgets.
        kv_bits: bits of keys and values, a name of `kvkeep.kv.slot_codec.KV_BITS`; ``None``: the model's dtype.
    """
    return kind_of(kv_bits, pooled=bool(policy.spreads) or any(isinstance(number, tuple) for number in numbers))


def reach(block: Block, policy: Policy, numbers: Sequence[Number], among: Heads = ALONE) -> None:
    """Tell a block's pool, if it has one, how many slots a head may get when the policy shares budgets among heads."""
    store = block.store
    if not isinstance(store, PooledStore) or policy.spreads is None:
        return
    heads = store.sizes.shape[1]
    means = {-(-sum(each) // heads) for each in by_head(numbers, heads)}
    most = max(policy.spreads.most(policy, mean, heads * among.ranks) for mean in means)
    store.widest = max(store.widest, min(most + 1, store.entries.shape[1] - 1))
