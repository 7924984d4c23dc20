"""How many tokens per second come out of a fixed amount of KV memory?

    python bench/throughput.py                       # a short look: 32 MiB, short texts
    python bench/throughput.py --full [--scale 0.5]  # 1 GiB, 512+32, 512+512, 512+1024, 2048+256 (prompt + new tokens)
    python bench/throughput.py --workloads 512+1024 --kv-mib 128 --bits 16 8 4    # slots that hold codes, too

Every system gets the same prompts and works on as many at once as its keys and values fit into the memory. Counted: new
tokens, over the time for prompts and new tokens together. Greedy, to the full length. Systems run in turn, each in a
process of its own. The number of requests is --scale times what kvkeep's policy has rows for, with the fewest bits.
"""

from __future__ import annotations

import argparse
import math

import torch
from lib import arguments, finish, kernel, positive, show, speed_config
from lib.cells import System, alternating, asked, leaving_out, middle, ran, saved_model, skipped
from lib.sizes import MIB, bounded_row_bytes, token_bytes

from kvkeep.kv_bits import KV_BITS

SHORT, LONG = ["512+32"], ["512+32", "512+512", "512+1024", "2048+256"]
BASE = "transformers"
COLUMNS = ["system", "rows", "requests", "new tokens/s", f"vs {BASE}", "seconds", "peak MiB"]


def lengths(text: str) -> tuple[int, int]:
    """``512+32``: prompt and new tokens."""
    prompt, plus, new = text.partition("+")
    if not (plus and prompt.isdigit() and new.isdigit() and int(prompt) and int(new)):
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form PROMPT+NEW, for example 512+32")
    return int(prompt), int(new)


def kv_bits(options: argparse.Namespace) -> list[str | None]:
    """Bits of the slots; ``None``: the model's dtype."""
    return [None if bits == "16" else bits for bits in options.bits]


def systems(prompt: int, new: int, options: argparse.Namespace) -> list[System]:
    """Each at the largest batch that fits; the last new token is never fed."""
    cap, total = options.kv_mib * MIB, prompt + new
    per_token = token_bytes(speed_config(options.layers), getattr(torch, options.dtype))
    budget = math.ceil(options.ratio * total)
    ours = {"kv_bytes": cap, "chunk": options.chunk, "prompts_first": True}  # as in batch jobs
    press = {"press": "SnapKVPress", "budget": budget, "attention": "sdpa"}
    name = f"kvkeep {options.policy} {options.ratio:.0%}"
    bounded = [
        System(
            name if bits is None else f"{name}, {bits}",
            "kvkeep",
            {**ours, "policy": options.policy, "budget": budget, "kv_bits": bits},
        )
        for bits in kv_bits(options)
    ]
    return [
        *bounded,
        System("kvkeep full", "kvkeep", {**ours, "policy": "full", "budget": total - 1}),
        System(BASE, "transformers", {"rows": cap // (per_token * (total - 1))}),
        System("generate_batch", "transformers_batch", {"kv_bytes": cap, "token_bytes": per_token}),
        System("kvpress SnapKV", "kvpress", press),
    ]


def cell(model: str, prompt: int, new: int, options: argparse.Namespace) -> dict:
    """One table, and its numbers."""
    config = speed_config(options.layers)
    budget = math.ceil(options.ratio * (prompt + new))
    given = config, getattr(torch, options.dtype), options.policy, budget
    row_bytes = min(bounded_row_bytes(*given, bits) for bits in kv_bits(options))
    work = {
        "model": model,
        "dtype": options.dtype,
        "threads": options.threads,
        "vocabulary": config.vocab_size,
        "requests": max(1, round(options.scale * (options.kv_mib * MIB // row_bytes))),
        "prompt_tokens": prompt,
        "new_tokens": new,
        "limit_s": options.limit_s,
    }
    found = alternating(asked(systems(prompt, new, options), options), work, options.repeats)
    speeds = {name: speed(runs) for name, runs in ran(found).items()}
    lines = []
    for name, runs in ran(found).items():
        ratio = f"{speeds[name] / speeds[BASE]:.2f}x" if BASE in speeds else ""
        rows, requests, seconds, peak = (middle(runs, key) for key in ("rows", "requests", "seconds", "peak_bytes"))
        numbers = [
            f"{rows:.0f}",
            f"{requests:.0f}",
            f"{speeds[name]:.1f}",
            ratio,
            f"{seconds:.1f}",
            f"{peak / MIB:.0f}",
        ]
        lines.append([name, *numbers])
    title = f"{prompt}+{new} tokens, {work['requests']} requests, {options.kv_mib} MiB, {options.dtype}"
    show(title, COLUMNS, lines, skipped(found))
    kept = ("versions", "rows", "requests", "new_tokens", "seconds", "held_bytes", "peak_bytes", "sample", "skipped")
    short = {name: [{key: run[key] for key in kept if key in run} for run in runs] for name, runs in found.items()}
    return {"prompt": prompt, "new": new, "requests": work["requests"], "tokens_per_s": speeds, "runs": short}


def speed(runs: list[dict]) -> float:
    """New tokens per second, the median over runs."""
    return middle([{"speed": run["new_tokens"] / run["seconds"]} for run in runs], "speed")


def parse_arguments() -> argparse.Namespace:
    parser = leaving_out(arguments(__doc__))
    parser.add_argument("--full", action="store_true", help="1 GiB and four workloads")
    parser.add_argument("--workloads", type=lengths, nargs="+", help="for example 512+32 2048+256")
    parser.add_argument(
        "--kv-mib", type=positive, help="memory for keys and values, MiB; default 32, under --full 1024"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of requests")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--ratio", type=float, default=0.2, help="budget as a share of prompt and new tokens")
    parser.add_argument("--bits", nargs="+", default=["16"], choices=["16", *KV_BITS], help="16: the model's dtype")
    parser.add_argument("--chunk", type=positive, default=512, help="kvkeep's prompt tokens per step")
    parser.add_argument("--repeats", type=positive, default=1)
    parser.add_argument(
        "--limit-s", type=float, help="no new batch after so many seconds; kvkeep and generate_batch end"
    )
    options = parser.parse_args()
    options.kv_mib = options.kv_mib or (1024 if options.full else 32)
    options.workloads = options.workloads or [lengths(text) for text in (LONG if options.full else SHORT)]
    return options


def main() -> None:
    options = parse_arguments()
    print(f"threads: {options.threads}, kvkeep's kernel: {kernel()}")
    with saved_model(options.layers, options.dtype) as model:
        cells = [cell(model, prompt, new, options) for prompt, new in options.workloads]
    finish({"bench": "throughput", **vars(options), "cells": cells})


if __name__ == "__main__":
    main()
