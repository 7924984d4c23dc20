"""How long does a prompt take under each policy, beside transformers' own cache?

    python bench/reading.py                                     # a short look: 2048 tokens
    python bench/reading.py --full [--dtype bfloat16]           # 2048 and 8192 tokens, 5 repeats
    python bench/reading.py --contexts 32768 --policies h2o --repeats 3
    python bench/reading.py --shape qwen3-0.6b                  # a size that users know, in bfloat16
    python bench/reading.py --full --policies snapkv leverage reread --cpu-time --threads 1   # beside other work

One prompt in one row of one process, up to the logits of its last token. Systems take turns, so a drift of the machine
affects all of them. `bench/prefill_memory.py` measures the memory of a prompt, in a process for each system.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from lib import (
    arguments,
    finish,
    interleaved,
    kernel,
    median_ms,
    positive,
    settle_shape,
    show,
    speed_config,
    speed_model,
    spread,
    with_shapes,
)
from transformers import DynamicCache, PreTrainedModel

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.models.prepare import fuse_modules
from kvkeep.types import Phase

BASE = "transformers whole"
POLICIES = ["h2o", "local", "snapkv", "adakv", "tova", "ahakv", "full"]
IN_CHUNKS = {"h2o", "full"}
"""Policies that are read in chunks as well."""
COLUMNS = ["system", "ms (quartiles)", "/ transformers", "tokens/s"]


def read(model: PreTrainedModel, cache: object, prompt: torch.Tensor, chunk: int | None) -> torch.Tensor:
    """Feed a prompt, whole or in chunks, and return the logits of its last token."""
    with torch.inference_mode():
        for piece in prompt.split(chunk or prompt.shape[1], dim=1):
            if isinstance(cache, kvkeep.BoundedCache):
                cache.phase = Phase.PREFILL
            out = model(input_ids=piece, **handed(model, cache), use_cache=True, logits_to_keep=1)
    return out.logits


def tasks(prompt: torch.Tensor, options: argparse.Namespace) -> dict[str, Callable[[], torch.Tensor]]:
    """What is compared. Both models have the same weights."""
    dense = speed_model(getattr(torch, options.dtype), options.layers, attach=False, shape=options.shape)
    with torch.device("meta"):
        bounded = type(dense)(copy.deepcopy(dense.config)).eval()
    bounded.load_state_dict(dense.state_dict(), assign=True)
    bounded.tie_weights()
    bounded.base_model.rotary_emb = copy.deepcopy(dense.base_model.rotary_emb)  # its frequencies are no parameters
    fuse_modules(kvkeep.attach(bounded))  # as `kvkeep.load` does
    context = prompt.shape[1]

    def ours(policy: str, chunk: int | None) -> torch.Tensor:
        budget = context if policy == "full" else min(options.budget, context)
        cache = kvkeep.BoundedCache(bounded.config, policy, budget, prefill_chunk=chunk)
        return read(bounded, cache, prompt, chunk)

    found: dict[str, Callable[[], torch.Tensor]] = {
        BASE: lambda: read(dense, DynamicCache(config=dense.config), prompt, None),
        f"transformers by {options.chunk}": lambda: read(
            dense, DynamicCache(config=dense.config), prompt, options.chunk
        ),
    }
    for policy in options.policies:
        found[f"{policy} whole"] = partial(ours, policy, None)
        if policy.partition(":")[0] in IN_CHUNKS:
            found[f"{policy} by {options.chunk}"] = partial(ours, policy, options.chunk)
    return {name: task for name, task in found.items() if name == BASE or name not in options.without}


def cell(context: int, options: argparse.Namespace) -> dict[str, object]:
    """One table, and its numbers."""
    prompt = torch.randint(
        speed_config(1, options.shape).vocab_size, (1, context), generator=torch.Generator().manual_seed(0)
    )
    clock = time.process_time if options.cpu_time else time.perf_counter
    times = interleaved(tasks(prompt, options), options.repeats, warmup=1, clock=clock)
    base = median_ms(times[BASE])
    lines = [
        [name, spread(seconds), f"{median_ms(seconds) / base:.2f}", f"{context / statistics.median(seconds):.0f}"]
        for name, seconds in times.items()
    ]
    model = "" if options.shape == "speed" else f" of {options.shape}"
    show(f"{context} prompt tokens{model}, {options.dtype}, budget {options.budget}, in turn", COLUMNS, lines)
    return {"context": context, "seconds": times}


def parse_arguments() -> argparse.Namespace:
    parser = with_shapes(arguments(__doc__))
    parser.add_argument("--full", action="store_true", help="2048 and 8192 tokens, 5 repeats")
    parser.add_argument("--contexts", type=positive, nargs="+", help="prompt tokens")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--without", nargs="+", default=[], metavar="SYSTEM", help="leave these lines of the table out")
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--chunk", type=positive, default=512)
    parser.add_argument("--repeats", type=positive)
    parser.add_argument("--cpu-time", action="store_true", help="seconds of all threads, for a machine with other work")
    options = parser.parse_args()
    settle_shape(options)
    options.contexts = options.contexts or ([2048, 8192] if options.full else [2048])
    options.repeats = options.repeats or (5 if options.full else 3)
    torch.set_num_threads(options.threads)
    return options


def main() -> None:
    options = parse_arguments()
    print(f"threads: {options.threads}, kvkeep's kernel: {kernel()}")
    finish({"bench": "reading", **vars(options), "cells": [cell(context, options) for context in options.contexts]})


if __name__ == "__main__":
    main()
