"""Where the kernels run: on CUDA where Triton is installed, on a CPU only through its interpreter, for tests."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from dataclasses import dataclass

import torch
from torch import Tensor

INTERPRET = "TRITON_INTERPRET"
"""Triton's own environment variable: ``1``, set before its first import, runs kernels in numpy, slowly."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kernels:
    """Where the kernels run.

    Attributes:
        devices: types of device: ``cuda``, ``cpu``.
        detail: in words, with the reason where there are none.
    """

    devices: frozenset[str]
    detail: str


@functools.cache
def kernels() -> Kernels:
    """Look once at what is installed."""
    if importlib.util.find_spec("triton") is None:
        return Kernels(frozenset(), "Triton is not installed; pip install kvkeep[gpu]")
    if interprets():
        return Kernels(frozenset({"cuda", "cpu"}), "interpreted, slow: for tests")
    return Kernels(frozenset({"cuda"}), f"on CUDA, compiled when first used; on a CPU only with {INTERPRET}=1")


def interprets() -> bool:
    """Whether Triton runs kernels in its interpreter."""
    return os.environ.get(INTERPRET, "0") == "1"


def runs(*tensors: Tensor) -> bool:
    """Whether kernels take these: ordinary tensors, dense in their last axis, that nobody differentiates."""
    if tensors[0].device.type not in kernels().devices or torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if type(tensor) is not Tensor or (tensor.stride(-1) != 1 and tensor.shape[-1] > 1):
            return False
        if tensor.requires_grad and torch.is_grad_enabled():
            return False
    return True


@functools.cache
def notice(reason: str) -> None:
    """Say once why torch does the work on a device that has kernels."""
    _log.warning("No kernel for this attention, torch does it, more slowly: %s.", reason)
