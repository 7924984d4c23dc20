"""Values of options as the user gave them, for messages about them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any


def given(param: Any, words: Sequence[str], ctx: Any) -> str:
    """The last value that was given for a parameter: in the command line, a variable, or a file of settings."""
    found = ""
    for word, following in zip(words, (*words[1:], ""), strict=False):
        for name in param.opts:
            if word == name:
                found = following
            elif word.startswith(f"{name}=") or (len(name) == 2 and word.startswith(name)):
                found = word.removeprefix(name).removeprefix("=")
    prefix = getattr(ctx, "auto_envvar_prefix", None)
    variable = os.environ.get(f"{prefix}_{param.name.upper()}", "") if prefix else ""
    return found or variable or str((ctx.default_map or {}).get(param.name, ""))
