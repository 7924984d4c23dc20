"""How fast are pretrained models, as a user starts them? First token, time per token and memory, beside others.

    make real
    python bench/real.py ~/.cache/kvkeep-real-models/smollm2 ~/.cache/kvkeep-real-models/gemma3
    python bench/real.py ~/.cache/kvkeep-real-models/smollm2.gguf      # beside llama.cpp and OpenVINO GenAI, too
    python bench/real.py MODEL --rows 1 8 32 --contexts 500 2000 8000 --repeats 5

The prompts are pieces of kvkeep's own documentation, so that tokens are those of a text; many long ones overlap. Every
system loads the same folder in the dtype of its weights, or the same GGUF file, is given no option that a user would
not know, and runs in a process of its own; systems run in turn. All rows' prompts come at the same moment, so a row's
time per token contains the reading of prompts that came later in the queue; a run ends with the last token of the last
row. Peak is the memory of a process in a run, the model included. `make peers` installs the other systems.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from lib import counted, finish, kernel, positive, show
from lib.cells import System, alternating, asked, leaving_out, middle, ran, skipped

import kvkeep
from kvkeep.models.checkpoint import Tokenizer
from kvkeep.models.load import quiet
from kvkeep.policies import DEFAULT

BASE = "transformers"
COLUMNS = ["system", "first token s", "ms per token", "run s", f"token, run vs {BASE}", "peak MiB"]
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
        System("llama.cpp", "llama_cpp", {}),
        System("OpenVINO GenAI", "openvino", {}),
        System("the same, evicting", "openvino", {"budget": min(options.budget, whole)}),
        System("vLLM", "vllm", {}),
    ]


def pieces(tokenizer: Tokenizer, rows: int, context: int) -> list[list[int]]:
    """Tokens of a text, a piece of it for each row. Pieces overlap where the text is too short for them."""
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    ids = tokenizer.encode(text, add_special_tokens=False)
    apart = min(context, (len(ids) - context) // max(1, rows - 1))
    if apart < 1:
        raise SystemExit(f"The documentation has {len(ids)} tokens, too few for {rows} rows of {context}.")
    return [ids[row * apart : row * apart + context] for row in range(rows)]


def cell(model: str, loaded: LoadedModel, rows: int, context: int, options: argparse.Namespace) -> dict:
    """One table, and its numbers."""
    work = {
        "model": model,
        "dtype": loaded.dtype,
        "threads": options.threads,
        "vocabulary": loaded.vocabulary,
        "requests": rows,
        "prompt_tokens": context,
        "new_tokens": options.new,
        "texts": pieces(loaded.tokenizer, rows, context),
    }
    found = alternating(asked(systems(rows, context, options), options), work, options.repeats)
    times = {name: (median(map(of_run, runs)), middle(runs, "seconds")) for name, runs in ran(found).items()}
    lines = []
    for name, runs in ran(found).items():
        first = median(median(run["first_s"]) for run in runs)
        peak = median(run["held_bytes"] + run["peak_bytes"] for run in runs) / 2**20
        token, whole = times[name]
        lines.append([name, f"{first:.2f}", f"{token:.1f}", f"{whole:.1f}", beside_base(times, name), f"{peak:.0f}"])
    name = Path(model).name
    title = f"{name}, {loaded.dtype}: {counted(rows)} x {context} tokens + {options.new} new, runs: {options.repeats}"
    show(title, COLUMNS, lines, skipped(found))
    return {"model": name, "dtype": loaded.dtype, "rows": rows, "context": context, "systems": found}


def beside_base(times: dict[str, tuple[float, float]], name: str) -> str:
    """How many times faster than the base: a token, and the run."""
    if BASE not in times:
        return ""
    return ", ".join(f"{base / own:.2f}x" for base, own in zip(times[BASE], times[name], strict=True))


def of_run(run: dict) -> float:
    """The median time per token of a run, in ms."""
    return 1000 * median(run["tpot_s"])


class LoadedModel(NamedTuple):
    """What is asked of a model before the systems load it themselves."""

    tokenizer: Tokenizer
    dtype: str
    vocabulary: int


def loaded(path: str) -> LoadedModel:
    """Read a model, and forget its weights."""
    with quiet():
        model, tokenizer = kvkeep.load(path, device="cpu")
    return LoadedModel(tokenizer, str(model.dtype).removeprefix("torch."), model.config.get_text_config().vocab_size)


def main() -> None:
    parser = leaving_out(argparse.ArgumentParser(description=__doc__.partition("\n")[0]))
    parser.add_argument("models", nargs="+", metavar="MODEL", help="folders of pretrained models, or GGUF files")
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
    models = {model: loaded(model) for model in options.models}
    for found in models.values():
        pieces(found.tokenizer, max(options.rows), max(options.contexts))  # refused now, not in the last cell
    cells = [
        cell(model, found, rows, context, options)
        for model, found in models.items()
        for rows in options.rows
        for context in options.contexts
    ]
    finish({"bench": "real", **vars(options), "cells": cells})


if __name__ == "__main__":
    main()
