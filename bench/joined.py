"""Does it pay to run the model once over several chunks of prompts, or over a chunk and the rows that decode?

    python bench/joined.py [--chunk 64] [--prompts 8] [--decoding 3] [--dtype bfloat16]

CPU time of all threads, so that other processes on the machine matter less; the ways are timed in turn. Each prompt
feeds its first chunk. The rows that decode have full slots.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from lib import arguments, finish, positive, show, speed_model

from kvkeep.engine import Engine, Request
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.scheduler import InputBatch, ModelRun
from kvkeep.engine.sequence import Sequence
from kvkeep.models.prepare import prepare_for_rows
from kvkeep.types import Phase

COLUMNS = ["runs of the model", "CPU ms (minimum)", "against one by one"]


def engine_of(options: argparse.Namespace) -> tuple[Engine, list[Sequence], list[InputBatch]]:
    """An engine whose first rows decode, the prompts in its other rows, and the batch of the rows that decode."""
    model = speed_model(getattr(torch, options.dtype), options.layers)
    rows = options.decoding + options.prompts
    prepare_for_rows(model, rows)
    engine = Engine(model, policy="h2o", budget=options.budget, rows=rows, prefill_chunk=options.chunk)

    draw = random.Random(0)

    def ask(tokens: int) -> None:
        prompt = draw.choices(range(model.config.vocab_size), k=tokens)  # equal ones would be read once
        engine.add(Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=10**5), ignore_end=True))

    for _ in range(options.decoding):
        ask(options.budget + 8)
    while not all(one.token_ids for one in engine._scheduler.running) or engine._scheduler.waiting:
        engine.step()
    for _ in range(options.prompts):
        ask(options.chunk)
    engine._admit()
    return engine, engine._scheduler.running[options.decoding :], engine._scheduler._decode()


def ways(options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """What is timed, by name. Every run begins the prompts anew."""
    engine, prompts, decoding = engine_of(options)

    def chunk(*rows: Sequence) -> InputBatch:
        tokens = [one.prompt for one in rows]
        return InputBatch(rows[0].row or 0, rows, tokens, [0] * len(rows), Phase.PREFILL, fresh=True)

    def runs(*found: list[InputBatch]) -> Callable[[], None]:
        def go() -> None:
            for batches in found:
                engine._runner.run(ModelRun(batches), engine._kv)

        return go

    apart = [[chunk(one)] for one in prompts]
    together = [chunk(one) for one in prompts]
    return {
        "prompts one by one, then decode": runs(*apart, decoding),
        "prompts joined, then decode": runs(together, decoding),
        "prompts as a batch of one length, then decode": runs([chunk(*prompts)], decoding),
        "prompts and decode joined": runs([*together, *decoding]),
        "decode": runs(decoding),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--chunk", type=positive, default=512, help="tokens of each prompt")
    parser.add_argument("--prompts", type=positive, default=1)
    parser.add_argument("--decoding", type=positive, default=3, help="rows that decode")
    parser.add_argument("--budget", type=positive, default=512)
    parser.add_argument("--repeats", type=positive, default=7)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tasks = ways(options)
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for repeat in range(-1, options.repeats):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            if repeat >= 0:
                times[name].append(1e3 * (time.process_time() - start))
    middle = {name: statistics.median(found) for name, found in times.items()}
    base = next(iter(middle.values()))
    lines = [[name, f"{middle[name]:.1f} ({min(times[name]):.1f})", f"{middle[name] / base:.2f}x"] for name in times]
    size = f"{options.prompts} x {options.chunk} prompt tokens, {options.decoding} rows decode"
    show(f"{size}, {options.dtype}, threads: {options.threads}", COLUMNS, lines)
    finish({"bench": "joined", **vars(options), "ms": times})


if __name__ == "__main__":
    main()
