"""Bytes, counted on real tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

from torch import Tensor


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Sum of the tensors' sizes in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


@dataclass(frozen=True)
class MemoryUsage:
    """What a cache holds, in bytes; reports of layers add up.

    Attributes:
        allocated_bytes: everything: keys, values, positions, policy state, counters.
        occupied_bytes: the part of keys, values, positions and state that belongs to slots with a token.
        state_bytes: the policy's state and the counters, a part of ``allocated_bytes``.
        full_bytes: keys and values of every token seen, which a full cache would hold (padding not counted), and the
            states of layers without slots.
    """

    allocated_bytes: int = 0
    occupied_bytes: int = 0
    state_bytes: int = 0
    full_bytes: int = 0

    def __add__(self, other: MemoryUsage) -> MemoryUsage:
        return MemoryUsage(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def compression(self) -> float:
        """Full bytes per allocated byte, e.g. 4.0 for a quarter of the memory."""
        return self.full_bytes / self.allocated_bytes if self.allocated_bytes else 1.0
