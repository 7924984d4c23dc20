"""A backend for slots in a pool: keys and values are copied side by side before attention starts."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.added import Limits
from kvkeep.backends.protocol import Backend
from kvkeep.ranges import PoolSlots
from kvkeep.rotary.ranks import Rotation
from kvkeep.statistic import Statistic
from kvkeep.types import AttentionOptions, Budget, Report, Slots


def append(
    slots: PoolSlots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
) -> Int[Tensor, "B Hk 1"]:
    """`Backend.append` for slots in a pool. The first empty slot of a head lies in the head's range."""
    slot: Int[Tensor, "B Hk 1"] = slots.positions.argmin(dim=-1, keepdim=True)
    slots.write(slot, keys, values)
    slots.positions.scatter_(2, slot, now.to(slots.positions.dtype)[:, :, None].expand(slot.shape))
    return slot


def in_pool(backend: Backend) -> Backend:
    """This backend for slots in a pool."""
    return backend if backend.pools else InPool(backend)


class InPool(Backend):
    """Any backend over slots in a pool.

    Args:
        backend: does the work.
    """

    name = "in_pool"

    def __init__(self, backend: Backend):
        self.backend = backend

    def attend(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        statistic: Statistic,
        options: AttentionOptions,
    ) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """See `Backend.attend`."""
        return self.backend.attend(query, _copied(slots), now, statistic=statistic, options=options)

    def reread(
        self,
        query: Float[Tensor, "B Hq T D"],
        slots: Slots,
        now: Int[Tensor, "B T"],
        *,
        length: Int[Tensor, "B #Hk"],
        rotation: Rotation | None,
        options: AttentionOptions,
    ) -> Float[Tensor, "B Hk S"]:
        """See `Backend.reread`."""
        there = _copied(slots)
        return self.backend.reread(query, there, now, length=length, rotation=rotation, options=options)

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """See `Backend.append`."""
        if isinstance(slots, PoolSlots):
            return append(slots, keys, values, now)
        return self.backend.append(slots, keys, values, now)

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """See `Backend.expire`."""
        self.backend.expire(positions, seen, window)

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """See `Backend.is_over`."""
        return self.backend.is_over(positions, limit)

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: Limits) -> None:
        """See `Backend.evict`."""
        self.backend.evict(positions, score, limits)


def _copied(slots: Slots) -> Slots:
    return slots.copied() if isinstance(slots, PoolSlots) else slots
