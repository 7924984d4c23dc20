"""What a decoder layer does before and behind its attention, in the kernel; ``None`` if the kernel cannot do it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvkeep.backends.native.checks import TYPES
from kvkeep.backends.native.small_ops import fits, library_for, matches, most_rows, one

_BEFORE = struct.Struct("4q 2q")
_SCALED = struct.Struct("q 2d")
_TURN = struct.Struct("4q")
_BEHIND = struct.Struct("4q 4q")


class Norm(NamedTuple):
    """A norm by the root mean square: the weight, plus ``plus``, times a row over its root mean square.

    Attributes:
        weight: ``(width,)``.
        epsilon: is added to the mean of the squares.
        plus: is added to the weight.
    """

    weight: Float[Tensor, " width"]
    epsilon: float
    plus: float


def before(
    x: Float[Tensor, "B 1 width"],
    norm: Norm,
    layers: Sequence[nn.Linear],
    each: Sequence[Norm | None],
    angles: tuple[Float[Tensor, "_B _T _D"], Float[Tensor, "_B _T _D"]],
) -> tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]] | None:
    """Query, key and value of the norm of ``x``, with query and key rotated.

    Args:
        x: a token per row.
        norm: of the rows.
        layers: of queries, keys and values.
        each: norms of the heads of queries and of keys; ``None``: there is none.
        angles: cosines and sines of the rows' positions, each ``(B, 1, D)`` or ``(1, 1, D)``. The first half of the
            dims is paired with the second.
    """
    library, (B, _, width), (cosines, sines) = library_for(x), x.shape, angles
    D = cosines.shape[-1]
    if library is None or most_rows(x.dtype) < B or D % 2 or not all(_turns(part, x, D) for part in angles):
        return None
    if not matches(norm.weight, x, (width,)) or not all(head is None or matches(head.weight, x, (D,)) for head in each):
        return None
    if not all(fits(layer, x, width) and layer.out_features % D == 0 for layer in layers):
        return None
    if layers[1].out_features != layers[2].out_features:  # heads of values have another number of dims
        return None
    outs = [x.new_empty((B, layer.out_features // D, 1, D)) for layer in layers]
    scratch = torch.empty_like(x)
    packed = _BEFORE.pack(
        *(B, width, torch.get_num_threads(), TYPES[x.dtype], x.data_ptr(), scratch.data_ptr()),
    )
    packed += _scaled(norm) + b"".join(one(layer, out.data_ptr()) for layer, out in zip(layers, outs, strict=True))
    packed += struct.pack("q", D) + b"".join(map(_scaled, each))
    packed += _TURN.pack(cosines.data_ptr(), sines.data_ptr(), _row(cosines), _row(sines))
    return None if library.kvkeep_before(packed) else (outs[0], outs[1], outs[2])


def behind(
    x: Float[Tensor, "B 1 width"],
    attention: Float[Tensor, "_B _T _inner"],
    output: nn.Linear,
    norm: Norm,
    gate: nn.Linear,
    up: nn.Linear,
    down: nn.Linear,
) -> Float[Tensor, "B 1 width"] | None:
    """``y + down(silu(gate(n)) * up(n))`` with ``y = x + output(attention)`` and ``n`` the norm of ``y``."""
    library, (B, _, width), inner = library_for(x), x.shape, gate.out_features
    if library is None or most_rows(x.dtype) < B or library_for(attention) is None or attention.dtype != x.dtype:
        return None
    if not (
        fits(output, x, attention.shape[-1]) and output.out_features == width and matches(norm.weight, x, (width,))
    ):
        return None
    if not (fits(gate, x, width) and fits(up, x, width) and fits(down, x, inner)):
        return None
    if up.out_features != inner or down.out_features != width or attention.shape[:-1] != x.shape[:-1]:
        return None
    scratch, out = x.new_empty(B * (2 * width + inner)), torch.empty_like(x)
    packed = _BEHIND.pack(
        *(B, width, torch.get_num_threads(), TYPES[x.dtype]),
        *(x.data_ptr(), attention.data_ptr(), attention.shape[-1], scratch.data_ptr()),
    )
    packed += one(output, 0) + one(gate, 0) + one(up, 0) + one(down, out.data_ptr()) + _scaled(norm)
    return None if library.kvkeep_behind(packed) else out


def _scaled(norm: Norm | None) -> bytes:
    return _SCALED.pack(0, 0.0, 0.0) if norm is None else _SCALED.pack(norm.weight.data_ptr(), *norm[1:])


def _turns(angles: Tensor, x: Tensor, dim: int) -> bool:
    """Whether these are angles of the rows of ``x``, dense in the last axis."""
    if type(angles) is not Tensor or not angles.is_cpu or angles.dtype != x.dtype or angles.ndim != 3:
        return False
    return angles.shape[0] in {1, len(x)} and angles.shape[1:] == (1, dim) and angles.stride(-1) == 1


def _row(angles: Tensor) -> int:
    return angles.stride(0) if len(angles) > 1 else 0
