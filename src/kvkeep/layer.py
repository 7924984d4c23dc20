"""The steps of one layer: append → attend → observe → evict.

A `Layer` owns a fixed number of slots per row and KV head, and the policy that decides which tokens stay in them. It
knows nothing of transformers: `kvkeep.cache` and the engine drive it. ``docs/layouts.md`` draws its tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep import budget as budgets
from kvkeep.asked import one_each
from kvkeep.budget import Number
from kvkeep.capacity import check_pins, check_room
from kvkeep.errors import BrokenCacheError, ShapeError, UnsupportedOperationError
from kvkeep.eviction import append, cut, evict, fused, repeated
from kvkeep.held import Held
from kvkeep.kv import lost_mass, ranking
from kvkeep.kv.block import beside, view_of
from kvkeep.kv.cascade import Cascade
from kvkeep.kv.slot_codec import at
from kvkeep.kv.store import inference
from kvkeep.pins import Spans
from kvkeep.policies.base import Policy
from kvkeep.prefill import chunk_size, for_prompt, in_chunks, read
from kvkeep.repeating import Repeating
from kvkeep.rotary import Rotation
from kvkeep.together import Together
from kvkeep.types import AttentionOptions, Fresh, Phase, Report, Slots, View


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
        together: Together | None = None,
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
