"""Options about KV memory that several subcommands have: how a budget is spread, and which positions attention sees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from kvkeep.errors import InputError

PANEL = "KV memory"

LayerBudget = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="How the budget is spread over layers: uniform, ramp:0.2, pyramid:20, or calibrated:FILE. "
        "Default: the policy's own.",
        rich_help_panel=PANEL,
    ),
]
Positions = Annotated[
    str | None,
    typer.Option(
        metavar="MODE",
        help="true, or slot: tokens are attended at their rank in the cache, for streams longer than the model was "
        "trained for. Default: the policy's own.",
        rich_help_panel=PANEL,
    ),
]


def parse_layer_budget(text: str | None) -> str | list[float] | None:
    """A rule as it is, or the weights from a file of persistence ratios, one per layer.

    Raises:
        InputError: the file cannot be read or holds something else.
    """
    name, _, file = (text or "").partition(":")
    if name != "calibrated":
        return text
    from kvkeep.budget import calibrated

    try:
        content = json.loads(Path(file).expanduser().read_text(encoding="utf-8"))
        ratios = content["persistence"] if isinstance(content, dict) else content
        numbers = [float(ratio) for ratio in ratios]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--layer-budget {text}: {file or 'no file'} is no JSON list of persistence ratios by layer ({error})."
        ) from error
    if not all(0.0 <= number <= 1.0 for number in numbers):
        raise InputError(f"--layer-budget {text}: a persistence ratio is a share from 0 to 1.")
    return calibrated(numbers)


def parse_positions(text: str | None) -> Literal["true", "slot"] | None:
    """The mode.

    Raises:
        InputError: there is no such mode.
    """
    if text not in (None, "true", "slot"):
        raise InputError(f"--positions {text!r} is not a mode; use true or slot.")
    return cast(Literal["true", "slot"] | None, text)
