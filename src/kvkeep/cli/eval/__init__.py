"""``kvkeep eval``: its options. The work is in `kvkeep.cli.eval.grid`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvkeep.cli import complete
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import place
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
from kvkeep.errors import InputError
from kvkeep.policies import DEFAULT

_GRID, _TASKS = "Grid", "Tasks"


@one_line_errors
def evaluate(
    model: Model = None,
    policies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Policies with their options, e.g. full,local,h2o:recent=8,sinks=4,tova. "
            "full is run once, with room for the whole text.",
            autocompletion=complete.policy_list,
            rich_help_panel=_GRID,
        ),
    ] = f"full,local,h2o,{DEFAULT}",
    budgets: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Budgets per layer and head: shares of the text such as 20%, or tokens: 512, 4K (4096), 4k (4000).",
            rich_help_panel=_GRID,
        ),
    ] = "4%,10%,20%,60%",
    tasks: Annotated[
        str, typer.Option(metavar="LIST", help="Tasks to measure.", rich_help_panel=_GRID)
    ] = "recall,perplexity,agreement,mass",
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Questions per context and texts per task. Default: 30 questions, 8 texts (mass: 4).",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    seed: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Chooses questions and windows of the text. Several seeds, e.g. 0,1,2, give a mean and a range.",
            rich_help_panel=_TASKS,
        ),
    ] = "0",
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text for all tasks but recall. Default: the package's own plain sentences.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    context: Annotated[
        str, typer.Option(metavar="LIST", help="Lengths of recall prompts in tokens.", rich_help_panel=_TASKS)
    ] = "512,1024",
    facts: Annotated[
        int, typer.Option(metavar="N", help="Facts in a recall prompt; one is asked for.", rich_help_panel=_TASKS)
    ] = 16,
    documents: Annotated[
        str,
        typer.Option(
            metavar="LOOK",
            help="The recall texts: prose, or harder ones in which facts stand out less: facts, list, dialogue, "
            "script, table.",
            autocompletion=complete.words("prose", "facts", "list", "dialogue", "script", "table"),
            rich_help_panel=_TASKS,
        ),
    ] = "prose",
    depths: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Places of the asked facts in the text, from 0 (start) to 1 (end). Default: evenly spread.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    ask: Annotated[
        str,
        typer.Option(
            metavar="WHEN",
            help="prompt (or inside): the recall question is read before the text is cut to the budget. "
            "later: the text is cut first, and its questions follow.",
            autocompletion=complete.words("prompt", "inside", "later"),
            rich_help_panel=_TASKS,
        ),
    ] = "prompt",
    window: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Length of a perplexity window. Default: 1024, or the trained length if that is less.",
            rich_help_panel=_TASKS,
        ),
    ] = None,
    stride: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            help="Tokens that perplexity feeds in one step; 1 is decoding.",
            rich_help_panel=_TASKS,
        ),
    ] = "16",
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    head_budget: HeadBudget = None,
    positions: Positions = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    output: Annotated[
        str | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for results.jsonl and plots. The same command again resumes a run that was stopped.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="DIR",
            help="Run nothing; show the table of a finished folder and draw its plots again.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plots: Annotated[
        bool, typer.Option(help="Draw plots, with matplotlib (extra: plots).", rich_help_panel=OUTPUT)
    ] = True,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure policies at budgets: recall, perplexity, agreement with the full cache, retained attention mass.

    Every result is written to DIR at once.
    """
    folder = _folder(output, report)
    spread = parse_layer_budget(layer_budget)
    asked: dict[str, Any] = {
        "model": model,
        "output": folder,
        "policies": policies,
        "budgets": tuple(parse_budget(item, "--budgets") for item in _items(budgets, "--budgets")),
        "tasks": tasks,
        "limit": None if limit is None else parse_tokens(limit, "--limit"),
        "seeds": tuple(dict.fromkeys(_whole(item, "--seed") for item in _items(seed, "--seed"))),
        "text": text,
        "contexts": tuple(parse_tokens(item, "--context") for item in _items(context, "--context")),
        "facts": facts,
        "documents": documents,
        "depths": () if depths is None else tuple(parse_number(one, "--depths") for one in _items(depths, "--depths")),
        "ask": ask,
        "window": None if window is None else parse_tokens(window, "--window"),
        "stride": parse_tokens(stride, "--stride"),
        "positions": parse_positions(positions),
        "layer_budget": tuple(spread) if isinstance(spread, list) else spread,
        "head_budget": parse_head_budget(head_budget),
        "prefill_chunk": parse_prefill_chunk(prefill_chunk),
        "plots": plots,
        "dtype": dtype,
        "device": device,
        "load_in": load_in,
        "threads": parse_threads(threads),
        "allow_pickle": allow_pickle,
        "json": json,
    }
    from kvkeep.cli.eval import grid  # imports torch and transformers

    request = grid.Request(**asked)
    if report is None:
        grid.serve(request)
    else:
        grid.report(request)


def _folder(output: str | None, report: str | None) -> Path:
    if output is not None and report is not None:
        raise InputError("--output and --report were both given; --report only shows what a folder already holds.")
    if report is not None:
        return place(report, "--report")
    if output is None:
        raise InputError("There is no folder for results. Give --output DIR, or --report DIR to show earlier ones.")
    return place(output, "--output")


def _items(text: str, option: str) -> list[str]:
    items = list(filter(None, (item.strip() for item in text.split(","))))
    if not items:
        raise InputError(f"{option} is an empty list; leave it out for the default.")
    return items


def _whole(text: str, option: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{option}: {text!r} is not a whole number.") from None
