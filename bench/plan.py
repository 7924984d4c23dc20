"""How near do the bytes and speeds of `kvkeep plan` come to what a model takes?

    python bench/plan.py                                       # Qwen3-0.6B's shape, 1 row, 2048 and 8192 tokens
    python bench/plan.py --rows 8 --contexts 2048 --repeats 15

The plan is made from the configuration alone, with the speeds that `kvkeep plan --measure` would measure. Bytes are
those of the tensors that exist; speed is that of decode steps on filled caches, kvkeep's and transformers' in turn. The
plan counts a full cache as a good implementation would have it, so it is compared with kvkeep's own `full` first.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace

import torch
from decode import stepper
from lib import (
    arguments,
    counted,
    finish,
    interleaved,
    kernel,
    median_ms,
    policy,
    positive,
    settle_shape,
    show,
    speed_config,
    speed_model,
    twin,
    with_shapes,
)
from lib.sizes import MIB
from peers import kvkeep as bounded
from peers import transformers as dense
from transformers import LlamaForCausalLM

import kvkeep
from kvkeep.models.prepare import fuse_modules, prepare_for_rows
from kvkeep.planning.bandwidth import measure_bandwidth, measure_products
from kvkeep.planning.plan import Plan, plan

COLUMNS = ["what", "planned", "measured", "measured / planned"]
WARMUP = 2


def planned(context: int, options: argparse.Namespace) -> Plan:
    """What is said before the model is loaded."""
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-") as folder:
        speed_config(options.layers, options.shape).save_pretrained(folder)
        asked = {"context": context, "rows": options.rows, "dtype": options.dtype, "bandwidth": options.bandwidth}
        return replace(plan(folder, options.policy, options.budget, **asked), products=options.products)


def tensor_bytes(model: LlamaForCausalLM) -> int:
    """Weights; tied ones are counted once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def speeds(model: LlamaForCausalLM, context: int, options: argparse.Namespace) -> tuple[dict[str, float], int]:
    """Tokens per second of steps with a full and with a bounded cache, and the bytes of the bounded one.

    A full cache is kvkeep's own, and the static one of transformers.
    """
    ours = twin(model)
    fuse_modules(ours)
    prepare_for_rows(ours, options.rows)
    kvkeep.attach(ours)
    shape = {"rows": options.rows, "tokens": context}
    cache = bounded.filled_cache(ours, options.policy, options.budget, **shape)
    token = torch.zeros((options.rows, 1), dtype=torch.long)
    room = options.repeats + WARMUP
    tasks = {
        "static": stepper(model, dense.static_cache(model, **shape, room=room), token),
        "full": stepper(ours, bounded.filled_cache(ours, "full", context + room, **shape), token),
        "bounded": stepper(ours, cache, token),
    }
    times = interleaved(tasks, options.repeats, WARMUP)
    return {name: 1e3 * options.rows / median_ms(one) for name, one in times.items()}, cache.memory().allocated_bytes


def cell(model: LlamaForCausalLM, context: int, options: argparse.Namespace) -> dict[str, object]:
    """One table, and its numbers."""
    made = planned(context, options)
    found, held = speeds(model, context, options)
    name = f"{options.policy} {options.budget}"
    pairs = {
        "weights, MiB": (made.bounded.weight_bytes / MIB, tensor_bytes(model) / MIB),
        f"cache of {counted(options.rows)}, {name}, MiB": (options.rows * made.bounded.row_bytes / MIB, held / MIB),
        f"tokens/s, {name}": (made.tokens_per_s(made.bounded, options.rows) or 0.0, found["bounded"]),
        "tokens/s, full cache": (made.tokens_per_s(made.full, options.rows) or 0.0, found["full"]),
        "the same, in transformers": (made.tokens_per_s(made.full, options.rows) or 0.0, found["static"]),
    }
    lines = [[what, f"{one:.1f}", f"{two:.1f}", f"{two / one:.2f}"] for what, (one, two) in pairs.items()]
    show(f"{options.shape}, {counted(options.rows)} x {context} tokens, {options.dtype}", COLUMNS, lines)
    return {
        "context": context,
        "pairs": {what: {"planned": one, "measured": two} for what, (one, two) in pairs.items()},
    }


def parse_arguments() -> argparse.Namespace:
    parser = with_shapes(arguments(__doc__))
    parser.set_defaults(shape="qwen3-0.6b")
    parser.add_argument("--rows", type=positive, default=1)
    parser.add_argument("--contexts", type=positive, nargs="+", default=[2048, 8192])
    parser.add_argument("--policy", type=policy, default="h2o")
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--repeats", type=positive, default=9)
    options = parser.parse_args()
    settle_shape(options)
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.bandwidth = measure_bandwidth(torch.device("cpu")).best
    config = speed_config(options.layers, options.shape)
    dtype = getattr(torch, options.dtype)
    products = measure_products(torch.device("cpu"), dtype, options.rows, width=config.hidden_size)
    options.products = {options.rows: products}
    speed = f"{options.bandwidth / 1e9:.1f} GB/s, products {products / 1e9:.1f} GB/s"
    print(f"Memory bandwidth (threads: {options.threads}): {speed}; kvkeep's kernel: {kernel()}")
    model = speed_model(dtype, options.layers, attach=False, shape=options.shape)
    try:
        cells = [cell(model, context, options) for context in options.contexts]
    except kvkeep.KVKeepError as error:
        raise SystemExit(str(error)) from error
    finish({"bench": "plan", **vars(options), "cells": cells})


if __name__ == "__main__":
    main()
