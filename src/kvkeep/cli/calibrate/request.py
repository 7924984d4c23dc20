"""A request to ``kvkeep calibrate``, and the file that it writes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvkeep.cli.files import STANDARD_OUTPUT, place
from kvkeep.cli.model_request import ModelRequest
from kvkeep.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Request(ModelRequest):
    """The options of ``kvkeep calibrate``. Numbers of tokens are read; the rest is not checked."""

    text: str | None
    output: Path
    overwrite: bool
    context: int | None
    sinks: int
    recent: int
    case: str
    documents: int
    questions: int
    windows: int
    seed: int
    from_duo: str | None
    sparsity: float | None
    json: bool


def target(name: str, *, overwrite: bool) -> Path:
    """The file for a profile, after a check that it can be written there.

    Raises:
        InputError: there is something of that name already, or no folder for it.
    """
    path = place(name, "--output")
    if name == STANDARD_OUTPUT:
        raise InputError("A profile is written to a file, not to standard output; give a name such as heads.json.")
    if path.is_dir() or (os.path.lexists(path) and not path.is_file()):
        raise InputError(f"{path} is a folder, or no regular file. Give the name of a file for the profile.")
    if os.path.lexists(path) and not overwrite:
        raise InputError(f"{path} exists. Give another --output, or --overwrite to replace it.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for the profile. Make it first, or give another --output.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"Nothing can be written to the folder {path.parent}. Give another --output.")
    return path
