"""How near is the attention of a decode step to the speed of the memory, in the native kernel and in plain torch?

    python bench/kernel.py [--shapes 1x512 32x2048] [--repeats 25] [--threads 2]

One layer of 12 query and 4 KV heads of 64, all slots occupied, with the mass that `h2o` wants. Calls go round many
copies of the block, as a model's layers do, so that none of it is in the processor's caches. What has to move (keys,
values, positions, mass) over the time, beside the memory's own speed: the better of reading and of copying a large
buffer. All of it is interleaved in one run; medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable

import torch
from lib import finish, interleaved, kernel, positive, show, spread

from kvkeep.backends import Backend, choose
from kvkeep.backends.torch import TorchBackend
from kvkeep.statistic import Mass
from kvkeep.types import AttentionOptions, Slots

HEADS, KV_HEADS, DIM = 12, 4, 64
BUFFER_BYTES = 2**28
"""Of a buffer, and of the copies of a block together."""


class Block:
    """Copies of one layer's block, and attention that goes round them.

    Attributes:
        bytes: what one call has to move.
        calls: how many calls make a measurable time.
    """

    def __init__(self, rows: int, slots: int, dtype: torch.dtype):
        size = 2 * rows * KV_HEADS * slots * DIM * dtype.itemsize
        copies = -(-BUFFER_BYTES // size)
        self.bytes = size + (4 + 4) * rows * KV_HEADS * slots
        self.calls = max(1, copies // 8)
        self._store = torch.randn(copies, 2, rows, KV_HEADS, slots, DIM, dtype=dtype)
        self._query = torch.randn(rows, HEADS, 1, DIM, dtype=dtype)
        self._positions = torch.arange(slots, dtype=torch.int32).repeat(rows, KV_HEADS, 1)
        self._now = torch.full((rows, 1), slots - 1)
        self._order = itertools.cycle(range(copies))

    def task(self, backend: Backend) -> Callable[[], None]:
        """So many calls of a backend's attention."""
        options = AttentionOptions(scaling=DIM**-0.5)

        def run() -> None:
            for _ in range(self.calls):
                slots = Slots(*self._store[next(self._order)], self._positions)
                backend.attend(self._query, slots, self._now, statistic=Mass(), options=options)

        return run


def measure(rows: int, slots: int, dtype: torch.dtype, repeats: int) -> dict:
    """Seconds of a call, and bytes per second of the memory."""
    block = Block(rows, slots, dtype)
    source = torch.ones(BUFFER_BYTES // 4)
    target = torch.zeros_like(source)
    tasks = {
        "read": source.sum,
        "copy": lambda: target.copy_(source),
        "attend": block.task(choose(source.device, dtype)),
        "torch": block.task(TorchBackend()),
    }
    with torch.inference_mode():
        times = interleaved(tasks, repeats)
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {
        "rows": rows,
        "slots": slots,
        "bytes": block.bytes,
        "attend_s": [seconds / block.calls for seconds in times["attend"]],
        "torch_s": [seconds / block.calls for seconds in times["torch"]],
        "memory": max(BUFFER_BYTES / middle["read"], 2 * BUFFER_BYTES / middle["copy"]),
        "moved": block.bytes * block.calls / middle["attend"],
        "speedup": middle["torch"] / middle["attend"],
    }


def shape(text: str) -> tuple[int, int]:
    """Rows and slots, such as 32x2048."""
    rows, _, slots = text.partition("x")
    return positive(rows), positive(slots)


def line(cell: dict) -> list[str]:
    return [
        f"{cell['rows']} x {cell['slots']}",
        f"{cell['bytes'] / 1e6:.1f}",
        spread(cell["attend_s"]),
        f"{cell['moved'] / 1e9:.1f}",
        f"{cell['memory'] / 1e9:.1f}",
        f"{cell['moved'] / cell['memory']:.0%}",
        spread(cell["torch_s"]),
        f"{cell['speedup']:.1f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ["1x512", "1x2048", "8x1024", "32x512", "32x2048"]
    parser.add_argument("--shapes", type=shape, nargs="+", default=list(map(shape, shapes)), help="rows x slots")
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--repeats", type=positive, default=25)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cells = []
    for dtype in options.dtypes:
        found = [measure(*size, getattr(torch, dtype), options.repeats) for size in options.shapes]
        cells += [{"dtype": dtype, **cell} for cell in found]
        show(
            f"Decode attention of one layer, {dtype}, {options.threads} threads, {kernel()}; ms: median (quartiles)",
            ["rows x slots", "MB", "ms", "GB/s", "memory", "of it", "torch: ms", "/ ms"],
            [line(cell) for cell in found],
        )
    finish({"bench": "kernel", "repeats": options.repeats, "threads": options.threads, "cells": cells})


if __name__ == "__main__":
    main()
