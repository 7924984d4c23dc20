"""What ``kvkeep plan`` prints: a table for people, one JSON object for machines."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from kvkeep.cli import console
from kvkeep.cli.console import show_bytes
from kvkeep.cli.plan.sizing import Plan, name_of
from kvkeep.planning.cost import Cost
from kvkeep.registry import spec

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


def show(plan: Plan, *, json: bool) -> None:
    """Print a plan."""
    if json:
        console.write_json(describe(plan))
        return
    screen = console.out()
    screen.print(console.facts(_head(plan)))
    screen.print()
    filled = console.table("", "full cache", f"budget {plan.setting.budget}")
    for column in filled.columns[1:]:
        column.justify = "right"
    for name, cell in _lines(plan).items():
        filled.add_row(name, cell(plan.full), cell(plan.bounded))
    screen.print(filled)
    screen.print()
    if missing := _not_asked(plan):
        screen.print(Text(missing, "dim"))
    screen.print(Text(f"counted: {'; '.join(COUNTED)}", "dim"))
    screen.print(Text(f"not counted: {'; '.join(NOT_COUNTED)}", "dim"))
    for line in notes(plan):
        console.note(line)


def describe(plan: Plan) -> dict[str, object]:
    """A plan as plain data; sizes in bytes, speeds in bytes or tokens per second."""
    setting = plan.setting
    shape = setting.outline.shape
    return {
        "model": setting.outline.name,
        "parameters": shape.parameters,
        "weights_dtype": name_of(setting.weights_dtype),
        "weights_bytes": plan.bounded.weight_bytes,
        "dtype": name_of(setting.dtype),
        "token_bytes": setting.token_bytes,
        "context_tokens": setting.context,
        "prefill_chunk": setting.chunk,
        "policy": spec(setting.policy),
        "budget": setting.budget,
        "layer_budgets": setting.layer_budgets(),
        "memory_bytes": plan.memory,
        "bandwidth": _describe_bandwidth(plan),
        "full": _describe_cost(plan, plan.full),
        "bounded": {
            **_describe_cost(plan, plan.bounded),
            "compression": plan.full.row_bytes / plan.bounded.row_bytes,
        },
        "counted": list(COUNTED),
        "not_counted": list(NOT_COUNTED),
        "notes": notes(plan),
    }


def notes(plan: Plan) -> list[str]:
    """What a user may not expect."""
    setting, found = plan.setting, plan.setting.outline
    said = []
    if found.dtype is None:
        said.append(f"{found.name} names no dtype; what --dtype does not say is counted as float32.")
    if found.quantised:
        said.append(
            f"{found.name} has quantised weights; they are counted as {name_of(setting.weights_dtype)} and take less."
        )
    if setting.policy.evicts and setting.budget >= setting.context:
        said.append(
            f"nothing is evicted: the budget of {setting.budget} is not smaller than the context of {setting.context}."
        )
    if found.trained_length and setting.context > found.trained_length:
        said.append(
            f"{setting.context} tokens are more than the {found.trained_length} that the model was trained for."
        )
    if setting.policy.spreads:
        heads = max(layer.kv_heads for layer in found.shape.layers)
        said.append(
            f"{spec(setting.policy)} gives heads budgets of their own, and a layer takes what its largest head needs: "
            f"up to {heads} times the bytes that are counted here."
        )
    if found.other_layers:
        said.append(f"{console.count(found.other_layers, 'layer')} without keys and values are not counted.")
    return said


def _head(plan: Plan) -> dict[str, str]:
    setting = plan.setting
    shape = setting.outline.shape
    cells = {
        "model": setting.outline.name,
        "weights": f"{_show_count(shape.parameters)} parameters, {show_bytes(plan.bounded.weight_bytes)} in "
        f"{name_of(setting.weights_dtype)}",
        "cache": f"{console.count(len(shape.layers), 'layer')}, {show_bytes(setting.token_bytes)} "
        f"per token in {name_of(setting.dtype)}",
        "policy": f"{spec(setting.policy)}, budget {setting.budget}{_spread(plan)}",
        "rows": f"{setting.context} tokens each, prompts in chunks of {setting.chunk}",
    }
    if plan.memory is not None:
        cells["memory"] = f"{show_bytes(plan.memory)} ({plan.memory / 2**30:.4g} GiB)"
    if plan.bandwidth is not None:
        how = "given" if plan.device is None else f"measured on {plan.device}"
        cells["bandwidth"] = f"{show_bytes(round(plan.bandwidth))}/s, {how}"
    return cells


def _not_asked(plan: Plan) -> str:
    """What else could be said."""
    hints = []
    if plan.memory is None:
        hints.append("how many rows fit: --memory 24GiB")
    if plan.bandwidth is None:
        hints.append("how fast they are at most: --bandwidth 100GB/s, or --measure")
    return "; ".join(hints)


def _show_count(number: int) -> str:
    """A large number in words: ``8.03 billion``."""
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _spread(plan: Plan) -> str:
    per_layer = plan.setting.layer_budgets()
    return f" ({min(per_layer)} to {max(per_layer)} by layer)" if len(set(per_layer)) > 1 else ""


def _lines(plan: Plan) -> dict[str, Callable[[Cost], str]]:
    """The table: what each line says of a kind of cache."""
    lines: dict[str, Callable[[Cost], str]] = {
        "cache of a row": lambda one: show_bytes(one.row_bytes),
        "compression": lambda one: console.show_factor(plan.full.row_bytes / one.row_bytes),
        "working memory of a prompt's chunk": lambda one: show_bytes(one.prompt_bytes),
    }
    if plan.memory is not None:
        lines["rows that fit"] = lambda one: f"{_most(plan, one)}"
    if plan.rows is not None:
        lines[f"memory for {console.count(plan.rows, 'row')}"] = lambda one: _fits(plan, one, plan.rows or 0)
    lines["a step reads more cache than weights from"] = lambda one: console.count(one.crossover_rows, "row")
    for name, rows in _speeds(plan).items():
        lines[f"tokens/s at most, {name}"] = lambda one, rows=rows: _speed(plan, one, rows(one))  # type: ignore[misc]
    return lines


def _speeds(plan: Plan) -> dict[str, Callable[[Cost], int]]:
    """Numbers of rows for which a speed is worth knowing."""
    if plan.bandwidth is None:
        return {}
    cases: dict[str, Callable[[Cost], int]] = {"1 row": lambda one: 1}
    if plan.memory is not None:
        cases["all that fit"] = lambda one: _most(plan, one)
    if plan.rows is not None and plan.rows > 1:
        cases[f"{plan.rows} rows"] = lambda one: plan.rows or 0
    return cases


def _most(plan: Plan, one: Cost) -> int:
    return 0 if plan.memory is None else one.most_rows(plan.memory)


def _fits(plan: Plan, one: Cost, rows: int) -> str:
    peak = one.peak_bytes(rows)
    verdict = "" if plan.memory is None else ", fits" if peak <= plan.memory else ", too much"
    return f"{show_bytes(peak)}{verdict}"


def _speed(plan: Plan, one: Cost, rows: int) -> str:
    """Tokens per second of rows that fit; a dash for what does not."""
    if plan.bandwidth is None or not rows or (plan.memory is not None and rows > _most(plan, one)):
        return "–"
    return console.show_rate(one.tokens_per_s(rows, plan.bandwidth))


def _describe_bandwidth(plan: Plan) -> dict[str, object] | None:
    if plan.bandwidth is None:
        return None
    if plan.measured is None:
        return {"bytes_per_s": plan.bandwidth, "source": "given"}
    return {
        "bytes_per_s": plan.bandwidth,
        "source": "measured",
        "device": plan.device,
        "read_bytes_per_s": plan.measured.read,
        "copy_bytes_per_s": plan.measured.copy,
    }


def _describe_cost(plan: Plan, one: Cost) -> dict[str, object]:
    """One kind of cache: what a row takes, and what some numbers of rows do."""
    most = None if plan.memory is None else _most(plan, one)
    return {
        "row_bytes": one.row_bytes,
        "prompt_bytes": one.prompt_bytes,
        "step_bytes": one.step_bytes,
        "crossover_rows": one.crossover_rows,
        "rows": most,
        "with_rows": [
            {
                "rows": rows,
                "peak_bytes": one.peak_bytes(rows),
                "fits": None if most is None else rows <= most,
                "read_bytes": round(one.read_bytes(rows)),
                "tokens_per_s": None if plan.bandwidth is None else one.tokens_per_s(rows, plan.bandwidth),
            }
            for rows in sorted({1, plan.rows or 1, most or 1})
        ],
    }
