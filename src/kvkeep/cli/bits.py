"""The option for the bits of keys and values in the slots."""

from __future__ import annotations

from typing import Annotated

import typer

from kvkeep.cli import complete
from kvkeep.cli.options import MEMORY

KvBits = Annotated[
    str | None,
    typer.Option(
        metavar="BITS",
        help="Bits of keys and values in the slots: 8, 4, k8v4 (keys in 8, values in 4), or 16 for the model's dtype. "
        "Default: 16.",
        autocompletion=complete.words("8", "4", "k8v4", "16"),
        rich_help_panel=MEMORY,
    ),
]


def parse_kv_bits(text: str | None) -> str | None:
    """Read ``--kv-bits``; ``"16"`` stays what it is, for options that a file decides otherwise.

    Raises:
        InputError: slots cannot have so many bits.
    """
    if text is None:
        return None
    from kvkeep.kv.slot_codec import check_bits  # imports torch

    return check_bits(text) or "16"
