"""``kvkeep tune``: its options. The work is in `kvkeep.cli.tune_run`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import place
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
    parse_head_budget,
    parse_layer_budget,
    parse_number,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.errors import InputError

_QUALITY, _SEARCH = "Quality", "Search"


@one_line_errors
def tune(
    model: Model = None,
    case: Annotated[
        str,
        typer.Option(
            metavar="CASE",
            help="later: questions come after the text was cut. inside: the question ends the text. "
            "stream: the text goes on.",
            autocompletion=shell_completion.words("later", "inside", "stream"),
            rich_help_panel=_QUALITY,
        ),
    ] = "later",
    target: Annotated[
        str,
        typer.Option(
            metavar="SHARE",
            help="Share of the full cache's quality to keep with 95 % confidence: 0.98, or 98%.",
            rich_help_panel=_QUALITY,
        ),
    ] = "0.98",
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text, in which facts are planted and asked for; for stream, the text that goes on. "
            "Default: the package's own plain sentences.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    questions: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help='Your own questions in place of planted facts: JSONL lines with a "question", its "answer", and '
            'perhaps a "text" of their own.',
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Length of a text. Default: 1024, or the trained length if that is less.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    facts: Annotated[
        int, typer.Option(metavar="N", help="Facts planted in a text; all are asked for.", rich_help_panel=_QUALITY)
    ] = 16,
    limit: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Questions of the confirmation, or texts for stream. Default: 448 questions, 24 texts.",
            rich_help_panel=_QUALITY,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, metavar="N", help="Chooses facts and texts.", rich_help_panel=_QUALITY)
    ] = 0,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Policies to search, e.g. leverage,h2o:recent=8,sinks=4. Default: those made for the case.",
            autocompletion=shell_completion.policy_list,
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    budgets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Budgets to search: shares of the text such as 20%, or tokens. Default: 11 from 3% to 90%.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    prefill_chunk: PrefillChunk = None,
    layer_budget: LayerBudget = None,
    head_budget: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Rules to search that divide the budget among KV heads, e.g. uniform,ada:0.2,global:0.2,profile:FILE "
            "with the file of [b]kvkeep calibrate[/b]. Default: each policy's own rule.",
            autocompletion=shell_completion.words("uniform", "ada:0.2", "global:0.2", "profile:"),
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    positions: Positions = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for kvkeep.toml, curve.png and measurements. The same command again resumes a search that "
            "was stopped.",
            rich_help_panel=OUTPUT,
        ),
    ] = "tuned",
    plots: Annotated[
        bool, typer.Option(help="Draw the curve, with matplotlib (extra: plots).", rich_help_panel=OUTPUT)
    ] = True,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the policy and budget with the smallest memory that keep the target share of the full cache's quality.

    The settings are written to DIR/kvkeep.toml, which kvkeep generate --config and Engine.from_config read.
    """
    folder = place(output, "--output")
    spread = parse_layer_budget(layer_budget)
    number = _share(target)
    from kvkeep.cli import tune_run  # imports torch and transformers

    tune_run.serve(
        tune_run.TuneOptions(
            model=model,
            case=case,
            target=number,
            text=text,
            questions=questions,
            context=None if context is None else parse_tokens(context, "--context"),
            facts=facts,
            limit=None if limit is None else parse_tokens(limit, "--limit"),
            seed=seed,
            policies=policies,
            budgets=_budgets(budgets),
            prefill_chunk=parse_prefill_chunk(prefill_chunk),
            layer_budget=tuple(spread) if isinstance(spread, list) else spread,
            head_budgets=_heads(head_budget),
            positions=parse_positions(positions),
            output=folder,
            plots=plots,
            dtype=dtype,
            device=device,
            load_in=load_in,
            threads=parse_threads(threads),
            allow_pickle=allow_pickle,
            json=json,
        )
    )


def _share(text: str) -> float:
    """Read ``--target``.

    Raises:
        InputError: it is no share, or one that no confidence can reach.
    """
    number = parse_number(text[:-1], "--target") / 100 if text.endswith("%") else parse_number(text, "--target")
    if not 0 < number < 1:
        raise InputError(
            f"--target {text} is not a share between 0 and 1, such as 0.98 or 98%. No number of questions can show "
            "that all of the full cache's quality is kept."
        )
    return number


def _budgets(text: str | None) -> tuple[float | int, ...]:
    """Read ``--budgets``; empty for the default."""
    return () if text is None else tuple(parse_budget(one, "--budgets") for one in _items(text, "--budgets"))


def _heads(text: str | None) -> tuple[str | None, ...]:
    """Read ``--head-budget``."""
    if text is None:
        return (None,)
    return tuple(parse_head_budget(item) for item in _items(text, "--head-budget"))


def _items(text: str, option: str) -> list[str]:
    items = list(filter(None, (item.strip() for item in text.split(","))))
    if not items:
        raise InputError(f"{option} is an empty list; leave it out for the default.")
    return items
