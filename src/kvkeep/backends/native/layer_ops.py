"""What a decoder layer does before and behind its attention, in the kernel; ``None`` if the kernel cannot do it.

`Before` and `Behind` check and pack a layer's weights once, and are told the tokens with each call. Whoever keeps them
compares `places`: the kernel reads the weights where they lay.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from kvkeep.backends.native.checks import TYPES
from kvkeep.backends.native.small_ops import fits, library_for, matches, most_rows

_BEFORE = struct.Struct("6q q2d 12q q q2d q2d 4q")
_BEHIND = struct.Struct("8q 16q q2d")

Place: TypeAlias = tuple[int, torch.device, torch.dtype, torch.Size, tuple[int, ...]] | type
"""An address, and what lies there: device, dtype, shape and strides. Of what is no plain parameter, its type."""


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


def places(weights: Iterable[object]) -> list[Place]:
    """Where weights lie."""
    return [
        (one.data_ptr(), one.device, one.dtype, one.shape, one.stride()) if type(one) is nn.Parameter else type(one)
        for one in weights
    ]


class Before:
    """Query, key and value of the norm of a layer's input, query and key rotated.

    Args:
        norm: of the rows.
        layers: of queries, keys and values.
        each: norms of the heads of queries and of keys; ``None``: there is none.
        dim: number of dims of a head, of which the first half is paired with the second.
    """

    def __init__(self, norm: Norm, layers: Sequence[nn.Linear], each: Sequence[Norm | None], dim: int) -> None:
        like, width = norm.weight, len(norm.weight)
        outputs = [layer.out_features for layer in layers]
        self._is_known = (
            (dim % 2 == 0 and outputs[1] == outputs[2])  # else heads of values have another number of dims
            and _is_norm(norm, like, width)
            and all(head is None or _is_norm(head, like, dim) for head in each)
            and all(fits(layer, like, width) and layer.out_features % dim == 0 for layer in layers)
        )
        self._dtype, self._width, self._dim = like.dtype, width, dim
        self._heads = [n // dim for n in outputs]
        self._norm, (self._query, self._key, self._value) = _scaled(norm), map(_weights, layers)
        self._rest = dim, *_scaled(each[0]), *_scaled(each[1])

    def __call__(
        self, x: Float[Tensor, "B 1 width"], angles: tuple[Float[Tensor, "_B _T _D"], Float[Tensor, "_B _T _D"]]
    ) -> tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]] | None:
        """Query, key and value.

        Args:
            x: a token per row.
            angles: cosines and sines of the rows' positions, each ``(B, 1, D)`` or ``(1, 1, D)``.
        """
        library, (B, T, width), (cosines, sines), D = library_for(x), x.shape, angles, self._dim
        if library is None or not self._is_known or x.dtype != self._dtype or width != self._width or T != 1:
            return None
        if most_rows(x.dtype) < B or not _turns(cosines, x, D) or not _turns(sines, x, D):
            return None
        query, key, value = (x.new_empty((B, heads, 1, D)) for heads in self._heads)
        scratch = torch.empty_like(x)
        packed = _BEFORE.pack(
            *(B, width, torch.get_num_threads(), TYPES[x.dtype], x.data_ptr(), scratch.data_ptr()),
            *self._norm,
            *(*self._query[:2], query.data_ptr(), self._query[2]),
            *(*self._key[:2], key.data_ptr(), self._key[2]),
            *(*self._value[:2], value.data_ptr(), self._value[2]),
            *self._rest,
            *(cosines.data_ptr(), sines.data_ptr(), _row(cosines), _row(sines)),
        )
        return None if library.kvkeep_before(packed) else (query, key, value)


class Behind:
    """``y + down(silu(gate(n)) * up(n))`` with ``y = x + output(attention)`` and ``n`` the norm of ``y``.

    Args:
        output: the projection of attention.
        norm: of the sum.
        gate: half of the feed-forward layer's first product.
        up: the other half.
        down: the feed-forward layer's second product.
    """

    def __init__(self, output: nn.Linear, norm: Norm, gate: nn.Linear, up: nn.Linear, down: nn.Linear) -> None:
        like, width, inner = norm.weight, len(norm.weight), gate.out_features
        self._dtype, self._width, self._inner, self._attended = like.dtype, width, inner, output.in_features
        self._is_known = (
            (output.out_features == width and up.out_features == inner and down.out_features == width)
            and _is_norm(norm, like, width)
            and fits(output, like, self._attended)
            and (fits(gate, like, width) and fits(up, like, width) and fits(down, like, inner))
        )
        within = [number for layer in (output, gate, up) for number in (*_weights(layer)[:2], 0, _weights(layer)[2])]
        self._within, self._down, self._norm = within, _weights(down), _scaled(norm)

    def __call__(
        self, x: Float[Tensor, "B 1 width"], attention: Float[Tensor, "_B _T _inner"]
    ) -> Float[Tensor, "B 1 width"] | None:
        """The layer's output.

        Args:
            x: the layer's input.
            attention: what the heads of each row put out.
        """
        library, (B, T, width) = library_for(x), x.shape
        if library is None or not self._is_known or x.dtype != self._dtype or width != self._width or T != 1:
            return None
        if most_rows(x.dtype) < B or library_for(attention) is None or attention.dtype != x.dtype:
            return None
        if attention.shape != (B, 1, self._attended):
            return None
        scratch, out = x.new_empty(B * (2 * width + self._inner)), torch.empty_like(x)
        packed = _BEHIND.pack(
            *(B, width, torch.get_num_threads(), TYPES[x.dtype]),
            *(x.data_ptr(), attention.data_ptr(), self._attended, scratch.data_ptr()),
            *self._within,
            *(*self._down[:2], out.data_ptr(), self._down[2]),
            *self._norm,
        )
        return None if library.kvkeep_behind(packed) else out


def _weights(layer: nn.Linear) -> tuple[int, int, int]:
    """Addresses of the weights and of the bias, and the number of outputs."""
    return _address(layer.weight), _address(layer.bias), layer.out_features


def _scaled(norm: Norm | None) -> tuple[int, float, float]:
    return (0, 0.0, 0.0) if norm is None else (_address(norm.weight), norm.epsilon, norm.plus)


def _address(weight: Tensor | None) -> int:
    """Where a weight lies; 0 if there is none, or none that the kernel can read."""
    return weight.data_ptr() if type(weight) is nn.Parameter else 0


def _is_norm(norm: Norm, like: Tensor, width: int) -> bool:
    return norm.weight.dtype in TYPES and matches(norm.weight, like, (width,))


def _turns(angles: Tensor, x: Tensor, dim: int) -> bool:
    """Whether these are angles of the rows of ``x``, dense in the last axis."""
    if type(angles) is not Tensor or not angles.is_cpu or angles.dtype != x.dtype or angles.ndim != 3:
        return False
    shape = angles.shape
    return shape[0] in {1, x.shape[0]} and shape[1] == 1 and shape[2] == dim and angles.stride(-1) == 1


def _row(angles: Tensor) -> int:
    return angles.stride(0) if angles.shape[0] > 1 else 0
