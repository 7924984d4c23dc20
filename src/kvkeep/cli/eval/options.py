"""Options of ``kvkeep eval`` that no other command has, and how they are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli import complete
from kvkeep.cli.files import place
from kvkeep.cli.options import OUTPUT
from kvkeep.errors import InputError

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
        autocompletion=complete.words(*RECIPES),
        rich_help_panel=GRID,
    ),
]

Policies = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Policies with their options, e.g. full,local,h2o:recent=8,sinks=4,tova. "
        "full is run once, with room for the whole text. h2o@4bit has slots of 4 bits, see --kv-bits.",
        autocompletion=complete.policy_list,
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
        autocompletion=complete.words("prose", "facts", "list", "dialogue", "script", "table", "code", "hops"),
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
        autocompletion=complete.words("prompt", "inside", "later"),
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
