"""``--ray-address``: the cluster of Ray on which a batch job's workers or a server's replicas run."""

from __future__ import annotations

from typing import Any

import typer

from kvkeep.errors import InputError


def address(panel: str) -> Any:
    """The option, under a heading of the help."""
    return typer.Option(
        metavar="HOST:PORT",
        help="The cluster, or auto for the one of this machine. Default: RAY_ADDRESS, or processes of this machine "
        "alone.",
        rich_help_panel=panel,
    )


def check_address(text: str | None, what: str, *, asked: bool) -> None:
    """Refuse an address that is empty, or that nothing runs at.

    Args:
        text: the value of ``--ray-address``, if it was given.
        what: what runs there, such as ``workers``; ``--ray-`` before it is the option that says how many.
        asked: whether that option was given.

    Raises:
        InputError: the address is refused.
    """
    if text is None:
        return
    if not asked:
        raise InputError(f"--ray-address is where the {what} of --ray-{what} run; give --ray-{what} N, too.")
    if not text.strip():
        raise InputError(
            f"--ray-address is empty. Give host:port, or leave it out: the {what} then run on this machine."
        )
