"""``kvkeep plan``. The work is in `kvkeep.cli.plan.report`, the arithmetic in `kvkeep.planning`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.bits import KvBits
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.heads import HeadBudget
from kvkeep.cli.options import MEMORY, Debug, Device, Json, LayerBudget, Policy, Positions
from kvkeep.cli.plan import options
from kvkeep.policies import DEFAULT


@one_line_errors
def plan(
    model: options.ModelConfig = None,
    policy: Policy = DEFAULT,
    budget: options.Budget = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    context: options.Context = None,
    prefill_chunk: options.PrefillChunk = None,
    rows: Annotated[
        int | None,
        typer.Option(metavar="N", help="Show whether N rows fit, and how fast they can be.", rich_help_panel=MEMORY),
    ] = None,
    host_rows: Annotated[
        int, typer.Option(metavar="N", help="Sequences that wait in main memory.", rich_help_panel=MEMORY)
    ] = 0,
    dtype: options.Dtype = "auto",
    weights_dtype: options.WeightsDtype = None,
    weights_memory: options.WeightsMemory = None,
    memory: options.Memory = None,
    bandwidth: options.Bandwidth = None,
    measure: options.Measure = False,
    device: Device = "auto",
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how many rows fit into a memory, and how fast they can be, before a model is loaded.

    Only the model's configuration is read: a hub name, a folder or a config.json is enough.
    """
    asked = options.arguments(
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
    from kvkeep.cli.plan import report  # imports torch and transformers

    report.serve(measure=measure, device=device, json=json, **asked)
