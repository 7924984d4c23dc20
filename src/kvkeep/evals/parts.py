"""The parts of a task that consists of several."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from kvkeep.errors import InputError


def chosen(task: str, wanted: Sequence[str], known: Sequence[str], default: Sequence[str]) -> list[str]:
    """The parts to run, in the task's order. A name that ends with ``*`` stands for all that begin so.

    Raises:
        InputError: there is no such part.
    """
    found: set[str] = set()
    for name in wanted:
        own = {part for part in known if part == name or (name.endswith("*") and part.startswith(name[:-1]))}
        if not own:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InputError(f"`parts`: {task} has no part {name!r}.{hint} Known: {', '.join(known)}.")
        found |= own
    return [part for part in known if part in (found or set(default))]
