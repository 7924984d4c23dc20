"""The option that divides the budget among KV heads."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import complete
from kvkeep.cli.options import MEMORY

HeadBudget = Annotated[
    str | None,
    typer.Option(
        metavar="RULE",
        help="How the budget is divided among KV heads: uniform, ada:0.2 within each layer, global:0.2 over all "
        "layers, or profile:FILE with the file of [b]kvkeep calibrate[/b]. Default: the policy's own rule.",
        autocompletion=complete.words("uniform", "ada:0.2", "global:0.2", "profile:"),
        rich_help_panel=MEMORY,
    ),
]


def parse_head_budget(text: str | None) -> str | None:
    """Read ``--head-budget``.

    Raises:
        BudgetError: there is no such rule, or its number is out of range.
        InputError: the profile cannot be read.
    """
    if text is None:
        return None
    from kvkeep.head_profile import Profile
    from kvkeep.policies._head_budgets import PROFILE, parsed  # imports torch

    if parsed(text)[0] == PROFILE:
        Profile.load(text.partition(":")[2])
    return text
