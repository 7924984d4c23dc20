"""The options of ``kvkeep fleet``, and how they are read."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kvkeep.cli.options import JSON, option, parse_bytes
from kvkeep.cli.plan import PlanningOptions, parse_speed
from kvkeep.errors import InputError

LOAD, DEVICES = "What comes", "Devices"
_LOAD = ("rate", "prompt_tokens", "max_new_tokens", "sessions", "turns", "between", "input", "requests", "seed")
_MACHINES = ("devices", "first_token", "per_token", "steps", "compute", "host_memory", "bus", "disk")

_COMPUTE = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([GTP])(?:FLOPS?/s|FLOPS)\s*", re.ASCII)
_PREFIXES = {"G": 1e9, "T": 1e12, "P": 1e15}


def parse_compute(text: str, option: str) -> float:
    """Read operations per second: ``400TFLOP/s``.

    Raises:
        InputError: the text is not a number with a unit, or the speed is not above 0.
    """
    found = _COMPUTE.fullmatch(text)
    speed = float(found[1]) * _PREFIXES[found[2]] if found else 0.0
    if not 0 < speed < 1e21:
        raise InputError(f"{option} {text!r} is no number of operations per second; write e.g. 400TFLOP/s.")
    return speed


@dataclass(frozen=True, kw_only=True)
class FleetOptions(PlanningOptions):
    """Show how many devices bear a load, and what waits where, before one is bought.

    Each device is simulated step by step, under kvkeep and under a full cache in pages. --memory and --bandwidth are
    those of each device. Only the model's configuration is read: a hub name, a folder or a config.json is enough.
    """

    rate: float | None = option("Users that come per second, at random.", default=None, metavar="RATE", group=LOAD)
    prompt_tokens: str | None = option(
        "Of a message: 128; 64-512: all equally likely; ~200: exponential with this mean. Default: 128.",
        default=None,
        metavar="LENGTH",
        group=LOAD,
    )
    max_new_tokens: str | None = option(
        "The same, of an answer. Default: 64.", "-n", default=None, metavar="LENGTH", group=LOAD
    )
    sessions: str | None = option(
        "The same: conversations of a user. Default: 1.", default=None, metavar="LENGTH", group=LOAD
    )
    turns: str | None = option(
        "The same: messages of a conversation. Default: 1.", default=None, metavar="LENGTH", group=LOAD
    )
    between: str | None = option(
        "The same: between an answer and the next message. Default: 60.", default=None, metavar="SECONDS", group=LOAD
    )
    input: str | None = option(
        'JSONL with lengths, {"prompt_tokens": 512, "max_tokens": 64}, or a trace, with "at" in seconds and "session" '
        "as well; the output of bench-server is one.",
        "-i",
        default=None,
        metavar="FILE",
        group=LOAD,
    )
    requests: int | None = option(
        "Messages that are simulated on a device. Default: 2000.", default=None, metavar="N", group=LOAD, rare=True
    )
    seed: int | None = option("Of times and lengths. Default: 0.", default=None, metavar="N", group=LOAD, rare=True)
    rows: int | None = option(
        "Rows of each device. Default: all that fit.", default=None, metavar="N", group=DEVICES, rare=True
    )
    devices: int | None = option("Default: as few as keep the two limits.", default=None, metavar="N", group=DEVICES)
    first_token: float | None = option(
        "Until the first token, in 99 % of the answers. Default: 5.", default=None, metavar="SECONDS", group=DEVICES
    )
    per_token: float | None = option(
        "Per token after it, in 99 %. Default: no limit.", default=None, metavar="SECONDS", group=DEVICES
    )
    steps: str | None = option(
        "Measured steps, as bench/fleet.py prints them. Default: the limits of --bandwidth and --compute.",
        default=None,
        metavar="FILE",
        group=DEVICES,
        rare=True,
    )
    compute: float | None = option(
        "Arithmetic, e.g. 400TFLOP/s. Default: an estimate from --bandwidth.",
        read=parse_compute,
        default=None,
        metavar="SPEED",
        group=DEVICES,
        rare=True,
    )
    host_memory: int | None = option(
        "Main memory for idle conversations; others lie on the disk. Default: for all.",
        read=parse_bytes,
        default=None,
        metavar="SIZE",
        group=DEVICES,
        rare=True,
    )
    bus: float | None = option(
        "Between rows and main memory. Default: 25GB/s.",
        read=parse_speed,
        default=None,
        metavar="SPEED",
        group=DEVICES,
        rare=True,
    )
    disk: float | None = option(
        "Between main memory and the disk. Default: 2GB/s.",
        read=parse_speed,
        default=None,
        metavar="SPEED",
        group=DEVICES,
        rare=True,
    )
    json: bool = option(JSON)

    def load(self) -> dict[str, Any]:
        """Return the options of the load, as they were typed."""
        return {name: getattr(self, name) for name in _LOAD}

    def machines(self) -> dict[str, Any]:
        """Return what was said about the devices: arguments of `kvkeep_lab.fleet.setup.Fleet`."""
        given = {name: getattr(self, name) for name in _MACHINES}
        return {name: value for name, value in given.items() if value is not None}
