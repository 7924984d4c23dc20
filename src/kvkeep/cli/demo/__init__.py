"""``kvkeep demo``: the main job on the embedded model, in under a minute."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli.console import Debug, one_line_errors

STORY_BUDGET = 128
SEED = 2


@one_line_errors
def demo(
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Another story and another question.")] = SEED,
    debug: Debug = False,
) -> None:
    """Show a story in 128 tokens of memory, and what each policy still knows of a long text.

    Runs the embedded model on the CPU; nothing is downloaded.
    """
    from kvkeep.cli.demo import showcase  # torch and transformers are imported only when there is something to run

    showcase.run(seed)
