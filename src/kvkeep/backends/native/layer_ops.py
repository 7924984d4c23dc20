"""The operators between two attentions, in the native kernel; each returns ``None`` if the kernel cannot do it.

`products`, `gated` and `norm` are single operators. `Before` and `Behind` are all that a decoder layer does before and
behind its attention: they check and pack the layer's weights once, and are told the tokens with each call. `ModelStep`
is a step of all layers. Whoever keeps one of these compares the weights' addresses, since the kernel reads the weights
where they lay.

Weights stay as torch has them, or are a `QuantizedTensor`. Products are for a few rows only: with many, torch's are
faster, for which quantized weights are unpacked. On processors without products of half-precision numbers torch takes
up to ten times as long for them as in float32, so there they are for more rows, and with still more the weights are
widened.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, TypeAlias, TypeGuard

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from kvkeep.backends.native.bindings import TYPES
from kvkeep.backends.native.build import native
from kvkeep.backends.native.ops import NativeRepeat
from kvkeep.backends.quantized_tensor import LANES, QuantizedTensor, implements

MOST_ROWS, MOST_ROWS_OF_HALVES_BESIDE_TILES = 32, 16
"""The largest number of rows of a product, where torch's products are as fast as the processor; and the same in half
precision, where the processor has tiles of it (AMX)."""

MOST_ROWS_OF_SLOW = 128
"""The same for dtypes in which they are not."""

MOST_ROWS_OF_BYTES, MOST_ROWS_BESIDE_TILES, MOST_ROWS_WITHOUT_BYTES = 128, 32, 16
"""The same for quantized weights, where the processor multiplies bytes (VNNI), and where it does not. To unpack weights
takes as long as a product with 32 rows, and then torch's is faster by a third; with tiles of halves (AMX), by far."""

MOST_ROWS_IN_TILES = 512
"""The same for quantized weights where the kernel multiplies tiles of bfloat16 numbers itself, and makes each of them
when it is needed. With more rows torch's products make up for writing all weights to memory."""

MOST_ROWS_OF_LOGITS = 128
"""The same for a model's last product, which torch would round to half precision."""

WIDE_BYTES = 2**23
"""Bytes of weights that exist in float32 at a time."""

SILU, GELU, RELU, RELU_SQUARED = ACTIVATIONS = (0, 1, 2, 3)
"""The kernel's activations; GELU is the approximation with tanh."""

# half precision → torch's function that says whether the processor multiplies it
_SUPPORT = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}

# structs of small.h: the heads of Products and Gated, Weights, and Norm with its Scaled
_HEAD = struct.Struct("4q 2q")
_WEIGHTS = struct.Struct("6q")
_NORM = struct.Struct("4q 2q 3q2d")
_NUMBER = struct.Struct("q")
_MOST_WEIGHTS = 3  # of Products
_NO_WEIGHTS = bytes(_WEIGHTS.size)
_NONE = (0,) * 6
"""Fields of weights that are missing."""


@functools.cache
def slow(dtype: torch.dtype) -> bool:
    """Return whether torch is slow at products in this dtype on this processor: half precision without AVX-512."""
    supported = getattr(torch.ops.mkldnn, _SUPPORT.get(dtype, ""), None)
    return supported is not None and not supported()


@functools.cache
def most_rows_of_quantized() -> int:
    """Return the largest number of rows for which the kernel's product with quantized weights is faster on this
    processor than torch's with unpacked ones.
    """
    if not _has("_is_vnni_supported"):
        return MOST_ROWS_WITHOUT_BYTES
    return MOST_ROWS_BESIDE_TILES if _has("_is_amx_tile_supported") else MOST_ROWS_OF_BYTES


@functools.cache
def has_tiles() -> bool:
    """Return whether this processor multiplies tiles of halves (AMX)."""
    return _has("_is_amx_tile_supported")


def _has(name: str) -> bool:
    """Return what the function of this name in ``torch.cpu`` says of the processor; ``False`` if there is none."""
    supported = getattr(torch.cpu, name, None)
    return bool(supported and supported())


def widened(
    x: Float[Tensor, "*n in"], layer: nn.Linear, dtype: torch.dtype | None = None
) -> Float[Tensor, "*n out"] | None:
    """Compute a linear layer in a `slow` dtype for many rows, with its weights in float32 piece by piece.

    Return ``None`` for another dtype or quantized weights, or if the layer does not fit. The output has the dtype of
    ``x`` unless another one is given.
    """
    # no kernel is called here, but under gradients, autocast and traces there is none either: the layer itself computes
    if not slow(x.dtype) or library_for(x) is None or not fits(layer, x, x.shape[-1]):
        return None
    if isinstance(layer.weight, QuantizedTensor):
        return None
    wide, out = x.float(), x.new_empty((*x.shape[:-1], layer.out_features), dtype=dtype)
    step = max(1, WIDE_BYTES // (4 * layer.in_features))
    for first in range(0, layer.out_features, step):
        part = slice(first, first + step)
        bias = None if layer.bias is None else layer.bias[part].float()
        out[..., part] = linear(wide, layer.weight[part].float(), bias)
    return out


class Linear(NamedTuple):
    """What products need of a linear layer."""

    weight: Tensor
    bias: Tensor | None

    @property
    def out_features(self) -> int:
        """Return the number of outputs."""
        return len(self.weight)

    @property
    def in_features(self) -> int:
        """Return the number of inputs."""
        return self.weight.shape[1]


def split(layer: nn.Linear, sizes: Sequence[int]) -> list[Linear] | None:
    """Return a linear layer as several with so many outputs each, in their order, whose weights are views of its own.

    Return ``None`` if the numbers of outputs do not add up to those of the layer, if one is below 1, or if a part of
    quantized weights would begin within a block.
    """
    weight, bias, ends = layer.weight, layer.bias, [*accumulate(sizes)]
    starts = [0, *ends[:-1]]
    if min(sizes) <= 0 or ends[-1] != layer.out_features:
        return None
    if isinstance(weight, QuantizedTensor) and any(start % LANES for start in starts):
        return None
    return [
        Linear(_rows(weight, start, end), None if bias is None else _rows(bias, start, end))
        for start, end in zip(starts, ends, strict=True)
    ]


def _rows(weight: Tensor, start: int, end: int) -> Tensor:
    """Return a view of rows of a weight: a parameter again, or a `QuantizedTensor`, as `is_readable` asks for."""
    if isinstance(weight, QuantizedTensor):
        return weight.rows(start, end)
    return nn.Parameter(weight.detach()[start:end], requires_grad=False)


@implements(linear)
def quantized_linear(
    input: Float[Tensor, "*n in"],  # noqa: A002  torch's name, by which it may be given
    weight: Float[Tensor, "out in"],
    bias: Float[Tensor, " out"] | None = None,
) -> Float[Tensor, "*n out"]:
    """Compute what ``torch.nn.functional.linear`` would with quantized weights or a quantized input. The kernel
    multiplies a few rows with packed weights; for more, or if it cannot, they are unpacked and torch multiplies.
    """
    x = input.dequantize() if isinstance(input, QuantizedTensor) else input
    if not isinstance(weight, QuantizedTensor):
        return linear(x, weight, bias)
    found = products(x.contiguous(), [Linear(weight, bias)])
    if found is not None:
        return found[0]
    # where the dtypes differ, torch refuses them or autocast casts them, as with ordinary weights
    if not slow(x.dtype) or x.dtype != weight.dtype:
        return linear(x, weight.dequantize(), bias)
    # torch is faster in float32 here, see `slow`
    wide = weight.to(torch.float32).dequantize()
    return linear(x.float(), wide, None if bias is None else bias.float()).to(x.dtype)


@implements(embedding)
def quantized_embedding(
    input: Tensor,  # noqa: A002  torch's name, by which it may be given
    weight: QuantizedTensor,
    *_: object,
    **__: object,
) -> Tensor:
    """Return the rows of a quantized table of embeddings for these ids, ``(*ids, columns)``, in the table's dtype; only
    these are unpacked. Other arguments of torch's function concern training.
    """
    return weight.dequantize(input).view(*input.shape, weight.shape[1])


def products(x: Float[Tensor, "*n in"], layers: Sequence[nn.Linear | Linear]) -> list[Tensor] | None:
    """Compute up to three linear layers for the same few rows in the kernel, and return their outputs in the dtype of
    ``x``; ``None`` if it cannot, or if torch is faster for so many rows.
    """
    most = MOST_ROWS_IN_TILES if _unpacks_to_tiles(x.dtype, layers) else most_rows(x.dtype, layers)
    return None if x.numel() > most * x.shape[-1] else _products(x, layers, x.dtype)


def logits(x: Float[Tensor, "*n in"], layer: nn.Linear) -> Float[Tensor, "*n out"] | None:
    """Compute a linear layer with outputs in float32, in which the kernel adds up anyway; ``None`` if it cannot.

    With more than `MOST_ROWS_OF_LOGITS` rows, unless the kernel multiplies tiles, return what `widened` returns. That
    is ``None`` where torch is not slow, and then the caller's torch computes and rounds the logits.
    """
    if x.numel() > MOST_ROWS_OF_LOGITS * x.shape[-1] and not _has_squares(x.dtype):
        return widened(x, layer, torch.float32)
    found = _products(x.contiguous(), [layer], torch.float32)
    return None if found is None else found[0]


def _unpacks_to_tiles(dtype: torch.dtype, layers: Sequence[nn.Linear | Linear]) -> bool:
    """Return whether all weights are quantized, and the kernel multiplies rows of this dtype with tiles that it makes
    of them.
    """
    return all(isinstance(layer.weight, QuantizedTensor) for layer in layers) and _has_squares(dtype)


def _has_squares(dtype: torch.dtype) -> bool:
    """Return whether there is a kernel that multiplies tiles of numbers of this dtype; so far only of bfloat16."""
    library = native().library if dtype is torch.bfloat16 else None
    return library is not None and bool(library.kvkeep_has_squares(b""))


def _products(
    x: Float[Tensor, "*n in"], layers: Sequence[nn.Linear | Linear], dtype: torch.dtype
) -> list[Tensor] | None:
    """Compute up to three linear layers in the kernel, whatever the number of rows, with outputs in ``dtype``: float32
    or that of ``x``. Return ``None`` if it cannot.
    """
    library = library_for(x)
    if library is None or len(layers) > _MOST_WEIGHTS or not all(fits(layer, x, x.shape[-1]) for layer in layers):
        return None
    outs = [x.new_empty((*x.shape[:-1], layer.out_features), dtype=dtype) for layer in layers]
    packed = _head(x, x.numel() // x.shape[-1], len(layers))
    packed += b"".join(_packed(layer, out.data_ptr()) for layer, out in zip(layers, outs, strict=True))
    packed += _NO_WEIGHTS * (_MOST_WEIGHTS - len(layers)) + _NUMBER.pack(dtype is torch.float32)
    return None if library.kvkeep_products(packed) else outs


def gated(
    x: Float[Tensor, "*n in"],
    gate: nn.Linear | Linear,
    up: nn.Linear | Linear | None,
    down: nn.Linear | Linear,
    activation: int = SILU,
) -> Float[Tensor, "*n out"] | None:
    """Compute ``down(activation(gate(x)) * up(x))`` for a few rows, or ``down(activation(gate(x)))`` without ``up``.

    Return ``None`` if the kernel cannot do it, or if torch is faster for so many rows. ``activation`` is one of
    `ACTIVATIONS`.
    """
    library, width, inner = library_for(x), x.shape[-1], gate.out_features
    if library is None or not (_are_inner(gate, up, x, width) and fits(down, x, inner)):
        return None
    rows = x.numel() // width
    if rows > most_rows(x.dtype, _present(gate, up, down)):
        return None
    between, out = x.new_empty((rows, inner)), x.new_empty((*x.shape[:-1], down.out_features))
    packed = _head(x, rows, between.data_ptr()) + _packed(gate, 0)
    packed += (_NO_WEIGHTS if up is None else _packed(up, 0)) + _packed(down, out.data_ptr())
    return None if library.kvkeep_gated(packed + _NUMBER.pack(activation)) else out


def _present(*layers: nn.Linear | Linear | None) -> list[nn.Linear | Linear]:
    """Return the layers that are not ``None``."""
    return [layer for layer in layers if layer is not None]


def _are_inner(gate: nn.Linear | Linear, up: nn.Linear | Linear | None, x: Tensor, width: int) -> bool:
    """Return whether gate and up of a feed-forward layer take rows of this width in the dtype of ``x``, the kernel can
    read them, and they have equally many outputs; ``up`` may be missing.
    """
    if not fits(gate, x, width):
        return False
    return up is None or (fits(up, x, width) and up.out_features == gate.out_features)


class Norm(NamedTuple):
    """A norm by the root mean square: the weight, plus ``plus``, times a row over its root mean square, plus the bias.

    Attributes:
        weight: ``(width,)``.
        epsilon: is added to the mean of the squares.
        plus: is added to the weight.
        bias: ``(width,)``; ``None``: none is added.
        is_centred: whether the row's mean is subtracted first, as a layer norm does.
    """

    weight: Float[Tensor, " width"]
    epsilon: float
    plus: float = 0.0
    bias: Float[Tensor, " width"] | None = None
    is_centred: bool = False


def norm(x: Float[Tensor, "*n width"], by: Norm) -> Float[Tensor, "*n width"] | None:
    """Return ``x`` normed over the last axis, in its dtype; ``None`` if the kernel cannot do it."""
    library, width = library_for(x), x.shape[-1]
    if library is None or not _is_norm(by, x, width):
        return None
    out = torch.empty_like(x)
    packed = _NORM.pack(
        *(x.numel() // width, width, torch.get_num_threads(), TYPES[x.dtype]),
        *(x.data_ptr(), out.data_ptr()),
        *_scaled(by),
    )
    return None if library.kvkeep_norm(packed) else out


def most_rows(dtype: torch.dtype, layers: Sequence[nn.Linear | Linear] = ()) -> int:
    """Return the largest number of rows for which the kernel's products in this dtype with all of these layers are
    worth it; with more, torch's are faster. Without layers the weights count as plain.
    """
    if layers and all(isinstance(layer.weight, QuantizedTensor) for layer in layers):
        return most_rows_of_quantized()
    if slow(dtype):
        return MOST_ROWS_OF_SLOW
    return MOST_ROWS_OF_HALVES_BESIDE_TILES if dtype.itemsize < 4 and has_tiles() else MOST_ROWS


def _head(x: Tensor, rows: int, last: int) -> bytes:
    """Return the packed beginning of a call: rows, width, threads, dtype, the address of ``x``, and one more number,
    whose meaning depends on the call.
    """
    return _HEAD.pack(rows, x.shape[-1], torch.get_num_threads(), TYPES[x.dtype], x.data_ptr(), last)


def _packed(layer: nn.Linear | Linear, out: int) -> bytes:
    """Pack a linear layer and the address of its output as the kernel takes them."""
    return _WEIGHTS.pack(*_weights(layer).fields(out))


def library_for(x: Tensor) -> ctypes.CDLL | None:
    """Return the kernel if it can read the rows: a plain, contiguous CPU tensor with elements, in a dtype that it
    knows. Else, and where gradients or autocast are enabled, or it `is_watched`, return ``None``.
    """
    if type(x) is not Tensor or not x.is_cpu or x.dtype not in TYPES or not x.is_contiguous() or not x.numel():
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    return None if is_watched() else native().library


def is_watched() -> bool:
    """Return whether somebody follows torch's operators: a trace, a mode that counts or replaces them, `torch.func`."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def fits(layer: nn.Linear | Linear, x: Tensor, width: int) -> bool:
    """Return whether a layer takes rows of this width, and the kernel can read its weight and bias beside ``x``."""
    outputs = layer.out_features
    if not matches(layer.weight, x, (outputs, width)):
        return False
    return layer.bias is None or matches(layer.bias, x, (outputs,))


def matches(weight: Tensor, x: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a weight has this shape and the dtype of ``x``, and the kernel can read it: on the CPU,
    contiguous, and `is_readable`.
    """
    if not is_readable(weight) or not weight.is_cpu or weight.dtype != x.dtype:
        return False
    return weight.shape == shape and weight.is_contiguous()


def is_readable(weight: object) -> TypeGuard[Tensor]:
    """Return whether a weight is of a kind that the kernel reads: a plain parameter, or a `QuantizedTensor`."""
    return type(weight) is nn.Parameter or isinstance(weight, QuantizedTensor)


# structs of layer.h
_BEFORE = struct.Struct("6q 3q2d 18q 2qd 3q2d 3q2d 4q")
_BEHIND = struct.Struct("8q 24q 3q2d 3q2d 3q2d q")
_ANGLES = struct.Struct("4q")
_MODEL_STEP = struct.Struct("5q")
_STEP_HEAD = struct.Struct("8q")  # of Attend


Angles: TypeAlias = tuple[Float[Tensor, "_B _T _D"], Float[Tensor, "_B _T _D"]]
"""Cosines and sines of the rows' positions, each ``(B, 1, rotary_dim)`` or ``(1, 1, rotary_dim)``."""


class Before:
    """Query, key and value of the norm of a layer's input, query and key rotated, the query scaled.

    Args:
        norm: of the rows.
        layers: of queries, keys and values.
        each: norms of the heads of queries and of keys; ``None``: there is none.
        dim: number of dims of a head.
        rotary_dim: how many of them, the first ones, are rotated: the first half of these against the second. 0: none.
        query_scale: what queries are multiplied with.
    """

    def __init__(
        self,
        norm: Norm,
        layers: Sequence[nn.Linear | Linear],
        each: Sequence[Norm | None],
        dim: int,
        rotary_dim: int,
        query_scale: float = 1.0,
    ) -> None:
        like, width = norm.weight, len(norm.weight)
        outputs = [layer.out_features for layer in layers]
        self._is_known = (
            (0 <= rotary_dim <= dim and rotary_dim % 2 == 0)
            and outputs[1] == outputs[2]  # else heads of values have another number of dims
            and _is_norm(norm, like, width)
            and all(head is None or _is_norm(head, like, dim) for head in each)
            and all(fits(layer, like, width) and layer.out_features % dim == 0 for layer in layers)
        )
        self._dtype, self._width, self._dim, self.rotary_dim = like.dtype, width, dim, rotary_dim
        self._heads, self._most_rows = [n // dim for n in outputs], most_rows(like.dtype, layers)
        self._norm, (self._query, self._key, self._value) = _scaled(norm), map(_weights, layers)
        self._rest = dim, rotary_dim, query_scale, *_scaled(each[0]), *_scaled(each[1])

    def __call__(
        self, x: Float[Tensor, "B 1 width"], angles: Angles | None
    ) -> tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]] | None:
        """Norm the rows of ``x``, and return their queries, keys and values, queries and keys rotated; ``None`` if the
        kernel cannot compute them.

        Args:
            x: a token per row.
            angles: of the rows; ``None`` if nothing is rotated.
        """
        library, (B, T, width), D = library_for(x), x.shape, self._dim
        if library is None or not self._is_known or x.dtype != self._dtype or width != self._width or T != 1:
            return None
        if self._most_rows < B or not self.takes_angles(x, angles):
            return None
        query, key, value = (x.new_empty((B, heads, 1, D)) for heads in self._heads)
        scratch = torch.empty_like(x)
        packed = self.pack(
            *(B, x.data_ptr(), scratch.data_ptr()),
            (query.data_ptr(), key.data_ptr(), value.data_ptr()),
            addresses(angles),
        )
        return None if library.kvkeep_before(packed) else (query, key, value)

    def pack(
        self,
        rows: int,
        x: int = 0,
        scratch: int = 0,
        outs: tuple[int, int, int] = (0, 0, 0),
        angles: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> bytes:
        """Pack the arguments of the kernel. All but the number of rows are addresses, and the angles' strides. For a
        `ModelStep` they stay 0: the kernel fills them in.
        """
        linear = zip((self._query, self._key, self._value), outs, strict=True)
        return _BEFORE.pack(
            *(rows, self._width, torch.get_num_threads(), TYPES[self._dtype], x, scratch),
            *self._norm,
            *(number for weights, out in linear for number in weights.fields(out)),
            *self._rest,
            *angles,
        )

    def leads_to(self, behind: Behind, step: NativeRepeat) -> bool:
        """Return whether this object, a step of attention and ``behind`` can be one decoder layer to the kernel: it can
        compute them, and their dtypes and their numbers of rows, heads and dims agree.
        """
        rows, kv_heads, group, _, dim, value_dim, _, kind = _STEP_HEAD.unpack_from(step.packed)
        if not (self._is_known and behind.is_known) or self._dtype != behind.dtype or self._width != behind.width:
            return False
        if (
            rows > min(self._most_rows, behind.most_rows)
            or kind != TYPES[self._dtype]
            or not dim == value_dim == self._dim
        ):
            return False
        if step.rotated_dims not in (0, self.rotary_dim):
            return False
        heads = [kv_heads * group, kv_heads, kv_heads]
        return self._heads == heads and behind.attended == heads[0] * dim

    def takes_angles(self, x: Tensor, angles: Angles | None) -> bool:
        """Return whether the kernel can rotate the rows of ``x`` by these angles; always if nothing is rotated."""
        if not self.rotary_dim:
            return True
        return angles is not None and all(_are_angles(part, x, self.rotary_dim) for part in angles)

    def reads(self, x: Tensor, rows: int) -> bool:
        """Return whether ``x`` has one token for each of so many rows, in the dtype and of the width of this layer."""
        return x.dtype == self._dtype and x.shape == (rows, 1, self._width)


class Behind:
    """``y + down(activation(gate(n)) * up(n))`` with ``y = x + output(attention)`` and ``n`` the norm of ``y``.

    Args:
        output: the projection of attention.
        norm: of the sum.
        gate: half of the feed-forward layer's first product.
        up: the other half; ``None``: there is none, and nothing is multiplied with it.
        down: the feed-forward layer's second product.
        added: norms of what is added to ``x``, and of what is added to ``y``; ``None``: there is none.
        activation: of the gate's outputs, one of `ACTIVATIONS`.
    """

    def __init__(
        self,
        output: nn.Linear,
        norm: Norm,
        gate: nn.Linear | Linear,
        up: nn.Linear | Linear | None,
        down: nn.Linear | Linear,
        *,
        added: Sequence[Norm | None] = (None, None),
        activation: int = SILU,
    ) -> None:
        like, width, inner = norm.weight, len(norm.weight), gate.out_features
        self.dtype, self.width, self._inner, self.attended = like.dtype, width, inner, output.in_features
        self.most_rows = most_rows(like.dtype, _present(output, gate, up, down))
        self.is_known = (
            (output.out_features == width and down.out_features == width)
            and _is_norm(norm, like, width)
            and all(more is None or _is_norm(more, like, width) for more in added)
            and fits(output, like, self.attended)
            and (_are_inner(gate, up, like, width) and fits(down, like, inner))
        )
        # 0: the kernel puts these outputs into the scratch
        each = (_NONE if layer is None else _weights(layer).fields(0) for layer in (output, gate, up))
        within = [number for fields in each for number in fields]
        self._within, self._down = within, _weights(down)
        self._rest = *_scaled(norm), *_scaled(added[0]), *_scaled(added[1]), activation

    def __call__(
        self, x: Float[Tensor, "B 1 width"], attention: Float[Tensor, "_B _T _inner"]
    ) -> Float[Tensor, "B 1 width"] | None:
        """Return the output of the decoder layer from its input and its heads' output; ``None`` if the kernel cannot
        compute it.

        Args:
            x: the layer's input, which is added to.
            attention: what the heads of each row put out, before the output's projection.
        """
        library, (B, T, width) = library_for(x), x.shape
        if library is None or not self.is_known or x.dtype != self.dtype or width != self.width or T != 1:
            return None
        if self.most_rows < B or library_for(attention) is None or attention.dtype != x.dtype:
            return None
        if attention.shape != (B, 1, self.attended):
            return None
        scratch, out = x.new_empty(B * (2 * width + self._inner)), torch.empty_like(x)  # y, its norm, what `down` takes
        packed = self.pack(B, x.data_ptr(), attention.data_ptr(), scratch.data_ptr(), out.data_ptr())
        return None if library.kvkeep_behind(packed) else out

    def pack(self, rows: int, x: int = 0, attention: int = 0, scratch: int = 0, out: int = 0) -> bytes:
        """Pack the arguments of the kernel; all but the number of rows are addresses. For a `ModelStep` they stay 0:
        the kernel fills them in.
        """
        return _BEHIND.pack(
            *(rows, self.width, torch.get_num_threads(), TYPES[self.dtype]),
            *(x, attention, self.attended, scratch),
            *self._within,
            *self._down.fields(out),
            *self._rest,
        )


LayerStep: TypeAlias = tuple[Before, NativeRepeat, Behind, int]
"""A layer's decode step: what comes before attention, attention, what comes behind it, and the number of the angles by
which the layer rotates."""


class ModelStep:
    """A decode step of all layers in one call, each as `Before`, a step of attention that is told its tokens alone, and
    `Behind`.

    Args:
        layers: the layers. Steps of attention hold nothing but addresses: who calls makes sure that these are still
            right.

    Attributes:
        fits: whether the kernel can run these layers.
    """

    def __init__(self, layers: Sequence[LayerStep]) -> None:
        self._rows: int = _STEP_HEAD.unpack_from(layers[0][1].packed)[0]
        self._first = layers[0][0]
        # one layer of each is asked whether it takes the angles
        self._ways_to_rotate = {(kind, before.rotary_dim): before for before, _, _, kind in layers}
        self.fits = all(before.leads_to(behind, step) for before, step, behind, _ in layers)
        self._count, packed = len(layers), b""
        if self.fits:
            each = [
                before.pack(self._rows) + step.packed + behind.pack(self._rows) + _NUMBER.pack(kind)
                for before, step, behind, kind in layers
            ]
            packed = b"".join(each)
        self._kept = ctypes.create_string_buffer(packed, len(packed))

    def __call__(self, x: Float[Tensor, "B 1 width"], angles: Sequence[Angles | None]) -> bool:
        """Run the step: write the output of the last layer into ``x``, and count the tokens in the layers'
        `Block.seen`.

        Args:
            x: a token per row, which goes into the first layer.
            angles: of the rows, for each kind of layer, see `Before`.

        Returns:
            Whether the kernel could run the step; if not, nothing has changed.

        Raises:
            MemoryError: some slots hold the tokens, and there was no memory for the rest.
        """
        library = library_for(x)
        if library is None or not self.fits or not self._first.reads(x, self._rows):
            return False
        if not all(before.takes_angles(x, angles[kind]) for (kind, _), before in self._ways_to_rotate.items()):
            return False
        places_of_angles = b"".join(_ANGLES.pack(*addresses(each)) for each in angles)
        kept, turns = ctypes.addressof(self._kept), ctypes.create_string_buffer(places_of_angles)
        packed = _MODEL_STEP.pack(
            *(self._count, torch.get_num_threads(), kept, ctypes.addressof(turns), x.data_ptr()),
        )
        failed = library.kvkeep_model_step(packed)
        if failed > 0:  # below 0 nothing has changed
            raise MemoryError("There was no memory for all of a decode step.")
        return not failed


def addresses(angles: Angles | None) -> tuple[int, int, int, int]:
    """Return the addresses of cosines and sines, and how far apart their rows are; zeros without angles."""
    if angles is None:
        return 0, 0, 0, 0
    cosines, sines = angles
    return cosines.data_ptr(), sines.data_ptr(), _row(cosines), _row(sines)


def is_native(step: object) -> TypeGuard[NativeRepeat]:
    """Return whether a recorded step of attention is the native backend's."""
    return isinstance(step, NativeRepeat)


class _Weights(NamedTuple):
    """A linear layer as the kernel takes it: addresses, the number of outputs, and the format of quantized weights."""

    weight: int
    bias: int
    outputs: int
    bits: int
    group: int

    def fields(self, out: int) -> tuple[int, ...]:
        """Return the fields of the kernel's struct, with the address of the output."""
        return self.weight, self.bias, out, self.outputs, self.bits, self.group


def _weights(layer: nn.Linear | Linear) -> _Weights:
    """Return where a linear layer's weights and bias lie, its number of outputs, and how the weights are packed; 0 bits
    if they are plain.
    """
    weight = layer.weight
    bits, group = (weight.bits, weight.group) if isinstance(weight, QuantizedTensor) else (0, 0)
    return _Weights(_address(weight), _address(layer.bias), layer.out_features, bits, group)


def _scaled(norm: Norm | None) -> tuple[int, int, int, float, float]:
    """Return the fields of the kernel's struct `Scaled` for a norm; zeros without a norm."""
    if norm is None:
        return 0, 0, 0, 0.0, 0.0
    return _address(norm.weight), _address(norm.bias), norm.is_centred, norm.epsilon, norm.plus


def _address(weight: Tensor | None) -> int:
    """Return the address of a weight; 0 if there is none, or none that the kernel can read."""
    return weight.data_ptr() if weight is not None and is_readable(weight) else 0


def _is_norm(norm: Norm, like: Tensor, width: int) -> bool:
    """Return whether the kernel can compute this norm for rows of this width in the dtype of ``like``: weight and bias
    have them, too.
    """
    if not matches(norm.weight, like, (width,)) or norm.weight.dtype not in TYPES:
        return False
    return norm.bias is None or matches(norm.bias, like, (width,))


def _are_angles(angles: Tensor, x: Tensor, dim: int) -> bool:
    """Return whether these are rotary angles for the rows of ``x``, dense in the last axis."""
    if type(angles) is not Tensor or not angles.is_cpu or angles.dtype != x.dtype or angles.ndim != 3:
        return False
    shape = angles.shape
    return shape[0] in {1, x.shape[0]} and shape[1] == 1 and shape[2] == dim and angles.stride(-1) == 1


def _row(angles: Tensor) -> int:
    """Return the distance of two rows of angles; 0 if all rows share one."""
    return angles.stride(0) if angles.shape[0] > 1 else 0
