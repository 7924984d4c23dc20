"""``kvkeep calibrate``: its options. The work is in `kvkeep.cli.calibrate_run`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvkeep.cli import shell_completion
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import STANDARD_OUTPUT, place
from kvkeep.cli.options import (
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    LoadIn,
    Model,
    ModelRequest,
    Threads,
    parse_threads,
    parse_tokens,
)
from kvkeep.errors import InputError

# A request to ``kvkeep calibrate``, and the file that it writes.


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions(ModelRequest):
    """The options of ``kvkeep calibrate``. Numbers of tokens are read; the rest is not checked."""

    text: str | None
    output: Path
    overwrite: bool
    context: int | None
    sinks: int
    recent: int
    case: str
    documents: int
    questions: int
    windows: int
    seed: int
    from_duo: str | None
    sparsity: float | None
    json: bool


def target(name: str, *, overwrite: bool) -> Path:
    """The file for a profile, after a check that it can be written there.

    Raises:
        InputError: there is something of that name already, or no folder for it.
    """
    path = place(name, "--output")
    if name == STANDARD_OUTPUT:
        raise InputError("A profile is written to a file, not to standard output; give a name such as heads.json.")
    if path.is_dir() or (os.path.lexists(path) and not path.is_file()):
        raise InputError(f"{path} is a folder, or no regular file. Give the name of a file for the profile.")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{path} exists. Give another --output, or --overwrite to replace it.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for the profile. Make it first, or give another --output.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"Nothing can be written to the folder {path.parent}. Give another --output.")
    return path


_MEASURE, _IMPORT = "Measurement", "Import"


@one_line_errors
def calibrate(
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the profile, for example heads.json. The same command again resumes a run that was stopped.",
            rich_help_panel=OUTPUT,
        ),
    ],
    model: Model = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="UTF-8 text on which heads are compared with the full cache; - is standard input. Default: the "
            "package's own sentences.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Length of each text. Default: 1024, or the trained length if that is less.",
            rich_help_panel=_MEASURE,
        ),
    ] = None,
    sinks: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="First tokens that a limited head still sees.", rich_help_panel=_MEASURE),
    ] = 4,
    recent: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Newest tokens that a limited head still sees.", rich_help_panel=_MEASURE
        ),
    ] = 32,
    case: Annotated[
        str,
        typer.Option(
            metavar="CASE",
            help="later: questions come after the text was cut. inside: the question ends the text, so a limited head "
            "still reads it with all of the past.",
            autocompletion=shell_completion.words("later", "inside"),
            rich_help_panel=_MEASURE,
        ),
    ] = "later",
    documents: Annotated[
        int, typer.Option(min=0, metavar="N", help="Number of texts with planted facts.", rich_help_panel=_MEASURE)
    ] = 6,
    questions: Annotated[
        int,
        typer.Option(
            min=1, metavar="N", help="Questions about each text with facts, at most 16.", rich_help_panel=_MEASURE
        ),
    ] = 16,
    windows: Annotated[
        int, typer.Option(min=1, metavar="N", help="Windows of --text that are read.", rich_help_panel=_MEASURE)
    ] = 3,
    seed: Annotated[
        int,
        typer.Option(
            min=0, max=2**31 - 1, metavar="N", help="Seed of facts, questions and windows.", rich_help_panel=_MEASURE
        ),
    ] = 0,
    from_duo: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Measure nothing: turn a pattern of DuoAttention, a full_attention_heads.tsv or its folder, into a "
            "profile. No weights are read.",
            rich_help_panel=_IMPORT,
        ),
    ] = None,
    sparsity: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="With --from-duo: the share of heads that need no far past; the others need it. Default: the "
            "pattern's own numbers.",
            rich_help_panel=_IMPORT,
        ),
    ] = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    load_in: LoadIn = None,
    threads: Threads = None,
    allow_pickle: AllowPickle = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a profile of that name.", rich_help_panel=OUTPUT)
    ] = False,
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure which heads of a model need the far past, and write a profile for budgets per head.

    Each head is limited to its first and newest tokens, alone and together with others. Measured are the answers to
    planted facts that are lost, and the distance from the full cache on your text. Every finished layer is kept.
    """
    request = CalibrateOptions(
        model=model,
        text=text,
        output=target(output, overwrite=overwrite),
        overwrite=overwrite,
        context=None if context is None else parse_tokens(context, "--context"),
        sinks=sinks,
        recent=recent,
        case=case,
        documents=documents,
        questions=questions,
        windows=windows,
        seed=seed,
        from_duo=from_duo,
        sparsity=sparsity,
        dtype=dtype,
        device=device,
        load_in=load_in,
        threads=parse_threads(threads),
        allow_pickle=allow_pickle,
        json=json,
    )
    from kvkeep.cli import calibrate_run  # imports torch and transformers

    calibrate_run.serve(request)
