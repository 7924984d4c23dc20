"""``--ray-workers`` and ``--ray-address``: how many workers of Ray share the work of a command, and where they run."""

from __future__ import annotations

from typing import Any

import typer

from kvkeep.errors import InputError

MOST_WORKERS = 1024


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


def check_workers(number: int | None, address: str | None) -> None:
    """Refuse a number of workers that cannot be, and an address that nothing runs at.

    Args:
        number: the value of ``--ray-workers``, if it was given.
        address: that of ``--ray-address``.

    Raises:
        InputError: one of them is refused.
    """
    check_address(address, "workers", asked=number is not None)
    if number is not None and not 1 <= number <= MOST_WORKERS:
        raise InputError(f"--ray-workers {number} is out of range; give 1 to {MOST_WORKERS}.")
