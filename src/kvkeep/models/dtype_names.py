"""The names of dtypes, refused before torch is imported; `kvkeep.models.device` has the dtypes."""

from __future__ import annotations

from kvkeep.errors import InputError, closest

DTYPE_NAMES = ("float32", "bfloat16", "float16")
"""Dtypes that a model can be loaded in, besides ``auto``: the checkpoint's own."""


def check_dtype(text: str) -> None:
    """Refuse a name that is neither ``auto`` nor that of a dtype.

    Raises:
        InputError: the name is unknown.
    """
    if text not in ("auto", *DTYPE_NAMES):
        close = closest(text, DTYPE_NAMES)
        hint = f" Did you mean {close!r}?" if close else ""
        raise InputError(f"Unknown dtype {text!r}.{hint} Known: auto, {', '.join(DTYPE_NAMES)}.")
