"""kvkeep's kernels for CUDA, in Triton; the only package that imports Triton, and only when a kernel runs.

===============================  ====================================================================================
`launch`                         where kernels run, which tensors they take, their tile sizes and arguments
`slots`, `decode`                kernels of a decode step, also over quantized slots; `ops` are their functions on
                                 tensors
`prefill`                        kernels of a prompt; `prefill_ops` are their functions on tensors
===============================  ====================================================================================

Each kernel's docstring says what the kernel moves and how exact it is; ``docs/gpu.md`` gives an overview.
"""

from __future__ import annotations

from dataclasses import replace

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.base import AttentionInputs, Backend, FusedStep, SlotLimits, is_known, wanted
from kvkeep.backends.copying import Copying
from kvkeep.backends.torch import TorchBackend
from kvkeep.backends.triton import launch, ops, prefill_ops
from kvkeep.kv.slot_codec import LazySlots
from kvkeep.types import Budget, Report, Slots

__all__ = ["TritonBackend"]


class TritonBackend(Backend):
    """Triton's kernels where there is one, torch elsewhere, with a notice in the log."""

    name = "triton"
    fuses = True
    codes = True

    def __init__(self) -> None:
        self._torch = TorchBackend()

    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend in kernels, or in torch if they cannot. A padded query, and one that sees nothing, give zeros."""
        done = _by_kernels(inputs)
        return self._torch.attend(inputs) if done is None else done

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Write one token per row into an empty slot of each head, in a kernel, or in torch if the kernel cannot."""
        slot = ops.write(slots, (keys, values), now)
        return Copying(self._torch).append(slots, keys, values, now) if slot is None else slot

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty the slots that a sliding window has passed, in a kernel, or in torch if the kernel cannot."""
        if not ops.evict(positions, None, SlotLimits(seen, window=window)):
            self._torch.expire(positions, seen, window)

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Return whether a head may hold more than its limit, as torch's backend says: on a GPU always ``True``."""
        return self._torch.is_over(positions, limit)

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: SlotLimits) -> None:
        """Empty one slot of every head over its limit, in a kernel, or in torch if the kernel cannot."""
        # with a window the kernel would also expire slots, which `Backend.evict` does not
        if not ops.evict(positions, score, replace(limits, window=None)):
            self._torch.evict(positions, score, limits)

    def step(self, step: FusedStep) -> Float[Tensor, "B Hq 1 E"] | None:
        """Append, attend, update the policy's sums, expire and evict in two kernels, in place, and return the output.

        Return ``None``, with nothing changed, for what the kernels cannot do (see `FusedStep.suits_kernels`), or for
        tensors that they cannot take, such as quantized slots.
        """
        query, slots, new, now, statistic, options, added, limits, _ = step
        if not step.suits_kernels:
            return None
        asked = wanted(statistic) if added.states else None
        return ops.step(query, slots, new, now, options=options, wanted=asked, added=added, limits=limits)


def _by_kernels(inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report] | None:
    """Compute `Backend.attend` in kernels.

    If they cannot, return ``None``; on a device with kernels a notice is logged.
    """
    query, slots, now, options, statistic = inputs
    if not launch.runs(query):
        return None
    if query.shape[2] > 1:
        slots = slots.copied() if isinstance(slots, LazySlots) else slots
        return prefill_ops.attend(inputs._replace(slots=slots))
    if options.top is not None or not is_known(statistic):
        launch.notice(
            f"it uses only its largest probabilities, or reports {type(statistic).__name__} with what it needs"
        )
        return None
    found = ops.attend(query, slots, now, options=options, wanted=wanted(statistic))
    if found is None:
        return None
    out, *sums = found
    return out, Report(dict(zip(statistic.fields, sums, strict=True)))
