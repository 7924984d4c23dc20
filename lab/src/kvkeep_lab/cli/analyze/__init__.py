"""``kvkeep analyze``: its options. The work is in `kvkeep_lab.cli.analyze.analysis`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import options
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import place
from kvkeep.cli.options import (
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    LoadIn,
    Model,
    Threads,
    parse_threads,
    parse_tokens,
)
from kvkeep.cli.plugins import MEASURE, Plugin
from kvkeep_lab.cli.analyze.request import Request

_ANALYSIS = "Analysis"
_WORKERS = "Workers"


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
            help="Folder for the page, pictures and numbers. The same command again resumes a run that was stopped.",
            rich_help_panel=OUTPUT,
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
            help="Tokens of the text that are read. Default: 4096, or the trained length if that is less.",
            rich_help_panel=_ANALYSIS,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(min=0, max=2**31 - 1, metavar="N", help="Seed of all random choices.", rich_help_panel=_ANALYSIS),
    ] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    ray_workers: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Make the measurements on N copies of the model, each in a process of a cluster of Ray. Needs the "
            "extra kvkeep\\[ray].",
            rich_help_panel=_WORKERS,
        ),
    ] = None,
    ray_address: Annotated[str | None, options.address(_WORKERS)] = None,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure on your model and text what the papers measured on theirs, and name the risks of a smaller cache.

    The result is one page with figures and claims. The text runs through a full cache once, in blocks, so memory stays
    bounded. Every finished measurement is written to DIR at once.
    """
    options.check_workers(ray_workers, ray_address)
    length = None if max_tokens is None else parse_tokens(max_tokens, "--max-tokens")
    folder = place(output, "--output")
    from kvkeep_lab.cli.analyze import analysis  # imports torch and transformers

    analysis.serve(
        Request(
            model=model,
            text=text,
            output=folder,
            only=() if only is None else tuple(filter(None, (name.strip() for name in only.split(",")))),
            max_tokens=length,
            seed=seed,
            dtype=dtype,
            device=device,
            load_in=load_in,
            threads=parse_threads(threads),
            allow_pickle=allow_pickle,
            json=json,
            workers=ray_workers,
            ray_address=ray_address,
        )
    )


PLUGIN = Plugin(
    command=analyze,
    panel=MEASURE,
    examples={
        "kvkeep analyze MODEL --text report.txt -o page": "Write a page with figures and risks",
    },
)
