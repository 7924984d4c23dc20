"""How near is the attention of a decode step to the speed of the memory, in the native kernel and in plain torch?

    python bench/kernel.py [--shapes 1x512 32x2048] [--repeats 25] [--threads 2]
    python bench/kernel.py --bits 16 8 4 k8v4 --shapes 8x8192 32x8192    # codes beside numbers of the dtype
    python bench/kernel.py --bits 8 4 --dim 128 --heads 16 --kv-heads 8

One layer of 12 query and 4 KV heads of 64, all slots occupied, with the mass that `h2o` wants. Calls go round many
copies of the block, as a model's layers do, so that none of it is in the processor's caches. What has to move (keys,
values, scales, positions, mass) over the time, beside the memory's own speed: the better of reading and of copying a
large buffer. All of it is interleaved in one run; medians. With codes, "write" is one token's share of that time: it is
rotated, coded and put into a free slot of each head. "faster" is against the first numbers of a shape: the first dtype
with the first bits.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from lib import finish, interleaved, kernel, positive, show, spread

from kvkeep.attention_stats import Mass
from kvkeep.backends import AttentionInputs, Backend, choose
from kvkeep.backends.torch import TorchBackend
from kvkeep.kv.slot_codec import CodedSlots, Codes, encode
from kvkeep.types import AttentionOptions, Slots

BUFFER_BYTES = 2**28
"""Of a buffer, and of the copies of a block together."""

BITS = {"16": None, "8": (8, 8), "4": (4, 4), "k8v4": (8, 4)}
"""Bits of keys and values; ``None``: numbers of the dtype."""


@dataclass(frozen=True)
class Shape:
    """The size of a layer."""

    rows: int
    slots: int
    heads: int
    kv_heads: int
    dim: int

    def copies(self, dtype: torch.dtype, bits: tuple[int, int] | None) -> tuple[list[Slots], int]:
        """So many blocks that no cache holds them, and the bytes that a call moves in one."""
        room = self.rows, self.kv_heads, self.slots
        positions = torch.arange(self.slots, dtype=torch.int32).repeat(self.rows, self.kv_heads, 1)

        def made() -> Slots:
            x = torch.randn(2, *room, self.dim, dtype=dtype)
            if bits is None:
                return Slots(x[0], x[1], positions)
            return CodedSlots.of(encode(x[0], bits[0]), encode(x[1], bits[1]), positions, dtype)

        first = made()
        size = sum(tensor.nbytes for tensor in tensors_of(first))
        others = (moved(first) for _ in range(-(-BUFFER_BYTES // size) - 1))
        return [first, *others], size + (4 + 4) * positions.numel()


def tensors_of(slots: Slots) -> list[torch.Tensor]:
    """Keys and values, or their codes and scales."""
    if not isinstance(slots, CodedSlots):
        return [slots.keys, slots.values]
    return [tensor for codes in (slots.coded_keys, slots.coded_values) for tensor in codes[:2]]


def moved(slots: Slots) -> Slots:
    """The same slots elsewhere in memory; their positions are shared."""
    if not isinstance(slots, CodedSlots):
        return Slots(slots.keys.clone(), slots.values.clone(), slots.positions)
    keys, values = (
        Codes(codes.numbers.clone(), codes.scales.clone(), codes.bits)
        for codes in (slots.coded_keys, slots.coded_values)
    )
    return CodedSlots.of(keys, values, slots.positions, slots.dtype)


class Block:
    """Copies of one layer's block, and calls that go round them.

    Attributes:
        bytes: what one call has to move.
        calls: how many calls make a measurable time.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, bits: tuple[int, int] | None):
        copies, self.bytes = shape.copies(dtype, bits)
        self.calls = max(1, len(copies) // 8)
        self._query = torch.randn(shape.rows, shape.heads, 1, shape.dim, dtype=dtype)
        self._new = torch.randn(2, shape.rows, shape.kv_heads, 1, shape.dim, dtype=dtype)
        self._now = torch.full((shape.rows, 1), shape.slots - 1)
        self._padding = torch.full((shape.rows, 1), -1)
        self._order = itertools.cycle(copies)
        self._options = AttentionOptions(scaling=shape.dim**-0.5)

    def attention(self, backend: Backend) -> Callable[[], None]:
        """So many calls of a backend's attention."""

        def run() -> None:
            for _ in range(self.calls):
                slots, statistic = next(self._order), Mass()
                backend.attend(AttentionInputs(self._query, slots, self._now, self._options, statistic))
                if isinstance(slots, CodedSlots):
                    slots.forget()

        return run

    def writing(self, backend: Backend) -> Callable[[], None]:
        """So many tokens written. Their position is that of padding, so that the slot stays free for the next one."""

        def run() -> None:
            for _ in range(self.calls):
                backend.append(next(self._order), *self._new, self._padding)

        return run


def measure(shape: Shape, kinds: list[tuple[str, str]], repeats: int) -> list[dict]:
    """Seconds of a call and bytes per second, for numbers of each dtype and number of bits; and the memory's speed."""
    source = torch.ones(BUFFER_BYTES // 4)
    target = torch.zeros_like(source)
    tasks = {"read": source.sum, "copy": lambda: target.copy_(source)}
    blocks = {}
    for dtype, bits in kinds:
        block = blocks[dtype, bits] = Block(shape, getattr(torch, dtype), BITS[bits])
        backend = choose(source.device, getattr(torch, dtype))
        tasks[f"attend {dtype} {bits}"] = block.attention(backend)
        tasks[f"write {dtype} {bits}"] = block.writing(backend)
        if BITS[bits] is None:
            tasks[f"torch {dtype} {bits}"] = block.attention(TorchBackend())
    with torch.inference_mode():
        times = interleaved(tasks, repeats)
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    memory = max(BUFFER_BYTES / middle["read"], 2 * BUFFER_BYTES / middle["copy"])
    found = []
    for (dtype, bits), block in blocks.items():
        own = {name: f"{name} {dtype} {bits}" for name in ("attend", "write", "torch")}
        cell = {"rows": shape.rows, "slots": shape.slots, "dtype": dtype, "bits": bits, "bytes": block.bytes}
        for name, full in own.items():
            cell[f"{name}_s"] = [seconds / block.calls for seconds in times.get(full, [])]
        cell["memory"], cell["moved"] = memory, block.bytes * block.calls / middle[own["attend"]]
        cell["writing"] = middle[own["write"]] / middle[own["attend"]]
        cell["speedup"] = middle[own["torch"]] / middle[own["attend"]] if own["torch"] in middle else None
        found.append(cell)
    for cell in found:
        cell["ratio"] = statistics.median(found[0]["attend_s"]) / statistics.median(cell["attend_s"])
    return found


def shape(text: str) -> tuple[int, int]:
    """Rows and slots, such as 32x2048."""
    rows, _, slots = text.partition("x")
    return positive(rows), positive(slots)


def line(cell: dict) -> list[str]:
    coded, torchs = cell["bits"] != "16", cell["torch_s"]
    return [
        f"{cell['rows']} x {cell['slots']}",
        f"{cell['bits']} ({cell['dtype']})" if coded else cell["dtype"],
        f"{cell['bytes'] / 1e6:.1f}",
        spread(cell["attend_s"]),
        f"{cell['ratio']:.2f}",
        f"{cell['moved'] / 1e9:.1f}",
        f"{cell['memory'] / 1e9:.1f}",
        f"{cell['moved'] / cell['memory']:.0%}",
        f"{cell['writing']:.1%}",
        spread(torchs) if torchs else "",
        f"{cell['speedup']:.1f}" if torchs else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shapes = ["1x512", "1x2048", "8x1024", "32x512", "32x2048"]
    parser.add_argument("--shapes", type=shape, nargs="+", default=list(map(shape, shapes)), help="rows x slots")
    parser.add_argument(
        "--dtypes", nargs="+", choices=["float32", "bfloat16", "float16"], default=["float32", "bfloat16"]
    )
    parser.add_argument("--bits", nargs="+", choices=list(BITS), default=["16"], help="16: numbers of the dtype")
    parser.add_argument("--heads", type=positive, default=12)
    parser.add_argument("--kv-heads", type=positive, default=4)
    parser.add_argument("--dim", type=positive, default=64)
    parser.add_argument("--repeats", type=positive, default=25)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    options = parser.parse_args()
    if options.heads % options.kv_heads:
        parser.error(f"{options.heads} query heads cannot share {options.kv_heads} KV heads: give a multiple")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    layer = options.heads, options.kv_heads, options.dim
    kinds = [(dtype, bits) for bits in options.bits for dtype in options.dtypes]
    cells = [cell for size in options.shapes for cell in measure(Shape(*size, *layer), kinds, options.repeats)]
    show(
        f"Decode attention of one layer, {options.threads} threads, {kernel()}; ms: median (quartiles)",
        ["rows x slots", "numbers", "MB", "ms", "faster", "GB/s", "memory", "of it", "write", "torch: ms", "/ ms"],
        [line(cell) for cell in cells],
    )
    data = {name: getattr(options, name) for name in ("heads", "kv_heads", "dim", "repeats", "threads")}
    finish({"bench": "kernel", **data, "cells": cells})


if __name__ == "__main__":
    main()
