"""The bandwidth of a device's memory, measured with buffers that are larger than the processor's caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvkeep.models.device import enough_memory

BUFFER_BYTES = 2**28
REPEATS = 9


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second, medians over repeats.

    Attributes:
        read: while a buffer is summed.
        copy: while one buffer is copied to another; bytes read and bytes written both count.
    """

    read: float
    copy: float

    @property
    def best(self) -> float:
        """The larger of both."""
        return max(self.read, self.copy)


def measure_bandwidth(device: torch.device, *, size_bytes: int = BUFFER_BYTES, repeats: int = REPEATS) -> Bandwidth:
    """Measure the bandwidth of a device's memory, with torch's threads.

    Args:
        device: where the buffers are.
        size_bytes: size of each of two buffers.
        repeats: number of measurements, after one that does not count.

    Raises:
        InputError: the device has no room for the buffers.
    """
    with enough_memory(device):
        source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)
        target = torch.zeros_like(source)
        read = _seconds(source.sum, device, repeats)
        copy = _seconds(lambda: target.copy_(source), device, repeats)
    return Bandwidth(size_bytes / read, 2 * size_bytes / copy)


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """The median time of the work."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])
