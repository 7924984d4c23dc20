"""``kvkeep remember``: its options. The work is done by `reading`."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.bits import KvBits, parse_kv_bits
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.files import not_empty
from kvkeep.cli.heads import HeadBudget, parse_head_budget
from kvkeep.cli.options import (
    MEMORY,
    OUTPUT,
    AllowPickle,
    Debug,
    Device,
    Dtype,
    Json,
    LayerBudget,
    LoadIn,
    Model,
    Policy,
    Positions,
    PrefillChunk,
    Threads,
    parse_layer_budget,
    parse_positions,
    parse_prefill_chunk,
    parse_threads,
    parse_tokens,
)
from kvkeep.cli.remember.request import Request, target
from kvkeep.policies import LATER

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
    from kvkeep.cli.remember import reading  # imports torch and transformers

    request = Request(
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
    reading.serve(request)
