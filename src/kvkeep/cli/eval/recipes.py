"""``--recipe``, ``--quick`` and ``--dry-run`` of ``kvkeep eval``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvkeep.cli import console
from kvkeep.cli.noted import is_given
from kvkeep.errors import InputError


def replaced(recipe: str | None, quick: bool) -> dict[str, str]:
    """The options that a recipe sets and the user has not given, with their values.

    Raises:
        InputError: there is no such recipe, or ``--quick`` without one.
    """
    if recipe is None:
        if quick:
            raise InputError("--quick cuts a recipe down, and there is none. Give --recipe NAME.")
        return {}
    from kvkeep.evals.recipes.recipe import find

    options = find(recipe).options(quick=quick)
    return {name: value for name, value in options.items() if not is_given(name)}


def facts(name: str | None) -> dict[str, str]:
    """What a recipe repeats, and the paper's model; nothing without a recipe."""
    if name is None:
        return {}
    from kvkeep.evals.recipes.recipe import find

    recipe = find(name)
    return {"recipe": f"{name}: {recipe.title}", "the paper's model": recipe.model}


def show_table(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """Print the paper's figures beside ours, and what keeps them apart."""
    from kvkeep.cli.eval.tables import parts
    from kvkeep.evals.recipes.recipe import find

    recipe, screen = find(name), console.out()
    found = recipe.table(rows)
    screen.print(console.visible(found.title), style="bold")
    for part in parts(found, screen.width):
        screen.print(part)
    for note in recipe.notes(rows):
        screen.print(f"  {console.visible(note)}", style="dim")
    screen.print()
