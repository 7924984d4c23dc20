"""Arguments and options about the model, which all subcommands that run one have."""

from __future__ import annotations

from typing import Annotated

import typer

PANEL = "Model"


def given(model: str | None) -> str | None:
    """Refuse a name that is empty, as of a variable that a script has not set."""
    if model == "":
        raise typer.BadParameter("it is empty; leave it out for the embedded model")
    return model


Model = Annotated[
    str | None,
    typer.Argument(
        help="A hub name or a local folder. The embedded model if not given.",
        show_default=False,
        metavar="MODEL",
        callback=given,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(metavar="NAME", help="float32, bfloat16, float16, or auto: the checkpoint's.", rich_help_panel=PANEL),
]
Device = Annotated[
    str,
    typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, or auto: CUDA where there is one.", rich_help_panel=PANEL),
]
AllowPickle = Annotated[
    bool,
    typer.Option(
        "--allow-pickle",
        help="Accept weights that are not safetensors, if you trust their source.",
        rich_help_panel=PANEL,
    ),
]
