"""The steps of one layer: append → attend → observe → evict.

A `Layer` owns a fixed number of slots per row and KV head, and the policy that decides which tokens stay in them. It
knows nothing of transformers: `kvkeep.cache.bounded_cache` and the engine drive it. ``docs/layouts.md`` draws its
tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, SupportsIndex, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.attention_stats import Statistic
from kvkeep.backends import Backend, Repeat, choose, in_codes, in_pool
from kvkeep.budget import Number, by_head
from kvkeep.cache.decode_replay import CachedStatistic, Repeating, one_each
from kvkeep.cache.eviction import append, check_pins, check_room, cut, evict, fused, fuses, repeated
from kvkeep.cache.shared_budget import SharedBudget
from kvkeep.errors import BrokenCacheError, BudgetError, ShapeError, UnsupportedOperationError
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv import lost_mass, ranking
from kvkeep.kv.block import Block, beside, view_of
from kvkeep.kv.cascade import Cascade, NoCascade
from kvkeep.kv.memory_usage import MemoryUsage
from kvkeep.kv.pooled_store import PooledStore, kind_of
from kvkeep.kv.row_copy import RowCopy
from kvkeep.kv.slot_codec import at
from kvkeep.kv.store import Store, inference
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Fresh, OutputProjection, Phase, Queries, Report, Slots, State, View

# The block that a layer holds between its steps: allocated, handed over, selected from, forgotten and counted.
#
# A step that is like the last one but for its tokens is made here, too.

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
    _together: SharedBudget | None = None
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
        together: SharedBudget | None,
        sequences: Sequence[int] | None,
        pins: Sequence[Spans],
        kv_bits: str | None,
    ):
        self.policy, self._asked = policy, CachedStatistic(policy)
        self.columns, self.moves, self.allocated, self.broken, self._made = 0, 0, False, False, False
        self._index, self._rotation, self._sequences, self._pins = index, rotation, sequences, pins
        self._shared = (cascade or policy.cascades(index)) if policy.cascades else NoCascade()
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
        together: SharedBudget | None = None,
    ) -> _Layer:
        """A copy of this layer over a block that somebody else owns and that has seen ``columns`` columns."""
        other = copy.copy(self)
        other.hold(block, columns=columns)
        other._together = together
        other._shared, other._asked = cascade or NoCascade(), CachedStatistic(self.policy)
        return other

    def memory(self) -> MemoryUsage:
        """Bytes of this layer; zeros before the first step."""
        if not self.allocated:
            return MemoryUsage()
        shared = self._shared.bytes(self._index)
        return self.block.memory() + MemoryUsage(allocated_bytes=shared, state_bytes=shared)

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


# The parts of a prompt's step: its chunks, its second reading, and the queries that a policy may ask for.


def chunk_size(chunk: object) -> int | None:
    """Check the number of a prompt's tokens that are taken at once; ``None``: all of them.

    Raises:
        BudgetError: it is no whole number, or below 1.
    """
    if chunk is None:
        return None
    if not isinstance(chunk, SupportsIndex) or isinstance(chunk, bool) or int(chunk) < 1:
        raise BudgetError(f"The prefill chunk {chunk} is no whole number of 1 or more tokens.")
    return int(chunk)


def in_chunks(
    step: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor],
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk T D"],
    values: Float[Tensor, "B Hk T E"],
    *,
    real: Bool[Tensor, "B T"] | None,
    size: int,
) -> Float[Tensor, "B Hq T E"]:
    """Run ``step`` on ``size`` real tokens of each row at a time, and put the outputs back in their columns.

    Chunks are cut in tokens, not in columns, so padding never moves a cut.

    Args:
        step: takes queries, keys, values and which of their columns are real (``None``: all); returns the output.
        query: queries.
        keys: keys.
        values: values.
        real: which columns are real; ``None``: all.
        size: tokens of a chunk.
    """
    T = query.shape[2]
    if size >= T:
        return step(query, keys, values, real)
    if real is None:
        parts = zip(*(x.split(size, dim=2) for x in (query, keys, values)), strict=True)
        return torch.cat([step(q, k, v, None) for q, k, v in parts], dim=2)
    order = real.int().argsort(dim=1, descending=True, stable=True)  # real tokens first, in their order
    front = [x.gather(2, order[:, None, :, None].expand_as(x)).split(size, dim=2) for x in (query, keys, values)]
    pieces = zip(*front, real.gather(1, order).split(size, dim=1), strict=True)
    out = torch.cat([step(q, k, v, r) for q, k, v, r in pieces], dim=2)
    return torch.empty_like(out).scatter_(2, order[:, None, :, None].expand_as(out), out)


def for_prompt(
    policy: Policy,
    view: View,
    query: Float[Tensor, "B Hq T D"],
    positions: Int[Tensor, "B T"],
    output: OutputProjection | None,
) -> View:
    """The view of a prompt, with what only a prompt shows to a policy that asks for it.

    Args:
        policy: `Abilities.asks` and `Abilities.projects` say what it looks at.
        view: the slots and the chunk.
        query: the chunk's queries, rotated like the keys.
        positions: their true positions, -1 for padding.
        output: projection of the heads' outputs.
    """
    if policy.projects:
        view = replace(view, output=output)
    if not policy.asks:
        return view
    plain = query if view.rotation is None or not view.turned else view.rotation.undo(query, positions[:, None])
    return replace(view, queries=Queries(plain, positions))


def read(  # noqa: PLR0913  the arguments of attention
    policy: Policy,
    backend: Backend,
    query: Float[Tensor, "B Hq T D"],
    slots: Slots,
    now: Int[Tensor, "B T"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
    length: Int[Tensor, "B 1"],
    rotation: Rotation | None,
) -> tuple[Float[Tensor, "B Hq T E"], Report]:
    """Attention of a prompt's chunk and the report; for a policy that `rereads`, of a second reading as well.

    The arguments are those of `kvkeep.backends.Backend.attend_twice`.
    """
    if not policy.rereads:
        return backend.attend(query, slots, now, statistic=statistic, options=options)
    out, report, again = backend.attend_twice(
        query, slots, now, statistic=statistic, options=options, length=length, rotation=rotation
    )
    return out, Report({**report.sums, "again": again})


class Layer(Held):
    """One layer's slots and their policy.

    Args:
        policy: the eviction policy.
        budget: slots that may stay occupied after a step; one number, or one per row.
        index: the layer's number in the model, a key of counter-based randomness.
        window: sliding window of the layer in tokens; its budget is then ``min(budget, window)``.
        prefill_chunk: tokens of each row's prompt that are taken at once; ``None``: all.
        sequences: identity of each row for randomness; 0 for all rows if not given.
        rotation: the model's rotary embedding, for slot positions: keys are stored unrotated and attended at their
            rank in the cache. ``None``: true positions.
        cascade: the tables that this layer shares with others under a policy that prunes through the layers.
        together: the layers that share their budget with this one; ``None``: none do.
        pins: spans that the policy may not evict (`kvkeep.pins.spans_of_rows`), one entry for all rows or one per row.
        kv_bits: bits of keys and values in the slots, a name of `kvkeep.kv.slot_codec.KV_BITS`; ``None``: the model's
        dtype.

    Raises:
        BudgetError: the budget or ``prefill_chunk`` is out of range, or the policy protects more than the budget, or
            does so together with the pins.

    Attributes:
        columns: columns seen so far, padding included.
        moves: number of times that rows were selected.
        broken: whether a step has failed between its beginning and its end.
        block: the slots, state and counters; allocated by the first step.
        budgets: the budget asked for, at most the window; one number, or one per row.
        rotary: the model's rotary embedding, set for a policy that looks at unrotated keys or turns queries.
        heads: which of the layer's KV heads this process holds; by default all.
    """

    def __init__(  # noqa: PLR0913  a layer is told everything at once
        self,
        policy: Policy,
        budget: int | Sequence[Number],
        *,
        index: int = 0,
        window: int | None = None,
        prefill_chunk: int | None = None,
        sequences: Sequence[int] | None = None,
        rotation: Rotation | None = None,
        cascade: Cascade | None = None,
        together: SharedBudget | None = None,
        pins: Sequence[Spans] = (),
        kv_bits: str | None = None,
    ):
        numbers = budgets.check(budget)
        for number in {one for row in numbers for one in (row if isinstance(row, tuple) else (row,))}:
            policy.check(number)
        self.window, self._prefill_chunk = window, chunk_size(prefill_chunk)
        self.budgets = tuple(budgets.at_most(number, window) for number in numbers)
        pins = pins if policy.evicts else ()
        check_pins(policy, [budgets.smallest(number) for number in self.budgets], pins, window=window)
        super().__init__(
            policy,
            index=index,
            rotation=rotation,
            cascade=cascade,
            together=together,
            sequences=sequences,
            pins=pins,
            kv_bits=kv_bits,
        )

    def step(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B Hq T E"]:
        """Add ``T`` new tokens per row, attend, and evict down to the budget. Under `Phase.PROBE` only attend.

        Args:
            query: new queries, rotated like the keys.
            keys: new keys.
            values: new values.
            options: scaling, soft cap, sinks; its window must be the layer's.
            phase: what the tokens are. Generated tokens come one at a time.
            real: which of the new tokens are real; ``None``: all. Padding never enters a slot.

        Returns:
            The attention output; undefined for padded tokens.

        Raises:
            ShapeError: there is no token, the tensors do not fit the block, or several tokens came as generated ones.
            CapacityError: the policy does not evict and the budget is exhausted.
            BrokenCacheError: an earlier step failed before its end.
            UnsupportedOperationError: under `Phase.PROBE`, the policy prunes through the layers.
        """
        if self._repeating is not None and phase is Phase.DECODE and real is None:
            again = self._again(query, keys, values, options)
            if again is not None:
                return again
        return self._step(query, keys, values, options=options, phase=phase, real=real)

    @inference
    def _step(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B Hq T E"]:
        """See `step`."""
        if self.broken:
            raise BrokenCacheError("a step failed between its beginning and its end")
        T = query.shape[2]
        self._open(keys, values)
        if phase is Phase.DECODE and T > 1:
            raise ShapeError(f"{T} tokens per row came as generated ones; they come one at a time.")
        if phase is Phase.PROBE and self.policy.cascades:
            raise UnsupportedOperationError(f"{self.policy} prunes through the layers and cannot read a text again.")
        check_room(self.policy, self.block, T, real, phase=phase, window=self.window)
        self.broken = True  # until the step has ended
        held, self.block = self.block, self.block.opened()
        try:
            out = self._run(query, keys, values, options=options, phase=phase, real=real)
            held.close(self.block)
        finally:
            self.block = held
        if self._together is not None:
            self._together.end(self.policy, held)
        if self._repeating is not None:
            self._repeating.hold(held)
        self.broken = False
        return out

    def _run(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        *,
        options: AttentionOptions,
        phase: Phase,
        real: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B Hq T E"]:
        if phase is Phase.DECODE:
            return self._decode(query, keys, values, options, real)
        if phase is Phase.PROBE:
            return self._probe(query, keys, values, options, real)
        feed, size = partial(self._prefill, options), self._prefill_chunk or query.shape[2]
        return in_chunks(feed, query, keys, values, real=real, size=size)

    def _decode(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        options: AttentionOptions,
        real: Bool[Tensor, "B 1"] | None,
    ) -> Float[Tensor, "B Hq 1 E"]:
        """Write the token into an empty slot, attend, and empty the victim's slot. No other slot is moved."""
        positions = self.block.advance(1, real, Phase.DECODE)
        self.columns += 1
        slots, backend = self.store.slots(), self._backend
        fresh = one_each(len(positions), positions.device) if real is None else real.sum(dim=1)
        if self._fuses and self.block.pins is None:
            view, new = self._view(slots, new=fresh, phase=Phase.DECODE), (query, keys, values, positions)
            asked, window = self._asked.by(view), self.window
            done = fused(
                self.policy, self.block, view, new, statistic=asked, options=options, window=window, backend=backend
            )
            if done is not None:
                if real is None and self._may_repeat():
                    given = (self.policy, self.block, view, new)
                    call = repeated(*given, statistic=asked, options=options, window=window, backend=backend)
                    self._repeating = None if call is None else Repeating(call, options)
                return done
        if self._rotation is not None:
            query, keys = self._rotation.unrotated(query, keys, positions)
        append(self.policy, self.block, keys, values, positions, backend=backend)
        view = self._view(slots, new=fresh, phase=Phase.DECODE)
        if (focus := self.policy.focuses) is not None:
            options = replace(options, top=focus.top(self.policy, view))
        out, report = backend.attend(query, slots, positions, statistic=self.policy.wants(view), options=options)
        self._shared.add(slots.positions[:, 0], report, self.heads)
        self.block.remember(self.policy.observe(self.state, view, report))
        among = None if self.window is None else ranking.expire(slots.positions, self.seen, self.window) >= 0
        evict(self.policy, self.block, view, window=self.window, backend=backend)
        lost_mass.count(self.block.lost, report, self.store.positions >= 0, phase=Phase.DECODE, among=among)
        self._shared.leave(self._index, self.store.positions[:, 0])
        return out

    def _prefill(
        self,
        options: AttentionOptions,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        real: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B Hq T E"]:
        """Attend over slots ∪ chunk, then keep the best of both."""
        used = self.store.used() if self.columns else 0  # 0: only the chunk is attended; all heads agree on positions
        new = self.block.advance(query.shape[2], real, Phase.PREFILL)
        self.columns += query.shape[2]
        if self._rotation is not None:
            query, keys = self._rotation.unrotated(query, keys, new)
        chunk = (Fresh if real is None else Slots)(keys, values, new.to(torch.int32)[:, None])
        slots, state = beside(self.block, chunk, starts=self.policy.slots, used=used)
        left = slots.positions if self.window is None else ranking.expire(slots.positions, self.seen, self.window)
        view = self._view(at(slots, left), new=(new >= 0).sum(dim=1), phase=Phase.PREFILL)
        view, turn = for_prompt(self.policy, view, query, new, options.output), self._rotation or self.rotary
        attended, wanted = slots if used else chunk, self.policy.wants(view)
        given, length = (self.policy, self._backend, query, attended, new), self.seen[:, None]
        out, report = read(*given, statistic=wanted, options=options, length=length, rotation=turn)
        self._shared.add(left[:, 0], report, self.heads)
        state = self.policy.observe(state, view, report)
        if self._together is not None:
            self._together.wait(self.policy, self.block, view, state, report, used=used)
            return out
        stays = cut(self.policy, self.block, view, state, window=self.window, used=used, chunk=chunk)
        lost_mass.count(self.block.lost, report, stays, phase=Phase.PREFILL, among=left >= 0)
        self._shared.leave(self._index, self.store.positions[:, 0])
        return out

    def _probe(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        options: AttentionOptions,
        real: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B Hq T E"]:
        """Attend over the slots and the probes so far, and report the attention of the slots to the policy."""
        held, now = self.store.capacity, self.block.following(query.shape[2], real)
        if self._rotation is not None:
            query, keys = self._rotation.unrotated(query, keys, now)
        probes = Slots(keys, values, now.to(torch.int32)[:, None])
        slots, _ = beside(self.block, probes, starts={}, used=held)
        view = self._view(self.store.slots(), new=(now >= 0).sum(dim=1), phase=Phase.PROBE)
        out, report = self._backend.attend(query, slots, now, statistic=self.policy.wants(view), options=options)
        mine = Report({name: tensor[..., :held] for name, tensor in report.sums.items()})
        self.block.remember(self.policy.observe(self.state, view, mine))
        return out

    def _view(self, slots: Slots, *, new: Int[Tensor, " B"], phase: Phase) -> View:
        tables = self._shared.enter(self._index, slots.positions[:, 0])
        turned = self._rotation is None
        return view_of(
            *(self.block, slots),
            new=new,
            phase=phase,
            layer=self._index,
            tables=tables,
            rotation=self.rotary,
            turned=turned,
            heads=self.heads,
        )
