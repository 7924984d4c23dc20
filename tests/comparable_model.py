"""The embedded model for texts of requests that run beside others, which are compared with their texts alone."""

from __future__ import annotations

from functools import cached_property
from typing import Any

DTYPE = "float32"
"""In which such texts are compared: see the fixture `comparable`."""


class Comparable:
    """The embedded model, read when it is first asked for.

    Attributes:
        dtype: its numbers.
        words: what a command is told so that it computes in them.
    """

    dtype = DTYPE
    words = ("--dtype", DTYPE)

    @cached_property
    def loaded(self) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        import kvkeep

        return kvkeep.load(dtype=DTYPE)
