"""Attention and decode steps in C++, compiled for this machine at first use.

`build` compiles and loads the kernel, and its `native` returns it, or why there is none. `bindings` turn tensors into
arguments of the kernel, and check what it relies on. `ops` are its functions on tensors and slots, `layer_ops` the
operators between two attentions.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.base import (
    AtRanks,
    AttentionInputs,
    Backend,
    FusedStep,
    Repeat,
    SecondReading,
    SlotLimits,
    is_known,
    turned,
    wanted,
)
from kvkeep.backends.copying import Copying
from kvkeep.backends.native import ops
from kvkeep.backends.native.bindings import KeyRotation, coding_of, turn_of
from kvkeep.backends.native.build import Native, native
from kvkeep.backends.torch import TorchBackend
from kvkeep.kv.pooled_store import lying
from kvkeep.kv.slot_codec import LazySlots
from kvkeep.rotary import Rotation
from kvkeep.types import Budget, Report, Slots

__all__ = ["Native", "NativeBackend", "native"]


class NativeBackend(Backend):
    """The kernels, and torch for what they cannot do.

    Args:
        rotation: for slot positions, see `Backend.at_ranks`: in decode steps the kernel rotates each key while it reads
            it; a prompt's keys are rotated before. ``None`` for true positions.

    Cost of `attend`:
        for one token, the visible part of ``B·Hk·S·(D + E)`` elements, or of their codes and scales, is read once. For
        more, ``2·B·Hq·T·S·(D + E)`` FLOPs, half of it for a causal chunk; extra memory for a float32 copy of the keys
        and values of some heads. Over slots that hold codes, a chunk attends to a copy of the layer's slots in the
        model's dtype, ``B·Hk·S·(D + E)`` elements.
    """

    name = "native"
    pools = True
    codes = True
    fuses = True
    tallies = True
    has_layer_ops = True

    def __init__(self, rotation: Rotation | None = None) -> None:
        self._rotation = rotation
        self._others: Backend = TorchBackend() if rotation is None else AtRanks(NativeBackend(), rotation)

    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend in the kernel, or in torch if the kernel cannot.

        A padded query, or one that sees nothing, gives zeros.
        """
        query, slots, now, options, statistic = inputs
        if query.shape[2] > 1:
            read = ops.attend_prefill(inputs) if self._rotation is None else None
            return read or self._others.attend(inputs)
        found = None
        if options.top is None and is_known(statistic):
            there, ranges = lying(slots)
            (keys, values, positions), codes = coding_of(there)
            given, turn = (query, keys, values, now, positions), self._turn(positions.shape[2], query.dtype)
            asked: dict[str, Any] = {"options": options, "wanted": wanted(statistic), "turn": turn}
            found = ops.attend(*given, **asked, ranges=ranges, codes=codes)
        if found is None:
            return self._others.attend(inputs)
        out, *sums = found
        return out, Report(dict(zip(statistic.fields, sums, strict=True)))

    def reread(self, inputs: AttentionInputs, again: SecondReading) -> Float[Tensor, "B Hk S"]:
        """Compute `Backend.reread` in torch, with keys rotated first under slot positions."""
        return self._others.reread(inputs, again)

    def attend_twice(
        self, inputs: AttentionInputs, again: SecondReading
    ) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]]:
        """Return the results of `attend` and `reread` from one call of the kernel, or from torch if the kernel
        cannot.
        """
        done = ops.attend_twice(inputs, turned(inputs.query, again)) if self._rotation is None else None
        return done or self._others.attend_twice(inputs, again)

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Write one token per row into an empty slot of each head, in the kernel, or in torch if the kernel cannot."""
        there, ranges = lying(slots)
        there, codes = coding_of(there)
        slot = ops.write(*there, new=(keys, values), now=now, ranges=ranges, codes=codes)
        if slot is None:
            return Copying(self._others).append(slots, keys, values, now)
        if isinstance(slots, LazySlots):
            slots.forget()  # the decoded copy lacks the new token
        return slot

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty the slots that a sliding window has passed, in the kernel, or in torch if the kernel cannot."""
        if not ops.expire(positions, seen, window):
            self._others.expire(positions, seen, window)

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Return whether a head holds more than its limit, counted in the kernel, or in torch if the kernel cannot."""
        count = ops.count_over(positions, limit)
        return self._others.is_over(positions, limit) if count is None else count > 0

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: SlotLimits) -> None:
        """Empty one slot of every head over its limit, in the kernel, or in torch if the kernel cannot."""
        if not ops.evict(positions, score, limits):
            self._others.evict(positions, score, limits)

    def step(self, step: FusedStep) -> Float[Tensor, "B Hq 1 E"] | None:
        """Run a whole decode step in one call of the kernel, and return the output; ``None``, with nothing changed,
        if it cannot.
        """
        call = self._packed(step)
        out = None if call is None else call.run()
        if isinstance(step.slots, LazySlots):
            step.slots.forget()  # as in `append`
        return out

    def repeat(self, step: FusedStep) -> Repeat | None:
        """Return the step as packed arguments that are given other tokens only.

        Return ``None`` if the kernel cannot run the step, if something else changes with each token, such as bits in
        rings, or if it would need a converted copy of a counter or of the model's sinks.
        """
        limits = step.limits
        # the kernel gets sinks as a float32 copy, which `NativeRepeat` would not keep
        if step.added.ring is not None or step.options.sinks is not None:
            return None
        counters = [counter for counter in (limits.seen, limits.prompt) if counter is not None]
        if any(counter.dtype != torch.int64 for counter in counters):
            return None  # the kernel would be given a copy, and go on reading it
        call = self._packed(step)
        return None if call is None else ops.NativeRepeat(call, self._rotation)

    def _packed(self, step: FusedStep) -> ops.NativeStep | None:
        """Check a step, and return its arguments packed for the kernel, which `NativeStep.run` starts; ``None`` if the
        kernel cannot run it. Nothing is changed yet.
        """
        query, slots, new, now, statistic, options, added, limits, ranges = step
        if not step.suits_kernels:
            return None
        there, ranges = (slots, ranges) if ranges is not None else lying(slots)
        there, codes = coding_of(there)
        return ops.step(
            *((query, *new), there, now),
            options=options,
            wanted=wanted(statistic) if added.states else None,  # without states nobody adds the sums up
            added=added,
            limits=limits,
            # where positions lie in the pool, too, there are more of them than any head has slots
            turn=self._turn((ranges and ranges.width) or there.positions.shape[2], query.dtype, rotated_at=now),
            ranges=ranges,
            codes=codes,
        )

    def at_ranks(self, rotation: Rotation) -> Backend:
        """Return a native backend for slot positions, whose kernel rotates keys while it reads them.

        The kernel rotates two halves against each other. Other pairs are rotated before it starts.
        """
        return NativeBackend(rotation) if rotation.dims is None else AtRanks(self, rotation)

    def _turn(self, slots: int, dtype: torch.dtype, rotated_at: Int[Tensor, "B 1"] | None = None) -> KeyRotation | None:
        """Return the angles by which the kernel rotates keys of this dtype to their ranks; ``None`` under true
        positions, where keys are rotated already. The arguments are those of `turn_of`.
        """
        return None if self._rotation is None else turn_of(self._rotation, slots, dtype, rotated_at)
