"""``--ray-workers`` and ``--ray-address`` of ``kvkeep eval``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import cluster
from kvkeep.errors import InputError

_WORKERS = "Workers"

RayWorkers = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Run the cells on N copies of the model, each in a process of a cluster of Ray. Needs the extra "
        "kvkeep\\[ray].",
        rich_help_panel=_WORKERS,
    ),
]

RayAddress = Annotated[str | None, cluster.address(_WORKERS)]


def check(workers: int | None, address: str | None, *, idle: bool) -> None:
    """Refuse workers that cannot be.

    Args:
        workers: the value of ``--ray-workers``.
        address: that of ``--ray-address``.
        idle: whether the command runs no cell.

    Raises:
        InputError: they are refused.
    """
    cluster.check_workers(workers, address)
    if workers is not None and idle:
        raise InputError("--ray-workers runs cells; --report, --merge, --leaderboard and --dry-run run none.")
