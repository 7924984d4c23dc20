"""Matrices of weights in 4 to 8 bits, as a subclass of torch's tensors.

Such a tensor holds its weights as the kernel reads them, see quantized.h. `layer_ops` multiplies with it. Every other
operator of torch gets its numbers, unpacked for the length of the call.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._pytree import tree_leaves, tree_map_only

from kvkeep.backends.native.bindings import TYPES, library_for
from kvkeep.errors import UnsupportedOperationError

LANES = 16
"""Rows of a block."""

FORMATS = {(4, 16), (4, 32), (5, 32), (6, 16), (8, 32)}
"""Bits of a code, and weights of a row that share a scale and a minimum."""

GROUP_SIZE = 32
"""Weights that share a scale and a minimum where `QuantizedTensor.quantize` chooses; columns are a multiple of it."""

_FACTORS = 4 * LANES  # bytes
_AT_ONCE = 2**18  # weights; with more, what was needed meanwhile stays with the allocator
_READ = 2**23  # weights
_LARGEST_HALF = 15  # the exponent of the largest float16
_UNPACK = struct.Struct("4q 3q 2q")  # Unpack in quantized.h
_aten = torch.ops.aten


class QuantizedTensor(Tensor):
    """A matrix of weights ``scale * code + minimum``, whose groups of neighbours in a row share scale and minimum.

    Args:
        packed: all rows, as the kernel reads them.
        shape: rows and columns.
        bits: of a code.
        group: weights that share scale and minimum, see `FORMATS`.
        dtype: of the numbers that the tensor stands for.

    Attributes:
        place: the address of the packed weights, and all that says how to read them. Unlike torch's attributes it costs
            no call of `__torch_function__`.
    """

    packed: UInt8[Tensor, "blocks bytes"]
    bits: int
    group: int

    @staticmethod
    def __new__(
        cls, packed: Tensor, shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype
    ) -> QuantizedTensor:
        """Return a tensor that has the shape and dtype of the weights, and no storage of its own."""
        made: QuantizedTensor = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        return made

    def __init__(
        self, packed: UInt8[Tensor, "blocks bytes"], shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype
    ) -> None:
        self.packed, self.bits, self.group = packed, bits, group
        self.place = packed.data_ptr(), shape, bits, group, dtype

    @staticmethod
    def can_have(shape: Sequence[int]) -> bool:
        """Return whether weights of this shape can be packed: a matrix whose columns are a multiple of `GROUP_SIZE`."""
        return len(shape) == 2 and shape[1] > 0 and not shape[1] % GROUP_SIZE

    @staticmethod
    def bytes_of(shape: Sequence[int], bits: int, group: int) -> int:
        """Return the bytes of the packed weights of a matrix of this shape; its last block of `LANES` rows counts
        whole.
        """
        return -(-shape[0] // LANES) * _block_bytes(shape[1], bits, group)

    @staticmethod
    def rows_at_once(columns: int) -> int:
        """Return how many rows of so many columns to give to `set_rows` at once: a multiple of `LANES`, with some
        hundred thousand weights, whose codes take a byte each and whose numbers take four.
        """
        return LANES * max(1, _AT_ONCE // (LANES * columns))

    @classmethod
    def blank(cls, shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype) -> QuantizedTensor:
        """Return a packed matrix on the CPU whose rows are still to be set by `set_rows`; its content is undefined."""
        assert (bits, group) in FORMATS, (bits, group)
        assert cls.can_have(shape), shape
        size = -(-shape[0] // LANES), _block_bytes(shape[1], bits, group)
        # on a CPU, whatever torch's default device is
        return cls(torch.empty(size, dtype=torch.uint8, device="cpu"), shape, bits, group, dtype)

    @classmethod
    def quantize(
        cls, weight: Float[Tensor, "rows columns"], bits: int, done: Callable[[Tensor], None] | None = None
    ) -> QuantizedTensor:
        """Return a packed copy of a matrix on the CPU, rounded to 4 or 8 bits: codes reach from the smallest to the
        largest weight of a group of `GROUP_SIZE`.

        Args:
            weight: the matrix; its columns are a multiple of `GROUP_SIZE`. The result stands for numbers of its dtype.
            bits: of a code.
            done: is called with each part of the matrix, some millions of weights, that has been read.
        """
        rows, columns = weight.shape
        result = cls.blank((rows, columns), bits, GROUP_SIZE, weight.dtype)
        most = LANES * max(1, _READ // (LANES * columns))
        for begin in range(0, rows, most):
            part = weight[begin : begin + most]
            result._quantize_rows(begin, part, bits)
            if done is not None:
                done(part)
        return result

    def _quantize_rows(self, begin: int, weight: Float[Tensor, "n columns"], bits: int) -> None:
        """Round weights, and set them as the rows from ``begin`` on, a multiple of `LANES`."""
        rows, columns = weight.shape
        step = self.rows_at_once(columns)
        for first in range(0, rows, step):
            groups = weight[first : first + step].detach().float().unflatten(1, (-1, GROUP_SIZE))
            minimums, largest = groups.amin(-1), groups.amax(-1)
            scales = (largest - minimums) / (2**bits - 1)
            # a group of equal weights has a scale of 0, and codes of 0
            steps = (groups - minimums[..., None]) / scales.clamp_min(torch.finfo(torch.float32).tiny)[..., None]
            codes = steps.round().clamp(0, 2**bits - 1).to(torch.uint8)
            self.set_rows(begin + first, codes.flatten(1), scales, minimums)

    def set_rows(
        self,
        first: int,
        codes: UInt8[Tensor, "n columns"],
        scales: Float[Tensor, "n groups"],
        minimums: Float[Tensor, "n groups"],
    ) -> None:
        """Set rows in place, so that they stand for ``scales * codes + minimums``; scales and minimums are rounded to
        float16, relative to a power of two of their row.

        Args:
            first: the first row, a multiple of `LANES`. The number of rows is one, too, unless they are the last.
            codes: a code for each weight.
            scales: a scale for each group of neighbours in a row.
            minimums: a minimum for each such group.
        """
        blocks = -(-len(codes) // LANES)
        missing = (0, 0, 0, blocks * LANES - len(codes))  # no columns, and the rows that the last block lacks
        groups = self.shape[1] // self.group
        numbers = torch.stack((scales, minimums), -1)
        factors = _factors(numbers)
        halves = (numbers / factors[:, None, None]).half()
        to = self.packed[first // LANES : first // LANES + blocks]
        to[:, :_FACTORS] = pad(factors, missing[2:], value=1.0).view(blocks, LANES).view(torch.uint8)
        inner = to[:, _FACTORS:].view(blocks, groups, -1)
        # 4 bytes a lane: a scale and a minimum, each a float16
        inner[..., -4 * LANES :] = _by_lane(pad(halves, (0, 0, *missing)).transpose(1, 2), blocks).view(torch.uint8)
        # a step of the kernel reads 4 codes of each lane
        _put_codes(pad(codes, missing).view(blocks, LANES, groups, -1, 4), self.bits, inner)

    def dequantize(self, indices: Int[Tensor, "*n"] | None = None) -> Float[Tensor, "rows columns"]:
        """Return the numbers of all rows, or of rows with these indices, one after the other, unpacked by the kernel if
        it can, else by torch; in the dtype of this tensor.

        Args:
            indices: rows in any order, also repeatedly, in a tensor of any shape; ``None``: all rows.

        Raises:
            IndexError: an index is below 0, or not below the number of rows.
            MemoryError: the kernel got no memory.
        """
        rows, columns = (len(self) if indices is None else indices.numel()), self.shape[1]
        if indices is not None and rows and not 0 <= int(indices.min()) <= int(indices.max()) < len(self):
            raise IndexError(f"An index is out of range: there are {len(self)} rows.")
        library = library_for(self.packed)
        if library is None or self.dtype not in TYPES:
            return self._unpacked(indices)
        indices = None if indices is None else indices.to(torch.int64).contiguous()
        out = self.packed.new_empty((rows, columns), dtype=self.dtype)
        if not rows:
            return out
        sizes = rows, columns, torch.get_num_threads(), TYPES[self.dtype]
        places = 0 if indices is None else indices.data_ptr(), self.packed.data_ptr(), out.data_ptr()
        if library.kvkeep_unpack(_UNPACK.pack(*sizes, *places, self.bits, self.group)):
            raise MemoryError("There was no memory to unpack weights.")
        return out

    def _unpacked(self, indices: Tensor | None) -> Tensor:
        """Return the numbers of all rows, or of rows with these indices, computed by torch, in the tensor's dtype.

        The whole matrix is unpacked first. Indices of any shape are read one after the other.
        """
        blocks, groups = len(self.packed), self.shape[1] // self.group
        factors = self.packed[:, :_FACTORS].contiguous().view(torch.float32).view(-1, 1, 1)
        inner = self.packed[:, _FACTORS:].reshape(blocks, groups, -1)
        codes = _codes(inner[..., : -4 * LANES], self.bits).reshape(blocks * LANES, groups, -1)
        halves = inner[..., -4 * LANES :].contiguous().view(torch.float16).view(blocks, groups, 2, LANES)
        scales, minimums = halves.permute(2, 0, 3, 1).reshape(2, blocks * LANES, groups, 1).float()
        values = codes * (scales * factors) + minimums * factors
        values = values.view(blocks * LANES, -1)[: len(self)].to(self.dtype)
        found: Tensor = values if indices is None else values[indices.flatten()]
        return found

    def rows(self, first: int, last: int) -> QuantizedTensor:
        """Return a view of rows ``first`` to ``last``, the last one excluded; ``first`` is a multiple of `LANES`."""
        assert first % LANES == 0, first
        part = self.packed[first // LANES : -(-last // LANES)]
        return QuantizedTensor(part, (last - first, self.shape[1]), self.bits, self.group, self.dtype)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch gives it the contents as text
        """Return shape and format."""
        return f"QuantizedTensor({tuple(self.shape)}, bits={self.bits}, group={self.group}, dtype={self.dtype})"

    def data_ptr(self) -> int:
        """Return the address of the packed weights, as the tensor has no storage of its own."""
        return self.packed.data_ptr()

    def _like(self, packed: Tensor, dtype: torch.dtype | None = None) -> QuantizedTensor:
        """Return a tensor of this one's shape, bits and group around other packed bytes; ``dtype``: of the numbers that
        it stands for, by default this one's.
        """
        rows, columns = self.shape
        return QuantizedTensor(packed, (rows, columns), self.bits, self.group, dtype or self.dtype)

    # The protocol of subclasses that wrap tensors.

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        """Return the name of the inner tensor, and what else `__tensor_unflatten__` needs."""
        return ["packed"], (tuple(self.shape), self.bits, self.group, self.dtype)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], rest: tuple[Any, ...], *_: Any) -> QuantizedTensor:
        """Return a tensor made of its inner tensor."""
        return QuantizedTensor(inner["packed"], *rest)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        """Return a copy with packed weights of its own, a parameter if this is one."""
        if id(self) not in memo:
            copy = self._like(self.packed.clone())
            memo[id(self)] = torch.nn.Parameter(copy, False) if isinstance(self, torch.nn.Parameter) else copy
        found: QuantizedTensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Return what pickle needs to make the tensor anew: packed weights, format, and whether it is a parameter."""
        rest = tuple(self.shape), self.bits, self.group, self.dtype
        return _restored, (self.packed, *rest, isinstance(self, torch.nn.Parameter))

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch, or what `implements` has registered in its place."""
        own = _FUNCTIONS.get(func)
        if own is not None:
            return own(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as what switches it off
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operator on unpacked numbers, which are plain tensors, and so is the result. Detach, alias, clone and
        conversions return a packed tensor.

        Raises:
            UnsupportedOperationError: the operator changes a quantized tensor.
        """
        kwargs = kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default):
            return args[0]._like(args[0].packed)
        if func is _aten.clone.default:
            return args[0]._like(args[0].packed.clone())
        if func.overloadpacket in (_aten.to, _aten._to_copy) and isinstance(args[0], QuantizedTensor):
            given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
            like = given.get("other")  # a tensor in place of device and dtype
            device, dtype = (given.get(name) if like is None else getattr(like, name) for name in ("device", "dtype"))
            return args[0]._like(args[0].packed.to(device or args[0].device), dtype)
        if func._schema.is_mutable and _changes(func._schema.arguments, args, kwargs):
            _refuse()
        unpack: Callable[[QuantizedTensor], Tensor] = QuantizedTensor.dequantize
        return func(*tree_map_only(QuantizedTensor, unpack, args), **tree_map_only(QuantizedTensor, unpack, kwargs))


def _changes(declared: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether an operator writes to a quantized tensor.

    Args:
        declared: the arguments that the operator's schema declares.
        args: the arguments by position.
        kwargs: the arguments by name.
    """
    given = dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs
    written = [given.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write]
    return any(isinstance(leaf, QuantizedTensor) for leaf in tree_leaves(written))


def _refuse() -> NoReturn:
    """Raise the error that packed weights cannot be changed."""
    raise UnsupportedOperationError(
        "Quantized weights cannot be changed or trained. Load the model without `load_in`; a GGUF file with `unpacked`."
    )


_FUNCTIONS: dict[Any, Callable[..., Any]] = {}


def implements(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that registers a function to be called in place of these functions of torch whenever they are
    given a `QuantizedTensor`. The function itself stays as it is.
    """

    def register(own: Callable[..., Any]) -> Callable[..., Any]:
        _FUNCTIONS.update(dict.fromkeys(functions, own))
        return own

    return register


def _restored(
    packed: Tensor, shape: tuple[int, int], bits: int, group: int, dtype: torch.dtype, is_parameter: bool
) -> Tensor:
    """Return a quantized tensor, or a parameter, from what `QuantizedTensor.__reduce_ex__` has returned."""
    tensor = QuantizedTensor(packed, shape, bits, group, dtype)
    return torch.nn.Parameter(tensor, False) if is_parameter else tensor


# The layout of a block, see `Packing` in quantized.h.


def _block_bytes(columns: int, bits: int, group: int) -> int:
    """Return the bytes of a block of `LANES` rows: codes, and a scale and a minimum for each group."""
    return _FACTORS + LANES * (columns * bits // 8 + columns // group * 4)


def _factors(numbers: Float[Tensor, "n groups 2"]) -> Float[Tensor, " n"]:
    """Return a power of two for each row, in float32. Divided by it, the row's largest scale or minimum has a size from
    2**14 to below 2**15: float16 neither overflows nor loses digits.
    """
    _, exponents = torch.frexp(numbers.abs().amax(dim=(1, 2)))
    factors = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents - _LARGEST_HALF)
    return factors.clamp_min(torch.finfo(torch.float32).tiny)  # else 0 for a row of subnormal numbers


def _by_lane(halves: Tensor, blocks: int) -> Tensor:
    """Return ``(rows, 2, groups)`` numbers as ``(blocks, groups, 2 * LANES)``: for each group of a block first the
    scales of all its rows, then their minimums.
    """
    _, pair, groups = halves.shape
    return halves.reshape(blocks, LANES, pair, groups).permute(0, 3, 2, 1).reshape(blocks, groups, -1)


def _put_codes(codes: UInt8[Tensor, "blocks lanes groups steps 4"], bits: int, to: Tensor) -> None:
    """Pack codes into ``to``, ``(blocks, groups, bytes)``, in place; each group's scales and minimums at the end of its
    bytes stay.

    Two codes share a byte with their lower 4 bits, one of the first half of a group's steps and one of the second.
    Further bits of all steps share the bytes behind them.
    """
    words = codes.permute(0, 2, 3, 1, 4)  # blocks, groups, steps, lanes, 4
    blocks, groups, steps = words.shape[:3]
    if bits == 8:
        to[..., : -4 * LANES] = words.reshape(blocks, groups, -1)
        return
    half = steps // 2
    lower = words & 15 if bits > 4 else words
    to[..., : half * 4 * LANES] = (lower[:, :, :half] | (lower[:, :, half:] << 4)).reshape(blocks, groups, -1)
    if bits > 4:
        upper = torch.zeros_like(words[:, :, 0])
        for step in range(steps):
            upper |= (words[:, :, step] >> 4) << (bits - 4) * step
        to[..., half * 4 * LANES : -4 * LANES] = upper.reshape(blocks, groups, -1)


def _codes(stored: UInt8[Tensor, "blocks groups bytes"], bits: int) -> UInt8[Tensor, "blocks lanes groups steps 4"]:
    """Unpack the codes of all rows, one byte for each; the inverse of `_put_codes`. ``stored`` has no scales."""
    words = stored.reshape(*stored.shape[:2], -1, LANES, 4)
    if bits < 8:
        upper = bits - 4
        lower = words[:, :, : words.shape[2] - (upper > 0)]  # the last word of a group has the further bits
        codes = torch.cat((lower & 15, lower >> 4), 2)
        if upper:
            shifts = upper * torch.arange(codes.shape[2], dtype=torch.uint8, device=codes.device).view(-1, 1, 1)
            codes |= ((words[:, :, -1:] >> shifts) & (2**upper - 1)) << 4
        words = codes
    return words.permute(0, 3, 1, 2, 4)
