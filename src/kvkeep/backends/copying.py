"""Backends for slots that they cannot read where they lie: keys and values are copied before attention starts."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.base import AttentionInputs, Backend, SecondReading, SlotLimits
from kvkeep.kv.pooled_store import PoolSlots
from kvkeep.kv.slot_codec import CodedSlots, LazySlots
from kvkeep.types import EMPTY, Budget, Report, Slots


def append(
    slots: LazySlots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
) -> Int[Tensor, "B Hk 1"]:
    """Write one token per row into an empty slot of each head, in place, and return the slots, see `Backend.append`.

    The slot of a padded token stays empty, and so does that of a token that the head cannot store, such as one with NaN
    in quantized slots.
    """
    slot: Int[Tensor, "B Hk 1"] = slots.positions.argmin(dim=-1, keepdim=True)  # in a pool: in the head's range
    used = slots.write(slot, keys, values)
    positions = now.to(slots.positions.dtype)[:, :, None].expand(slot.shape)
    slots.positions.scatter_(2, slot, positions if used is None else positions.masked_fill(~used, EMPTY))
    return slot


def in_pool(backend: Backend) -> Backend:
    """Return a backend for slots in a pool: this one if it reads them where they lie, else one that copies them
    first.
    """
    return backend if backend.pools else Copying(backend)


def in_codes(backend: Backend, *, turned: bool) -> Backend:
    """Return a backend for quantized slots: this one if it reads them itself, else one that hands it a decoded copy.

    Args:
        backend: does the work.
        turned: whether the backend turns keys to their ranks, which needs them as they were before `KeyTransform`.
    """
    return backend if backend.codes else Copying(backend) if turned else Decoding(backend)


class Copying(Backend):
    """Any backend over slots that are copied side by side before each step.

    Args:
        backend: does the work.
    """

    name = "copying"

    def __init__(self, backend: Backend):
        self.backend = backend

    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend with the inner backend, over a copy of the slots if they lie in a pool or are quantized."""
        return self.backend.attend(_copied(inputs))

    def reread(self, inputs: AttentionInputs, again: SecondReading) -> Float[Tensor, "B Hk S"]:
        """Compute `Backend.reread` with the inner backend, over a copy of the slots if they lie in a pool or are
        quantized.
        """
        return self.backend.reread(_copied(inputs), again)

    def attend_twice(
        self, inputs: AttentionInputs, again: SecondReading
    ) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]]:
        """Return the results of `attend` and `reread` of the inner backend, over one copy of the slots if they lie in a
        pool or are quantized.
        """
        return self.backend.attend_twice(_copied(inputs), again)

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Write one token per row into an empty slot of each head, in place, and return the slots: by the function
        `append` if they lie in a pool or are quantized, else by the inner backend.
        """
        if isinstance(slots, LazySlots):
            return append(slots, keys, values, now)
        return self.backend.append(slots, keys, values, now)

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty the slots that a sliding window has passed, by the inner backend."""
        self.backend.expire(positions, seen, window)

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Return whether a head may hold more than its limit, as the inner backend says."""
        return self.backend.is_over(positions, limit)

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: SlotLimits) -> None:
        """Empty one slot of every head over its limit, by the inner backend."""
        self.backend.evict(positions, score, limits)


class Decoding(Copying):
    """Any backend over slots that hold codes. `attend` leaves keys as they were coded, and changes the query instead,
    see `KeyTransform`; a second reading takes decoded keys, as in `Copying`.
    """

    name = "decoding"

    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend with the inner backend. It gets a decoded copy of quantized slots whose keys stay transformed, and the
        query that belongs to such keys; other slots as they are.
        """
        if isinstance(slots := inputs.slots, CodedSlots):
            inputs = inputs._replace(query=slots.transform.query(inputs.query), slots=slots.transformed())
        return self.backend.attend(inputs)


def _copied(inputs: AttentionInputs) -> AttentionInputs:
    """Return inputs with a copy of the slots side by side: quantized ones decoded, a quantized pool's still quantized.

    Other inputs are returned as they are.
    """
    if isinstance(slots := inputs.slots, PoolSlots):
        return inputs._replace(slots=slots.laid)
    return inputs._replace(slots=slots.copied()) if isinstance(slots, LazySlots) else inputs
