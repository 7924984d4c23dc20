"""``kvkeep fleet``. The work is in `kvkeep_lab.cli.fleet.simulation`, the simulator in `kvkeep_lab.fleet`."""

from __future__ import annotations

from kvkeep.cli import plan as plans
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.options import Debug, Device, HeadBudget, Json, KvBits, LayerBudget, Policy, Positions, parse_bytes
from kvkeep.cli.plugins import LOOK, Plugin
from kvkeep.policies import DEFAULT
from kvkeep_lab.cli.fleet import options


@one_line_errors
def fleet(
    model: plans.ModelConfig = None,
    policy: Policy = DEFAULT,
    budget: plans.Budget = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    context: plans.Context = None,
    prefill_chunk: plans.PrefillChunk = None,
    dtype: plans.Dtype = "auto",
    weights_dtype: plans.WeightsDtype = None,
    weights_memory: plans.WeightsMemory = None,
    memory: plans.Memory = None,
    bandwidth: plans.Bandwidth = None,
    measure: plans.Measure = False,
    device: Device = "auto",
    rate: options.Rate = None,
    prompt_tokens: options.PromptTokens = None,
    max_new_tokens: options.NewTokens = None,
    sessions: options.Sessions = None,
    turns: options.Turns = None,
    between: options.Between = None,
    input: options.Input = None,  # noqa: A002  the flag of all commands
    requests: options.Requests = None,
    seed: options.Seed = None,
    rows: options.Rows = None,
    devices: options.Devices = None,
    first_token: options.FirstToken = None,
    per_token: options.PerToken = None,
    steps: options.Steps = None,
    compute: options.Compute = None,
    decode_every: options.DecodeEvery = None,
    host_memory: options.HostMemory = None,
    bus: options.Bus = None,
    disk: options.Disk = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show how many devices bear a load, and what waits where, before one is bought.

    Each device is simulated step by step, under kvkeep and under a full cache in pages. --memory and --bandwidth are
    those of each device. Only the model's configuration is read: a hub name, a folder or a config.json is enough.
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
        "compute": None if compute is None else options.parse_compute(compute),
        "decode_every": decode_every,
        "host_memory": None if host_memory is None else parse_bytes(host_memory, "--host-memory"),
        "bus": None if bus is None else plans.parse_speed(bus, "--bus"),
        "disk": None if disk is None else plans.parse_speed(disk, "--disk"),
    }
    asked = plans.arguments(
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
        dtype=dtype,
        weights_dtype=weights_dtype,
        weights_memory=weights_memory,
        memory=memory,
        bandwidth=bandwidth,
        measure=measure,
    )
    from kvkeep_lab.cli.fleet import simulation  # imports torch and transformers

    simulation.serve(load, machines, measure=measure, device=device, json=json, **asked)


PLUGIN = Plugin(
    command=fleet,
    panel=LOOK,
    examples={
        "kvkeep fleet --rate 4 --memory 1GB --bandwidth 50GB/s": "Devices for four users per second",
        "kvkeep fleet --rate 4 --memory 1GB --steps steps.txt": "With steps that were measured",
    },
)
