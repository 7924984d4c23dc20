"""``kvkeep eval``: its options. The work is in `kvkeep.cli.eval.grid`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli.bits import KvBits, parse_kv_bits
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.eval.options import (
    GRID,
    TASKS,
    Ask,
    Budgets,
    Data,
    Depths,
    Documents,
    Leaderboard,
    Limit,
    Merge,
    Output,
    Parts,
    Policies,
    Recipe,
    Report,
    Seed,
    Shard,
    Shots,
    Stride,
    TextFile,
    Turns,
    Window,
    folder_of,
    items,
    joined,
    parse_shard,
    whole,
)
from kvkeep.cli.eval.recipes import replaced
from kvkeep.cli.eval.request import Request
from kvkeep.cli.eval.workers import RayAddress, RayWorkers, check
from kvkeep.cli.heads import HeadBudget, parse_head_budget
from kvkeep.cli.options import (
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    LayerBudget,
    LoadIn,
    Model,
    Positions,
    PrefillChunk,
    Threads,
    parse_budget,
    parse_layer_budget,
    parse_number,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.policies import DEFAULT


@one_line_errors
def evaluate(
    model: Model = None,
    recipe: Recipe = None,
    quick: Annotated[bool, typer.Option("--quick", help="Cut the recipe down.", rich_help_panel=GRID)] = False,
    policies: Policies = f"full,local,h2o,{DEFAULT}",
    budgets: Budgets = "4%,10%,20%,60%",
    tasks: Annotated[
        str, typer.Option(metavar="LIST", help="Tasks to measure.", rich_help_panel=GRID)
    ] = "recall,perplexity,agreement,mass",
    limit: Limit = None,
    seed: Seed = "0",
    text: TextFile = None,
    context: Annotated[
        str, typer.Option(metavar="LIST", help="Lengths of recall prompts in tokens.", rich_help_panel=TASKS)
    ] = "512,1024",
    facts: Annotated[
        int, typer.Option(metavar="N", help="Facts in a recall prompt; one is asked for.", rich_help_panel=TASKS)
    ] = 16,
    documents: Documents = "prose",
    depths: Depths = None,
    ask: Ask = "prompt",
    turns: Turns = None,
    window: Window = None,
    stride: Stride = "16",
    data: Data = None,
    parts: Parts = None,
    shots: Shots = "5",
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    kv_bits: KvBits = None,
    positions: Positions = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    output: Output = None,
    report: Report = None,
    shard: Shard = None,
    merge: Merge = None,
    leaderboard: Leaderboard = None,
    ray_workers: RayWorkers = None,
    ray_address: RayAddress = None,
    plots: Annotated[
        bool, typer.Option(help="Draw plots, with matplotlib (extra: plots).", rich_help_panel=OUTPUT)
    ] = True,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Run nothing; show the cells, their memory and the time of decoding.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure policies at budgets: recall, perplexity, agreement with the full cache, retained attention mass.

    Every result is written to DIR at once.
    """
    folders = joined(merge, leaderboard, report, shard, dry_run=dry_run)
    check(ray_workers, ray_address, idle=dry_run or bool(folders) or report is not None)
    folder = Path() if dry_run and output is report is None else folder_of(output, report)
    spread = parse_layer_budget(layer_budget)
    own = {"policies": policies, "budgets": budgets, "tasks": tasks, "limit": limit, "parts": parts, "shots": shots}
    words = {**own, "context": context, "ask": ask, **replaced(recipe, quick)}
    asked: dict[str, Any] = {
        "model": model,
        "output": folder,
        "recipe": recipe,
        "dry_run": dry_run,
        "shard": parse_shard(shard),
        "policies": words["policies"],
        "budgets": tuple(parse_budget(item, "--budgets") for item in items(words["budgets"], "--budgets")),
        "tasks": words["tasks"],
        "limit": None if words["limit"] is None else parse_tokens(words["limit"], "--limit"),
        "seeds": tuple(dict.fromkeys(whole(item, "--seed") for item in items(seed, "--seed"))),
        "text": text,
        "contexts": tuple(parse_tokens(item, "--context") for item in items(words["context"], "--context")),
        "facts": facts,
        "documents": documents,
        "depths": () if depths is None else tuple(parse_number(one, "--depths") for one in items(depths, "--depths")),
        "ask": words["ask"],
        "turns": turns,
        "window": None if window is None else parse_tokens(window, "--window"),
        "stride": parse_tokens(stride, "--stride"),
        "data": data,
        "shots": whole(words["shots"], "--shots"),
        "parts": () if words["parts"] is None else tuple(items(words["parts"], "--parts")),
        "positions": parse_positions(positions),
        "layer_budget": tuple(spread) if isinstance(spread, list) else spread,
        "head_budget": parse_head_budget(head_budget),
        "kv_bits": parse_kv_bits(kv_bits),
        "prefill_chunk": parse_prefill_chunk(prefill_chunk),
        "plots": plots,
        "dtype": dtype,
        "device": device,
        "load_in": load_in,
        "threads": parse_threads(threads),
        "allow_pickle": allow_pickle,
        "json": json,
        "workers": ray_workers,
        "ray_address": ray_address,
    }
    from kvkeep.cli.eval import grid  # imports torch and transformers

    request = Request(**asked)
    if leaderboard is not None:
        grid.page(request, folders)
    elif merge is not None:
        grid.merge(request, folders)
    elif report is None:
        grid.serve(request)
    else:
        grid.report(request)
