"""Tensors as the numbers and addresses that the kernel takes."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from kvkeep.types import Budget

LAST = 2**31 - 1
"""The largest position: the kernel counts positions in 32 bits."""


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype; a comparison is cheaper than a conversion to the same dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def bounded(value: Budget) -> Budget:
    """The value, limited so that the kernel can subtract it from a position without an overflow."""
    return value.to(torch.int64).clamp(-LAST, LAST) if isinstance(value, Tensor) else max(-LAST, min(value, LAST))


def either(value: int | float | Tensor, dtype: torch.dtype) -> tuple[Tensor | None, int | float]:
    """A dense tensor of this dtype and 0, or ``None`` and one number for all."""
    return (value.to(dtype).contiguous(), 0) if isinstance(value, Tensor) else (None, value)


def pointer(tensor: Tensor | None) -> int:
    """The tensor's address; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def strides(limits: Int[Tensor, "B #Hk"]) -> tuple[int, int]:
    """From row to row and from head to head; the latter is 0 where one number is for all heads."""
    return limits.stride(0), limits.stride(1) if limits.shape[1] > 1 else 0
