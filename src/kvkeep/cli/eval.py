"""``kvkeep eval``: its options. The work is in `kvkeep.cli.eval_run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvkeep.cli import console, options, shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import place
from kvkeep.cli.help import is_given
from kvkeep.cli.options import (
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    HeadBudget,
    Json,
    KvBits,
    LayerBudget,
    LoadIn,
    Model,
    ModelRequest,
    Positions,
    PrefillChunk,
    Threads,
    parse_budget,
    parse_head_budget,
    parse_kv_bits,
    parse_layer_budget,
    parse_number,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.errors import InputError
from kvkeep.policies import DEFAULT

# Options of ``kvkeep eval`` that no other command has, and how they are read.

GRID, TASKS = "Grid", "Tasks"
"""Panels of ``--help``."""

RECIPES = (
    *("h2o-table2", "h2o-table6", "h2o-fig4", "scissorhands-table4", "scissorhands-fig"),
    *("ahakv-longbench", "ahakv-ablation", "kvpress-ruler4k"),
)
"""Names of recipes, as `kvkeep.evals.recipes.recipe` knows them."""

Recipe = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=f"A paper's table: {', '.join(RECIPES)}. It sets the options that you leave out, and the paper's figures "
        "are shown beside yours.",
        autocompletion=shell_completion.words(*RECIPES),
        rich_help_panel=GRID,
    ),
]

Policies = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Policies with their options, e.g. full,local,h2o:recent=8,sinks=4,tova. "
        "full is run once, with room for the whole text. h2o@4bit has slots of 4 bits, see --kv-bits.",
        autocompletion=shell_completion.policy_list,
        rich_help_panel=GRID,
    ),
]

Budgets = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Budgets per layer and head: shares of the text such as 20%, or tokens: 512, 4K (4096), 4k (4000).",
        rich_help_panel=GRID,
    ),
]

Limit = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help="Questions per context and texts per task. Default: 30 questions, 8 texts (mass: 4).",
        rich_help_panel=TASKS,
    ),
]

Seed = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Chooses questions and windows of the text. Several seeds, e.g. 0,1,2, give a mean and a range.",
        rich_help_panel=TASKS,
    ),
]

TextFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="UTF-8 text for all tasks but recall. Default: the package's own plain sentences.",
        rich_help_panel=TASKS,
    ),
]

Documents = Annotated[
    str,
    typer.Option(
        metavar="LOOK",
        help="The recall texts: prose, or harder ones in which facts stand out less: facts, list, dialogue, "
        "script, table, code, hops.",
        autocompletion=shell_completion.words("prose", "facts", "list", "dialogue", "script", "table", "code", "hops"),
        rich_help_panel=TASKS,
    ),
]

Depths = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Places of the asked facts in the text, from 0 (start) to 1 (end). Default: evenly spread.",
        rich_help_panel=TASKS,
    ),
]

Ask = Annotated[
    str,
    typer.Option(
        metavar="WHEN",
        help="prompt (or inside): the recall question is read before the text is cut to the budget. "
        "later: the text is cut first, and its questions follow.",
        autocompletion=shell_completion.words("prompt", "inside", "later"),
        rich_help_panel=TASKS,
    ),
]

Turns = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="The recall text comes in N turns, with a cut after each, and is asked about each fact ten turns later. "
        "Needs --ask later.",
        rich_help_panel=TASKS,
    ),
]

Window = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Length of a perplexity window. Default: 1024, or the trained length if that is less.",
        rich_help_panel=TASKS,
    ),
]

Stride = Annotated[
    str,
    typer.Option(
        metavar="TOKENS",
        help="Tokens that perplexity feeds in one step; 1 is decoding.",
        rich_help_panel=TASKS,
    ),
]

Data = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder with files of public data sets, for longbench, choice, summary, and ruler's qa_1 and qa_2. "
        "hub: read them from the Hugging Face hub (extra: datasets).",
        rich_help_panel=TASKS,
    ),
]

Parts = Annotated[
    str | None,
    typer.Option(
        metavar="LIST",
        help="Parts of ruler, longbench, choice or summary, e.g. niah_*,vt. Default: all that can be run.",
        rich_help_panel=TASKS,
    ),
]

Shots = Annotated[
    str,
    typer.Option(metavar="N", help="Solved examples before a question of choice.", rich_help_panel=TASKS),
]

Output = Annotated[
    str | None,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Folder for results.jsonl and plots. The same command again resumes a run that was stopped.",
        rich_help_panel=OUTPUT,
    ),
]

Report = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Run nothing; show the table of a finished folder and draw its plots again.",
        rich_help_panel=OUTPUT,
    ),
]

Shard = Annotated[
    str | None,
    typer.Option(
        metavar="K/N",
        help="Run every Nth cell from the Kth on, e.g. 3/8, in a folder of its own; join the folders with --merge.",
        rich_help_panel=OUTPUT,
    ),
]

Merge = Annotated[
    str | None,
    typer.Option(
        metavar="DIRS",
        help="Run nothing; join the results of several folders, e.g. a,b,c, in the folder --output.",
        rich_help_panel=OUTPUT,
    ),
]

Leaderboard = Annotated[
    str | None,
    typer.Option(
        metavar="DIRS",
        help="Run nothing; write a page with the results of several folders, also of several models, to --output.",
        rich_help_panel=OUTPUT,
    ),
]


def joined(
    merge: str | None, leaderboard: str | None, report: str | None, shard: str | None, *, dry_run: bool
) -> list[Path]:
    """The folders of ``--merge`` or ``--leaderboard``; none if neither was given.

    Raises:
        InputError: two options were given that exclude each other.
    """
    given = sum(option is not None for option in (merge, leaderboard, report, shard))
    if given > 1 or (dry_run and (merge is not None or leaderboard is not None)):
        raise InputError(
            "--merge, --leaderboard, --report and --shard exclude each other; --dry-run goes with --shard."
        )
    if merge is leaderboard is None:
        return []
    option, text = ("--merge", merge) if merge is not None else ("--leaderboard", leaderboard)
    return [place(item, option) for item in items(text or "", option)]


def parse_shard(text: str | None) -> tuple[int, int] | None:
    """Read ``--shard``.

    Raises:
        InputError: it is not two whole numbers K/N with 1 ≤ K ≤ N.
    """
    if text is None:
        return None
    number, _, count = text.partition("/")
    if not (number.isascii() and count.isascii() and number.isdecimal() and count.isdecimal()) or len(text) > 12:
        raise InputError(f"--shard: {text!r:.40} is no share of a run; write the number of the share as 3/8.")
    if not 1 <= int(number) <= int(count):
        raise InputError(f"--shard: there is no share {text}; the first of {count} is 1/{count}.")
    return int(number), int(count)


def folder_of(output: str | None, report: str | None) -> Path:
    """The folder of results of ``--output`` or ``--report``.

    Raises:
        InputError: there is none, or both were given.
    """
    if output is not None and report is not None:
        raise InputError("--output and --report were both given; --report only shows what a folder already holds.")
    if report is not None:
        return place(report, "--report")
    if output is None:
        raise InputError("There is no folder for results. Give --output DIR, or --report DIR to show earlier ones.")
    return place(output, "--output")


def items(text: str, option: str) -> list[str]:
    """The words of a list with commas.

    Raises:
        InputError: there is none.
    """
    found = list(filter(None, (item.strip() for item in text.split(","))))
    if not found:
        raise InputError(f"{option} is an empty list; leave it out for the default.")
    return found


def whole(text: str, option: str) -> int:
    """A whole number.

    Raises:
        InputError: the text is none.
    """
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{option}: {text!r} is not a whole number.") from None


# ``--recipe``, ``--quick`` and ``--dry-run`` of ``kvkeep eval``.


def replaced(recipe: str | None, quick: bool) -> dict[str, str]:
    """The options that a recipe sets and the user has not given, with their values.

    Raises:
        InputError: there is no such recipe, or ``--quick`` without one.
    """
    if recipe is None:
        if quick:
            raise InputError("--quick cuts a recipe down, and there is none. Give --recipe NAME.")
        return {}
    from kvkeep.evals.recipes.recipe import find

    options = find(recipe).options(quick=quick)
    return {name: value for name, value in options.items() if not is_given(name)}


def facts(name: str | None) -> dict[str, str]:
    """What a recipe repeats, and the paper's model; nothing without a recipe."""
    if name is None:
        return {}
    from kvkeep.evals.recipes.recipe import find

    recipe = find(name)
    return {"recipe": f"{name}: {recipe.title}", "the paper's model": recipe.model}


def show_table(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the paper's figures beside ours, and what keeps them apart."""
    from kvkeep.cli.eval_run import parts
    from kvkeep.evals.recipes.recipe import find

    recipe, screen = find(name), console.out()
    found = recipe.table(rows)
    screen.print(console.visible(found.title), style="bold")
    for part in parts(found, screen.width):
        screen.print(part)
    for note in recipe.notes(rows):
        screen.print(f"  {console.visible(note)}", style="dim")
    screen.print()


# ``--ray-workers`` and ``--ray-address`` of ``kvkeep eval``.

_WORKERS = "Workers"

RayWorkers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Run the cells on N copies of the model, each in a process of a cluster of Ray. Needs the extra "
        "kvkeep\\[ray].",
        rich_help_panel=_WORKERS,
    ),
]

RayAddress = Annotated[str | None, options.address(_WORKERS)]


def check(workers: int | None, address: str | None, *, idle: bool) -> None:
    """Refuse workers that cannot be.

    Args:
        workers: the value of ``--ray-workers``.
        address: that of ``--ray-address``.
        idle: whether the command runs no cell.

    Raises:
        InputError: they are refused.
    """
    options.check_workers(workers, address)
    if workers is not None and idle:
        raise InputError("--ray-workers runs cells; --report, --merge, --leaderboard and --dry-run run none.")


# The options of ``kvkeep eval`` as values.


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelRequest):
    """The options of ``kvkeep eval``. Numbers are read; lists of names and the text file are not.

    Attributes:
        budgets: each a share of the text (a float) or a number of tokens (an int).
        workers: the number of workers of Ray; ``None`` to run the cells in this process.
    """

    output: Path
    recipe: str | None
    dry_run: bool
    shard: tuple[int, int] | None
    policies: str
    budgets: tuple[float | int, ...]
    tasks: str
    limit: int | None
    seeds: tuple[int, ...]
    text: str | None
    contexts: tuple[int, ...]
    facts: int
    documents: str
    depths: tuple[float, ...]
    ask: str
    turns: int | None
    window: int | None
    stride: int
    data: str | None
    shots: int
    parts: tuple[str, ...]
    positions: Literal["true", "slot"] | None
    layer_budget: str | tuple[float, ...] | None
    head_budget: str | None
    kv_bits: str | None
    prefill_chunk: int | None
    plots: bool
    json: bool
    workers: int | None
    ray_address: str | None


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
    from kvkeep.cli import eval_run  # imports torch and transformers

    request = EvalOptions(**asked)
    if leaderboard is not None:
        eval_run.page(request, folders)
    elif merge is not None:
        eval_run.merge(request, folders)
    elif report is None:
        eval_run.serve(request)
    else:
        eval_run.show_report(request)
