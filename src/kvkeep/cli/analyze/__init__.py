"""``kvkeep analyze``: the options. The work is in `kvkeep.cli.analyze.analysis`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli.console import Debug, Json, one_line_errors, parse_tokens
from kvkeep.cli.files import place
from kvkeep.cli.model_options import AllowPickle, Device, Dtype, Model

_ANALYSIS, _OUTPUT = "Analysis", "Output"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the user asked for; the text is not read yet.

    Attributes:
        only: names of measurements; all if empty.
    """

    model: str | None
    text: str
    output: Path
    only: tuple[str, ...]
    max_tokens: int | None
    seed: int
    dtype: str
    device: str
    allow_pickle: bool
    json: bool


@one_line_errors
def analyze(
    text: Annotated[
        str,
        typer.Option(metavar="FILE", help="UTF-8 text to read; - is standard input.", rich_help_panel=_ANALYSIS),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Folder for the page, pictures and numbers. A run that was stopped goes on there.",
            rich_help_panel=_OUTPUT,
        ),
    ],
    model: Model = None,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="LIST", help="Measurements, e.g. sparsity,persistence. Default: all.", rich_help_panel=_ANALYSIS
        ),
    ] = None,
    max_tokens: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Read so many tokens of the text. Default: 4096, or the trained length if that is less.",
            rich_help_panel=_ANALYSIS,
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, metavar="N", help="Of whatever is drawn.", rich_help_panel=_ANALYSIS)
    ] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    allow_pickle: AllowPickle = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Show what the papers saw on a model and a text of yours: one page with figures, claims and a recommendation.

    The text runs through the full cache once, in blocks, so memory stays bounded. Every finished measurement is written
    to DIR at once; the same command again goes on where it was stopped.
    """
    request = Request(
        model=model,
        text=text,
        output=place(output, "--output"),
        only=() if only is None else tuple(filter(None, (name.strip() for name in only.split(",")))),
        max_tokens=None if max_tokens is None else parse_tokens(max_tokens, "--max-tokens"),
        seed=seed,
        dtype=dtype,
        device=device,
        allow_pickle=allow_pickle,
        json=json,
    )
    from kvkeep.cli.analyze import analysis  # torch and transformers: only now

    analysis.serve(request)
