"""A load and the devices that are to bear it, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvkeep.errors import CapacityError, InputError
from kvkeep.planning.plan import Plan
from kvkeep.policies.registry import spec
from kvkeep_lab.fleet.load import FleetLoad
from kvkeep_lab.fleet.paged import STEP_TOKENS
from kvkeep_lab.fleet.steps import Fitted

MOST_DEVICES = 10**6
BUS, DISK = 25e9, 2e9
"""Bytes per second between rows and main memory, and between main memory and the disk, unless given."""

FIRST_TOKEN_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """A load, and the devices that are to bear it.

    Attributes:
        plan: the model, its cache, and the memory of a device.
        load: what comes.
        steps: measured steps of kvkeep; ``None``: the limits of the plan, which then has a bandwidth.
        compute: operations per second of a device, see `Limits.of`.
        chunk: prompt tokens that are read in one run; ``None``: a whole prompt.
        decode_every: prompt tokens for which every running row gets a token; ``None``: the engine's choice.
        device: type of the devices, ``cpu`` or ``cuda``.
        rows: of a device; ``None``: all that fit.
        devices: their number; ``None``: as few as the limits allow.
        first_token, per_token: the most seconds to the first token, and per token after it, in 99 % of the answers.
        host_memory: bytes of main memory of a device for idle conversations; ``None``: as many as there are.
        bus, disk: bytes per second.

    Raises:
        InputError: a number is out of range, or the plan lacks what a simulation needs.
        CapacityError: the policy evicts nothing, and conversations are longer than the budget.
    """

    plan: Plan
    load: FleetLoad
    steps: Fitted | None = None
    compute: float | None = None
    chunk: int | None = None
    decode_every: int | None = None
    device: str = "cuda"
    rows: int | None = None
    devices: int | None = None
    first_token: float = FIRST_TOKEN_S
    per_token: float | None = None
    host_memory: int | None = None
    bus: float = BUS
    disk: float = DISK

    def __post_init__(self) -> None:
        if self.plan.memory is None:
            raise InputError("A fleet needs the `memory` of a device, e.g. 80GB.")
        if self.steps is None and self.plan.bandwidth is None:
            raise InputError("A fleet needs the time of a step: give the `bandwidth` of a device, or measured `steps`.")
        for name in ("compute", "first_token", "per_token", "bus", "disk"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"`{name}={value:g}` is not above 0.")
        for name in ("rows", "devices", "decode_every"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MOST_DEVICES:
                raise InputError(f"`{name}={value}` is outside 1 … {MOST_DEVICES}.")
        setting, longest = self.plan.setting, max(talk.total for talk in self.load.pool)
        if not setting.policy.evicts and longest > setting.budget:
            raise CapacityError(
                f"{spec(setting.policy)} never evicts, and a conversation of {longest} tokens is longer than the "
                f"budget of {setting.budget}. Give `budget={longest}`, or a policy that evicts."
            )

    @property
    def memory(self) -> int:
        """Return the bytes of a device's memory."""
        assert self.plan.memory is not None
        return self.plan.memory

    @property
    def row_count(self) -> int:
        """Return the rows of a device.

        Raises:
            InputError: more rows are asked for than fit.
        """
        most = self.plan.bounded.most_rows(self.memory)
        if self.rows is not None and self.rows > most:
            raise InputError(f"`rows={self.rows}` do not fit into the `memory` of a device; {most} do.")
        return most if self.rows is None else self.rows

    @property
    def paged_tokens(self) -> int:
        """Return the most tokens of a step of the paged cache."""
        return self.chunk or STEP_TOKENS
