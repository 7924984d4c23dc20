"""Options about KV memory that several subcommands have: how a budget is spread, positions, chunks of a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Literal, cast

import typer

from kvkeep.cli.console import parse_tokens
from kvkeep.errors import InputError
from kvkeep.runs import in_full, parse

PANEL = "KV memory"

LayerBudget = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="How the budget is spread over layers: uniform, ramp:0.2, pyramid:20, taper:0.5, or calibrated:FILE, "
        "with the persistence.json of [b]kvkeep analyze[/b]. Default: the policy's own.",
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
PrefillChunk = Annotated[
    str | None,
    typer.Option(
        metavar="TOKENS",
        help="Take the prompt in pieces of so many tokens, so that memory is bounded there too. Default: all at once.",
        rich_help_panel=PANEL,
    ),
]


def parse_layer_budget(text: str | None) -> str | list[float] | None:
    """A rule as it is, or the weights from a file of persistence ratios, one per layer.

    Raises:
        InputError: there is no such rule, or the file cannot be read or holds something else.
        BudgetError: the rule's parameter is out of range.
    """
    if text is None:
        return None
    from kvkeep.budget import RULES, calibrated, per_layer  # torch comes with it

    name, _, file = text.partition(":")
    if name in RULES:
        per_layer(text, budget=1, layers=1)  # checks the parameter
        return text
    if name != "calibrated":
        raise InputError(
            f"--layer-budget {text!r} is no rule; use uniform, ramp:0.2, pyramid:20, taper:0.5 or calibrated:FILE."
        )
    try:
        content = parse(in_full(file).read_bytes())
        numbers = [float(ratio) for ratio in _persistence(content)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"--layer-budget {text}: {file or 'no file'} is no JSON list of persistence ratios by layer ({error})."
        ) from error
    if not all(0.0 <= number <= 1.0 for number in numbers):
        raise InputError(f"--layer-budget {text}: a persistence ratio is a share from 0 to 1.")
    return calibrated(numbers)


def _persistence(content: Any) -> list[Any]:
    """Ratios by layer: a list, an object with one, or what ``kvkeep analyze`` wrote to ``persistence.json``."""
    if not isinstance(content, dict):
        return list(content)
    if content.get("name") != "persistence":
        return list(content["persistence"])
    found = content["result"]
    ratios = found["by_prefix"][str(found["read"])]["ratio"]
    return [1.0 if ratio is None else ratio for ratio in ratios]  # where nothing mattered late, nothing was missed


def parse_positions(text: str | None) -> Literal["true", "slot"] | None:
    """The mode.

    Raises:
        InputError: there is no such mode.
    """
    if text not in (None, "true", "slot"):
        raise InputError(f"--positions {text!r} is not a mode; use true or slot.")
    return cast(Literal["true", "slot"] | None, text)


def parse_prefill_chunk(text: str | None) -> int | None:
    """The number of tokens.

    Raises:
        InputError: it is no whole number of 1 or more.
    """
    tokens = None if text is None else parse_tokens(text, "--prefill-chunk")
    if tokens is not None and tokens < 1:
        raise InputError(f"--prefill-chunk {text} takes no token; give 1 or more, or leave it out for whole prompts.")
    return tokens
