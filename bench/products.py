"""How fast are the products of a decode step with the model's weights, plain and packed?

    python bench/products.py [--rows 1 8 32] [--dtypes float32 bfloat16] [--repeats 15] [--threads 2]

All linear layers of the model for speed, one after the other, each on random input: its weights come from the memory
as they do in a step. Packed is `kvkeep.pack_weights`. Interleaved in one run; medians.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable

import torch
from lib import SPEED_MODEL, counted, finish, interleaved, median_ms, positive, show, speed_model, spread
from torch import nn

import kvkeep
from kvkeep.models.packed_weights import PackedLinear


def products(layers: list[nn.Module], inputs: list[torch.Tensor]) -> Callable[[], None]:
    """One product of every layer."""

    def run() -> None:
        for layer, x in zip(layers, inputs, strict=True):
            layer(x)

    return run


def layers_of(model: nn.Module, kind: type[nn.Module]) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, kind)]


def measure(dtype: torch.dtype, rows: list[int], layers: int, repeats: int) -> list[dict]:
    """Seconds of a step's products, per number of rows."""
    model = speed_model(dtype, layers, attach=False)
    plain = layers_of(model, nn.Linear)
    other = copy.deepcopy(model)
    kvkeep.pack_weights(other)
    packed = layers_of(other, PackedLinear)
    if not packed:
        raise SystemExit(f"This build of torch cannot pack weights in {dtype} on this processor.")
    flop = 2 * sum(layer.in_features * layer.out_features for layer in plain)
    cells = []
    for n in rows:
        inputs = [torch.randn(n, 1, layer.in_features, dtype=dtype) for layer in plain]
        tasks = {"plain": products(plain, inputs), "packed": products(packed, inputs)}
        with torch.inference_mode():
            times = interleaved(tasks, repeats)
        cells.append({"rows": n, "flop": flop * n, **{f"{name}_s": seconds for name, seconds in times.items()}})
    return cells


def line(cell: dict) -> list[str]:
    plain, packed = median_ms(cell["plain_s"]), median_ms(cell["packed_s"])
    columns = [counted(cell["rows"])]
    for name, ms in (("plain", plain), ("packed", packed)):
        columns += [spread(cell[f"{name}_s"]), f"{cell['flop'] / 1e6 / ms:.0f}"]
    return [*columns, f"{plain / packed:.2f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=positive, default=SPEED_MODEL.num_hidden_layers, help="fewer: a quick look")
    parser.add_argument("--repeats", type=positive, default=15)
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    cells = []
    for dtype in options.dtypes:
        found = measure(getattr(torch, dtype), options.rows, options.layers, options.repeats)
        cells += [{"dtype": dtype, **cell} for cell in found]
        show(
            f"Products of a decode step, {dtype}, {options.threads} threads; ms: median (quartiles)",
            ["rows", "plain: ms", "GFLOP/s", "packed: ms", "GFLOP/s", "plain / packed"],
            [line(cell) for cell in found],
        )
    finish({"bench": "products", "repeats": options.repeats, "threads": options.threads, "cells": cells})


if __name__ == "__main__":
    main()
