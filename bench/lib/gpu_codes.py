"""Slots that hold codes on a GPU: attention over 8 and 4 bits beside the dtype's numbers, and writing a token."""

from __future__ import annotations

import torch

from kvkeep.attention_stats import Mass
from kvkeep.backends import AttentionInputs, choose
from kvkeep.kv.slot_codec import CodedSlots, encode
from kvkeep.kv_bits import KV_BITS
from kvkeep.types import AttentionOptions, Slots
from lib.gpu import Bench, middle

KINDS = {"16": None, **KV_BITS}


def codes(bench: Bench) -> list[dict]:
    """(h) Decode attention with H2O's report in several bits: time, bytes, and how much faster than 16 bits."""
    shapes = [(rows, slots, bits) for rows in bench.sizes.rows for slots in bench.sizes.slots for bits in KINDS]
    found: list[dict] = []
    for rows, slots, bits in bench.cells(shapes, "h"):
        with bench.survives(f"h: {rows} x {slots}, {bits}"):
            found.append(_codes(bench, rows, slots, bits))
    base = {(one["rows"], one["slots"]): middle(one["seconds"]) for one in found if one["bits"] == "16"}
    for one in found:
        whole = base.get((one["rows"], one["slots"]))
        one["faster"] = None if whole is None else whole / middle(one["seconds"])
    return found


def _codes(bench: Bench, rows: int, slots: int, bits: str) -> dict:
    """Calls go round many blocks, so that none of them stays in a cache; all in one graph."""
    heads, kv_heads, dim = bench.sizes.heads
    size = 2 * rows * kv_heads * slots * dim * bench.sizes.dtype.itemsize
    copies = max(1, min(16, bench.sizes.buffer_bytes // (4 * size)))
    positions = torch.arange(slots, dtype=torch.int32, device=bench.device).repeat(rows, kv_heads, 1)
    blocks = [filled(bench, (rows, kv_heads, slots, dim), positions, bits) for _ in range(copies)]
    query, new = bench.random(rows, heads, 1, dim), bench.random(2, rows, kv_heads, 1, dim)
    now, padding = (torch.full((rows, 1), at, device=bench.device) for at in (slots - 1, -1))
    options, backend = AttentionOptions(scaling=dim**-0.5), choose(query.device, query.dtype)

    def attend() -> None:
        for block in blocks:
            backend.attend(AttentionInputs(query, block, now, options, Mass()))

    def write() -> None:
        for block in blocks:
            backend.append(block, *new, padding)

    with torch.inference_mode():
        seconds, writing = (
            [one / copies for one in bench.seconds(bench.recorded(task, f"h: {rows} x {slots}, {bits}"))]
            for task in (attend, write)
        )
    must = _bytes(blocks[0]) + 8 * positions.numel()
    return {"rows": rows, "slots": slots, "bits": bits, "bytes": must, "seconds": seconds, "write_s": writing}


def filled(bench: Bench, shape: tuple[int, ...], positions: torch.Tensor, bits: str) -> Slots:
    keys, values = bench.random(2, *shape)
    kinds = KINDS[bits]
    if kinds is None:
        return Slots(keys, values, positions)
    return CodedSlots.of(encode(keys, kinds[0]), encode(values, kinds[1]), positions, keys.dtype)


def _bytes(slots: Slots) -> int:
    if not isinstance(slots, CodedSlots):
        return slots.keys.nbytes + slots.values.nbytes
    return sum(tensor.nbytes for codes in (slots.coded_keys, slots.coded_values) for tensor in codes[:2])


def lines(part: str, found: list[dict], bench: Bench) -> tuple[str, list[str], list[list[str]]]:
    """A part's table: title, columns, rows."""
    rows = [
        [
            f"{one['rows']} x {one['slots']}",
            one["bits"],
            f"{one['bytes'] / 1e6:.1f}",
            f"{1e6 * middle(one['seconds']):.1f}",
            f"{one['bytes'] / middle(one['seconds']) / 1e9:.0f}",
            "" if one["faster"] is None else f"{one['faster']:.2f}",
            f"{1e6 * middle(one['write_s']):.1f}",
        ]
        for one in found
    ]
    columns = ["rows x slots", "bits", "MB", "us", "GB/s", "faster", "write: us"]
    return "(h) decode attention over codes, one layer", columns, rows
