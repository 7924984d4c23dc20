"""Backends do the work of a layer's step. `choose` alone decides which one, for a device and a dtype.

`base` says what a backend does. `reference` is the definition that all others are tested against. `layer_ops` are the
operators between two attentions, for backends that have them.
"""

from __future__ import annotations

import functools
import os

import torch

from kvkeep.backends.base import Added, AttentionInputs, Backend, FusedStep, Repeat, Ring, SecondReading, SlotLimits
from kvkeep.backends.copying import in_codes, in_pool
from kvkeep.backends.native import NativeBackend, layer_ops, native
from kvkeep.backends.native.bindings import TYPES
from kvkeep.backends.quantized_tensor import QuantizedTensor
from kvkeep.backends.reference import ReferenceBackend
from kvkeep.backends.torch import TorchBackend
from kvkeep.backends.triton import TritonBackend, launch
from kvkeep.errors import InputError

__all__ = [
    "KINDS",
    "SWITCH",
    "Added",
    "AttentionInputs",
    "Backend",
    "FusedStep",
    "QuantizedTensor",
    "Repeat",
    "Ring",
    "SecondReading",
    "SlotLimits",
    "choose",
    "in_codes",
    "in_pool",
    "layer_ops",
    "missing_kernel",
    "why",
]

SWITCH = "KVKEEP_BACKEND"
"""Environment variable: the name of the backend to use; by default the fastest one that can run."""

KINDS: dict[str, type[Backend]] = {
    kind.name: kind for kind in (NativeBackend, TritonBackend, TorchBackend, ReferenceBackend)
}
"""Every backend by its name. A backend that is added here can be forced, but `choose` never takes it by itself."""


def choose(device: torch.device, dtype: torch.dtype) -> Backend:
    """Return the backend for a device and a model's dtype: the one that the environment variable names, else the
    fastest. There is one object of each kind.

    Raises:
        InputError: the environment variable names no backend, or one that cannot run there.
    """
    forced = os.environ.get(SWITCH)
    return _made(KINDS[_checked(forced, device.type) if forced else _fastest(device.type, dtype)])


def why(device: torch.device, dtype: torch.dtype) -> str:
    """Return in words why `choose` takes the backend that it takes: the variable that names it, or which kernel there
    is, or why there is none.

    Raises:
        InputError: see `choose`.
    """
    name = choose(device, dtype).name
    if os.environ.get(SWITCH):
        return f"{SWITCH}={name}"
    details = {"native": native().detail, "triton": launch.kernels().detail}
    if name in details:
        return details[name]
    if device.type == "cpu" and native().library is not None:
        known = ", ".join(str(kind).removeprefix("torch.") for kind in TYPES)
        return f"the native kernel reads {known}, and no {str(dtype).removeprefix('torch.')}"
    # torch works, so there is no kernel, and its detail says why
    return native().detail if device.type == "cpu" else launch.kernels().detail


def missing_kernel(device: torch.device) -> str | None:
    """Return a sentence on the native kernel that is missing on a CPU, and on what to do.

    Return ``None`` if it is there, or if the user has chosen a backend.
    """
    if device.type != "cpu" or os.environ.get(SWITCH) or native().library is not None:
        return None
    return (
        "There is no native kernel for this CPU, so torch computes in its place and each token takes several times as "
        f"long: {native().detail}. Install a C++ compiler such as g++, with which the kernel is compiled at first use, "
        f"or a wheel of kvkeep for this system, which brings it. {SWITCH}=torch silences this line."
    )


@functools.cache
def _made(kind: type[Backend]) -> Backend:
    """Return the backend of a kind, the same object at every call."""
    # one object per kind, since a backend may cache what it has compiled
    return kind()


def _fastest(device: str, dtype: torch.dtype) -> str:
    """Return the name of the backend whose compiled kernels run on this type of device, on a CPU also in this dtype;
    ``torch`` if there are none.
    """
    if device == "cpu":
        return "native" if dtype in TYPES and native().library is not None else "torch"
    return "triton" if device in launch.kernels().devices else "torch"


def _checked(name: str, device: str) -> str:
    """Return the given name of a backend if there is such a backend and it can run on this type of device.

    Raises:
        InputError: the backend cannot run there, or there is no backend of this name.
    """
    if name not in KINDS:
        raise InputError(f"{SWITCH}={name!r} is no backend. There are {', '.join(sorted(KINDS))}.")
    if name == "native" and (device != "cpu" or native().library is None):
        reason = native().detail if device == "cpu" else "it runs on CPUs only"
        raise InputError(f"{SWITCH}=native cannot run on {device}: {reason}.")
    if name == "triton" and device not in launch.kernels().devices:
        raise InputError(f"{SWITCH}=triton cannot run on {device}: {launch.kernels().detail}.")
    return name
