"""``kvkeep explain``: its options. The work is done by `making`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import complete
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.explain.request import Request, target
from kvkeep.cli.files import place
from kvkeep.cli.options import (
    MEMORY,
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    LoadIn,
    Model,
    Threads,
    parse_budget,
    parse_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.errors import InputError

_TEXT = "Text"


@one_line_errors
def explain(
    text: Annotated[
        str,
        typer.Option(
            "--text",
            "-f",
            metavar="FILE",
            help="The text, a UTF-8 file; - is standard input.",
            rich_help_panel=_TEXT,
        ),
    ],
    model: Model = None,
    question: Annotated[
        str | None,
        typer.Option(
            "--prompt",
            "-p",
            metavar="TEXT",
            help="The question. It follows the text after a blank line.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the tokenizer's chat template.", rich_help_panel=_TEXT)
    ] = False,
    policies: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Policies with their options, at most six, e.g. h2o:recent=8,sinks=4,tova.",
            autocompletion=complete.policy_list,
            rich_help_panel=MEMORY,
        ),
    ] = "h2o,snapkv,local",
    budget: Annotated[
        str,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, or a share of the prompt's.",
            rich_help_panel=MEMORY,
        ),
    ] = "20%",
    prefill_chunk: Annotated[
        str,
        typer.Option(
            metavar="TOKENS",
            help="Tokens of the prompt that are read at a time. Each chunk is a moment of the page.",
            rich_help_panel=MEMORY,
        ),
    ] = "64",
    max_new_tokens: Annotated[
        str,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="TOKENS",
            help="The most tokens of an answer, up to 54.",
            rich_help_panel=_TEXT,
        ),
    ] = "32",
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="File for the page, e.g. page.html.", rich_help_panel=OUTPUT
        ),
    ] = None,
    plots: Annotated[
        str | None,
        typer.Option(
            "--plots",
            metavar="FOLDER",
            help="Folder for pictures, with matplotlib (extra: plots).",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files of that name.", rich_help_panel=OUTPUT)
    ] = False,
    terminal: Annotated[
        bool,
        typer.Option(
            "--terminal",
            help="Print the text under each policy, side by side. Dots stand for tokens that no head holds.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what a bounded memory kept of a text, what it dropped and why, beside other policies.

    The result is one page for a browser. It needs no network. The text is read under each policy, and then once with
    the full cache, which tells what the answer's tokens would have looked at.
    """
    if output is None and plots is None and not (terminal or json):
        raise InputError("There is no place for the page. Give --output page.html, or --terminal to see it here.")
    request = Request(
        model=model,
        text=text,
        question=question or "",
        raw=raw,
        policies=policies,
        budget=parse_budget(budget, "--budget"),
        prefill_chunk=parse_chunk(prefill_chunk),
        max_new_tokens=parse_tokens(max_new_tokens, "--max-new-tokens"),
        output=None if output is None else target(output, overwrite=overwrite),
        plots=None if plots is None else place(plots, "--plots"),
        overwrite=overwrite,
        terminal=terminal,
        dtype=dtype,
        device=device,
        load_in=load_in,
        threads=parse_threads(threads),
        allow_pickle=allow_pickle,
        json=json,
    )
    from kvkeep.cli.explain import making  # imports torch and transformers

    making.serve(request)
