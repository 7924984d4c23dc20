"""The work of ``kvkeep plan``: make the plan and print it, as a table for people or one JSON object for programs.

Importing this module imports torch; transformers is imported for models that are not counted without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from rich.text import Text

from kvkeep.cli import console
from kvkeep.cli.plan import PlanOptions
from kvkeep.errors import show_bytes
from kvkeep.models.device import parse_device
from kvkeep.planning.bandwidth import BUFFER_BYTES, Bandwidth, measure_bandwidth, measure_products
from kvkeep.planning.cost import Cost
from kvkeep.planning.plan import Plan, Setting, name_of, plan
from kvkeep.policies.registry import label, spec

# What ``kvkeep plan --measure`` finds out about a device: the speed of its memory, and of products with weights.

FEW, MOST = 32, 1024
"""Rows up to which weights are too many for the processor's caches while products are measured, and the most rows."""


@dataclass(frozen=True)
class MeasuredDevice:
    """A bandwidth and the device on which it was measured."""

    bandwidth: Bandwidth
    device: str


def measured(made: Plan, place: torch.device) -> tuple[Plan, MeasuredDevice]:
    """Measure a device's speeds, and return a copy of the plan that goes by them, and the speeds.

    Products are measured for each number of rows that the plan speaks of, except with quantised weights: they are made
    by packages that the plan does not need.

    Raises:
        InputError: the device has no room for the buffers.
    """
    found = MeasuredDevice(measure_bandwidth(place), str(place))
    setting = made.setting
    width = setting.outline.shape.hidden
    known = not (setting.scheme or setting.weights_memory)
    rows = {n for cost in (made.full, made.bounded) if known for n in rows_of(made, cost)}
    products = {n: _products(place, setting.weights_dtype, n, width) for n in sorted(rows)}
    return replace(made, bandwidth=found.bandwidth.best, products=products), found


def _products(place: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """Measure the speed of matrix products for a number of rows: bytes of weights per second.

    Beyond `MOST` rows it is extrapolated from that number.
    """
    some = min(rows, MOST)
    # more rows are multiplied with fewer weights, so that no measurement takes longer
    size = BUFFER_BYTES * FEW // max(FEW, some)
    return measure_products(place, dtype, some, width=width, size_bytes=size) * some / rows


def rows_of(made: Plan, cost: Cost) -> list[int]:
    """Return the numbers of rows whose speed a plan states for one kind of cache, ascending; 1 is among them."""
    return sorted({1, made.rows or 1, most_rows(made, cost) or 1})


def most_rows(made: Plan, cost: Cost) -> int:
    """Return how many rows of one kind of cache fit into the plan's memory; 0 if the memory is not known."""
    return 0 if made.memory is None else cost.most_rows(made.memory)


def speeds(made: Plan, found: MeasuredDevice | None) -> dict[str, object] | None:
    """Return the speeds that a plan goes by as plain data; ``None`` if the plan has no bandwidth.

    Args:
        made: the plan.
        found: the device that was measured; ``None`` if the bandwidth was given.
    """
    if made.bandwidth is None:
        return None
    if found is None:
        return {"bytes_per_s": made.bandwidth, "source": "given"}
    return {
        "bytes_per_s": made.bandwidth,
        "source": "measured",
        "device": found.device,
        "read_bytes_per_s": found.bandwidth.read,
        "copy_bytes_per_s": found.bandwidth.copy,
        "weight_bytes_per_s": {str(rows): speed for rows, speed in made.products.items()},
    }


COUNTED = (
    "weights",
    "the cache of every row",
    "one step's activations, keys and values, blocks of logits and last logits in the largest layer",
)
NOT_COUNTED = (
    "the libraries themselves, such as CUDA's context",
    "what an allocator holds back",
    "float32 copies of weights on a CPU that does not compute in their dtype",
    "the state of layers without keys and values",
)


def serve(request: PlanOptions) -> None:
    """Make a plan and print it.

    Raises:
        KVKeepError: an option or the model cannot be used, or not one row fits.
    """
    place = parse_device(request.device)
    console.progress("reading the configuration of the model …")
    made = plan(**request.arguments())
    found = None
    if request.measure:
        console.progress(f"measuring the memory of {place}, and products …")
        made, found = measured(made, place)
    show(made, found, json=request.json)


def show(made: Plan, found: MeasuredDevice | None, *, json: bool) -> None:
    """Print a plan, as a table or as JSON."""
    if json:
        console.write_json(describe(made, found))
        return
    screen = console.out()
    screen.print(console.facts(_head(made, found)))
    screen.print()
    filled = console.table("", "full cache", f"budget {made.setting.budget}")
    for column in filled.columns[1:]:
        column.justify = "right"
    for name, cell in _lines(made).items():
        filled.add_row(name, cell(made.full), cell(made.bounded))
    screen.print(filled)
    screen.print()
    if missing := _not_asked(made):
        screen.print(Text(missing, "dim"))
    screen.print(Text(f"counted: {'; '.join(COUNTED)}", "dim"))
    screen.print(Text(f"not counted: {'; '.join(NOT_COUNTED)}", "dim"))
    for line in notes(made):
        console.note(line)


def describe(made: Plan, found: MeasuredDevice | None) -> dict[str, object]:
    """Return a plan as plain data. Sizes are in bytes, speeds in bytes or tokens per second."""
    setting = made.setting
    shape = setting.outline.shape
    return {
        "model": setting.outline.name,
        "parameters": shape.parameters,
        "weights_dtype": name_of(setting.weights_dtype),
        "weights_bytes": made.bounded.weight_bytes,
        "weights_format": setting.weights_format,
        "dtype": name_of(setting.dtype),
        "token_bytes": setting.token_bytes,
        "context_tokens": setting.context,
        "prefill_chunk": setting.chunk,
        "policy": spec(setting.policy),
        "budget": setting.budget,
        "kv_bits": setting.kv_bits,
        "layer_budgets": setting.layer_budgets(),
        "memory_bytes": made.memory,
        "host_rows": made.host_rows,
        "host_bytes": made.host_bytes,
        "staged_bytes": made.staged_bytes,
        "bandwidth": speeds(made, found),
        "full": _describe_cost(made, made.full),
        "bounded": {
            **_describe_cost(made, made.bounded),
            "compression": made.full.row_bytes / made.bounded.row_bytes,
        },
        "counted": list(COUNTED),
        "not_counted": list(NOT_COUNTED),
        "notes": notes(made),
    }


def notes(made: Plan) -> list[str]:
    """Return sentences about figures that the user may not expect."""
    setting, found = made.setting, made.setting.outline
    said = []
    if found.dtype is None:
        said.append(f"{found.name} names no dtype; without --dtype it is counted as float32.")
    if found.is_quantized and setting.weights_memory is None:
        said.append(_quantized(setting))
    holds = setting.budget >= setting.context and setting.layout().keeps_all(setting.budget, setting.context)
    if setting.policy.evicts and holds:
        said.append(
            f"nothing is evicted: the budget of {setting.budget} is not smaller than the context of {setting.context}."
        )
    if found.trained_length and setting.context > found.trained_length:
        said.append(
            f"{setting.context} tokens are more than the {found.trained_length} that the model was trained for."
        )
    if found.other_layers:
        said.append(f"{console.count(found.other_layers, 'layer')} without keys and values are not counted.")
    return said


def _quantized(setting: Setting) -> str:
    """Return a sentence on how the bytes of quantised weights were counted."""
    name, rest = setting.outline.name, name_of(setting.weights_dtype)
    if setting.scheme is None:
        return (
            f"{name} has quantised weights; they are counted as {rest} and take less. If you know their size, give "
            "--weights-memory."
        )
    return (
        f"quantised weights are counted from {name}'s quantization_config: linear layers in {setting.scheme}; "
        f"embeddings, norms and what it leaves out in {rest}. The files may differ by some percent; "
        "--weights-memory takes their size."
    )


def _head(made: Plan, found: MeasuredDevice | None) -> dict[str, str]:
    """Return the lines above the table, name → text: model, weights, cache, policy, rows, memory and speeds."""
    setting = made.setting
    shape = setting.outline.shape
    cells = {
        "model": setting.outline.name,
        "weights": f"{_show_count(shape.parameters)} parameters, {show_bytes(made.bounded.weight_bytes)} "
        f"{setting.weights_format}",
        "cache": f"{console.count(len(shape.layers), 'layer')}, {show_bytes(setting.token_bytes)} "
        f"per token in {name_of(setting.dtype)}",
        "policy": f"{label(setting.policy)}, budget {setting.budget}{_spread(made)}{_bits(setting)}",
        "rows": f"{setting.context} tokens each, {_reading(setting)}",
    }
    if made.memory is not None:
        cells["memory"] = f"{show_bytes(made.memory)} ({made.memory / 2**30:.4g} GiB)"
    if made.host_rows:
        cells["host rows"] = (
            f"{made.host_rows}, {show_bytes(made.host_bytes)} of main memory while they wait; on CUDA "
            f"{show_bytes(made.staged_bytes)} beside the rows while they are copied"
        )
    if made.bandwidth is not None:
        how = "given" if found is None else f"measured on {found.device}"
        cells["bandwidth"] = f"{show_bytes(round(made.bandwidth))}/s, {how}"
    if made.products:
        cells["products"] = f"read {show_bytes(round(made.products[1]))}/s of weights with 1 row"  # see `rows_of`
    return cells


def _not_asked(made: Plan) -> str:
    """Return in words the options with which the plan would say more; empty if there are none."""
    hints = []
    if made.memory is None:
        hints.append("how many rows fit: --memory 24GiB")
    if made.bandwidth is None:
        hints.append("how fast they are at most: --bandwidth 100GB/s, or --measure")
    return "; ".join(hints)


def _show_count(number: int) -> str:
    """Return a large number in words with three digits: ``8.03 billion``, ``26.5 million``."""
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _reading(setting: Setting) -> str:
    """Return in words how prompts are prefilled: whole or in chunks."""
    return "prompts read whole" if setting.reads_whole else f"prompts in chunks of {setting.chunk}"


def _bits(setting: Setting) -> str:
    """Return in words the bits of keys and values; empty if slots have the cache's dtype."""
    return "" if setting.kv_bits is None else f", kv_bits {setting.kv_bits}"


def _spread(made: Plan) -> str:
    """Return the smallest and the largest budget of a layer in brackets; empty if all layers have the same."""
    per_layer = made.setting.layer_budgets()
    return f" ({min(per_layer)} to {max(per_layer)} by layer)" if len(set(per_layer)) > 1 else ""


def _lines(made: Plan) -> dict[str, Callable[[Cost], str]]:
    """Return the lines of the table: the name of each, and a function that returns its cell for one kind of cache."""
    fed = "prompt" if made.setting.reads_whole else "prompt's chunk"
    lines: dict[str, Callable[[Cost], str]] = {
        "cache of a row": lambda cost: show_bytes(cost.row_bytes),
        "compression": lambda cost: console.show_factor(made.full.row_bytes / cost.row_bytes),
        f"working memory of a {fed}": lambda cost: show_bytes(cost.prompt_bytes),
    }
    if made.memory is not None:
        lines["rows that fit"] = lambda cost: f"{most_rows(made, cost)}"
    if made.rows is not None:
        lines[f"memory for {console.count(made.rows, 'row')}"] = lambda cost: _fits(made, cost, made.rows or 0)
    lines["a step reads more cache than weights from"] = lambda cost: console.count(cost.crossover_rows, "row")
    limit = "" if made.products else " at most"  # without timed products only the memory's bandwidth is known
    for name, rows in _speeds(made).items():
        lines[f"tokens/s{limit}, {name}"] = _speed_of(made, rows)
    return lines


def _speed_of(made: Plan, rows: Callable[[Cost], int]) -> Callable[[Cost], str]:
    """Return a function of a cache that returns the speed of ``rows(cache)`` rows as text, see `_speed`."""
    return lambda cost: _speed(made, cost, rows(cost))


def _speeds(made: Plan) -> dict[str, Callable[[Cost], int]]:
    """Return the lines on speeds: the name of each, and a function of a cache that returns its number of rows.

    Return an empty mapping without a bandwidth.
    """
    if made.bandwidth is None:
        return {}
    cases: dict[str, Callable[[Cost], int]] = {"1 row": lambda cost: 1}
    if made.memory is not None:
        cases["all that fit"] = lambda cost: most_rows(made, cost)
    if made.rows is not None and made.rows > 1:
        cases[f"{made.rows} rows"] = lambda cost: made.rows or 0
    return cases


def _fits(made: Plan, cost: Cost, rows: int) -> str:
    """Return as text the peak memory of so many rows, and whether it fits into the plan's memory, if that is known."""
    peak = cost.peak_bytes(rows)
    verdict = "" if made.memory is None else ", fits" if peak <= made.memory else ", too much"
    return f"{show_bytes(peak)}{verdict}"


def _speed(made: Plan, cost: Cost, rows: int) -> str:
    """Return the tokens per second of so many rows as text; a dash for no rows, too many rows, or no bandwidth."""
    found = made.tokens_per_s(cost, rows) if rows else None
    if found is None or (made.memory is not None and rows > most_rows(made, cost)):
        return "–"
    return console.show_rate(found)


def _describe_cost(made: Plan, cost: Cost) -> dict[str, object]:
    """Return a cache's costs as plain data: bytes of a row and of working memory, the most rows that fit, then peaks
    and speeds of some numbers of rows.
    """
    most = None if made.memory is None else most_rows(made, cost)
    return {
        "row_bytes": cost.row_bytes,
        "prompt_bytes": cost.prompt_bytes,
        "step_bytes": cost.step_bytes,
        "crossover_rows": cost.crossover_rows,
        "rows": most,
        "with_rows": [
            {
                "rows": rows,
                "peak_bytes": cost.peak_bytes(rows),
                "fits": None if most is None else rows <= most,
                "read_bytes": round(cost.read_bytes(rows)),
                "tokens_per_s": made.tokens_per_s(cost, rows),
            }
            for rows in rows_of(made, cost)
        ],
    }
