"""How fast are pretrained models, as a user starts them? First token, time per token and memory, beside others.

    make real
    python bench/real.py ~/.cache/kvkeep-real-models/smollm2 ~/.cache/kvkeep-real-models/gemma3
    python bench/real.py MODEL --rows 1 8 32 --contexts 500 2000 8000 --repeats 5

The prompts are pieces of kvkeep's own documentation, so that tokens are those of a text. Every system loads the same
folder in the dtype of its weights, is given no option that a user would not know, and runs in a process of its own;
systems run in turn. Peak is the memory of a process in a run, the model included. All rows' prompts come at the same
moment.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from lib import counted, finish, kernel, positive, show
from lib.cells import System, alternating, asked, leaving_out, ran, skipped
from transformers import AutoConfig, AutoTokenizer

from kvkeep.policies import DEFAULT

BASE = "transformers"
COLUMNS = ["system", "first token s", "ms per token", "tokens/s, all rows", f"per token vs {BASE}", "peak MB"]
DOCS = Path(__file__).parents[1] / "docs"


def systems(rows: int, context: int, options: argparse.Namespace) -> list[System]:
    """Who is asked."""
    whole = context + options.new
    ours = {"policy": DEFAULT, "chunk": None}
    return [
        System(f"kvkeep {options.budget}", "kvkeep", {**ours, "budget": min(options.budget, whole)}),
        System("kvkeep 20%", "kvkeep", {**ours, "budget": max(1, whole // 5)}),
        System("kvkeep full", "kvkeep", {"policy": "full", "budget": whole, "chunk": None}),
        System(BASE, "transformers", {"rows": rows}),
    ]


def pieces(model: str, rows: int, context: int) -> list[list[int]]:
    """Tokens of a text, a piece of it for each row."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if len(ids) < rows * context:
        raise SystemExit(f"The documentation has {len(ids)} tokens, too few for {rows} rows of {context}.")
    return [ids[row * context : (row + 1) * context] for row in range(rows)]


def cell(model: str, rows: int, context: int, options: argparse.Namespace) -> dict:
    """One table, and its numbers."""
    config = AutoConfig.from_pretrained(model).get_text_config(decoder=True)
    dtype = str(config.dtype).removeprefix("torch.")
    work = {
        "model": model,
        "dtype": dtype,
        "threads": options.threads,
        "vocabulary": config.vocab_size,
        "requests": rows,
        "prompt_tokens": context,
        "new_tokens": options.new,
        "texts": pieces(model, rows, context),
    }
    found = alternating(asked(systems(rows, context, options), options), work, options.repeats)
    lines = []
    per_token = {name: statistics.median(map(of_run, runs)) for name, runs in ran(found).items()}
    for name, runs in ran(found).items():
        first = statistics.median(statistics.median(run["first_s"]) for run in runs)
        peak = statistics.median(run["held_bytes"] + run["peak_bytes"] for run in runs) / 2**20
        speed = 1000 * rows / per_token[name]
        ratio = f"{per_token[BASE] / per_token[name]:.2f}x faster" if BASE in per_token else ""
        lines.append([name, f"{first:.2f}", f"{per_token[name]:.1f}", f"{speed:.0f}", ratio, f"{peak:.0f}"])
    title = (
        f"{Path(model).name}, {dtype}: {counted(rows)} x {context} tokens + {options.new} new, {options.repeats} runs"
    )
    show(title, COLUMNS, lines, skipped(found))
    return {"model": Path(model).name, "dtype": dtype, "rows": rows, "context": context, "systems": found}


def of_run(run: dict) -> float:
    """The median time per token of a run, in ms."""
    return 1000 * statistics.median(run["tpot_s"])


def main() -> None:
    parser = leaving_out(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders of pretrained models")
    parser.add_argument("--rows", type=positive, nargs="+", default=[1, 8])
    parser.add_argument("--contexts", type=positive, nargs="+", default=[500, 2000], help="prompt tokens")
    parser.add_argument("--budget", type=positive, default=512, help="slots of the first line")
    parser.add_argument("--new", type=positive, default=64, help="tokens that are generated")
    parser.add_argument("--repeats", type=positive, default=3, help="runs of each system, in turn; medians")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    options = parser.parse_args()
    if options.new < 2:
        parser.error("time per token needs at least two new tokens: --new is 2 or more")
    print(f"threads: {options.threads}, kvkeep's kernel: {kernel()}")
    cells = [
        cell(model, rows, context, options)
        for model in options.models
        for rows in options.rows
        for context in options.contexts
    ]
    finish({"bench": "real", **vars(options), "cells": cells})


if __name__ == "__main__":
    main()
