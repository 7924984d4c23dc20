"""How much memory and time does a prompt take, whole and in chunks?

    python bench/prefill_memory.py                             # a short look: 2048 and 4096 tokens
    python bench/prefill_memory.py --full [--contexts 65536]   # 2048, 8192, 32768 tokens, every policy, 3 runs
    python bench/prefill_memory.py --shape qwen3-0.6b          # a size that users know, in bfloat16
    python bench/prefill_memory.py --pages                     # what is in use, without what the heap keeps

One prompt in one row, and its first token. Every cell is a new process; its peak resident memory is counted from the
moment when the model is loaded and warm. The title says what a full cache of the prompt holds, and what kvkeep's block.
glibc's heap keeps freed memory, more or less by chance. With --pages each system takes every block of 1 MiB or more
from the operating system and gives it back at once, so the peak is that of the memory in use.
"""

from __future__ import annotations

import argparse
import os

import torch
from lib import arguments, finish, kernel, policy, positive, settle_shape, show, speed_config, with_shapes
from lib.cells import System, alternating, asked, leaving_out, middle, ran, saved_model, skipped
from lib.sizes import MIB, bounded_row_bytes, token_bytes

from kvkeep.policies.registry import parse

POLICIES = ["h2o", "local", "snapkv", "adakv", "tova", "ahakv", "full"]
COLUMNS = ["system", "peak MiB", "vs transformers", "seconds", "tokens/s"]
BASE = "transformers whole"


def ours(policy: str, context: int, options: argparse.Namespace) -> list[System]:
    """A policy, whole and in chunks; `full` with room for the prompt and a token."""
    budget = options.budget if parse(policy).evicts else context + 1
    name, asked = f"kvkeep {policy} {budget}", {"policy": policy, "budget": budget}
    return [
        System(f"{name} whole", "kvkeep", {**asked, "chunk": None}),
        System(f"{name} by {options.chunk}", "kvkeep", {**asked, "chunk": options.chunk}),
    ]


def systems(context: int, options: argparse.Namespace) -> list[System]:
    press = {"budget": options.budget}
    return [
        *(system for policy in options.policies for system in ours(policy, context, options)),
        System(BASE, "transformers", {"rows": 1}),
        System(f"transformers by {options.chunk}", "transformers", {"rows": 1, "chunk": options.chunk}),
        System("kvpress SnapKV", "kvpress", {**press, "press": "SnapKVPress", "attention": "sdpa"}),
        System("kvpress Observed", "kvpress", {**press, "press": "ObservedAttentionPress", "attention": "eager"}),
    ]


def cell(model: str, context: int, options: argparse.Namespace) -> dict:
    """One table, and its numbers."""
    config, dtype = speed_config(options.layers, options.shape), getattr(torch, options.dtype)
    work = {
        "model": model,
        "dtype": options.dtype,
        "threads": options.threads,
        "vocabulary": config.vocab_size,
        "requests": 1,
        "prompt_tokens": context,
        "new_tokens": 1,
    }
    found = alternating(asked(systems(context, options), options), work, options.repeats)
    peaks = {name: middle(runs, "peak_bytes") for name, runs in ran(found).items()}
    lines = []
    for name, runs in ran(found).items():
        ratio = f"{peaks[name] / peaks[BASE]:.2f}x" if peaks.get(BASE) else ""
        seconds = middle(runs, "seconds")
        lines.append([name, f"{peaks[name] / MIB:.0f}", ratio, f"{seconds:.2f}", f"{context / seconds:.0f}"])
    full = context * token_bytes(config, dtype)
    block = bounded_row_bytes(config, dtype, options.policies[0], options.budget)
    title = (
        f"{context} prompt tokens, {options.dtype}; full cache {full / MIB:.0f} MiB, block of {options.policies[0]} "
        f"{block / MIB:.1f} MiB{', memory in use' if options.pages else ''}"
    )
    show(title, COLUMNS, lines, skipped(found))
    return {"context": context, "full_bytes": full, "block_bytes": block, "systems": found}


def parse_arguments() -> argparse.Namespace:
    parser = with_shapes(leaving_out(arguments(__doc__)))
    parser.add_argument("--full", action="store_true", help="2048, 8192, 32768 tokens, every policy, 3 runs")
    parser.add_argument("--contexts", type=positive, nargs="+", help="prompt tokens; 65536 is possible, too")
    parser.add_argument("--policies", type=policy, nargs="+", help=f"by default h2o; with --full {' '.join(POLICIES)}")
    parser.add_argument("--pages", action="store_true", help="count memory in use, without what glibc's heap keeps")
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--chunk", type=positive, default=512)
    parser.add_argument("--repeats", type=positive)
    options = parser.parse_args()
    settle_shape(options)
    options.policies = options.policies or (POLICIES if options.full else POLICIES[:1])
    options.contexts = options.contexts or ([2048, 8192, 32768] if options.full else [2048, 4096])
    options.repeats = options.repeats or (3 if options.full else 1)
    return options


def main() -> None:
    options = parse_arguments()
    print(f"threads: {options.threads}, kvkeep's kernel: {kernel()}")
    if options.pages:
        os.environ["MALLOC_MMAP_THRESHOLD_"] = str(MIB)  # of the systems' processes; glibc then never changes it
    with saved_model(options.layers, options.dtype, options.shape) as model:
        cells = [cell(model, context, options) for context in options.contexts]
    finish({"bench": "prefill_memory", **vars(options), "cells": cells})


if __name__ == "__main__":
    main()
