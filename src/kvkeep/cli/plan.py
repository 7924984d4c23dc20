"""``kvkeep plan``. The work is in `kvkeep.cli.plan_run`, the arithmetic in `kvkeep.planning`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from kvkeep.cli import shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.options import (
    MEMORY,
    MODEL,
    Debug,
    Device,
    HeadBudget,
    Json,
    KvBits,
    LayerBudget,
    Policy,
    Positions,
    given,
    parse_budget,
    parse_bytes,
    parse_head_budget,
    parse_kv_bits,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_tokens,
)
from kvkeep.errors import InputError
from kvkeep.policies import DEFAULT

# The options of a plan, and how they become arguments of `kvkeep.planning.plan.plan`.

MACHINE = "Machine"

ModelConfig = Annotated[
    str | None,
    typer.Argument(
        help="A hub name, a local folder, or a config.json. The embedded model if not given.",
        show_default=False,
        metavar="MODEL",
        callback=given,
        autocompletion=shell_completion.models,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        metavar="TOKENS",
        help="Tokens kept per layer and head, e.g. 512, 4K (4096), 4k (4000), or a share of the context as 20%. "
        "Default: 1024, or the context if that is shorter or the policy is full.",
        rich_help_panel=MEMORY,
    ),
]
Context = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Length of every row, prompt and new tokens. Default: the model's trained length.",
        rich_help_panel=MEMORY,
    ),
]
PrefillChunk = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Prompt tokens that are fed in one step, counted over all rows. Default: one whole prompt.",
        rich_help_panel=MEMORY,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Dtype of weights and cache: float32, bfloat16, float16, or auto: the checkpoint's.",
        rich_help_panel=MODEL,
    ),
]
WeightsDtype = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Dtype of the weights, if it differs from the cache's.", rich_help_panel=MODEL),
]
WeightsMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Size of all weights, if you know it, e.g. 18GB. Default: counted from the configuration, quantised "
        "weights with their scales.",
        rich_help_panel=MODEL,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory for everything, e.g. 24GiB (2^30 each), 24GB (10^9 each), 512MiB.",
        rich_help_panel=MACHINE,
    ),
]
Bandwidth = Annotated[
    str | None,
    typer.Option(
        metavar="SPEED",
        help="Bandwidth of the memory, e.g. 100GB/s, to predict tokens/s.",
        rich_help_panel=MACHINE,
    ),
]
Measure = Annotated[
    bool,
    typer.Option(
        "--measure",
        help="Measure --device for tokens/s: its bandwidth, and products with weights.",
        rich_help_panel=MACHINE,
    ),
]


def arguments(*, measure: bool, **options: Any) -> dict[str, Any]:
    """Return the arguments of `kvkeep.planning.plan.plan` for the options of a command, read from their texts.

    Args:
        measure: whether a device is measured.
        options: model, policy, budget and the other options of a plan, as they were typed.

    Raises:
        InputError: a text cannot be read, or two options say how fast the memory is.
    """
    if options["bandwidth"] is not None and measure:
        raise InputError("--bandwidth and --measure were both given; one of them says how fast the memory is.")
    kept = None if options["budget"] is None else parse_budget(options["budget"], "--budget")
    asked = {
        **options,
        "budget": kept if isinstance(kept, int) else None,
        "keep_ratio": kept if isinstance(kept, float) else None,
        "layer_budget": parse_layer_budget(options["layer_budget"]),
        "head_budget": parse_head_budget(options["head_budget"]),
        "kv_bits": parse_kv_bits(options["kv_bits"]),
        "positions": parse_positions(options["positions"]),
        "prefill_chunk": parse_prefill_chunk(options["prefill_chunk"]),
    }
    readers: dict[str, Callable[[str, str], float]] = {
        "context": parse_tokens,
        "weights_memory": parse_bytes,
        "memory": parse_bytes,
        "bandwidth": parse_speed,
    }
    for name, read in readers.items():
        if options[name] is not None:
            asked[name] = read(options[name], f"--{name.replace('_', '-')}")
    return asked


def parse_speed(text: str, option: str = "--bandwidth") -> float:
    """Read bytes per second: ``100GB/s``, ``3.35 TB/s``.

    Raises:
        InputError: the text is not a number with a unit, or the speed is not above 0.
    """
    example = "100GB/s"
    if not text.rstrip().endswith("/s"):
        raise InputError(f"{option} {text!r} is not a size per second; write e.g. {example}.")
    return float(parse_bytes(text.rstrip().removesuffix("/s"), option, example=example))


@one_line_errors
def plan(
    model: ModelConfig = None,
    policy: Policy = DEFAULT,
    budget: Budget = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    context: Context = None,
    prefill_chunk: PrefillChunk = None,
    rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show whether N rows fit, and how fast they can be.", rich_help_panel=MEMORY),
    ] = None,
    host_rows: Annotated[
        int, typer.Option(metavar="N", help="Sequences that wait in main memory.", rich_help_panel=MEMORY)
    ] = 0,
    dtype: Dtype = "auto",
    weights_dtype: WeightsDtype = None,
    weights_memory: WeightsMemory = None,
    memory: Memory = None,
    bandwidth: Bandwidth = None,
    measure: Measure = False,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how many rows fit into a memory, and how fast they can be, before a model is loaded.

    Only the model's configuration is read: a hub name, a folder or a config.json is enough.
    """
    asked = arguments(
        model=model,
        policy=policy,
        budget=budget,
        layer_budget=layer_budget,
        head_budget=head_budget,
        kv_bits=kv_bits,
        positions=positions,
        context=context,
        prefill_chunk=prefill_chunk,
        rows=rows,
        host_rows=host_rows,
        dtype=dtype,
        weights_dtype=weights_dtype,
        weights_memory=weights_memory,
        memory=memory,
        bandwidth=bandwidth,
        measure=measure,
    )
    from kvkeep.cli import plan_run  # imports torch and transformers

    plan_run.serve(measure=measure, device=device, json=json, **asked)
