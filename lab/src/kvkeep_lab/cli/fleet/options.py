"""The options of ``kvkeep fleet``, and how they are read."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from kvkeep.errors import InputError

LOAD, DEVICES = "What comes", "Devices"

Rate = Annotated[
    float | None, typer.Option(metavar="RATE", help="Users that come per second, at random.", rich_help_panel=LOAD)
]
PromptTokens = Annotated[
    str | None,
    typer.Option(
        metavar="LENGTH",
        help="Of a message: 128; 64-512: all equally likely; ~200: exponential with this mean. Default: 128.",
        rich_help_panel=LOAD,
    ),
]
NewTokens = Annotated[
    str | None,
    typer.Option(
        "--max-new-tokens",
        "-n",
        metavar="LENGTH",
        help="The same, of an answer. Default: 64.",
        rich_help_panel=LOAD,
    ),
]
Sessions = Annotated[
    str | None,
    typer.Option(metavar="LENGTH", help="The same: conversations of a user. Default: 1.", rich_help_panel=LOAD),
]
Turns = Annotated[
    str | None,
    typer.Option(metavar="LENGTH", help="The same: messages of a conversation. Default: 1.", rich_help_panel=LOAD),
]
Between = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS",
        help="The same: between an answer and the next message. Default: 60.",
        rich_help_panel=LOAD,
    ),
]
Input = Annotated[
    str | None,
    typer.Option(
        "--input",
        "-i",
        metavar="FILE",
        help='JSONL with lengths, {"prompt_tokens": 512, "max_tokens": 64}, or a trace, with "at" in seconds and '
        '"session" as well; the output of bench-server is one.',
        rich_help_panel=LOAD,
    ),
]
Requests = Annotated[
    int | None,
    typer.Option(metavar="N", help="Messages that are simulated on a device. Default: 2000.", rich_help_panel=LOAD),
]
Seed = Annotated[int | None, typer.Option(metavar="N", help="Of times and lengths. Default: 0.", rich_help_panel=LOAD)]
Rows = Annotated[
    int | None,
    typer.Option(metavar="N", help="Rows of each device. Default: all that fit.", rich_help_panel=DEVICES),
]
Devices = Annotated[
    int | None,
    typer.Option(metavar="N", help="Default: as few as keep the two limits.", rich_help_panel=DEVICES),
]
FirstToken = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Until the first token, in 99 % of the answers. Default: 5.", rich_help_panel=DEVICES
    ),
]
PerToken = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Per token after it, in 99 %. Default: no limit.", rich_help_panel=DEVICES),
]
Steps = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        help="Measured steps, as bench/fleet.py prints them. Default: the limits of --bandwidth and --compute.",
        rich_help_panel=DEVICES,
    ),
]
Compute = Annotated[
    str | None,
    typer.Option(
        metavar="SPEED",
        help="Arithmetic, e.g. 400TFLOP/s. Default: an estimate from --bandwidth.",
        rich_help_panel=DEVICES,
    ),
]
DecodeEvery = Annotated[
    int | None,
    typer.Option(
        metavar="TOKENS",
        help="Prompt tokens for which running rows get a token. Default: by the kind of --device.",
        rich_help_panel=DEVICES,
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Main memory for idle conversations; others lie on the disk. Default: for all.",
        rich_help_panel=DEVICES,
    ),
]
Bus = Annotated[
    str | None,
    typer.Option(metavar="SPEED", help="Between rows and main memory. Default: 25GB/s.", rich_help_panel=DEVICES),
]
Disk = Annotated[str | None, typer.Option(metavar="SPEED", help="Default: 2GB/s.", rich_help_panel=DEVICES)]

_COMPUTE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([GTP])(?:FLOPS?/s|FLOPS)\s*", re.ASCII)
_PREFIXES = {"G": 1e9, "T": 1e12, "P": 1e15}


def parse_compute(text: str) -> float:
    """Read operations per second: ``400TFLOP/s``.

    Raises:
        InputError: the text is not a number with a unit, or the speed is not above 0.
    """
    found = _COMPUTE.fullmatch(text)
    speed = float(found[1]) * _PREFIXES[found[2]] if found else 0.0
    if not 0 < speed < 1e21:
        raise InputError(f"--compute {text!r} is no number of operations per second; write e.g. 400TFLOP/s.")
    return speed
