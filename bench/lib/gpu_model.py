"""A whole model on a GPU: decode steps, throughput, and speed over the length of the history."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch
from peers import transformers as dense
from transformers import StoppingCriteria, StoppingCriteriaList

import kvkeep
from kvkeep.cache.hf_layers import handed
from kvkeep.engine import Engine, Request
from kvkeep.engine.kv_manager import KVManager
from kvkeep.engine.model_runner import ModelRunner
from kvkeep.engine.sampling_params import SamplingParams
from kvkeep.engine.scheduler import InputBatch, ModelRun
from kvkeep.engine.sequence import Sequence
from kvkeep.types import Phase
from lib.gpu import RUN_OUT, Bench, Step, fill, middle
from lib.sizes import bounded_row_bytes, token_bytes, weight_bytes

POLICIES = ("local", "h2o")
COMPILED = ", compiled"
DENSE = ("DynamicCache", "StaticCache")
MARGIN = {"kvkeep": 1.1, "DynamicCache": 1.25, "StaticCache": 1.45}
"""What a row takes beside its keys and values: copies of a layer, activations, logits."""


def largest(bench: Bench, row_bytes: int, system: str) -> int:
    """The batch that fits into nine tenths of the free memory; 0 if not one row does."""
    return min(bench.sizes.most_rows, int(0.9 * bench.free_bytes() / (row_bytes * MARGIN[system])))


def shrinking(bench: Bench, rows: int, run: Callable[[int], dict], tries: int = 4) -> dict | None:
    """A cell at the largest batch: with fewer rows, if they do not fit after all; ``None`` if it does not help."""
    while rows >= 1 and tries:
        try:
            return run(rows)
        except RUN_OUT:
            rows, tries = int(0.85 * rows), 0 if bench.is_over else tries - 1
        bench.tidy()
    return None


def bounded_step(bench: Bench, policy: str, budget: int, rows: int, *, history: int, compiled: bool = False) -> Step:
    """A decode step of the engine, recorded, over slots that have seen a history."""
    model = kvkeep.attach(bench.compiled if compiled else bench.model)
    memory = KVManager(model, kvkeep.parse(policy), budget)
    memory.allocate(rows)
    config = model.config
    shape = (1, config.num_key_value_heads, budget, config.hidden_size // config.num_attention_heads)
    for row_layer in memory.part(0, rows, Phase.DECODE).layers:
        keys, values = (bench.random(*shape).expand(rows, -1, -1, -1) for _ in range(2))
        fill(row_layer.stepper, keys, values, history)
    runner = ModelRunner(model, graphs=True)
    one = Sequence(0, Request(prompt=[0]), memory.policy, budget, frozenset(), fed=history, token_ids=[0])
    run = ModelRun([InputBatch(0, [one] * rows, [[0]] * rows, [one.fed] * rows, Phase.DECODE)])

    def step() -> object:
        return runner.run(run, memory).argmax(dim=-1)

    step()
    for name, why in runner.graphs.refused.items() if runner.graphs else ():
        if "out of memory" in why:
            raise torch.OutOfMemoryError(why)  # fewer rows can be recorded
        bench.notes.append(f"{name}: no CUDA graph: {why}")
    return step


def dense_step(bench: Bench, kind: str, rows: int, tokens: int) -> Step:
    """A decode step of transformers, with a cache that holds so many tokens."""
    bench.model.set_attn_implementation("sdpa")
    shape = {"rows": rows, "tokens": tokens}
    if kind == "DynamicCache":
        cache = dense.dynamic_cache(bench.model, **shape)
    else:
        cache = dense.static_cache(bench.model, **shape, room=2 * bench.sizes.repeats + 8)
    token = torch.zeros((rows, 1), dtype=torch.long, device=bench.device)

    def step() -> object:
        with torch.inference_mode():
            return bench.model(input_ids=token, **handed(bench.model, cache)).logits[:, -1].argmax(dim=-1)

    return step


def timed(bench: Bench, name: str, make: Callable[[int], Step], rows: int, attended: int) -> dict | None:
    """Tokens per second and the share of the memory's speed of one system."""
    weights = weight_bytes(bench.model)
    per_token = token_bytes(bench.sizes.config, bench.sizes.dtype)

    def run(rows: int) -> dict:
        seconds = bench.seconds(make(rows), max(2, bench.sizes.repeats // 2))
        must = weights + rows * attended * per_token
        step = middle(seconds)
        return {
            "name": name,
            "rows": rows,
            "attended": attended,
            "seconds": seconds,
            "tokens_per_s": rows / step,
            "mbu": must / step / bench.copy_speed,
        }

    found = shrinking(bench, rows, run)
    bench.tidy()
    if found is None:
        bench.notes.append(f"{name}, {attended} tokens: nothing fits")
    return found


def decode(bench: Bench) -> list[dict]:
    """(b) Decode steps, each system at its largest batch: kvkeep at budgets, transformers at contexts."""
    sizes, found = bench.sizes, []
    asked = [(policy, n) for n in sizes.budgets for policy in POLICIES]
    asked += [(f"h2o{COMPILED}", n) for n in sizes.budgets if bench.compile]
    asked += [(kind, n) for n in sizes.contexts for kind in DENSE]
    _ = bench.model  # before memory is looked at
    for name, tokens in bench.cells(asked, "b"):
        with bench.survives(f"b: {name}, {tokens}"):
            found += _largest_batch(bench, name, tokens)
    return found


def _largest_batch(bench: Bench, name: str, tokens: int) -> list[dict]:
    """One system of part b."""
    sizes = bench.sizes
    if name in DENSE:
        rows = largest(bench, tokens * token_bytes(sizes.config, sizes.dtype), name)
        cell = timed(bench, name, partial(dense_step, bench, name, tokens=tokens), rows, tokens + 1)
    else:
        policy, compiled = name.removesuffix(COMPILED), name.endswith(COMPILED)
        rows = largest(bench, bounded_row_bytes(sizes.config, sizes.dtype, policy, tokens), "kvkeep")
        make = partial(bounded_step, bench, policy, tokens, history=max(sizes.contexts), compiled=compiled)
        cell = timed(bench, f"kvkeep {name}", make, rows, tokens + 1)
    return [cell] if cell else []


def histories(bench: Bench) -> list[dict]:
    """(f) Decode steps of a few rows after histories of many lengths."""
    sizes, found = bench.sizes, []
    rows, budget = sizes.history_rows, sizes.budgets[len(sizes.budgets) // 2]
    asked = [(history, name) for history in sizes.histories for name in ("kvkeep h2o", "DynamicCache")]
    for history, name in bench.cells(asked, "f"):
        held = history if name == "DynamicCache" else min(budget, history)
        if name == "DynamicCache":
            make = partial(dense_step, bench, name, tokens=history)
        else:
            make = partial(bounded_step, bench, "h2o", held, history=history)
        with bench.survives(f"f: {name}, {history}"):
            cell = timed(bench, name, make, rows, held + 1)
            found += [{**cell, "history": history}] if cell else []
    return found


class Deadline(StoppingCriteria):
    """Stops everything at a point in time, and counts tokens per row."""

    def __init__(self, end: float) -> None:
        self.end, self.count = end, 0

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.count += 1
        return torch.full((len(input_ids),), time.monotonic() > self.end, dtype=torch.bool, device=input_ids.device)


def throughput(bench: Bench) -> list[dict]:
    """(e) New tokens per second over prompts and new tokens together, each system at its largest batch."""
    sizes, found = bench.sizes, []
    _ = bench.model
    asked = [(name, prompt, new) for prompt, new in sizes.workloads for name in ("kvkeep h2o", "transformers")]
    for name, prompt, new in bench.cells(asked, "e"):
        with bench.survives(f"e: {name}, {prompt}+{new}"):
            cell = _throughput(bench, name, prompt, new)
            found += [{"name": name, "prompt": prompt, "new": new, **cell}] if cell else []
    return found


def _throughput(bench: Bench, name: str, prompt: int, new: int) -> dict | None:
    """One system of part e."""
    sizes, budget = bench.sizes, round(bench.sizes.ratio * (prompt + new))
    if name == "transformers":
        rows = largest(bench, (prompt + new) * token_bytes(sizes.config, sizes.dtype), "DynamicCache")
        run = partial(generate_run, bench, prompt=prompt, new=new)
    else:
        rows = largest(bench, bounded_row_bytes(sizes.config, sizes.dtype, "h2o", budget), "kvkeep")
        run = partial(engine_run, bench, prompt=prompt, new=new, budget=budget)
    cell = shrinking(bench, min(rows, sizes.throughput_rows), run)
    if cell is None:
        bench.notes.append(f"e: {name}, {prompt}+{new}: nothing fits")
    return cell


def prompts(bench: Bench, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, bench.sizes.config.vocab_size, (rows, length), generator=generator)


def engine_run(bench: Bench, rows: int, prompt: int, new: int, budget: int) -> dict:
    """The engine, until everything is written or the slice of time is over."""
    engine = Engine(kvkeep.attach(bench.model), policy="h2o", budget=budget, rows=rows, prefill_chunk=None)
    for ids in prompts(bench, rows, prompt).tolist():
        engine.add(Request(prompt=ids, sampling=SamplingParams(max_new_tokens=new), ignore_end=True))
    start, count = time.monotonic(), 0
    while engine.busy and time.monotonic() < start + bench.sizes.slice_s:
        count += len(engine.step())
    seconds = time.monotonic() - start
    return {"rows": rows, "tokens": count, "seconds": seconds, "complete": not engine.busy}


def generate_run(bench: Bench, rows: int, prompt: int, new: int) -> dict:
    """transformers' generate, likewise."""
    bench.model.set_attn_implementation("sdpa")
    ids = prompts(bench, rows, prompt).to(bench.device)
    start = time.monotonic()
    clock = Deadline(start + bench.sizes.slice_s)
    bench.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    seconds = time.monotonic() - start
    return {"rows": rows, "tokens": rows * clock.count, "seconds": seconds, "complete": clock.count == new}


def lines(part: str, found: list[dict], bench: Bench) -> tuple[str, list[str], list[list[str]]]:
    """A part's table: title, columns, rows."""
    if part == "e":
        rows = [
            [
                one["name"],
                f"{one['prompt']}+{one['new']}",
                str(one["rows"]),
                f"{one['tokens'] / one['seconds']:.0f}",
                f"{one['seconds']:.1f}",
                "yes" if one["complete"] else "no",
            ]
            for one in found
        ]
        return (
            "(e) new tokens over all time, prompts included",
            [
                "system",
                "tokens",
                "rows",
                "tokens/s",
                "s",
                "to the end",
            ],
            rows,
        )
    columns = ["system", "history" if part == "f" else "attended", "rows", "ms per step", "tokens/s", "MBU"]
    rows = [
        [
            one["name"],
            str(one["history"] if part == "f" else one["attended"]),
            str(one["rows"]),
            f"{1e3 * middle(one['seconds']):.2f}",
            f"{one['tokens_per_s']:.0f}",
            f"{one['mbu']:.0%}",
        ]
        for one in found
    ]
    title = "(f) decode steps over histories" if part == "f" else "(b) decode steps at the largest batch"
    return title, columns, rows
