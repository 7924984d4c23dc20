"""Options of sampling that ``kvkeep generate`` and ``kvkeep chat`` share."""

from __future__ import annotations

from typing import Annotated

import typer

SAMPLING = "Sampling"
"""The panel of ``--help``."""

MaxNewTokens = Annotated[
    str,
    typer.Option(
        "--max-new-tokens", "-n", metavar="TOKENS", help="Stop after so many new tokens.", rich_help_panel=SAMPLING
    ),
]
Temperature = Annotated[
    float,
    typer.Option(
        "--temperature",
        "-t",
        metavar="NUMBER",
        help="0 takes the likeliest token. Above 0, tokens are drawn.",
        rich_help_panel=SAMPLING,
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Draw among the likeliest tokens whose probabilities sum up to this.",
        rich_help_panel=SAMPLING,
    ),
]
TopK = Annotated[
    int | None, typer.Option(metavar="N", help="Draw among the N likeliest tokens.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float | None,
    typer.Option(
        metavar="NUMBER",
        help="Draw among tokens that are at least this share as likely as the likeliest.",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option(metavar="NUMBER", help="Above 1: tokens that were used become less likely.", rich_help_panel=SAMPLING),
]
Seed = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="The same seed draws the same text. Each line of a batch job and each answer draws its own.",
        rich_help_panel=SAMPLING,
    ),
]
