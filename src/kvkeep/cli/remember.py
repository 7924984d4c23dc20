"""``kvkeep remember``: its options. The work is done by `reading`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import STANDARD_OUTPUT, not_empty, place
from kvkeep.cli.options import (
    MEMORY,
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
    Policy,
    Positions,
    PrefillChunk,
    Threads,
    parse_head_budget,
    parse_kv_bits,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.errors import InputError
from kvkeep.policies import LATER

# A request to ``kvkeep remember``, and the file that it writes.


@dataclass(frozen=True, kw_only=True)
class RememberOptions(ModelRequest):
    """The options of ``kvkeep remember``. Numbers of tokens are read; the rest is not checked."""

    text: str
    system: str | None
    raw: bool
    output: Path
    overwrite: bool
    policy: str
    budget: int | None
    prefill_chunk: int | None
    layer_budget: str | list[float] | None
    head_budget: str | None
    kv_bits: str | None
    positions: Literal["true", "slot"] | None
    json: bool


def target(name: str, *, overwrite: bool) -> Path:
    """The file for a memory, after a check that it can be written there.

    Raises:
        InputError: there is something of that name already, or no folder for it.
    """
    path = place(name, "--output")
    if name == STANDARD_OUTPUT:
        raise InputError("A memory is written to a file, not to standard output; give a name such as report.kvkeep.")
    if path.is_dir() or (os.path.lexists(path) and not path.is_file()):
        raise InputError(f"{path} is a folder, or no regular file. Give the name of a file for the memory.")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{path} exists. Give another --output, or --overwrite to replace it.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for the memory. Make it first, or give another --output.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"Nothing can be written to the folder {path.parent}. Give another --output.")
    return path


_TEXT = "Text"


@one_line_errors
def remember(
    text: Annotated[
        str,
        typer.Option(
            "--text",
            "-f",
            metavar="FILE",
            help="The text, a UTF-8 file; - is standard input. White space around the text is dropped.",
            rich_help_panel=_TEXT,
        ),
    ],
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="File for the memory, for example report.kvkeep.",
            rich_help_panel=OUTPUT,
        ),
    ],
    model: Model = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="A system message before the text, for models with a chat template.",
            rich_help_panel=_TEXT,
        ),
    ] = None,
    raw: Annotated[
        bool,
        typer.Option(
            "--raw",
            help="Do not apply the tokenizer's chat template, neither to the text nor to its questions.",
            rich_help_panel=_TEXT,
        ),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a memory of that name.", rich_help_panel=OUTPUT)
    ] = False,
    policy: Policy = LATER,
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "-b",
            metavar="TOKENS",
            help="Tokens kept per layer and head, e.g. 512, 4K (4096) or 4k (4000). Default: 1024; under full the "
            "text and 2048 more.",
            rich_help_panel=MEMORY,
        ),
    ] = None,
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
    json: Json = False,
    debug: Debug = False,
) -> None:
    """Read a text once and keep its memory in a file, to ask about it any number of times.

    The default policy suits questions that come later. Ask them with kvkeep generate --memory FILE or kvkeep chat
    --memory FILE; the model's weights and the memory's settings must then be the same.
    """
    from kvkeep.cli import remember_run  # imports torch and transformers

    request = RememberOptions(
        model=model,
        text=text,
        system=None if system is None else not_empty(system, "--system", "Leave it out, or give some text."),
        raw=raw,
        output=target(output, overwrite=overwrite),
        overwrite=overwrite,
        policy=policy,
        budget=None if budget is None else parse_tokens(budget, "--budget"),
        prefill_chunk=parse_prefill_chunk(prefill_chunk),
        layer_budget=parse_layer_budget(layer_budget),
        head_budget=parse_head_budget(head_budget),
        kv_bits=parse_kv_bits(kv_bits),
        positions=parse_positions(positions),
        dtype=dtype,
        device=device,
        load_in=load_in,
        threads=parse_threads(threads),
        allow_pickle=allow_pickle,
        json=json,
    )
    remember_run.serve(request)
