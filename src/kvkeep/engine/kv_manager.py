"""The KV memory of the engine: one row per running sequence, all rows allocated once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvkeep.budget import Number, smallest
from kvkeep.cache.bounded_cache import BoundedCache
from kvkeep.cache.hf_layers import HandingLayer, PhasedCache, beside_state
from kvkeep.cache.layer import Layer
from kvkeep.cache.layer_layout import Layout, caches_latents
from kvkeep.cache.prompt_kv import LayerPrompts, PromptReading
from kvkeep.cache.shared_budget import SharedBudget
from kvkeep.engine.kv_blocks import Blocks, RecurrentState, probed, states_of
from kvkeep.kv.block import Block
from kvkeep.kv.row_copy import has_room
from kvkeep.kv.store import inference
from kvkeep.kv_bits import transforms_keys
from kvkeep.models.checkpoint import Model
from kvkeep.models.key_transforms import key_transforms
from kvkeep.pins import Spans, end, spans
from kvkeep.policies._head_budgets import refusal
from kvkeep.policies._keep_prompt import keeps_share
from kvkeep.policies.base import Policy
from kvkeep.snapshot.contents import Contents, check_beside, mine, whole
from kvkeep.types import AttentionOptions, MemoryUsage, Phase, Stepper, bytes_of

# Neighbouring rows of several owners: one run of the model, and in each layer one step for each owner.


class Owner(NamedTuple):
    """How a row's steps are taken.

    Attributes:
        policy: the eviction policy.
        pinned: whether the row has pins. A kernel for whole steps knows only of first positions.
        lead: how many first positions stay while it generates, if pins and `keep_prompt` protect no others; otherwise
            0.
    """

    policy: Policy
    pinned: bool = False
    lead: int = 0


class Segment(NamedTuple):
    """Neighbouring rows of equal owners."""

    owner: Owner
    start: int
    stop: int


def segments(owners: Sequence[Owner | None], start: int, stop: int, default: Policy) -> tuple[Segment, ...]:
    """Split a range of rows into segments: neighbouring rows with equal owners, which are their policy and what of them
    is protected.

    A row without an owner joins the rows before it; if all rows are without one, the range is one segment under the
    default policy.
    """
    first = next((owner_of_row for owner_of_row in owners[start:stop] if owner_of_row is not None), Owner(default))
    found = [Segment(first, start, start)]
    for row, owner in enumerate(owners[start:stop], start):
        # an empty row in between must not cost a run of the model of its own
        if owner is not None and owner != found[-1].owner:
            found.append(Segment(owner, row, row))
        found[-1] = found[-1]._replace(stop=row + 1)
    return tuple(found)


class Segments:
    """Takes the steps of neighbouring rows that have layers of their own, and holds nothing itself.

    The model's matrices are read once for all rows; attention, statistics and eviction run once for each part.

    Args:
        parts: the rows of each part, counted from the first part's first row, and the part's layer.
    """

    def __init__(self, parts: Sequence[tuple[slice, Stepper]]) -> None:
        self._parts = parts

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
        """Run `kvkeep.Layer.step` for each segment on its own rows, and return the outputs of all rows in order."""
        done = []
        for rows, part in self._parts:
            mine = None if real is None else real[rows]
            done.append(part.step(query[rows], keys[rows], values[rows], options=options, phase=phase, real=mine))
        return torch.cat(done)


def joined(parts: Sequence[tuple[Segment, Stepper]]) -> Stepper:
    """Return the layers of neighbouring segments as one layer; a single segment's layer is returned itself."""
    start = parts[0][0].start
    steppers = [(slice(segment.start - start, segment.stop - start), layer) for segment, layer in parts]
    return steppers[0][1] if len(steppers) == 1 else Segments(steppers)


Watch: TypeAlias = Callable[[int, Segment, Policy], Policy]
"""Is given some rows in a layer and their policy. Returns this policy, or one around it that watches."""

_MAIN = torch.device("cpu")

_MOST = 64
"""Number of row ranges, and of policies, whose layers are remembered. Others are made again when they are needed."""


class KVManager:
    """Rows of slots in all layers of a model. They are made for one policy; others share them if they fit.

    Args:
        model: the model, attached.
        policy: the policy that the rows are made for.
        budget: the largest budget of a row; every row has memory for it.
        options: ``layer_budget``, ``head_budget``, ``positions``, ``kv_bits``, and for a model that reads prompts whole
            ``prefill_chunk``; see `BoundedCache`.

    Attributes:
        count: rows that are allocated; 0 before `allocate`.
        dtype: the name of the dtype of keys; ``None`` if the model has none.
        heads: which KV heads this process holds.
        row_bytes: bytes of one row under the policy that the rows are made for.
        token_bytes: bytes of a token's keys and values in all layers, in the model's dtype.
        alone: whether a run of the model may have only one row.

    Raises:
        UnsupportedModelError: the model has layers whose cache cannot be bounded.
    """

    def __init__(self, model: Model, policy: Policy, budget: int, **options: Any) -> None:
        self._config, self._latent = model.config, caches_latents(model.config)
        self._budget, self._options = budget, options
        self._layouts: dict[Policy, Layout] = {}
        # still equal to the one that was given: a rule for heads is no option of the policy, so it is not compared
        self.policy = policy = self.ruled(policy)
        self._layers: dict[Policy, list[Layer]] = {}
        self._owners: list[Owner | None] = []
        self._own: list[RecurrentState | None] = []
        self._parts: dict[tuple[tuple[Segment, ...], RecurrentState | None, Phase], PhasedCache] = {}
        self._renewals = self._parts_version = 0
        layers = (probe := probed(model)).bounded_layers()
        like = [layer.store.slots() for layer in layers.values()]
        self.dtype = str(like[0].keys.dtype).removeprefix("torch.") if like else None
        self.token_bytes = sum(bytes_of((slots.keys, slots.values)) for slots in like)  # of one token in one row
        layout = self._layout(policy)
        self.heads = layout.heads
        found = key_transforms(model) if transforms_keys(layout.kv_bits) else {}
        # for all layers or for none: the blocks take them in the order of the layers
        transforms = [found[number] for number in layers] if found.keys() >= layers.keys() else []
        self._blocks = Blocks(layout.policies, like, kv_bits=layout.kv_bits, among=layout.heads, transforms=transforms)
        self._windows = {index: layer.window for index, layer in layers.items()}
        self._state_bytes = RecurrentState(states_of(probe)).memory().allocated_bytes
        self._has_states = bool(states_of(probe))
        self.alone = policy.cascades or self._has_states
        self.row_bytes = self._blocks.row_bytes(self.numbers(policy, budget)) + self._state_bytes
        self.allocate(0)  # whoever makes the rows asks for `row_bytes` before it says how many there shall be

    @inference
    def allocate(self, count: int, *, most_bytes: int | None = None) -> None:
        """Allocate ``count`` empty rows in place of the old ones.

        Policies with more state may add to them later, up to ``most_bytes`` in all.
        """
        self.renew()
        self.count = count
        self._most_bytes = most_bytes
        self._owners = [None] * count
        self._own = [None] * count
        try:
            self._blocks.allocate(count, self.numbers(self.policy, self._budget))
        except BaseException:
            # there must be no rows without memory
            self.count = 0
            raise
        if count:
            self._layers_of(self.policy)  # now, so that the first request does not wait for them

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer with slots; ``None`` for full attention."""
        return tuple(self._windows.values())

    def takes(self, policy: Policy) -> bool:
        """Return whether a sequence under this policy may have one of the present rows, beside rows of other policies:
        it needs no more slots than they have, and its state fits into the memory limit.
        """
        if policy == self.policy:
            return True
        if policy.cascades or self.policy.cascades or (self._blocks.pooled and refusal(policy)):
            return False  # rows that run alone; heads that hold equally many tokens
        layers = zip(self._blocks, self.numbers(policy, self._budget), self._layout(policy).policies, strict=True)
        if not all(has_room(block, number, own.spreads is not None) for block, number, own in layers):
            return False
        more = self._blocks.lacks(policy)
        if self._most_bytes is None or not more:
            return True
        held = sum(block.memory().allocated_bytes for block in self._blocks) + self.count * self._state_bytes
        return held + more <= self._most_bytes

    @inference
    def begin(
        self,
        row: int,
        *,
        budget: int,
        policy: Policy | None = None,
        sequence: int = 0,
        pins: Spans = (),
        prompt_tokens: int = 0,
        contents: Contents | None = None,
        known: int = 0,
    ) -> None:
        """Empty a row for a new sequence, or continue one whose memory was taken before.

        Args:
            row: the row's index.
            budget: the sequence's budget.
            policy: one that `takes` accepts; ``None``: the policy that the rows are made for.
            sequence: the sequence's identity for randomness; the slots of ``contents`` keep theirs.
            pins: spans of positions that may not be evicted, besides those of ``contents``.
            prompt_tokens: length of the prompt, of which `keep_prompt` may keep a share.
            contents: the sequence's memory; ``None``: it begins empty.
            known: tokens of the prompt that were read before, and come with the run that reads the rest of it.

        Raises:
            BudgetError: the policy protects more than the budget, or does not give heads the budgets of the contents.
            ShapeError: the contents belong to another model or policy.
        """
        policy = self.policy if policy is None else policy
        held = contents.layers[0].pins if contents is not None and contents.layers else ()
        pins = spans((*held, *pins))
        # see `Owner`: a single span from the first position on is one that kernels can protect
        lead = pins[0][1] if policy.evicts and len(pins) == 1 and pins[0][0] == 0 else 0
        if keeps_share(policy):
            lead = prompt_tokens if end(pins) <= prompt_tokens else 0
        self._owners[row] = Owner(policy, bool(pins) and policy.evicts, lead)
        self._own[row] = self._new_own(policy)
        self._blocks.begin(row, policy, sequence)
        self._blocks.limit(row, self.numbers(policy, budget))
        self._blocks.skip(row, known)
        if contents is not None:
            contents = mine(contents, self.heads)
            own = self._own[row] or RecurrentState({})
            check_beside(contents, len(self._windows), own.states)
            self._blocks.check(contents.layers, policy)
            self._blocks.put(row, contents.layers, policy)
            own.put(contents, self._blocks[0] if self._windows else None)
        self._blocks.pin(row, pins)

    def drop(
        self, row: int, gone: Spans, *, policy: Policy, budget: int, sequence: int, pins: Spans, prompt_tokens: int
    ) -> None:
        """Evict the tokens at some positions from all layers and heads of a row. The other arguments are `begin`'s.

        Raises:
            UnsupportedOperationError: the model has layers with a state.
        """
        contents = self.take(row, None).without(gone)
        self.begin(
            row,
            policy=policy,
            budget=budget,
            sequence=sequence,
            pins=pins,
            prompt_tokens=prompt_tokens,
            contents=contents,
        )

    def limit_row(self, row: int, policy: Policy, budget: int) -> None:
        """Set a row's budget in all layers, from the next step on."""
        self._blocks.limit(row, self.numbers(policy, budget))

    @inference
    def take(self, row: int, device: torch.device | None = _MAIN) -> Contents:
        """Copy the memory of a row, with all heads, to a device, by default into main memory.

        ``None``: the row's own device.
        """
        owner, own = self._owners[row] or Owner(self.policy), self._own[row] or RecurrentState({})
        return whole(Contents(self._blocks.take(row, owner.policy, device), own.take(device)), self.heads)

    @inference
    def end(self, row: int) -> None:
        """Empty a row and remove its owner, so that the row may be part of a run under any policy."""
        if (own := self._own[row]) is not None:  # a part that is remembered would keep the states alive
            self._parts = {key: part for key, part in self._parts.items() if key[1] is not own}
        self._owners[row] = self._own[row] = None
        self._blocks.clear(row)

    @inference
    def move(self, source: int, target: int) -> None:
        """Move a sequence to another row, and empty the row that it had."""
        self._owners[target], self._own[target] = self._owners[source], self._own[source]
        self._blocks.move(source, target)
        self.end(source)

    def sole(self, start: int, stop: int) -> Owner | None:
        """Return the owner (policy and protected tokens) that all rows of a range have; ``None`` if they differ. Rows
        without an owner do not count, and if none has one, it is that of the default policy.
        """
        found = segments(self._owners, start, stop, self.policy)
        return found[0].owner if len(found) == 1 else None

    def part(
        self,
        start: int,
        stop: int,
        phase: Phase,
        *,
        fresh: bool = False,
        watch: Watch | None = None,
        readings: Sequence[PromptReading | None] = (),
    ) -> PhasedCache:
        """Return a cache over a range of rows, to be passed to the model. The same one is returned while the rows'
        tensors and owners stay the same, but for new prompts and for rows with readings.

        Args:
            start: the first row.
            stop: the row after the last one.
            phase: what the tokens of the run are.
            fresh: whether all rows begin a new prompt.
            watch: returns the policy to use for some rows of a layer, if they begin a new prompt.
            readings: of the rows' prompts, if any of them has one.
        """
        if self._parts_version != self.version:
            self._parts.clear()
            self._parts_version = self.version
        found = segments(self._owners, start, stop, self.policy)
        # of states of one's own the first row's do: rows that have some run alone, see `_cache_of`
        key = (found, self._own[start], phase)  # a recorded step keeps its part, so the part's phase must not change
        if fresh:
            part = self._cache_of(found, columns=0, watch=watch, readings=readings)
        elif any(readings):
            part = self._cache_of(found, columns=1, readings=readings)
        elif key in self._parts:
            part = self._parts[key]
        else:
            _make_room(self._parts)
            part = self._parts[key] = self._cache_of(found, columns=1)  # not 0: the slots hold tokens
        part.phase = phase
        return part

    def renew(self) -> None:
        """Drop the caches made from the rows' tensors, and increment ``version``."""
        self._parts.clear()
        self._renewals += 1

    @property
    def version(self) -> int:
        """Return a number that grows whenever row tensors, or the caches made from them, are replaced."""
        return self._renewals + self._blocks.version

    def numbers(self, policy: Policy, budget: int) -> list[Number]:
        """Return the budget of each layer under a policy: ``budget``, spread as the options say.

        Raises:
            BudgetError: the policy protects more than the budget.
        """
        return self._layout(policy).slots(budget)

    def ruled(self, policy: Policy) -> Policy:
        """Return the policy with the manager's ``head_budget`` applied."""
        return self._layout(policy).policy

    def _layout(self, policy: Policy) -> Layout:
        """Return how a policy's budgets are spread over the layers. Layouts are cached."""
        if policy not in self._layouts:
            _make_room(self._layouts)
            self._layouts[policy] = Layout.of(self._config, policy, **self._options)
        return self._layouts[policy]

    def memory(self) -> MemoryUsage:
        """Return the memory usage of all rows and layers, from real tensors.

        A free row counts its slots, but no state.
        """
        beside = (own.memory() for own in self._own if own is not None)
        return sum((*(block.memory() for block in self._blocks), *beside), MemoryUsage())

    def blocks_of(self, row: int) -> list[Block]:
        """Return, for each layer with slots, a block of one row that shares the memory of that row."""
        return [block.part(row, row + 1) for block in self._blocks]

    def memory_of(self, row: int) -> MemoryUsage:
        """Return the memory usage of one row over all layers."""
        return self._blocks.memory_of(row) + (self._own[row] or RecurrentState({})).memory()

    def may_evict(self, policy: Policy, budget: int, tokens: int) -> bool:
        """Return whether a row under a policy and a budget may have to evict some of ``tokens`` tokens, but for those
        that leave a sliding window anyway.
        """
        pairs = zip(self.numbers(policy, budget), self.windows, strict=True)
        return any(smallest(number) < min(tokens, window or tokens) for number, window in pairs)

    def lost_of(self, row: int) -> list[Tensor]:
        """Return copies of one row's sums of attention mass, one ``(heads, 4)`` per layer, with the heads of all
        processes: lost by eviction and all, in prompts and in decoding.
        """
        return self._blocks.lost_of(row)

    def _cache_of(
        self,
        parts: tuple[Segment, ...],
        *,
        columns: int,
        watch: Watch | None = None,
        readings: Sequence[PromptReading | None] = (),
    ) -> PhasedCache:
        """Return a new cache for the model over some segments of rows, in all layers.

        Args:
            parts: the segments.
            columns: 0 if the rows begin their prompts, and 1 if their slots hold tokens; see `Layer.over`.
            watch: see `part`.
            readings: see `part`.
        """
        # rows with a state run alone, so it is the only row
        own = self._own[parts[0].start]
        layers: dict[int, Any] = dict(own.states) if own else {}
        sharing = {segment: self._layout(segment.owner.policy).sharing for segment in parts}
        shared = {segment: SharedBudget.by_layer(numbers) if numbers else {} for segment, numbers in sharing.items()}
        before: dict[Segment, Layer] = {}
        for i, (index, window) in enumerate(self._windows.items()):
            before = {
                segment: self._layer(i, segment, columns, watch, before.get(segment), shared[segment].get(index))
                for segment in parts
            }
            for segment, layer in before.items() if any(readings) else ():
                mine = readings[segment.start - parts[0].start : segment.stop - parts[0].start]
                layer.prompts = LayerPrompts(i, mine) if any(mine) else None
            steps = joined(list(before.items()))
            layers[index] = beside_state(HandingLayer(steps, window), layers.get(index))
        # sorted, since layers with a state came first
        cache = PhasedCache(layers=[layers[index] for index in sorted(layers)])
        cache.latent = self._latent
        return cache

    def _layer(
        self,
        index: int,
        segment: Segment,
        columns: int,
        watch: Watch | None,
        before: Layer | None,
        shared: SharedBudget | None,
    ) -> Layer:
        """Return one layer over the rows of a segment, under its owner's policy. ``watch`` may replace the policy.

        Args:
            index: the layer's place among those with slots.
            segment: the rows.
            columns: see `_cache_of`.
            watch: see `part`.
            before: the layer before this one over the same rows; ``None`` for the first one.
            shared: the budget that the layer shares with others, if it does.
        """
        policy = segment.owner.policy
        block = self._blocks[index].under(policy.slots, policy.summaries).part(segment.start, segment.stop)
        if not segment.owner.pinned:
            # fused and recorded steps know nothing of most pins, so rows without any show none
            block.pins = None
        block.lead = segment.owner.lead
        layer = self._layers_of(policy)[index].over(block, columns=columns, before=before, together=shared)
        if watch is not None:
            layer.policy = watch(index, segment, layer.policy)
        return layer

    def _layers_of(self, policy: Policy) -> list[Layer]:
        """Return the layers with slots under a policy. They have no blocks: each run makes copies of them over the
        blocks of its rows.

        They are cached.
        """
        if policy not in self._layers:
            _make_room(self._layers)
            self._layers[policy] = list(self._cache(policy, self._budget).bounded_layers().values())
        return self._layers[policy]

    def _new_own(self, policy: Policy) -> RecurrentState | None:
        """Return new, empty states for one sequence, of the layers that keep a state; ``None`` for a model without such
        layers.
        """
        return RecurrentState(states_of(self._cache(policy, self._budget))) if self._has_states else None

    def _cache(self, policy: Policy, budget: int) -> BoundedCache:
        """Return a new cache under a policy, with the manager's options."""
        return BoundedCache(self._config, policy, budget, **self._options)


def _make_room(remembered: dict[Any, Any]) -> None:
    """Clear a dictionary that has `_MOST` entries; otherwise do nothing."""
    if len(remembered) >= _MOST:
        remembered.clear()
