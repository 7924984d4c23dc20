"""One layer on a GPU: how fast the decode kernel reads, what eviction adds, and what a prompt's report costs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

import kvkeep
from kvkeep.attention_stats import Mass, Nothing, Statistic
from kvkeep.backends import AttentionInputs, choose
from kvkeep.types import AttentionOptions, Fresh, Phase, Slots
from lib.gpu import Bench, fill, middle

POLICIES = ("local", "h2o", "ahakv", "scissorhands", "tova")


def bandwidth(bench: Bench) -> list[dict]:
    """(a) Decode attention with H2O's report: the bytes that must move, over the time."""
    shapes = [(rows, slots) for rows in bench.sizes.rows for slots in bench.sizes.slots]
    found = []
    for rows, slots in bench.cells(shapes, "a"):
        with bench.survives(f"a: {rows} x {slots}"):
            found.append(_bandwidth(bench, rows, slots))
    return found


def _bandwidth(bench: Bench, rows: int, slots: int) -> dict:
    """Calls go round many blocks, so that none of them stays in a cache; all in one graph."""
    heads, kv_heads, dim = bench.sizes.heads
    size = 2 * rows * kv_heads * slots * dim * bench.sizes.dtype.itemsize
    must = size + (4 + 4) * rows * kv_heads * slots
    copies = max(1, min(64, bench.sizes.buffer_bytes // (4 * size)))
    blocks = [bench.random(2, rows, kv_heads, slots, dim) for _ in range(copies)]
    query = bench.random(rows, heads, 1, dim)
    positions = torch.arange(slots, dtype=torch.int32, device=bench.device).repeat(rows, kv_heads, 1)
    now = torch.full((rows, 1), slots - 1, device=bench.device)
    options, backend = AttentionOptions(scaling=dim**-0.5), choose(query.device, query.dtype)

    def run() -> None:
        for keys, values in blocks:
            backend.attend(AttentionInputs(query, Slots(keys, values, positions), now, options, Mass()))

    with torch.inference_mode():
        times = [seconds / copies for seconds in bench.seconds(bench.recorded(run, f"a: {rows} x {slots}"))]
    speed = must / middle(times)
    return {"rows": rows, "slots": slots, "bytes": must, "seconds": times, "share": speed / bench.copy_speed}


def overhead(bench: Bench) -> list[dict]:
    """(c) A layer's whole decode step (append, attend, observe, evict) under some policies, beside plain SDPA."""
    rows, slots = bench.sizes.layer
    heads, kv_heads, dim = bench.sizes.heads
    query, new = bench.random(rows, heads, 1, dim), [bench.random(rows, kv_heads, 1, dim) for _ in range(2)]
    keys, values = (bench.random(rows, kv_heads, slots, dim) for _ in range(2))
    options = AttentionOptions(scaling=dim**-0.5)

    def evicting(policy: str) -> Callable[[], object]:
        layer = kvkeep.Layer(kvkeep.parse(policy), slots)
        fill(layer, keys, values, 4 * slots)
        return lambda: layer.step(query, *new, options=options, phase=Phase.DECODE)

    def plain() -> object:
        return scaled_dot_product_attention(query, keys, values, scale=options.scaling, enable_gqa=True)

    makers = {"SDPA": lambda: plain, **{policy: lambda policy=policy: evicting(policy) for policy in POLICIES}}
    found = []
    with torch.inference_mode():
        for name in bench.cells(list(makers), "c"):
            with bench.survives(f"c: {name}"):
                found.append({"name": name, "seconds": bench.seconds(bench.recorded(makers[name](), f"c: {name}"))})
    middles = {one["name"]: middle(one["seconds"]) for one in found}
    for one in found:
        for base in ("SDPA", "local"):
            one[f"vs {base}"] = middles[one["name"]] / middles[base] if base in middles else None
    return found


def prefill(bench: Bench) -> list[dict]:
    """(d) A prompt's attention with a report, beside attention alone: torch's, and ours."""
    found = []
    for tokens in bench.cells(bench.sizes.prompts, "d"):
        with bench.survives(f"d: {tokens}"), torch.inference_mode():
            found.append(_prefill(bench, tokens))
    return found


def _prefill(bench: Bench, tokens: int) -> dict:
    heads, kv_heads, dim = bench.sizes.heads
    query, keys, values = (bench.random(1, h, tokens, dim) for h in (heads, kv_heads, kv_heads))
    at = torch.arange(tokens, device=bench.device)[None]
    options = AttentionOptions(scaling=dim**-0.5)

    def ours(statistic: Statistic, output: str) -> Callable[[], object]:
        return lambda: _ours(query, keys, values, at, statistic, options, output)

    window = Mass(rows=bench.sizes.window)
    tasks = {
        "SDPA": lambda: scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=options.scaling, enable_gqa=True
        ),
        "kernel, no report": ours(Nothing(), "triton"),
        "SDPA + window": ours(window, "torch"),
        "SDPA + all rows": ours(Mass(), "torch"),
        "kernel + window": ours(window, "triton"),
        "kernel + all rows": ours(Mass(), "triton"),
    }
    repeats = max(2, bench.sizes.repeats // 2)
    times = {name: bench.seconds(bench.recorded(task, f"d: {tokens}, {name}"), repeats) for name, task in tasks.items()}
    base = middle(times["SDPA"])
    return {"tokens": tokens, "seconds": times, "vs SDPA": {name: middle(s) / base for name, s in times.items()}}


def _ours(query, keys, values, at, statistic: Statistic, options: AttentionOptions, output: str) -> object:
    """The kernels, with this or that output; without a GPU what runs there."""
    held = at[:, None].to(torch.int32)
    if not query.is_cuda:
        backend = choose(query.device, query.dtype)
        return backend.attend(AttentionInputs(query, Slots(keys, values, held), at, options, statistic))
    from kvkeep.backends.triton import prefill_ops

    found = prefill_ops.attend(AttentionInputs(query, Fresh(keys, values, held), at, options, statistic), output=output)
    assert found is not None
    return found


def lines(part: str, found: list[dict], bench: Bench) -> tuple[str, list[str], list[list[str]]]:
    """A part's table: title, columns, rows."""
    if part == "a":
        columns = ["rows x slots", "MB", "us", "GB/s", "of copy"]
        return (
            "(a) decode kernel with H2O's report, one layer",
            columns,
            [
                [
                    f"{one['rows']} x {one['slots']}",
                    f"{one['bytes'] / 1e6:.1f}",
                    f"{1e6 * middle(one['seconds']):.1f}",
                    f"{one['bytes'] / middle(one['seconds']) / 1e9:.0f}",
                    f"{one['share']:.0%}",
                ]
                for one in found
            ],
        )
    if part == "c":
        rows = [[one["name"], f"{1e6 * middle(one['seconds']):.1f}", *_ratios(one)] for one in found]
        title = "(c) a layer's decode step, {} rows x {} slots".format(*bench.sizes.layer)
        return title, ["", "us", "/ SDPA", "/ local"], rows
    names = list(found[0]["seconds"]) if found else []
    rows = [
        [str(one["tokens"]), *(f"{1e3 * middle(one['seconds'][n]):.2f} ({one['vs SDPA'][n]:.2f})" for n in names)]
        for one in found
    ]
    return "(d) a prompt's attention, one layer: ms (/ SDPA)", ["tokens", *names], rows


def _ratios(one: dict) -> list[str]:
    return ["" if one[f"vs {base}"] is None else f"{one[f'vs {base}']:.3f}" for base in ("SDPA", "local")]
