"""``kvkeep eval``: its options. The work is in `kvkeep.cli.eval_run`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from kvkeep.cli import options, shell_completion
from kvkeep.cli.files import place
from kvkeep.cli.help import is_given
from kvkeep.cli.options import (
    HEAD_BUDGET,
    JSON,
    KV_BITS,
    LAYER_BUDGET,
    NO_PLOTS,
    OUTPUT,
    POSITIONS,
    PREFILL_CHUNK,
    RAY_ADDRESS,
    WORKERS,
    ModelOptions,
    check_policies,
    items,
    option,
    parse_budgets,
    parse_layer_weights,
    parse_tokens,
)
from kvkeep.errors import InputError
from kvkeep.evals.task_names import split_tasks
from kvkeep.policies import DEFAULT

GRID, TASKS = "Grid", "Tasks"
"""Groups of options on the page of help."""

RECIPES = (
    *("h2o-table2", "h2o-table6", "h2o-fig4", "scissorhands-table4", "scissorhands-fig"),
    *("ahakv-longbench", "ahakv-ablation", "kvpress-ruler4k"),
)
"""Names of recipes, as `kvkeep.evals.recipes` knows them."""


def joined(
    merge: str | None, leaderboard: str | None, report: str | None, shard: object, *, dry_run: bool
) -> list[Path]:
    """Return the folders in the list of ``--merge`` or ``--leaderboard``; ``[]`` if neither was given.

    Raises:
        InputError: two options were given that exclude each other.
    """
    given = sum(option is not None for option in (merge, leaderboard, report, shard))
    # --merge and --leaderboard write results, which a dry run does not; --report runs no cell with or without --dry-run
    if given > 1 or (dry_run and (merge is not None or leaderboard is not None)):
        raise InputError(
            "--merge, --leaderboard, --report and --shard exclude each other; --dry-run goes with --shard."
        )
    if merge is leaderboard is None:
        return []
    option, text = ("--merge", merge) if merge is not None else ("--leaderboard", leaderboard)
    return [place(item, option) for item in items(text or "", option)]


def parse_shard(text: str, option: str) -> tuple[int, int]:
    """Return the two numbers of ``--shard``: which share of the run, of how many.

    Raises:
        InputError: the text is not two whole numbers K/N with 1 ≤ K ≤ N.
    """
    number, _, count = text.partition("/")
    # Python reads no number of more than 4300 digits; 12 characters name any share.
    if not (number.isascii() and count.isascii() and number.isdecimal() and count.isdecimal()) or len(text) > 12:
        raise InputError(f"{option}: {text!r:.40} is no share of a run; write the number of the share as 3/8.")
    if not 1 <= int(number) <= int(count):
        raise InputError(f"{option}: there is no share {text}; the first of {count} is 1/{count}.")
    return int(number), int(count)


def folder_of(output: str | None, report: str | None) -> Path:
    """Return the folder of results that ``--output`` or ``--report`` names.

    Raises:
        InputError: neither option was given, or both were.
    """
    if output is not None and report is not None:
        raise InputError("--output and --report were both given; --report only shows what a folder already holds.")
    if report is not None:
        return place(report, "--report")
    if output is None:
        raise InputError("There is no folder for results. Give --output DIR, or --report DIR to show earlier ones.")
    return place(output, "--output")


def whole(text: str, option: str) -> int:
    """Return the text of an option as an integer.

    Raises:
        InputError: the text is no whole number.
    """
    try:
        return int(text)
    except ValueError:
        raise InputError(f"{option}: {text!r} is not a whole number.") from None


def _seeds(text: str, option: str) -> tuple[int, ...]:
    """Return the seeds in an option's list with commas, in their order, each once."""
    return tuple(dict.fromkeys(whole(item, option) for item in items(text, option)))


def _contexts(text: str, option: str) -> tuple[int, ...]:
    """Return the lengths in an option's list with commas, in tokens."""
    return tuple(parse_tokens(item, option) for item in items(text, option))


def _parts(text: str | None, option: str) -> tuple[str, ...]:
    """Return the names in an option's list with commas; ``()`` if it is not given."""
    return () if text is None else tuple(items(text, option))


# ``--recipe``, ``--quick`` and ``--dry-run`` of ``kvkeep eval``.


def replaced(recipe: str | None, quick: bool) -> dict[str, str]:
    """Return the options that a recipe sets and the user has not given, with their values as they would be typed.

    Without a recipe return an empty mapping.

    Raises:
        InputError: there is no such recipe, or ``--quick`` without one.
    """
    if recipe is None:
        if quick:
            raise InputError("--quick cuts a recipe down, and there is none. Give --recipe NAME.")
        return {}
    from kvkeep.evals.recipes import find

    options = find(recipe).options(quick=quick)
    return {name: value for name, value in options.items() if not is_given(name)}


def check(workers: int | None, address: str | None, *, idle: bool) -> None:
    """Refuse workers for a command that runs no cell, and a number of workers or an address that cannot be used.

    Args:
        workers: the value of ``--ray-workers``.
        address: that of ``--ray-address``.
        idle: whether the command runs no cell.

    Raises:
        InputError: the workers are refused.
    """
    options.check_workers(workers, address)
    if workers is not None and idle:
        raise InputError("--ray-workers runs cells; --report, --merge, --leaderboard and --dry-run run none.")


@dataclass(frozen=True, kw_only=True)
class EvalOptions(ModelOptions):
    """Measure policies at budgets: recall, perplexity, agreement with the full cache, retained attention mass.

    Every result is written to DIR at once.

    Attributes:
        budgets: each a share of the text (a float) or a number of tokens (an int).
        workers: the number of workers of Ray; ``None`` to run the cells in this process.
        output: the folder of results.
        folders: those of ``--merge`` or ``--leaderboard``.

    """

    recipe: str | None = option(
        f"A paper's table, beside your figures: {', '.join(RECIPES)}. It sets the options that you leave out.",
        default=None,
        metavar="NAME",
        complete=shell_completion.words(*RECIPES),
        group=GRID,
    )
    quick: bool = option("Cut the recipe down.", default=False, group=GRID, rare=True)
    policies: str = option(
        "Policies with their options. h2o@4bit has slots of 4 bits, see --kv-bits.",
        default=f"full,local,h2o,{DEFAULT}",
        metavar="LIST",
        complete=shell_completion.policy_list,
        group=GRID,
    )
    budgets: tuple[float | int, ...] = option(
        "Shares of the text such as 20%, or tokens: 512, 4K.",
        read=parse_budgets,
        default="4%,10%,20%,60%",
        metavar="LIST",
        group=GRID,
    )
    tasks: str = option("Tasks to measure.", default="recall,perplexity,agreement,mass", metavar="LIST", group=GRID)
    limit: int | None = option(
        "Questions per context and texts per task. Default: 30 questions, 8 texts (mass: 4).",
        read=parse_tokens,
        default=None,
        metavar="N",
        group=TASKS,
    )
    seeds: tuple[int, ...] = option(
        "Several seeds, e.g. 0,1,2, give a mean and a range.",
        read=_seeds,
        name="seed",
        default="0",
        metavar="LIST",
        group=TASKS,
    )
    text: str | None = option(
        "UTF-8 text for all tasks but recall. Default: plain sentences of the package.",
        default=None,
        metavar="FILE",
        group=TASKS,
    )
    contexts: tuple[int, ...] = option(
        "Lengths of recall prompts in tokens.",
        read=_contexts,
        name="context",
        default="512,1024",
        metavar="LIST",
        group=TASKS,
    )
    facts: int = option("Facts in a recall prompt; one is asked for.", default=16, metavar="N", group=TASKS, rare=True)
    documents: str = option(
        "The recall texts: prose, or harder ones in which facts stand out less: facts, list, dialogue, script, table, "
        "code, hops. text-dev and text-test, for pretrained models: facts between the sentences of --text.",
        default="prose",
        metavar="LOOK",
        complete=shell_completion.words(
            *("prose", "facts", "list", "dialogue", "script", "table", "code", "hops", "text-dev", "text-test")
        ),
        group=TASKS,
        rare=True,
    )
    ask: tuple[str, ...] = option(
        "prompt (or inside): recall's question is read before the text is cut to the budget. later: after it. "
        "inside,later: both, in tables of their own.",
        read=_parts,
        default="prompt",
        metavar="WHEN",
        complete=shell_completion.words("prompt", "inside", "later"),
        group=TASKS,
    )
    turns: int | None = option(
        "The recall text comes in N turns, with a cut after each, and is asked about each fact ten turns later. Needs "
        "--ask later.",
        default=None,
        metavar="N",
        group=TASKS,
        rare=True,
    )
    window: int | None = option(
        "Length of a perplexity window. Default: 1024, or the trained length if that is less.",
        read=parse_tokens,
        default=None,
        metavar="TOKENS",
        group=TASKS,
        rare=True,
    )
    stride: int = option(
        "Tokens that perplexity feeds in one step; 1 is decoding.",
        read=parse_tokens,
        default="16",
        metavar="TOKENS",
        group=TASKS,
        rare=True,
    )
    prompt_tokens: int | None = option(
        "Length of agreement's prompts. Default: 512.",
        read=parse_tokens,
        default=None,
        metavar="TOKENS",
        group=TASKS,
        rare=True,
    )
    new_tokens: int | None = option(
        "Tokens of the full cache's own answer that agreement compares. Default: 64.",
        read=parse_tokens,
        default=None,
        metavar="TOKENS",
        group=TASKS,
        rare=True,
    )
    draw: bool = option(
        "agreement: the full cache draws its answer. Long answers of the likeliest tokens repeat themselves.",
        default=False,
        group=TASKS,
        rare=True,
    )
    data: str | None = option(
        "Folder of public data sets, for longbench, choice, summary and ruler; or hub (extra: datasets).",
        default=None,
        metavar="DIR",
        group=TASKS,
    )
    parts: tuple[str, ...] = option(
        "Parts of ruler, longbench, choice or summary, e.g. niah_*,vt. Default: all that can be run.",
        read=_parts,
        reads_none=True,
        default=None,
        metavar="LIST",
        group=TASKS,
        rare=True,
    )
    shots: int = option(
        "Solved examples before a question of choice.",
        read=whole,
        default="5",
        metavar="N",
        group=TASKS,
        rare=True,
    )
    prefill_chunk: int | None = option(PREFILL_CHUNK, rare=True)
    layer_budget: str | tuple[float, ...] | None = option(LAYER_BUDGET, read=parse_layer_weights)
    head_budget: str | None = option(HEAD_BUDGET)
    kv_bits: str | None = option(KV_BITS, rare=True)
    positions: Literal["true", "slot"] | None = option(POSITIONS)
    output_folder: str | None = option(
        "Folder for results.jsonl and plots. The same command again resumes a run.",
        "-o",
        name="output",
        default=None,
        metavar="DIR",
        group=OUTPUT,
    )
    report: str | None = option(
        "Run nothing; show the results of a folder again.",
        default=None,
        metavar="DIR",
        group=OUTPUT,
    )
    shard: tuple[int, int] | None = option(
        "Run every Nth cell from the Kth on, e.g. 3/8, in a folder of its own; join the folders with --merge.",
        read=parse_shard,
        default=None,
        metavar="K/N",
        group=OUTPUT,
        rare=True,
    )
    merge: str | None = option(
        "Run nothing; join the results of several folders, e.g. a,b,c, in the folder --output.",
        default=None,
        metavar="DIRS",
        group=OUTPUT,
        rare=True,
    )
    leaderboard: str | None = option(
        "Run nothing; write a page with the results of several folders, also of several models, to --output.",
        default=None,
        metavar="DIRS",
        group=OUTPUT,
        rare=True,
    )
    workers: int | None = option(
        "Run the cells on N copies of the model, each in a process of a cluster of Ray. Needs the extra kvkeep\\[ray].",
        name="ray_workers",
        default=None,
        metavar="N",
        group=WORKERS,
        rare=True,
    )
    ray_address: str | None = option(RAY_ADDRESS, group=WORKERS)
    plots: bool = option(NO_PLOTS)
    dry_run: bool = option("Run nothing; show the cells, their memory and time.", default=False, group=OUTPUT)
    json: bool = option(JSON)
    output: Path = Path()  # this and the next are set by `checked`
    folders: tuple[Path, ...] = ()

    @classmethod
    def prepare(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the typed options, with those of a recipe in place of what the user has left out."""
        return {**given, **replaced(given["recipe"], given["quick"])}

    def check_values(self) -> None:
        """Refuse a task, a model or a policy that does not exist, and a dtype or a device that cannot be used.

        Tasks and policies are looked at only if something is measured.

        Raises:
            KVKeepError: one of them cannot be used.
        """
        if self.is_run:
            split_tasks(self.tasks)
        super().check_values()
        if self.is_run:
            check_policies(self.policies)

    def checked(self) -> EvalOptions:
        """Return a copy of the options with the folders of results, after checks that concern several options.

        Raises:
            InputError: options exclude each other, or a folder is missing.
        """
        folders = joined(self.merge, self.leaderboard, self.report, self.shard, dry_run=self.dry_run)
        check(self.workers, self.ray_address, idle=self.dry_run or bool(folders) or self.report is not None)
        is_nowhere = self.dry_run and self.output_folder is self.report is None
        output = Path() if is_nowhere else folder_of(self.output_folder, self.report)
        return replace(self, output=output, folders=tuple(folders))

    @property
    def is_run(self) -> bool:
        """Return whether policies are measured, and not results of an earlier run shown."""
        return self.leaderboard is None and self.merge is None and self.report is None

    @property
    def run(self) -> str:
        """Return the function that does the work, as ``module:function``."""
        if self.leaderboard is not None:
            return "kvkeep.cli.eval_run:page"
        if self.merge is not None:
            return "kvkeep.cli.eval_run:merge"
        return "kvkeep.cli.eval_run:serve" if self.report is None else "kvkeep.cli.eval_run:show_report"
