"""How long until the first token, and between tokens?

    python bench/latency.py                              # a short look: 1 and 8 rows, 2048 tokens
    python bench/latency.py --full [--contexts 32768]    # 1 and 8 rows, 2048 and 8192 tokens, 5 times
    python bench/latency.py --history 1048576            # kvkeep alone: time per token after 1 k, 4 k, ... tokens

All prompts of a cell come at the same moment. kvkeep reads them in chunks, the oldest prompt first, and rows that have
their first token go on in between, as in generate_batch; transformers' generate reads them as one batch. Systems run in
turn, each in a process of its own; kvpress takes one prompt, so it is asked with one row only. A repeat
gives one number per column; the table shows the median over repeats, and the quartiles. A history is one prompt through
one row, on the embedded model, or with --speed-model on the model of the other tables.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from lib import (
    arguments,
    counted,
    finish,
    interleaved,
    kernel,
    median_ms,
    positive,
    show,
    speed_config,
    speed_model,
    spread,
)
from lib.cells import System, alternating, asked, leaving_out, ran, saved_model, skipped
from lib.sizes import token_bytes

from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.models import tiny
from kvkeep.models.load import find, quiet, read_weights

BASE = "transformers"
COLUMNS = ["system", "TTFT s: first", "median", "last", "TPOT ms", "tokens/s", f"TTFT, TPOT vs {BASE}"]
HISTORIES = (1024, 65_536)
"""The shortest history, and the longest by default."""


SPARE_TOKENS = 64
"""Room beside a row's tokens in a paged cache: its last page need not be full."""


def systems(rows: int, context: int, options: argparse.Namespace) -> list[System]:
    """Who is asked; a cache that holds everything has room for all rows."""
    total, chunk = context + options.new, {"chunk": options.chunk}
    paced = {**chunk, "decode_every": options.decode_every}
    per_token = token_bytes(speed_config(options.layers), getattr(torch, options.dtype))
    pages = {"kv_bytes": rows * (total + SPARE_TOKENS) * per_token, "token_bytes": per_token}
    ours = {"policy": options.policy, "budget": options.budget}
    found = [
        System(f"kvkeep {options.policy} {options.budget}", "kvkeep", {**ours, **paced}),
        System("kvkeep full", "kvkeep", {"policy": "full", "budget": total, **paced}),
        System(BASE, "transformers", {"rows": rows}),
        System("generate_batch", "transformers_batch", pages),
    ]
    press = {"press": "SnapKVPress", "budget": options.budget, "attention": "sdpa"}
    return found if rows > 1 else [*found, System("kvpress SnapKV", "kvpress", press)]


def cell(model: str, rows: int, context: int, options: argparse.Namespace) -> dict:
    """One table, and its numbers."""
    work = {
        "model": model,
        "dtype": options.dtype,
        "threads": options.threads,
        "vocabulary": speed_config(options.layers).vocab_size,
        "requests": rows,
        "prompt_tokens": context,
        "new_tokens": options.new,
    }
    found = alternating(asked(systems(rows, context, options), options), work, options.repeats)
    times = {name: [*map(of_requests, runs)] for name, runs in ran(found).items()}
    lines = [[name, *line(runs), beside_base(times, name)] for name, runs in times.items()]
    repeats = "1 run" if options.repeats == 1 else f"{options.repeats} runs in turn: medians and quartiles over runs"
    title = f"{counted(rows)} x {context} tokens + {options.new} new, {options.dtype}; {repeats}"
    show(title, COLUMNS, lines, skipped(found))
    return {"rows": rows, "context": context, "systems": found}


def of_requests(run: dict) -> tuple[float, ...]:
    """One repeat: the first, median and last first token in seconds, the median time per token in ms, tokens/s."""
    first, tpot = run["first_s"], run["tpot_s"]
    speed = run["new_tokens"] / run["seconds"]
    return min(first), statistics.median(first), max(first), median_ms(tpot), speed


def line(runs: Sequence[tuple[float, ...]]) -> list[str]:
    """The columns of a system: medians over runs, and the quartiles of the first token's median and of TPOT."""
    first, median, last, tpot, speed = zip(*runs, strict=True)
    middle = [digits(statistics.median(column)) for column in (first, last, speed)]
    return [middle[0], with_quartiles(median), middle[1], with_quartiles(tpot), middle[2]]


def with_quartiles(repeats: Sequence[float]) -> str:
    """The median over repeats; the quartiles if there are several."""
    if len(repeats) == 1:
        return digits(repeats[0])
    low, middle, high = map(digits, statistics.quantiles(repeats, n=4, method="inclusive"))
    return f"{middle} ({low}-{high})"


def digits(number: float) -> str:
    """Three digits, or all before the point."""
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def beside_base(times: dict[str, list[tuple[float, ...]]], name: str) -> str:
    """The medians of a system's median first token and of its time per token, over those of the base."""
    if BASE not in times:
        return ""
    ours, theirs = ([statistics.median(column) for column in zip(*times[n], strict=True)] for n in (name, BASE))
    return f"{ours[1] / theirs[1]:.2f}x, {ours[3] / theirs[3]:.2f}x"


def engines(options: argparse.Namespace) -> tuple[Engine, Engine]:
    """Two of one row each, on one model."""
    if options.speed_model:
        model = speed_model(getattr(torch, options.dtype), options.layers)
    else:
        with quiet():
            model = read_weights(find(tiny.path()), options.dtype, "cpu")
    settings = {"policy": options.policy, "budget": options.budget, "rows": 1, "prefill_chunk": options.chunk}
    return Engine(model, **settings), Engine(model, **settings)


def begun(one: Engine, tokens: int, new: int) -> tuple[float, Callable[[], object]]:
    """Seconds until the first token after a history of ``tokens``, and what draws the next ones."""
    prompt = random.Random(0).choices(range(one.model.config.vocab_size), k=tokens)
    start = time.perf_counter()
    stream = one.stream(Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=new), ignore_end=True))
    next(stream)
    return time.perf_counter() - start, partial(next, stream)


def beside(pair: tuple[Engine, Engine], tokens: int, new: int) -> tuple[float, dict[str, list[float]]]:
    """Seconds until the first token of a history, and of each token after it and after the shortest one, in turn."""
    first, old = begun(pair[0], tokens, new)
    _, young = begun(pair[1], HISTORIES[0], new)
    return first, interleaved({"old": old, "young": young}, new - 1, warmup=0)


def history(options: argparse.Namespace) -> None:
    """Time per token after histories of 1024 tokens, four times as many, and so on."""
    pair = engines(options)
    tokens = HISTORIES[0]
    beside(pair, tokens, options.history_new)
    lines, data = [], []
    while tokens <= options.history:
        first, times = beside(pair, tokens, options.history_new)
        old, young = times["old"], times["young"]
        data.append({"history": tokens, "first_s": first, **{f"{n}_ms": [1e3 * t for t in times[n]] for n in times}})
        ratio = median_ms(old) / median_ms(young)
        lines.append([f"{tokens:,}", spread(old), spread(young), f"{ratio:.2f}x", f"{1e6 * first / tokens:.0f}"])
        tokens *= 4
    name = "the model for speed" if options.speed_model else "the embedded model"
    short = f"after {HISTORIES[0]:,}, in turn"
    show(
        f"kvkeep {options.policy} {options.budget}, chunk {options.chunk}, {options.dtype}, on {name}",
        ["history, tokens", "ms per token (quartiles)", short, "ratio", "us per prompt token"],
        lines,
    )
    finish({"bench": "latency --history", **vars(options), "lengths": data})


def parse_arguments() -> argparse.Namespace:
    parser = leaving_out(arguments(__doc__))
    parser.add_argument("--full", action="store_true", help="1 and 8 rows x 2048 and 8192 tokens, 5 repeats")
    parser.add_argument("--rows", type=positive, nargs="+")
    parser.add_argument("--contexts", type=positive, nargs="+", help="prompt tokens; 32768 is possible, too")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budget", type=positive, default=1024)
    parser.add_argument("--chunk", type=positive, default=512, help="prompt tokens per step of kvkeep")
    parser.add_argument("--decode-every", type=positive, help="as in kvkeep.Engine; by default its default")
    parser.add_argument("--new", type=positive, default=32, help="tokens that are generated")
    parser.add_argument("--repeats", type=positive, help="runs of each system, in turn; by default 1, with --full 5")
    parser.add_argument(
        "--history", type=positive, nargs="?", const=HISTORIES[1], help="longest history; nothing else is run"
    )
    parser.add_argument(
        "--history-new", type=positive, default=257, help="tokens after each history; all but the first are timed"
    )
    parser.add_argument("--speed-model", action="store_true", help="for --history, instead of the embedded model")
    options = parser.parse_args()
    if min(options.new, options.history_new) < 2:
        parser.error("time between tokens needs at least two new tokens: --new and --history-new are 2 or more")
    if options.history and options.history < HISTORIES[0]:
        parser.error(f"--history begins at {HISTORIES[0]} tokens")
    options.rows = options.rows or [1, 8]
    options.contexts = options.contexts or ([2048, 8192] if options.full else [2048])
    options.repeats = options.repeats or (5 if options.full else 1)
    return options


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(options.threads)
    print(f"threads: {options.threads}, kvkeep's kernel: {kernel()}")
    if options.history:
        return history(options)
    with saved_model(options.layers, options.dtype) as model:
        cells = [cell(model, rows, context, options) for rows in options.rows for context in options.contexts]
    return finish({"bench": "latency", **vars(options), "cells": cells})


if __name__ == "__main__":
    main()
