"""The settings of a job, and those of ``--config``, where the command line gives none. It imports torch."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

from kvkeep.cli.files import refuse_device
from kvkeep.cli.generate.request import Request
from kvkeep.cli.memories import Memory
from kvkeep.config import NAME, Config
from kvkeep.engine.sampling_params import Sampling
from kvkeep.errors import InputError
from kvkeep.kv.slot_codec import check_bits
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import spec


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


def settings_of(
    request: Request, policy: Policy, budget: int, defaults: Sampling, memory: Memory | None
) -> dict[str, object]:
    """The settings on which completions depend, without lines and weights; options at their defaults are left out."""
    options: dict[str, object] = {
        "raw": request.raw,
        "dtype": None if request.dtype == "auto" else request.dtype,
        "load_in": request.load_in,
        "layer_budget": request.layer_budget,
        "head_budget": request.head_budget,
        "kv_bits": check_bits(request.kv_bits),
        "positions": request.positions,
        "prefill_chunk": request.prefill_chunk,
        "pin_system": request.pin_system,
        "guard": request.guard,
        "memory": None if memory is None else memory.digest,
    }
    options |= {name: value for name, value in asdict(defaults).items() if value != getattr(Sampling(), name)}
    always = {"model": request.model or "embedded", "policy": spec(policy), "budget": budget}
    return {**always, **{name: value for name, value in options.items() if value is not None and value is not False}}
