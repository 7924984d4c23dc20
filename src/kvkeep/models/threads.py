"""How many threads a model runs with on a CPU.

Threads of one product wait for each other. That costs more than it saves if a product takes microseconds, as in a
small model, or if other programs hold the cores. Importing this module imports no torch.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kvkeep.errors import InputError

if TYPE_CHECKING:
    from torch import nn

VARIABLE = "KVKEEP_THREADS"
SMALL_BYTES = 64 * 2**20
"""Weights of a model for which one thread is chosen. A guess: only a busy machine was measured (lab/log/kernels.md)."""

_LEAST_S = 0.5
"""Seconds after which it can be told how busy other programs are."""


def cores() -> int:
    """Return how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS, Windows
        return os.cpu_count() or 1


def check(number: int | None) -> int | None:
    """Return a number of threads, checked; for ``None`` that of the variable KVKEEP_THREADS, or ``None`` if it is not
    set.

    Raises:
        InputError: the number is below 1 or above the number of cores, or the variable is no number.
    """
    said = f"`threads={number}`"
    if number is None and os.environ.get(VARIABLE):
        text = os.environ[VARIABLE]
        if not re.fullmatch(r"\s*[+-]?[0-9]{1,9}\s*", text):  # int() of very many digits fails
            raise InputError(f"{VARIABLE}={text!r:.40} is not a number of threads; give 1 to {cores()}, or unset it.")
        number = int(text)
        said = f"{VARIABLE}={number}"
    if number is not None and not 1 <= number <= cores():
        raise InputError(
            f"{said} is out of range: this process may use {cores()} of the machine's cores, and more threads "
            f"than cores slow each other down. Give 1 to {cores()}."
        )
    return number


@contextmanager
def restored() -> Iterator[None]:
    """Set torch's number of threads back to what it was, when the context ends."""
    import torch

    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use(model: nn.Module, asked: int | None = None) -> int:
    """Set torch's number of threads, and return it: the number asked for, or else the `advised` one.

    Raises:
        InputError: see `check`.
    """
    import torch

    number = check(asked)
    if number is None:
        number = advised(model)
    torch.set_num_threads(number)
    return number


def advised(model: nn.Module) -> int:
    """Return how many threads suit a model on this machine: one for a small model, fewer than torch's choice if other
    programs are busy.

    OMP_NUM_THREADS is obeyed. A model on another device keeps torch's choice.
    """
    import torch

    most = torch.get_num_threads()
    if os.environ.get("OMP_NUM_THREADS") or any(weight.device.type != "cpu" for weight in model.parameters()):
        return most
    from kvkeep.models.quantized_weights import weight_bytes

    return choose(weight_bytes(model), most, _load())


def choose(weight_bytes: int, most: int, load: float) -> int:
    """Choose a number of threads: one for a small model; otherwise ``most`` less the busy cores, at least half of
    ``most``.

    Args:
        weight_bytes: bytes of weights that a step reads.
        most: threads on an idle machine.
        load: cores that other programs keep busy.
    """
    if weight_bytes <= SMALL_BYTES:
        return 1
    # other programs may end soon, and the number is chosen once
    return max(1, most // 2, most - round(load))


def _load() -> float:
    """Return how many cores other programs have kept busy since this module was imported.

    Where the system does not tell, or too little time has passed, return how many cores were busy during the last
    minute, with this program; 0 where that is not known either.
    """
    begun, now = _BEGUN, _busy()
    if begun is not None and now is not None and (passed := now.time - begun.time) >= _LEAST_S:
        return max(0.0, (now.system - begun.system) - (now.own - begun.own)) / passed
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows
        return 0.0


class _Busy(NamedTuple):
    """Seconds of the clock, and seconds that all cores together were busy: for all programs, and for this one."""

    time: float
    system: float
    own: float


def _busy() -> _Busy | None:
    """Return for how many seconds all cores have been busy so far, for all programs and for this one, and the time of
    the clock; ``None`` where the system does not count.

    Programs of low priority (nice) are left out, since they make room.
    """
    try:
        # the first line is of all cores: user, nice, system, idle, iowait, then times of interrupts
        user, _, system, _, _, *interrupts = map(int, _COUNTS.read_text().split(maxsplit=8)[1:8])
        ticks = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):  # not Linux, or not this form
        return None
    return _Busy(time.monotonic(), (user + system + sum(interrupts)) / ticks, sum(os.times()[:4]))


_COUNTS = Path("/proc/stat")
_BEGUN = _busy()
