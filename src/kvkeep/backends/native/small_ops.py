"""The operators between two attentions, in the kernel; each returns ``None`` if the kernel cannot do it.

Weights stay as torch has them. Products are for a few rows only: with many, torch's are faster. On processors without
products of half-precision numbers torch takes up to ten times as long for them as in float32, so there they are for
more rows, and with still more the weights are widened.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from kvkeep.backends.native.build import native
from kvkeep.backends.native.checks import TYPES

MOST_ROWS = 16
"""The largest number of rows of a product, where torch's products are as fast as the processor."""

MOST_ROWS_OF_SLOW = 128
"""The same for dtypes in which they are not."""

WIDE_BYTES = 2**23
"""Bytes of weights that exist in float32 at a time."""

_SUPPORT = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}

_HEAD = struct.Struct("4q 2q")
_ONE = struct.Struct("4q")
_NORM = struct.Struct("4q 3q 2d")
_MOST_WEIGHTS = 3
_NONE = bytes(_ONE.size)


@functools.cache
def slow(dtype: torch.dtype) -> bool:
    """Whether torch multiplies numbers of this dtype one by one on this processor: half precision without AVX-512."""
    supported = getattr(torch.ops.mkldnn, _SUPPORT.get(dtype, ""), None)
    return supported is not None and not supported()


def widened(x: Float[Tensor, "*n in"], layer: nn.Linear) -> Float[Tensor, "*n out"] | None:
    """The output of a linear layer for many rows in a `slow` dtype, with its weights in float32 piece by piece."""
    if not slow(x.dtype) or library_for(x) is None or not fits(layer, x, x.shape[-1]):
        return None
    wide, out = x.float(), x.new_empty((*x.shape[:-1], layer.out_features))
    step = max(1, WIDE_BYTES // (4 * layer.in_features))
    for first in range(0, layer.out_features, step):
        part = slice(first, first + step)
        bias = None if layer.bias is None else layer.bias[part].float()
        out[..., part] = linear(wide, layer.weight[part].float(), bias)
    return out


def products(x: Float[Tensor, "*n in"], layers: Sequence[nn.Linear]) -> list[Tensor] | None:
    """The outputs of up to three linear layers for the same few rows."""
    library = library_for(x)
    if library is None or not all(fits(layer, x, x.shape[-1]) for layer in layers):
        return None
    rows = x.numel() // x.shape[-1]
    if rows > most_rows(x.dtype) or len(layers) > _MOST_WEIGHTS:
        return None
    outs = [x.new_empty((*x.shape[:-1], layer.out_features)) for layer in layers]
    packed = _head(x, rows, len(layers))
    packed += b"".join(one(layer, out.data_ptr()) for layer, out in zip(layers, outs, strict=True))
    failed = library.kvkeep_products(packed + _NONE * (_MOST_WEIGHTS - len(layers)))
    return None if failed else outs


def gated(x: Float[Tensor, "*n in"], gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> Float[Tensor, "*n out"] | None:
    """``down(silu(gate(x)) * up(x))`` of a few rows."""
    library, width, inner = library_for(x), x.shape[-1], gate.out_features
    if library is None or not (fits(gate, x, width) and fits(up, x, width) and fits(down, x, inner)):
        return None
    rows = x.numel() // width
    if rows > most_rows(x.dtype) or up.out_features != inner:
        return None
    between, out = x.new_empty((rows, inner)), x.new_empty((*x.shape[:-1], down.out_features))
    packed = _head(x, rows, between.data_ptr()) + one(gate, 0) + one(up, 0) + one(down, out.data_ptr())
    return None if library.kvkeep_gated(packed) else out


def norm(
    x: Float[Tensor, "*n width"], weight: Float[Tensor, " m"], epsilon: float, *, plus: float
) -> Float[Tensor, "*n width"] | None:
    """Rows over their root mean square, times the weight plus ``plus``."""
    library, width = library_for(x), x.shape[-1]
    if library is None or not matches(weight, x, (width,)):
        return None
    out = torch.empty_like(x)
    packed = _NORM.pack(
        *(x.numel() // width, width, torch.get_num_threads(), TYPES[x.dtype]),
        *(x.data_ptr(), weight.data_ptr(), out.data_ptr()),
        *(epsilon, plus),
    )
    return None if library.kvkeep_norm(packed) else out


def most_rows(dtype: torch.dtype) -> int:
    """The largest number of rows of a product in this dtype."""
    return MOST_ROWS_OF_SLOW if slow(dtype) else MOST_ROWS


def _head(x: Tensor, rows: int, last: int) -> bytes:
    return _HEAD.pack(rows, x.shape[-1], torch.get_num_threads(), TYPES[x.dtype], x.data_ptr(), last)


def one(layer: nn.Linear, out: int) -> bytes:
    """A linear layer, and the address of its output, as the kernel takes them."""
    bias = layer.bias
    return _ONE.pack(layer.weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out, layer.weight.shape[0])


def library_for(x: Tensor) -> ctypes.CDLL | None:
    """The kernel, if rows are dense in main memory, and nobody traces, differentiates or casts."""
    if type(x) is not Tensor or not x.is_cpu or x.dtype not in TYPES or not x.is_contiguous() or not x.numel():
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    return native().library


def fits(layer: nn.Linear, x: Tensor, width: int) -> bool:
    """Whether a layer takes rows of this width, in the dtype of ``x``."""
    outputs = layer.out_features
    if not matches(layer.weight, x, (outputs, width)):
        return False
    return layer.bias is None or matches(layer.bias, x, (outputs,))


def matches(weight: Tensor, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether the kernel can read a weight beside ``x``, and it has this shape."""
    if type(weight) is not nn.Parameter or not weight.is_cpu or weight.dtype != x.dtype:
        return False
    return weight.shape == shape and weight.is_contiguous()
