"""Which sizes of tiles are fast on this GPU, for head dim 128 in half precision?

    python bench/gpu_tune.py [--only decode,codes] [--out tune.json]
    python bench/gpu_tune.py --dry-run            # a few sizes of tiny shapes on a CPU: does the script run?

Every size is compiled first, by several processes at once, then timed at several numbers of rows, with one slot more
than the budget as in a decode step. The tables of `kvkeep.backends.triton.launch` take what is fastest here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from lib import finish, show
from lib import gpu as shared
from lib.gpu_codes import filled

from kvkeep.attention_stats import Mass
from kvkeep.backends import AttentionInputs, choose
from kvkeep.backends.triton import launch, prefill_ops
from kvkeep.kv.slot_codec import CodedSlots
from kvkeep.result_files import write_whole
from kvkeep.types import AttentionOptions, Slots

DIM = 128
SIZES: dict[str, list[tuple[int, ...]]] = {
    "decode": [*itertools.product((32, 64, 128), (256, 512), (2, 4, 8), (2, 3, 4, 5))],
    "codes": [*itertools.product((64, 128, 256), (256, 512), (4, 8), (2, 3))],
    "forward": [*itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))],
    "columns": [*itertools.product((32, 64, 128), (64, 128), (4, 8), (2, 3))],
}
"""By kernel: slots of a tile, slots of a program, warps, stages; or rows and slots of a tile, warps, stages."""

ROWS = (1, 16, 64)
BUDGET = 1024
TOKENS = 8192
BITS = ("8", "4")


def cases(kinds: Sequence[str]) -> list[tuple[str, tuple[int, ...]]]:
    """Kinds of kernel with bits where there are codes, and their sizes."""
    found = []
    for kind in kinds:
        names = [f"codes of {bits} bits" for bits in BITS] if kind == "codes" else [kind]
        found += [(name, sizes) for name in names for sizes in SIZES[kind]]
    return found


def set_sizes(kind: str, sizes: tuple[int, ...]) -> None:
    """Have the kernels use these sizes, whatever the device and the dtype."""
    if kind == "forward":
        launch.FORWARD.update(dict.fromkeys(launch.FORWARD, launch.Tile(*sizes)))
    elif kind == "columns":
        launch.COLUMNS.update(dict.fromkeys(launch.COLUMNS, launch.Tile(*sizes)))
    else:
        launch.DECODE.update({key: {1024: launch.Decode(*sizes)} for key in launch.DECODE})
        launch.CODED.update(dict.fromkeys(launch.CODED, launch.Decode(*sizes)))


def one_row_calls(bench: shared.Bench, kind: str, rows: int, slots: int) -> list[Callable[[], object]]:
    """Attention of a token per row with H2O's report, over blocks that no cache holds together."""
    heads, kv_heads, dim = bench.sizes.heads
    bits = kind.split()[2] if kind.startswith("codes") else "16"
    size = 2 * rows * kv_heads * slots * dim * bench.sizes.dtype.itemsize
    copies = max(1, min(16, bench.sizes.buffer_bytes // (8 * size)))
    positions = torch.arange(slots, dtype=torch.int32, device=bench.device).repeat(rows, kv_heads, 1)
    blocks = [filled(bench, (rows, kv_heads, slots, dim), positions, bits) for _ in range(copies)]
    query = bench.random(rows, heads, 1, dim)
    now = torch.full((rows, 1), slots - 1, device=bench.device)
    options, backend = AttentionOptions(scaling=dim**-0.5), choose(query.device, query.dtype)

    def call(block: Slots | CodedSlots) -> Callable[[], object]:
        return lambda: backend.attend(AttentionInputs(query, block, now, options, Mass()))

    return [call(block) for block in blocks]


def prompt_calls(bench: shared.Bench, tokens: int) -> list[Callable[[], object]]:
    """A prompt's attention with the masses of all rows."""
    heads, kv_heads, dim = bench.sizes.heads
    query, keys, values = (bench.random(1, h, tokens, dim) for h in (heads, kv_heads, kv_heads))
    at = torch.arange(tokens, device=bench.device)[None]
    slots, options = Slots(keys, values, at[:, None].to(torch.int32)), AttentionOptions(scaling=dim**-0.5)
    if not bench.on_gpu:
        backend = choose(query.device, query.dtype)
        return [lambda: backend.attend(AttentionInputs(query, slots, at, options, Mass()))]
    work = prefill_ops.Prefill(query, keys, values, at, slots.positions, options)
    _out, lse = work.forward()
    ones, bounds = torch.ones(at.shape, device=at.device), torch.tensor([[0, tokens]], dtype=torch.int32).to(at.device)
    return [work.forward, lambda: work.columns(lse, ones, bounds)]


def calls_of(bench: shared.Bench, kind: str, rows: int) -> list[Callable[[], object]]:
    """What is timed of a kernel."""
    dry = not bench.on_gpu
    if kind in ("forward", "columns"):
        calls = prompt_calls(bench, 24 if dry else TOKENS)
        return calls if dry else [calls[kind == "columns"]]
    return one_row_calls(bench, kind, rows, 9 if dry else BUDGET + 1)


def compile_part(bench: shared.Bench, asked: Sequence[tuple[str, tuple[int, ...]]]) -> None:
    """Run each of some sizes once; the compiled kernels stay in Triton's cache."""
    calls: dict[str, Callable[[], object]] = {}
    with torch.inference_mode():
        for kind, sizes in asked:
            if kind not in calls:
                calls[kind] = calls_of(bench, kind, 2)[0]
            set_sizes(kind, sizes)
            with suppress(Exception):  # the timing says what does not run
                calls[kind]()


def compile_all(count: int, arguments: Sequence[str]) -> None:
    """Compile in so many processes at once."""
    command = [sys.executable, __file__, *arguments, "--of", str(count)]
    running = [subprocess.Popen([*command, "--part", str(part)]) for part in range(count)]
    for process in running:
        process.wait()


def timed(bench: shared.Bench, asked: Sequence[tuple[str, tuple[int, ...]]]) -> list[dict]:
    """Median seconds of each size at each number of rows."""
    found: list[dict] = []
    with torch.inference_mode():
        for kind, group in itertools.groupby(asked, lambda case: case[0]):
            sizes_of_kind = [sizes for _, sizes in group]
            for rows in (1,) if kind in ("forward", "columns") else ROWS:
                calls = calls_of(bench, kind, rows)
                for sizes in bench.cells(sizes_of_kind, f"{kind}, {rows} rows"):
                    found += measured(bench, kind, sizes, rows, calls)
    return found


def measured(
    bench: shared.Bench, kind: str, sizes: tuple[int, ...], rows: int, calls: Sequence[Callable[[], object]]
) -> list[dict]:
    """One size at one number of rows; nothing if it does not run."""
    set_sizes(kind, sizes)

    def run() -> None:
        for call in calls:
            call()

    try:
        step = bench.recorded(run, f"{kind} {sizes}")
        seconds = shared.middle(bench.seconds(step, 9)) / len(calls)
    except Exception as error:
        bench.notes.append(f"{kind} {sizes}: {type(error).__name__}: {shared.first_line(error)}")
        return []
    return [{"kind": kind, "sizes": list(sizes), "rows": rows, "seconds": seconds}]


def lines(found: Sequence[dict], kind: str) -> tuple[list[str], list[list[str]]]:
    """A table of a kernel's sizes, the fastest at most rows first."""
    mine = [one for one in found if one["kind"] == kind]
    rows = sorted({one["rows"] for one in mine})
    by_size: dict[tuple[int, ...], dict[int, float]] = {}
    for one in mine:
        by_size.setdefault(tuple(one["sizes"]), {})[one["rows"]] = 1e6 * one["seconds"]
    order = sorted(by_size.items(), key=lambda item: item[1].get(rows[-1], float("inf")))
    table = [[" ".join(map(str, sizes)), *(f"{us[n]:.1f}" if n in us else "" for n in rows)] for sizes, us in order]
    return ["sizes", *(f"us, {n} rows" for n in rows)], table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default=",".join(SIZES), help="kernels: " + ",".join(SIZES))
    parser.add_argument("--out", type=Path, help="file for all figures")
    parser.add_argument("--limit-s", type=float, default=120.0, help="no size is timed later than this")
    parser.add_argument("--top", type=int, default=8, help="sizes to show of each kernel")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on a CPU")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    kinds = [kind for kind in options.only.split(",") if kind]
    if unknown := set(kinds) - set(SIZES):
        parser.error(f"unknown kernels {', '.join(sorted(unknown))}; there are {', '.join(SIZES)}")
    if not options.dry_run and not torch.cuda.is_available():
        print("bench/gpu_tune.py needs a CUDA device, and torch sees none; --dry-run tries it.", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.dry_run else "cuda")
    bench = shared.Bench(device, shared.DRY if options.dry_run else shared.FULL)
    asked = cases(kinds)
    if options.dry_run:
        asked = [next(case for case in asked if case[0] == name) for name in dict.fromkeys(case[0] for case in asked)]
    if options.part is not None:
        compile_part(bench, asked[options.part :: options.of])
        return 0
    start = time.monotonic()
    if bench.on_gpu:
        compile_all(max(1, min(14, (os.cpu_count() or 2) - 2)), ["--only", options.only])
        print(f"compiled {len(asked)} sizes in {time.monotonic() - start:.0f} s")
    bench.end = start + options.limit_s
    found = timed(bench, asked)
    for kind in dict.fromkeys(one["kind"] for one in found):
        columns, table = lines(found, kind)
        show(f"{kind}: {len(table)} sizes, the fastest at most rows first", columns, table[: options.top])
    data = {"bench": "gpu_tune", "found": found, "notes": bench.notes}
    if options.out:
        write_whole(options.out, json.dumps(data).encode())
    finish({"bench": "gpu_tune", "notes": bench.notes[:20]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
