"""How long is a decode step, over rows, contexts and budgets, and how close is it to what the memory allows?

    python bench/decode.py                                    # a short look: 1 and 8 rows, 512 and 2048 tokens
    python bench/decode.py --full [--dtype bfloat16]          # 1, 8, 32 rows x 512, 2048, 8192 tokens
    python bench/decode.py --rows 32 --contexts 8192          # one cell
    python bench/decode.py --compile [--no-pack]              # kvkeep with compiled layers, too
    python bench/decode.py --shape qwen3-0.6b                 # a size that users know, in bfloat16
    python bench/decode.py --bits 16 8 4 --rows 8 32 --contexts 8192 --budgets 100%    # slots that hold codes, too

A step runs a 12-layer model, or one of another shape, on one token per row and takes the argmax. Caches are filled with
random keys and values, so no prompt is fed. Interleaved: transformers with DynamicCache and StaticCache, kvkeep's
`full`, and a policy at several budgets. If their caches do not fit into --memory together, groups of them take turns,
and the title says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lib import (
    arguments,
    counted,
    finish,
    interleaved,
    kernel,
    median_ms,
    positive,
    settle_shape,
    show,
    speed_model,
    spread,
    twin,
    with_shapes,
)
from lib.sizes import GIB, half_of_memory, token_bytes, weight_bytes
from peers import kvkeep as bounded
from peers import transformers as dense
from transformers import LlamaForCausalLM

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.kv_bits import KV_BITS
from kvkeep.models.packed_weights import PackedLinear
from kvkeep.models.prepare import fuse_modules, prepare_for_rows
from kvkeep.planning.bandwidth import measure_bandwidth

DYNAMIC, STATIC, FULL = "DynamicCache", "StaticCache", "kvkeep full"
DENSE = (DYNAMIC, STATIC, FULL)
BLOCKS = 3
WARMUP = 2
COLUMNS = ["system", "ms per step (quartiles)", "MB", "MBU", "limit", "vs DynamicCache", "vs best dense"]


@dataclass(frozen=True)
class System:
    """Something that decodes.

    Attributes:
        name: what the table calls it.
        attended: tokens per row that a step attends to.
        make: its cache and the model that runs on it.
        bits: of keys and values in the slots; ``None``: the model's dtype.
    """

    name: str
    attended: int
    make: Callable[[], tuple[LlamaForCausalLM, object]]
    bits: str | None = None


@torch.inference_mode()
def products_ms(model: LlamaForCausalLM, rows: int, repeats: int) -> float:
    """The products of a step with all weights and nothing else, as the model's linear layers lie, in milliseconds."""
    layers = [module for module in model.modules() if isinstance(module, (torch.nn.Linear, PackedLinear))]
    # layers of one width get the very same tensor, so that those which are computed together are
    inputs = {width: torch.randn(rows, 1, width, dtype=model.dtype) for width in {one.in_features for one in layers}}

    def multiply() -> None:
        for layer in layers:
            layer(inputs[layer.in_features])

    return median_ms(interleaved({"products": multiply}, repeats, WARMUP)["products"])


@dataclass(frozen=True)
class Models:
    """The same weights under transformers' own attention, under kvkeep's as batch jobs lay them out, and compiled."""

    dense: LlamaForCausalLM
    bounded: LlamaForCausalLM
    compiled: LlamaForCausalLM | None

    @classmethod
    def build(cls, options: argparse.Namespace, rows: int) -> Models:
        first = speed_model(getattr(torch, options.dtype), options.layers, attach=False, shape=options.shape)
        second = twin(first)
        if not options.no_pack:
            if options.compile:  # fused layers are not compiled
                fused, packed = 0, kvkeep.pack_weights(second, rows, if_faster=True)
            else:
                fused, packed = fuse_modules(second), prepare_for_rows(second, rows)
            print(f"Modules with {counted(rows)}: {fused} fused, {packed} packed")
        third = kvkeep.attach(twin(second)) if options.compile else None
        if third is not None:
            print(f"Layers compiled: {kvkeep.compile_layers(third)}")
        return cls(first, kvkeep.attach(second), third)


def slots(budget: str, context: int) -> int:
    """A budget in tokens: a number of them, or a share of the context."""
    return max(1, round(float(budget[:-1]) / 100 * context)) if budget.endswith("%") else int(budget)


def bounded_systems(
    models: Models, rows: int, context: int, *, policy: str, budgets: list[str], bits: list[str]
) -> Iterator[System]:
    """A policy at several budgets, in numbers of several bits."""
    for budget in sorted({slots(budget, context) for budget in budgets}):
        if budget > context:
            continue
        for each in bits:
            kv_bits = None if each == "16" else each
            fill = partial(
                *(bounded.filled_cache, models.bounded, policy, budget),
                rows=rows,
                tokens=context,
                kv_bits=kv_bits,
            )
            name = f"{policy} {budget} ({budget / context:.0%})" + (f", {each}" if kv_bits else "")
            yield System(name, budget + 1, lambda fill=fill: (models.bounded, fill()), kv_bits)
            if models.compiled is not None:
                yield System(f"{name}, compiled", budget + 1, lambda fill=fill: (models.compiled, fill()), kv_bits)


def systems(models: Models, rows: int, context: int, *, steps: int, **bounds: Any) -> list[System]:
    """What is compared in one cell. Dense caches get room for the steps that are timed."""
    shape = {"rows": rows, "tokens": context}
    whole = partial(bounded.filled_cache, models.bounded, "full", context + steps, **shape)
    found = [
        System(DYNAMIC, context + 1, lambda: (models.dense, dense.dynamic_cache(models.dense, **shape))),
        System(STATIC, context + 1, lambda: (models.dense, dense.static_cache(models.dense, **shape, room=steps))),
        System(FULL, context + 1, lambda: (models.bounded, whole())),
    ]
    return [*found, *bounded_systems(models, rows, context, **bounds)]


def stepper(model: LlamaForCausalLM, cache: object, token: torch.Tensor) -> Callable[[], torch.Tensor]:
    def step() -> torch.Tensor:
        with torch.inference_mode():
            return model(input_ids=token, **handed(model, cache)).logits[:, -1].argmax(dim=-1)

    return step


def groups(found: list[System], row_token_bytes: int, memory: int) -> Iterator[list[System]]:
    """Systems whose caches exist at the same time; one that is larger than the memory is alone."""
    group: list[System] = []
    held = 0
    for system in found:
        size = system.attended * row_token_bytes
        if group and held + size > memory:
            yield group
            group, held = [], 0
        group.append(system)
        held += size
    yield group


def measure(found: list[System], rows: int, split: list[list[System]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every system's steps: interleaved within a group, groups in turn."""
    times: dict[str, list[float]] = {system.name: [] for system in found}
    blocks = 1 if len(split) == 1 else min(BLOCKS, repeats)
    for block in range(blocks):
        for group in split:
            token = torch.zeros((rows, 1), dtype=torch.long)
            tasks = {system.name: stepper(*system.make(), token) for system in group}
            part = len(range(block, repeats, blocks))
            for name, seconds in interleaved(tasks, part, WARMUP).items():
                times[name] += seconds
            del tasks  # before the next group's caches are made
    return times


def cell(models: Models, rows: int, context: int, options: argparse.Namespace) -> dict:
    """One table, and its numbers."""
    config, dtype = models.dense.config, models.dense.dtype
    steps = options.repeats + WARMUP
    asked = {"policy": options.policy, "budgets": options.budgets, "bits": options.bits}
    found = systems(models, rows, context, steps=steps, **asked)
    per_token, weights = rows * token_bytes(config, dtype), weight_bytes(models.dense)
    products = products_ms(models.bounded, rows, options.repeats)
    split = [*groups(found, per_token, int(options.memory * GIB))]
    times = measure(found, rows, split, options.repeats)
    ms = {name: median_ms(seconds) for name, seconds in times.items()}
    best = min(ms[name] for name in DENSE)
    lines, data = [], {}
    for system in found:
        name, held = system.name, rows * token_bytes(config, dtype, system.bits) * system.attended
        must = weights + held
        mbu = must / (ms[name] / 1e3) / options.bandwidth.best
        limit = products + 1e3 * held / options.bandwidth.best
        ratios = [ms[DYNAMIC] / ms[name], best / ms[name]]
        shares = [f"{mbu:.0%}", f"{limit / ms[name]:.0%}"]
        lines.append([name, spread(times[name]), f"{must / 1e6:.0f}", *shares, *(f"{r:.2f}x" for r in ratios)])
        own = {"bytes": must, "mbu": mbu, "limit_ms": limit, "ratios": ratios}
        data[name] = {"ms": [1e3 * s for s in times[name]], **own}
    order = "steps interleaved" if len(split) == 1 else f"{len(split)} groups of systems in turn"
    show(f"{counted(rows)} x {context} tokens, {options.dtype}, {order}", COLUMNS, lines)
    print(f"products with weights alone: {products:.2f} ms")
    return {
        "rows": rows,
        "context": context,
        "products_ms": products,
        "groups": [[s.name for s in group] for group in split],
        "systems": data,
    }


def parse() -> argparse.Namespace:
    parser = with_shapes(arguments(__doc__))
    parser.add_argument("--full", action="store_true", help="1, 8, 32 rows x 512, 2048, 8192 tokens")
    parser.add_argument("--rows", type=positive, nargs="+")
    parser.add_argument("--contexts", type=positive, nargs="+", help="tokens in the cache; 16384 is possible, too")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budgets", nargs="+", default=["4%", "10%", "20%", "60%", "100%", "512"])
    parser.add_argument("--bits", nargs="+", default=["16"], choices=["16", *KV_BITS], help="16: the model's dtype")
    parser.add_argument("--repeats", type=positive, default=9)
    parser.add_argument("--memory", type=float, default=half_of_memory() / GIB, help="GiB for caches at one time")
    parser.add_argument("--compile", action="store_true", help="kvkeep with compiled layers as well")
    parser.add_argument("--no-pack", action="store_true", help="leave kvkeep's layers as transformers has them")
    options = parser.parse_args()
    settle_shape(options)
    options.rows = options.rows or ([1, 8, 32] if options.full else [1, 8])
    options.contexts = options.contexts or ([512, 2048, 8192] if options.full else [512, 2048])
    return options


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    options.bandwidth = measure_bandwidth(torch.device("cpu"))
    print(
        f"Memory bandwidth (threads: {options.threads}): {options.bandwidth.read / 1e9:.1f} GB/s read, "
        f"{options.bandwidth.copy / 1e9:.1f} GB/s copied"
    )
    print(f"kvkeep's kernel: {kernel()}")
    cells = []
    for rows in options.rows:
        models = Models.build(options, rows)
        cells += [cell(models, rows, context, options) for context in options.contexts]
    bandwidth = {"read": options.bandwidth.read, "copy": options.bandwidth.copy}
    data = {name: value for name, value in vars(options).items() if name != "bandwidth"}
    finish({"bench": "decode", **data, "bandwidth": bandwidth, "weights": weight_bytes(models.dense), "cells": cells})


if __name__ == "__main__":
    main()
