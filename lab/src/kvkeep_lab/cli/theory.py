"""``kvkeep theory``: checks the papers' claims about their methods."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from kvkeep.cli import console
from kvkeep.cli.console import one_line_errors
from kvkeep.cli.main import MEASURE, Plugin
from kvkeep.cli.options import Json
from kvkeep.errors import InputError

if TYPE_CHECKING:
    from kvkeep_lab.theory.claim import Claim, ClaimOutcome

_STYLES = {"holds": "green", "holds with a correction": "yellow", "fails": "red"}
_MOST_LISTED = 10
"""Claims that a message names; there are many more."""
_VERDICT_WIDTH = 12
"""Width of "holds with a", so that a verdict takes two lines at most."""


@one_line_errors
def theory(
    only: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Check only these claims, e.g. ahakv-gain.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Check the papers' claims about their methods: theorems, lemmas, formulas.

    Each claim is computed anew, in float64 from a fixed seed: it holds, holds with a correction, or fails, and by how
    much. The last line of each claim is the command that runs its test in a clone of the repository.
    """
    from kvkeep_lab.theory import CLAIMS  # imports torch

    claims = CLAIMS if only is None else choose(CLAIMS, only)
    if json:
        console.write_json(_report(claims))
        return
    screen = console.out()
    verdicts: Counter[str] = Counter()
    for claim in claims:
        outcome = claim.check()
        verdicts[outcome.verdict] += 1
        screen.print(_entry(claim, outcome))
        screen.print(Text(command(claim), "dim"), soft_wrap=True)
        screen.print()
    screen.print(_summary(verdicts))


def choose(claims: Sequence[Claim], only: str) -> list[Claim]:
    """Return the claims that a comma-separated list names, in the order of the papers.

    Raises:
        InputError: a name is unknown, or the list is empty.
    """
    names = {name.strip() for name in only.split(",")} - {""}
    known = [claim.name for claim in claims]
    unknown = sorted(names.difference(known))
    if unknown or not names:
        what = f"no claim is called {', '.join(map(repr, unknown))}" if unknown else "no claim is named"
        raise InputError(f"--only: {what}. {_hint(unknown, known)}")
    return [claim for claim in claims if claim.name in names]


def _hint(unknown: Sequence[str], known: Sequence[str]) -> str:
    """Return a hint at the names that were meant, or all names if they are few."""
    if len(known) <= _MOST_LISTED:
        return f"Known: {', '.join(known)}."
    close = [name for name_given in unknown for name in difflib.get_close_matches(name_given, known, n=1)]
    return f"Did you mean {', '.join(close)}?" if close else "kvkeep theory without --only names all of them."


def command(claim: Claim) -> str:
    """Return the command that runs the test of a claim."""
    return f"pytest {claim.test}"


def _report(claims: Sequence[Claim]) -> dict[str, Any]:
    """Return all claims with their outcomes, as plain data."""
    entries = []
    for claim in claims:
        outcome = claim.check()
        entries.append(
            {
                "name": claim.name,
                "source": claim.source,
                "statement": claim.statement,
                "verdict": outcome.verdict,
                "by": outcome.by,
                "test": command(claim),
            }
        )
    verdicts = Counter(str(entry["verdict"]) for entry in entries)
    return {"claims": entries, "verdicts": {verdict: verdicts[verdict] for verdict in _STYLES}}


def _entry(claim: Claim, outcome: ClaimOutcome) -> Table:
    """Return a row of the table: the verdict; beside it the claim's name, source, statement and outcome."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=_VERDICT_WIDTH)
    grid.add_column(overflow="fold")
    says = Text.assemble((claim.name, "bold"), f"  {claim.source}\n{claim.statement}\n→ {outcome.by}")
    grid.add_row(Text(outcome.verdict, _STYLES[outcome.verdict]), says)
    return grid


def _summary(verdicts: Counter[str]) -> str:
    """Return the number of claims, and of each verdict."""
    said = {"holds": "hold", "holds with a correction": "hold with a correction", "fails": "fail"}
    return f"{console.count(verdicts.total(), 'claim')}: " + ", ".join(
        f"{verdicts[v]} {words}" for v, words in said.items()
    )


PLUGIN = Plugin(
    command=theory,
    panel=MEASURE,
    examples={
        "kvkeep theory": "Check all claims",
        "kvkeep theory --only ahakv-gain": "Check one",
    },
)
