"""The bandwidth of a device's memory, and the speed of products, measured beyond the processor's caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvkeep.backends import choose, layer_ops
from kvkeep.errors import show_bytes
from kvkeep.models.device import enough_memory

BUFFER_BYTES = 2**28
"""More than the caches of a processor hold."""

REPEATS = 9
"""Timed reads and copies; their median is taken."""

PRODUCTS = 5
"""Timed products; fewer, since they take longer."""

MOST_LAYERS = 1024
"""Linear layers that are multiplied at most: narrow ones would make millions."""


@dataclass(frozen=True)
class Bandwidth:
    """The speed of a memory in bytes per second, medians over repeats.

    Attributes:
        read: while a buffer is summed.
        copy: while one buffer is copied to another; bytes read and bytes written both count.
    """

    read: float
    copy: float

    @property
    def best(self) -> float:
        """Return the larger of the read and copy bandwidths, in bytes per second."""
        return max(self.read, self.copy)


def measure_bandwidth(device: torch.device, *, size_bytes: int = BUFFER_BYTES, repeats: int = REPEATS) -> Bandwidth:
    """Measure and return the bandwidth of a device's memory, with torch's threads.

    Args:
        device: where the buffers are.
        size_bytes: size of each of two buffers.
        repeats: number of measurements, after one that does not count.

    Raises:
        InputError: the device has no room for the buffers.
    """
    with enough_memory(device, _room_for(2 * size_bytes)):
        source = torch.ones(size_bytes // 4, dtype=torch.float32, device=device)  # filled, so that its pages exist
        target = torch.zeros_like(source)
        read = _seconds(source.sum, device, repeats)
        copy = _seconds(lambda: target.copy_(source), device, repeats)
    return Bandwidth(size_bytes / read, 2 * size_bytes / copy)


def measure_products(
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    *,
    width: int,
    size_bytes: int = BUFFER_BYTES,
    repeats: int = PRODUCTS,
) -> float:
    """Measure how fast a step's rows are multiplied with weights, with torch's threads: by torch, or by the native
    kernels where there are some and they are faster.

    Args:
        device: where the weights are.
        dtype: of weights and rows.
        rows: number of rows of the step.
        width: inputs of each linear layer, which has three times as many outputs.
        size_bytes: of all weights, at least one layer and at most 1 024.
        repeats: number of measurements, after one that does not count.

    Returns:
        Bytes of weights per second.

    Raises:
        InputError: the device has no room for the weights.
    """
    one = 3 * width * width * dtype.itemsize
    count = min(max(1, size_bytes // one), MOST_LAYERS)
    with enough_memory(device, _room_for(count * one)), torch.inference_mode():
        layers = [_linear(part) for part in torch.full((count, 3 * width, width), 0.5, dtype=dtype, device=device)]
        x = torch.ones((rows, width), dtype=dtype, device=device)

        def multiply() -> None:
            for layer in layers:
                linear(x, layer.weight)  # not kept: results of narrow layers would take more than their weights

        def multiply_natively() -> None:
            for layer in layers:
                layer_ops.products(x, (layer,))

        seconds = _seconds(multiply, device, repeats)
        if choose(device, dtype).has_layer_ops and layer_ops.products(x, layers[:1]) is not None:
            seconds = min(seconds, _seconds(multiply_natively, device, repeats))
    return count * one / seconds


def _room_for(size_bytes: int) -> str:
    """Return a sentence on what to do if a measurement finds too little memory, for so many bytes of buffers."""
    return f"A measurement takes {show_bytes(size_bytes)}: end what fills the memory, or give a bandwidth instead."


def _linear(weight: Tensor) -> nn.Linear:
    """Return a linear layer with these weights and no bias."""
    # its own weights are replaced at once, so they get no memory
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return layer


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the median time of the work in seconds, after one run that does not count."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # a GPU works on after the call has returned
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first one warms up
