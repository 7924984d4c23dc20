"""``kvkeep plan``: the options. The work is in `kvkeep.cli.plan.sizing`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from kvkeep.cli.console import Debug, Json, one_line_errors, parse_budget, parse_bytes, parse_tokens
from kvkeep.cli.memory_options import PANEL, LayerBudget, Positions, parse_layer_budget, parse_positions
from kvkeep.cli.model_options import PANEL as MODEL
from kvkeep.cli.model_options import Device, given
from kvkeep.errors import InputError

DEFAULT_CHUNK = "512"

_MACHINE = "Machine"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; sizes are bytes, nothing else is checked yet.

    Attributes:
        budget: a share of the context (a float) or a number of tokens (an int).
        bandwidth: bytes per second.
    """

    model: str | None
    policy: str
    budget: float | int | None
    layer_budget: str | list[float] | None
    positions: str | None
    context: int | None
    prefill_chunk: int
    rows: int | None
    dtype: str
    weights_dtype: str | None
    memory: int | None
    bandwidth: int | None
    measure: bool
    device: str
    json: bool


@one_line_errors
def plan(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A hub name, a local folder, or a config.json. The embedded model if not given.",
            show_default=False,
            metavar="MODEL",
            callback=given,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            metavar="POLICY",
            help="What decides which tokens stay, e.g. h2o:recent=32; see [b]kvkeep policies[/b].",
            rich_help_panel=PANEL,
        ),
    ] = "h2o",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, e.g. 512, 4K (4096), 4k (4000), or a share of the context as 20%. "
            "Default: 1024, or the context if that is shorter or the policy is full.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    layer_budget: LayerBudget = None,
    positions: Positions = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Length of every row, prompt and new tokens. Default: what the model was trained for.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    prefill_chunk: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            help="Prompt tokens that are fed in one step, of all rows together.",
            rich_help_panel=PANEL,
        ),
    ] = DEFAULT_CHUNK,
    rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Say whether so many rows fit, and how fast.", rich_help_panel=PANEL),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Of weights and cache: float32, bfloat16, float16, or auto: the checkpoint's.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    weights_dtype: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of the weights, if another.", rich_help_panel=MODEL)
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="What there is for everything, e.g. 24GiB (2^30 each), 24GB (10^9 each), 512MiB.",
            rich_help_panel=_MACHINE,
        ),
    ] = None,
    bandwidth: Annotated[
        str | None,
        typer.Option(metavar="SPEED", help="Of the memory, e.g. 100GB/s; predicts tokens/s.", rich_help_panel=_MACHINE),
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the bandwidth of --device.", rich_help_panel=_MACHINE)
    ] = False,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Say how many rows fit into a memory, and how fast they can be, before anything is loaded.

    Reads the model's configuration only: a hub name, a folder or a config.json is enough.
    """
    if bandwidth is not None and measure:
        raise InputError("--bandwidth and --measure were both given; one of them says how fast the memory is.")
    request = Request(
        model=model,
        policy=policy,
        budget=None if budget is None else parse_budget(budget, "--budget"),
        layer_budget=parse_layer_budget(layer_budget),
        positions=parse_positions(positions),
        context=None if context is None else _some(parse_tokens(context, "--context"), "--context"),
        prefill_chunk=_some(parse_tokens(prefill_chunk, "--prefill-chunk"), "--prefill-chunk"),
        rows=rows,
        dtype=dtype,
        weights_dtype=weights_dtype,
        memory=None if memory is None else parse_bytes(memory, "--memory"),
        bandwidth=None if bandwidth is None else parse_speed(bandwidth),
        measure=measure,
        device=device,
        json=json,
    )
    from kvkeep.cli.plan import sizing  # torch and transformers: only now

    sizing.serve(request)


def parse_speed(text: str) -> int:
    """Read bytes per second: ``100GB/s``, ``3.35 TB/s``.

    Raises:
        InputError: it is no number with a unit, or not above 0.
    """
    example = "100GB/s"
    if not text.rstrip().endswith("/s"):
        raise InputError(f"--bandwidth {text!r} is not a size per second; write e.g. {example}.")
    return parse_bytes(text.rstrip().removesuffix("/s"), "--bandwidth", example=example)


def _some(tokens: int, option: str) -> int:
    if tokens < 1:
        raise InputError(f"{option} {tokens} is not above 0; give 1 token or more.")
    return tokens
