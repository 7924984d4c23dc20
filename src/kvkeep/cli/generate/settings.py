"""The settings of ``--config``, where the command line gives none. Importing this module imports torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvkeep.cli.files import refuse_device
from kvkeep.cli.generate.request import Request
from kvkeep.config import NAME, Config
from kvkeep.errors import InputError


def settled(request: Request, file: str) -> Request:
    """The request with the settings of a ``kvkeep.toml`` in place of options that were not given.

    Raises:
        InputError: the file cannot be used, or a memory was given, which brings settings of its own.
    """
    if request.memory is not None:
        raise InputError("--config and --memory were both given, and a memory has settings of its own. Leave one out.")
    if not file:
        raise InputError(f"--config is empty. Give the {NAME} that kvkeep tune has written, or leave it out.")
    refuse_device(file, "configuration")
    found = Config.read(file).settings()
    if isinstance(weights := found.get("layer_budget"), tuple):
        found["layer_budget"] = list(weights)
    if "kv_bits" in found:
        found["kv_bits"] = str(found["kv_bits"])
    if request.keep_ratio is not None:
        found.pop("budget", None)
    named = request.names_policy or "policy" in found
    return replace(
        request, **{name: value for name, value in found.items() if _open(request, name)}, names_policy=named
    )


def _open(request: Request, name: str) -> bool:
    """Whether the command line says nothing about a setting."""
    if name == "policy":
        return not request.names_policy
    given: Any = getattr(request, name)
    return given is None or (name == "dtype" and given == "auto")
