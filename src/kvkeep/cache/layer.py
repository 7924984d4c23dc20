"""The steps of one layer: append → attend → observe → evict.

A `Layer` owns a fixed number of slots per row and KV head, and the policy that decides which tokens stay in them. It
knows nothing of transformers: `kvkeep.cache.bounded_cache` and the engine drive it. ``docs/layouts.md`` draws its
tensors.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import SupportsIndex

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.backends.base import AttentionInputs, Backend, SecondReading
from kvkeep.budget import Number
from kvkeep.cache.decode_replay import DecodePath, DecodePaths, Repeating, one_each, until_burst
from kvkeep.cache.eviction import all_stay, append, check_pins, check_room, cut, evict, fused, fused_step
from kvkeep.cache.layer_block import BlockPlan, backend_for, lead_of, pin_read, store_for
from kvkeep.cache.prompt_kv import LayerPrompts
from kvkeep.cache.shared_budget import SharedBudget
from kvkeep.errors import BrokenCacheError, BudgetError, ShapeError, UnsupportedOperationError
from kvkeep.head_sharding import ALONE, Heads
from kvkeep.kv import lost_mass, ranking
from kvkeep.kv.block import Block, beside, view_of
from kvkeep.kv.pooled_store import PooledStore
from kvkeep.kv.slot_codec import KeyTransform, at
from kvkeep.kv.store import Store, inference
from kvkeep.pins import Spans
from kvkeep.policies._keep_prompt import check_budget, keeps_share, keeps_whole, with_prompt
from kvkeep.policies.base import Policy
from kvkeep.rotary import Rotation, TextRotation, lengths_read
from kvkeep.types import (
    AttentionOptions,
    Earlier,
    Fresh,
    MemoryUsage,
    OutputProjection,
    Phase,
    Queries,
    Report,
    Slots,
    State,
    View,
)

# The parts of a prompt's step: its chunks, its second reading, and the queries that a policy may ask for.


def chunk_size(chunk: object) -> int | None:
    """Return the length of a prefill chunk as an integer, after checking it; ``None``, the whole prompt, stays
    ``None``.

    Raises:
        BudgetError: ``chunk`` is no whole number, or below 1.
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
    """Run ``step`` on chunks of ``size`` real tokens per row, and put the outputs back in their columns.

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
    """Return the view of a prefill chunk, with the chunk's queries before their rotation and the output projection
    added if the policy asks for them.

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
    # a policy turns queries to other positions itself; those of padding are turned too, and nobody looks at them
    plain = query if view.rotation is None or not view.turned else view.rotation.undo(query, positions[:, None])
    return replace(view, queries=Queries(plain, positions))


def read(
    policy: Policy, backend: Backend, inputs: AttentionInputs, again: SecondReading
) -> tuple[Float[Tensor, "B Hq T E"], Report]:
    """Run attention for a prefill chunk, and return its output with the report for the policy. For a policy that
    `rereads`, queries of a second reading attend as well: their shares are the report's field ``again``.

    Args:
        policy: the policy that gets the report.
        backend: attends.
        inputs: the chunk's queries, and what they attend over.
        again: where the second reading comes.
    """
    if not policy.rereads:
        return backend.attend(inputs)
    out, report, shares = backend.attend_twice(inputs, again)
    return out, Report({**report.sums, "again": shares})


class Layer:
    """One layer's slots and their policy.

    Its parts are a `BlockPlan`, from which the first step allocates the block, and `DecodePaths`, which choose how a
    decode step is made. The shared budget is a part that several layers have in common.

    Args:
        policy: the eviction policy.
        budget: slots that may stay occupied after a step; one number, or one per row.
        index: the layer's number in the model, a key of counter-based randomness.
        window: sliding window of the layer in tokens; its budget is then ``min(budget, window)``.
        prefill_chunk: tokens of each row's prompt that are taken at once; ``None``: all.
        sequences: identity of each row for randomness; 0 for all rows if not given.
        rotation: the model's rotary embedding, for slot positions: keys are stored unrotated and attended at their
            rank in the cache. ``None``: true positions.
        before: the layer before this one, for a policy that prunes through the layers; ``None`` in the first layer.
        together: the layers that share their budget with this one; ``None``: none do.
        pins: spans that the policy may not evict (`kvkeep.pins.spans_of_rows`), one entry for all rows or one per row.
        kv_bits: bits of keys and values in the slots, a name of `kvkeep.kv_bits.KV_BITS`; ``None``: the model's
            dtype.
        checked: whether the policy has been asked already whether the budget is enough, as `Layout.spread` does for
            all layers at once.

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
        key_transform: what is done to keys of 4 bits before they are coded; ``None``: only what is done to all keys.
        plan: what the block is made of.
        paths: how decode steps are made; `DecodePaths.path` is the path of the last one.
        prompts: what the rows know of their prompts already, and what is kept of them; ``None``: nothing.
    """

    block: Block
    _backend: Backend

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
        before: Layer | None = None,
        together: SharedBudget | None = None,
        pins: Sequence[Spans] = (),
        kv_bits: str | None = None,
        checked: bool = False,
    ):
        numbers = budgets.check(budget)
        if not checked:
            for number in {size for row in numbers for size in (row if isinstance(row, tuple) else (row,))}:
                check_budget(policy, number)
        self.window, self._prefill_chunk = window, chunk_size(prefill_chunk)
        self.budgets: tuple[Number, ...] = tuple(budgets.at_most(number, window) for number in numbers)
        # a policy that never evicts has room for its pins wherever it has room for its tokens
        pins = pins if policy.evicts else ()
        check_pins(policy, [budgets.smallest(number) for number in self.budgets], pins, window=window)
        self.policy, self.paths = policy, DecodePaths(policy)
        store = store_for(policy, self.budgets, kv_bits)
        self.plan = BlockPlan(policy, index, store, sequences, pins)
        self.heads: Heads = ALONE
        self.key_transform: KeyTransform | None = None
        self.rotary: Rotation | None = None
        self.prompts: LayerPrompts | None = None
        # `_made`: whether the block has the layer's own budgets and pins
        self.columns, self.moves, self.allocated, self.broken, self._made = 0, 0, False, False, False
        self._index, self._rotation, self._together = index, rotation, together
        self._pins_prompts = True  # `over` unsets it
        self._prompt = torch.zeros(0, dtype=torch.int64)  # see `_prompt_ends`, which a prompt's step calls
        self._follow(before)

    def reset(self) -> None:
        """Empty all slots and counters.

        The next step uses the same memory, unless rows were selected or restored, the policy divides a budget among
        heads, or prompts stay whole: then it allocates a new block.
        """
        moves = self.moves
        self.columns, self.moves, self.broken, self.paths.recorded = 0, 0, False, None
        if self._together is not None:
            self._together.clear()
        # else budgets or pins may be others now
        self.allocated &= self._made and not moves and not self.policy.spreads and not keeps_whole(self.policy)
        if self.allocated:
            self.block.clear()
            # a row that held tokens when the transform changed has kept the one by which their keys were coded
            self.block.transform_keys(self.key_transform, slice(None))

    def transform_keys(self, transform: KeyTransform) -> None:
        """Set what is done to keys before they are coded in rows that hold no token, now and later."""
        self.key_transform = transform
        if self.allocated:
            self.block.transform_keys(transform, self.block.seen == 0)

    def mend(self, moves: int) -> None:
        """Mark the layer as intact after its block was filled anew, and drop steps that wait for other layers.

        ``moves`` are those of the first layer.
        """
        self.broken, self.moves = False, moves
        if self._together is not None:
            self._together.clear()

    @inference
    def select_rows(self, index: Int[Tensor, " n"]) -> None:
        """Replace row ``i`` by what row ``index[i]`` was, and have as many rows as ``index``.

        Do nothing before the first step.
        """
        if self.allocated:
            self.moves += 1
            broken, self.broken = self.broken, True  # until all rows have moved
            self.block.select_rows(index)
            self.broken = broken

    def over(
        self, block: Block, *, columns: int, before: Layer | None = None, together: SharedBudget | None = None
    ) -> Layer:
        """Return a copy of this layer that works on another owner's block, which has seen ``columns`` columns. The
        owner pins what prompts keep.
        """
        other = copy.copy(self)
        other._pins_prompts = False
        other.paths = DecodePaths(self.policy)  # before `hold`, which would otherwise change those of the original
        other.hold(block, columns=columns)
        other._together = together
        other._follow(before)
        return other

    def _follow(self, before: Layer | None) -> None:
        """Note the layer before this one, and the first layer of all, for a policy that prunes through the layers.

        For other policies note neither. ``None``: this is the first layer.
        """
        self._before = before if self.policy.cascades else None
        self._first: Layer | None = None if self._before is None else self._before._first or self._before

    def memory(self) -> MemoryUsage:
        """Return the bytes of this layer; zeros before the first step."""
        return self.block.memory() if self.allocated else MemoryUsage()

    @property
    def store(self) -> Store:
        """Return the store of keys, values and positions."""
        return self.block.store

    @property
    def state(self) -> State:
        """Return the policy's state, of slots and of heads. It is a copy where heads share a pool."""
        return self.block.opened().state

    @property
    def seen(self) -> Int[Tensor, " B"]:
        """Return the number of real tokens seen per row."""
        return self.block.seen

    def new_block(self, keys: Float[Tensor, "B Hk _ D"], values: Float[Tensor, "B Hk _ E"]) -> Block:
        """Return an empty block for keys and values like these. The layer does not use it yet."""
        block = self.plan.block(keys, values, budgets=self.budgets, heads=self.heads, together=self._together)
        block.transform_keys(self.key_transform, slice(None))  # all rows: keys to come are coded by it
        return block

    def hold(self, block: Block, *, columns: int, own: bool = False) -> None:
        """Work on this block from now on. It has seen ``columns`` columns; ``own`` says that it has the layer's
        budgets and pins.
        """
        self.block, self.columns, self.plan = block, columns, self.plan.filled_by(block)
        self.allocated, self._made = True, own
        self._backend = backend_for(block, self._rotation)
        self.paths.begin(self._backend, window=self.window, even=not isinstance(block.store, PooledStore))

    def find_lead(self) -> None:
        """Note in the layer's block how many first positions `keep_prompt` protects, see `lead_of`, so that kernels can
        protect them.

        Do nothing for a policy without `keep_prompt`, or while a compiler traces, which knows no numbers in tensors.
        """
        if self.policy.keep_prompt is not None and self.policy.evicts and not torch.compiler.is_compiling():
            self.block.lead = lead_of(self.policy, self.block)

    def _open(self, keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"]) -> None:
        """Allocate the block on the first step, or when an empty block has another shape, and check that the tensors
        fit it.

        Raises:
            ShapeError: there is no token, or the tensors do not fit the block.
        """
        if keys.shape[2] == 0:
            raise ShapeError("There are no tokens: the prompt is empty.")
        # an empty block of another shape is replaced: the cache was reset and is now fed another batch
        if not self.allocated or not (self.columns or self.store.fits(keys, values)):
            self.heads.check(keys.shape[1])
            self.hold(self.new_block(keys, values), columns=self.columns, own=True)
            if self.prompts is not None:  # these tokens come with the chunk, and their positions are taken
                self.block.seen += self.prompts.known
        self.store.check_fit(keys, values)

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
            CapacityError: the policy does not evict (under ``decode=grow``: generated tokens) and the budget is
                exhausted.
            BudgetError: prompts stay whole, and this one leaves no room in the budget.
            BrokenCacheError: an earlier step failed before its end.
            UnsupportedOperationError: under `Phase.PROBE`, the policy prunes through the layers; or a text has grown
                over the length beyond which keys are rotated in another way, see `_prompt_ends`.
        """
        if self.paths.recorded is not None and phase is Phase.DECODE and real is None:
            out = self._replay(query, keys, values, options)
            if out is not None:
                return out
        return self._step(query, keys, values, options=options, phase=phase, real=real)

    def replayable(self, options: AttentionOptions) -> Repeating | None:
        """Return the recorded decode step if the next step can be its replay, otherwise ``None``.

        Whoever runs the step calls `end_replay` afterwards.

        Args:
            options: what the model's attention asks for.

        Raises:
            CapacityError: the policy does not evict and its budget is exhausted.
        """
        recorded = self.paths.recorded
        if recorded is None or self.broken or self.paths.why_not_replayed(self.block, options) is not None:
            return None
        check_room(self.policy, self.block, 1, None, phase=Phase.DECODE, window=self.window)
        return recorded

    def end_replay(self, *, done: bool) -> None:
        """Count a replayed step, or drop the recorded one if it could not run. The layer counts as intact again.

        Args:
            done: whether it ran, and added each row's token to `Block.seen`; otherwise the recorded step is dropped.
        """
        if done:
            self.columns += 1
            if self.paths.path is not DecodePath.REPLAY:  # replays follow each other, and each microsecond counts
                self.paths.took(DecodePath.REPLAY)
        else:
            self.paths.forget("the backend could not replay the step")
        self.broken = False

    def _replay(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """Replay the recorded decode step for new tokens.

        Return ``None`` if there is none that fits, or the backend declines; then only the recorded step is dropped.
        """
        recorded, block = self.replayable(options), self.block
        if recorded is None or not recorded.call.takes(query, keys, values):
            why = self.paths.why_not_replayed(block, options)
            self.paths.forget(why or "the tensors of the tokens lie in another way")
            return None
        self.paths.recorded, self.broken = None, True  # a step that fails is not tried again
        out = recorded.call(query, keys, values, block.advance(1, None, Phase.DECODE))
        if out is None:
            block.seen.sub_(1)  # `advance` has counted the token, and the next path counts it again
        self.paths.recorded = recorded
        self.end_replay(done=out is not None)
        return out

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
        """Run a step that is no replay, see `step`. If it fails after its checks, the layer counts as broken.

        Raises:
            BrokenCacheError: an earlier step failed.
            ShapeError: several generated tokens per row came at once.
            UnsupportedOperationError: the step reads a text again, and the policy prunes through the layers.
        """
        if self.broken:
            raise BrokenCacheError("a step failed between its beginning and its end")
        T = query.shape[2]
        self._open(keys, values)
        if phase is Phase.DECODE and T > 1:
            raise ShapeError(f"{T} tokens per row came as generated ones; they come one at a time.")
        if phase is Phase.PROBE and self.policy.cascades:
            raise UnsupportedOperationError(f"{self.policy} prunes through the layers and cannot read a text again.")
        check_room(self.policy, self.block, T, real, phase=phase, window=self.window)
        if phase is Phase.PREFILL and self.rotary is not None and self.rotary.longest is not None:
            self._prompt = self._prompt_ends(self.rotary.longest, T, real)
        pins = phase is Phase.PREFILL and self._pins_prompts  # the owner of another block pins itself, see `over`
        if pins and keeps_whole(self.policy):
            pin_read(self.policy, self.block, T, real, window=self.window)
        self.broken = True  # until the step has ended
        out = self._run(query, keys, values, options=options, phase=phase, real=real)
        if self._together is not None:
            self._together.end(self.policy, self.block)
        if pins:
            self.find_lead()
        if self.paths.recorded is not None:
            self.paths.recorded.hold(self.block)  # as the step has left it
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
        """Run a step: one generated token per row, probes, or a prompt, which is cut into chunks."""
        if phase is Phase.DECODE:
            return self._decode(query, keys, values, options, real)
        T = query.shape[2]
        divides = phase is Phase.PREFILL and self._divides(T, real)
        with self._opened(in_place=phase is Phase.PREFILL and not divides):
            if phase is Phase.PROBE:
                return self._probe(query, keys, values, options, real)
            feed = partial(self._prefill, options, divides)
            return in_chunks(feed, query, keys, values, real=real, size=self._prefill_chunk or T)

    def _divides(self, T: int, real: Bool[Tensor, "B T"] | None) -> bool:
        """Return whether a step over a prompt may change the budgets of heads that divide one; ``True`` also where the
        question would make the host wait.

        While every token stays, the rules give heads equal budgets.
        """
        if self.policy.spreads is None:
            return False
        if not self.block.seen.is_cpu or self.heads.ranks > 1:
            return True  # the question itself would wait for a GPU, or for other processes
        if (budget := self.block.equal_budgets()) is None:
            return True
        seen = self.block.seen + (T if real is None else real.sum(dim=1))
        return bool((seen[:, None] > all_stay(self.policy, budget, window=self.window)).any())

    @contextlib.contextmanager
    def _opened(self, *, in_place: bool = False) -> Iterator[None]:
        """Work on slots side by side, which are copies if they lie in a pool, and write them back at the end.

        Without a pool do nothing. See `Block.opened`.
        """
        held, self.block = self.block, self.block.opened(in_place=in_place)
        try:
            yield
            held.close(self.block)
        finally:
            self.block = held

    def _decode(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        options: AttentionOptions,
        real: Bool[Tensor, "B 1"] | None,
    ) -> Float[Tensor, "B Hq 1 E"]:
        """Run a decode step on the fused path if that can be taken, otherwise on the plain one; see `DecodePaths`."""
        positions = self.block.advance(1, real, Phase.DECODE)
        self.columns += 1
        fresh = one_each(len(positions), positions.device) if real is None else real.sum(dim=1)
        why = self.paths.why_not_fused(self.block)
        if why is None:
            out = self._decode_fused(query, keys, values, positions, fresh, options, may_record=real is None)
            if out is not None:
                self.paths.took(DecodePath.FUSED)
                return out
            why = "the backend cannot take these tensors"
        self.paths.took(DecodePath.PLAIN, why)
        with self._opened():
            return self._decode_plain(query, keys, values, positions, fresh, options)

    def _decode_fused(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        positions: Int[Tensor, "B 1"],
        fresh: Int[Tensor, " B"],
        options: AttentionOptions,
        *,
        may_record: bool,
    ) -> Float[Tensor, "B Hq 1 E"] | None:
        """Let the backend make a whole decode step, and record it for a replay if possible.

        Return ``None`` if the backend declines; then nothing has changed.

        Args:
            query: see `step`.
            keys: see `step`.
            values: see `step`.
            positions: position of each row's token, -1 for padding.
            fresh: number of real tokens per row.
            options: see `step`.
            may_record: whether the step may be replayed: a replay knows nothing of padding.
        """
        view = self._view(self.store.in_ranges()[0], new=fresh, phase=Phase.DECODE)
        statistic, window = self.paths.statistic.by(view), self.window
        tokens = query, keys, values, positions
        step = fused_step(self.policy, self.block, view, tokens, statistic=statistic, options=options, window=window)
        out = fused(self.policy, self.block, view, step, window=window, backend=self._backend)
        if out is not None and may_record and self.paths.may_record(self.block):
            call = self._backend.repeat(step)
            until = until_burst(self.policy, self.block)
            self.paths.recorded = None if call is None else Repeating(call, options, until)
        return out

    def _decode_plain(
        self,
        query: Float[Tensor, "B Hq 1 D"],
        keys: Float[Tensor, "B Hk 1 D"],
        values: Float[Tensor, "B Hk 1 E"],
        positions: Int[Tensor, "B 1"],
        fresh: Int[Tensor, " B"],
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hq 1 E"]:
        """Write each row's token into an empty slot, attend, let the policy observe, and empty the slots of the tokens
        that go. No other token is moved.
        """
        slots, backend = self.store.slots(), self._backend
        if self._rotation is not None:
            query, keys = self._rotation.unrotated(query, keys, positions)
        append(self.policy, self.block, keys, values, positions, backend=backend)
        view = self._view(slots, new=fresh, phase=Phase.DECODE)
        if (focus := self.policy.focuses) is not None:
            options = replace(options, top=focus.top(self.policy, view))
        out, report = backend.attend(AttentionInputs(query, slots, positions, options, self.policy.wants(view)))
        self.block.remember(self.policy.observe(self.state, view, report))
        # later layers ask for the state of all tokens that this layer has attended, the next victim among them
        self._hand_on(slots.positions, self.state)
        # tokens that the window has passed are not lost by the policy; asked before the eviction empties more slots
        among = None if self.window is None else ranking.expire(slots.positions, self.seen, self.window) >= 0
        evict(self.policy, self.block, view, window=self.window, backend=backend)
        lost_mass.count(self.block.lost, report, self.store.positions >= 0, phase=Phase.DECODE, among=among)
        return out

    def _prefill(
        self,
        options: AttentionOptions,
        divides: bool,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        real: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B Hq T E"]:
        """Attend over the slots and a prompt chunk, then keep the best tokens of both. Return attention's output.

        Layers that share a budget evict later, together.
        """
        used = self.store.used() if self.columns else 0  # 0: only the chunk is attended; all heads agree on positions
        new = self.block.advance(query.shape[2], real, Phase.PREFILL)
        self.columns += query.shape[2]
        if self._rotation is not None:
            query, keys = self._rotation.unrotated(query, keys, new)
        # `Fresh` tells the backend that a causal mask is enough, without a look at the positions
        chunk: Slots = (Fresh if real is None else Slots)(keys, values, new.to(torch.int32)[:, None])
        prompts = self.prompts
        if prompts is not None:
            chunk = prompts.beside(chunk)
        slots, state = beside(self.block, chunk, starts=self.policy.slots, used=used)
        if prompts is not None:
            prompts.restore(state)
        left = slots.positions if self.window is None else ranking.expire(slots.positions, self.seen, self.window)
        # to the policy an expired token is gone already, so it takes no slot from another one
        view = self._view(at(slots, left), new=(new >= 0).sum(dim=1), phase=Phase.PREFILL)
        view = for_prompt(self.policy, view, query, new, options.output)
        turn = self._rotation or self._rotary_of(Phase.PREFILL)
        attended, wanted = slots if used else chunk, self.policy.wants(view)
        inputs = AttentionInputs(query, attended, new, options, wanted)
        out, report = read(self.policy, self._backend, inputs, SecondReading(self.seen[:, None], turn))
        state = self.policy.observe(state, view, report)
        if prompts is not None:
            prompts.note(self.policy, slots, state)
        self._hand_on(left, state)
        if self._together is not None and divides:
            self._together.wait(self.policy, self.block, view, state, report, used=used)
            return out
        stays = cut(
            *(self.policy, self.block, view, state), window=self.window, used=used, chunk=chunk, divides=divides
        )
        lost_mass.count(self.block.lost, report, stays, phase=Phase.PREFILL, among=left >= 0)
        return out

    def _probe(
        self,
        query: Float[Tensor, "B Hq T D"],
        keys: Float[Tensor, "B Hk T D"],
        values: Float[Tensor, "B Hk T E"],
        options: AttentionOptions,
        real: Bool[Tensor, "B T"] | None,
    ) -> Float[Tensor, "B Hq T E"]:
        """Attend over the slots and the probes so far, and let the policy observe what the slots received. The probes
        are neither stored nor counted.
        """
        # all slots, occupied or not: the policy's state has a number for each
        held, now = self.store.capacity, self.block.following(query.shape[2], real)
        if self._rotation is not None:
            query, keys = self._rotation.unrotated(query, keys, now)
        probes = Slots(keys, values, now.to(torch.int32)[:, None])
        # probes get no state of the policy, since they are never stored
        slots, _ = beside(self.block, probes, starts={}, used=held)
        view = self._view(self.store.slots(), new=(now >= 0).sum(dim=1), phase=Phase.PROBE)
        out, report = self._backend.attend(AttentionInputs(query, slots, now, options, self.policy.wants(view)))
        # the policy has no place for what probes have received themselves
        mine = Report({name: tensor[..., :held] for name, tensor in report.sums.items()})
        self.block.remember(self.policy.observe(self.state, view, mine))
        return out

    def _view(self, slots: Slots, *, new: Int[Tensor, " B"], phase: Phase) -> View:
        """Return the slots as the policy sees them in this step."""
        known = None
        if self._before is not None and self._first is not None:
            known = _earlier(self._first.block, self._before.block, slots.positions[:, 0])
        turned = self._rotation is None
        # the cut of a prompt chooses the share of it that stays; from then on these tokens are pinned
        keeps = phase is Phase.DECODE and keeps_share(self.policy)
        return view_of(
            *(self.block, slots),
            new=new,
            phase=phase,
            layer=self._index,
            earlier=known,
            rotation=self._rotary_of(phase),
            turned=turned,
            heads=self.heads,
            pins=with_prompt(self.block.pins, self.block.prompt) if keeps else None,
        )

    def _rotary_of(self, phase: Phase) -> Rotation | TextRotation | None:
        """Return the rotary embedding with which the rows' keys were rotated, for a policy that undoes it; ``None`` if
        the policy does not, or the layer's keys are not rotated.
        """
        whole = self.rotary
        if whole is None or whole.longest is None or whole.beyond is None:
            return whole
        ends = self._prompt if phase is Phase.PREFILL else self.block.prompt
        return TextRotation(whole, whole.beyond, whole.longest, ends)

    def _prompt_ends(self, longest: int, T: int, real: Bool[Tensor, "B T"] | None) -> Int[Tensor, " B"]:
        """Return the length of each row's text at the end of the prompt that is read, however it is cut into chunks: it
        decides the rotary frequencies.

        Args:
            longest: up to this length, texts have the first frequencies.
            T: new tokens per row.
            real: which of them are no padding; ``None``: all.

        Raises:
            UnsupportedOperationError: a row's prompt had at most ``longest`` tokens, and it has grown beyond them.
        """
        seen, before = self.block.seen, self.block.prompt
        if bool(((before <= longest) & (seen > longest) & (before > 0)).any()):
            raise UnsupportedOperationError(
                f"{self.policy} looks at keys before their rotation, which changes beyond {longest} tokens. This text "
                "has grown over that length, and which of its keys were rotated in which way is no longer known once "
                "another prompt is read. Give the whole text as one prompt."
            )
        ends, told = seen + (T if real is None else real.sum(dim=1)), lengths_read()
        if told is None or told.shape != (len(seen), T):  # those of another run tell nothing of these rows
            return ends
        return torch.maximum(ends, told.amax(dim=1).to(ends))

    def _hand_on(self, positions: Int[Tensor, "B Hk S"], state: State) -> None:
        """Write the state of these tokens into the first layer, where later layers find it, if the policy prunes
        through the layers.
        """
        if self._first is not None:
            _hand_on(self._first.block, positions[:, 0], state)


# What a layer knows of the layers before it, under a policy that prunes through the layers (SpAtten). The layers have
# no memory in common: the first layer's slots hold every token that a later layer holds, and with each token the
# policy's state that the layers have handed on so far.

_LATER = torch.iinfo(torch.int64).max


def _earlier(first: Block, before: Block, positions: Int[Tensor, "B S"]) -> Earlier:
    """Return the state that the earlier layers have handed on with these tokens (0 where there is none), and which of
    them the previous layer still holds.

    Args:
        first: the block of the first layer.
        before: the block of the layer before.
        positions: the tokens, -1 = empty. All heads hold the same ones.
    """
    index, found = _look_up(first.store.positions[:, 0], positions)
    state = {name: held[:, 0].gather(1, index) * found for name, held in first.of_slots().items()}
    return Earlier(state, _look_up(before.store.positions[:, 0], positions)[1])


def _hand_on(first: Block, positions: Int[Tensor, "B S"], state: State) -> None:
    """Write a later layer's state of its tokens into the first layer's slots of the same tokens.

    Args:
        first: the block of the first layer.
        positions: the tokens, -1 = empty.
        state: their state.
    """
    index, found = _look_up(positions, first.store.positions[:, 0])
    for name, held in first.of_slots().items():
        held.copy_(torch.where(found[:, None], state[name].gather(2, index[:, None].expand_as(held)), held))


def _look_up(held: Int[Tensor, "B N"], wanted: Int[Tensor, "B S"]) -> tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"]]:
    """Return the index of each wanted position among those held (any index if it is not), and a mask of the wanted
    positions that are held. -1, an empty slot, is never found.
    """
    # empty slots lie behind all tokens, so a search never finds one
    tokens, order = held.long().masked_fill(held < 0, _LATER).sort(dim=1)
    # torch warns of a search in another order of memory, and copies as well
    wanted = wanted.long().contiguous()
    # a token beyond the last one is not there; the clamped index is only one that can be read
    at = torch.searchsorted(tokens, wanted).clamp(max=tokens.shape[1] - 1)
    return order.gather(1, at), (tokens.gather(1, at) == wanted) & (wanted >= 0)
