"""``kvkeep plan``: its options. The work is in `kvkeep.cli.plan.report`, the arithmetic in `kvkeep.planning`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import complete
from kvkeep.cli.bits import KvBits, parse_kv_bits
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.heads import HeadBudget, parse_head_budget
from kvkeep.cli.options import (
    MEMORY,
    MODEL,
    Debug,
    Device,
    Json,
    LayerBudget,
    Policy,
    Positions,
    given,
    parse_budget,
    parse_bytes,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_tokens,
)
from kvkeep.cli.plan import options as fleets
from kvkeep.errors import InputError
from kvkeep.policies import DEFAULT

_MACHINE = "Machine"


@one_line_errors
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A hub name, a local folder, or a config.json. The embedded model if not given.",
            show_default=False,
            metavar="MODEL",
            callback=given,
            autocompletion=complete.models,
        ),
    ] = None,
    policy: Policy = DEFAULT,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, e.g. 512, 4K (4096), 4k (4000), or a share of the context as 20%. "
            "Default: 1024, or the context if that is shorter or the policy is full.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Length of every row, prompt and new tokens. Default: the model's trained length.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    prefill_chunk: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Prompt tokens that are fed in one step, counted over all rows. Default: one whole prompt.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
    rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show whether N rows fit, and how fast they can be.", rich_help_panel=MEMORY),
    ] = None,
    host_rows: Annotated[
        int, typer.Option(metavar="N", help="Sequences that wait in main memory.", rich_help_panel=MEMORY)
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Dtype of weights and cache: float32, bfloat16, float16, or auto: the checkpoint's.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    weights_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Dtype of the weights, if it differs from the cache's.", rich_help_panel=MODEL
        ),
    ] = None,
    weights_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Size of all weights, if you know it, e.g. 18GB. Default: counted from the configuration, quantised "
            "weights with their scales.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory for everything, e.g. 24GiB (2^30 each), 24GB (10^9 each), 512MiB.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(
            metavar="SPEED",
            help="Bandwidth of the memory, e.g. 100GB/s, to predict tokens/s.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure",
            help="Measure --device for tokens/s: its bandwidth, and products with weights.",
            rich_help_panel=_MACHINE,
        ),
    ] = False,
    device: Device = "auto",
    fleet: fleets.Fleet = False,
    rate: fleets.Rate = None,
    prompt_tokens: fleets.PromptTokens = None,
    max_new_tokens: fleets.NewTokens = None,
    sessions: fleets.Sessions = None,
    turns: fleets.Turns = None,
    between: fleets.Between = None,
    input: fleets.Input = None,  # noqa: A002  the flag of all commands
    requests: fleets.Requests = None,
    seed: fleets.Seed = None,
    devices: fleets.Devices = None,
    first_token: fleets.FirstToken = None,
    per_token: fleets.PerToken = None,
    steps: fleets.Steps = None,
    compute: fleets.Compute = None,
    decode_every: fleets.DecodeEvery = None,
    host_memory: fleets.HostMemory = None,
    bus: fleets.Bus = None,
    disk: fleets.Disk = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how many rows fit into a memory, and how fast they can be, before a model is loaded.

    Only the model's configuration is read: a hub name, a folder or a config.json is enough. With --fleet, show how many
    devices bear a load, and what waits where.
    """
    load = {
        "rate": rate,
        "prompt_tokens": prompt_tokens,
        "max_new_tokens": max_new_tokens,
        "sessions": sessions,
        "turns": turns,
        "between": between,
        "input": input,
        "requests": requests,
        "seed": seed,
    }
    machines = {
        "devices": devices,
        "first_token": first_token,
        "per_token": per_token,
        "steps": steps,
        "compute": None if compute is None else fleets.parse_compute(compute),
        "decode_every": decode_every,
        "host_memory": None if host_memory is None else parse_bytes(host_memory, "--host-memory"),
        "bus": None if bus is None else parse_speed(bus, "--bus"),
        "disk": None if disk is None else parse_speed(disk, "--disk"),
    }
    if not fleet and (alone := next((name for name, value in (load | machines).items() if value is not None), None)):
        raise InputError(f"`{alone}` says something about a fleet; add --fleet.")
    if bandwidth is not None and measure:
        raise InputError("--bandwidth and --measure were both given; one of them says how fast the memory is.")
    kept = None if budget is None else parse_budget(budget, "--budget")
    asked = {
        "model": model,
        "policy": policy,
        "budget": kept if isinstance(kept, int) else None,
        "keep_ratio": kept if isinstance(kept, float) else None,
        "layer_budget": parse_layer_budget(layer_budget),
        "head_budget": parse_head_budget(head_budget),
        "kv_bits": parse_kv_bits(kv_bits),
        "positions": parse_positions(positions),
        "context": None if context is None else parse_tokens(context, "--context"),
        "prefill_chunk": parse_prefill_chunk(prefill_chunk),
        "rows": rows,
        "host_rows": host_rows,
        "dtype": dtype,
        "weights_dtype": weights_dtype,
        "weights_memory": None if weights_memory is None else parse_bytes(weights_memory, "--weights-memory"),
        "memory": None if memory is None else parse_bytes(memory, "--memory"),
        "bandwidth": None if bandwidth is None else parse_speed(bandwidth),
    }
    if fleet:
        from kvkeep.cli.plan import fleet as simulated

        simulated.serve(load, machines, measure=measure, device=device, json=json, **asked)
        return
    from kvkeep.cli.plan import report  # imports torch and transformers

    report.serve(measure=measure, device=device, json=json, **asked)


def parse_speed(text: str, option: str = "--bandwidth") -> float:
    """Read bytes per second: ``100GB/s``, ``3.35 TB/s``.

    Raises:
        InputError: the text is not a number with a unit, or the speed is not above 0.
    """
    example = "100GB/s"
    if not text.rstrip().endswith("/s"):
        raise InputError(f"{option} {text!r} is not a size per second; write e.g. {example}.")
    return float(parse_bytes(text.rstrip().removesuffix("/s"), option, example=example))
