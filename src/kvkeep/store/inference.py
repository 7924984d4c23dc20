"""Slots are ordinary tensors, written in place: outside autograd and outside of inference mode."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

_P = ParamSpec("_P")
_R = TypeVar("_R")


def inference(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Keep the slots out of autograd's graph, which would hold every past step, and out of inference mode.

    Tensors made in ``torch.inference_mode`` cannot be written outside of it; slots that are ordinary tensors can be
    used from both.
    """

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)  # as it should be; entering the contexts takes longer than an eviction
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return wrapper
