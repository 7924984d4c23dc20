"""Keys and values in 8 or 4 bits per number: the codes, and slots that hold them.

Each token has one scale for a group of channels, so that a slot is overwritten in place without a look at its
neighbours. Keys are multiplied with a Hadamard matrix before they are coded. It spreads a channel that is much larger
than the others over its whole block. ``docs/quantised.md`` says why, and draws the layout.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Int8, UInt8
from torch import Tensor

from kvkeep.errors import InputError, UnsupportedModelError
from kvkeep.lazy import LazySlots, nothing
from kvkeep.types import Slots

GREATEST = {8: 127, 4: 7}
"""The greatest code by number of bits. The least is its negative."""

NUMBERS = {8: torch.int8, 4: torch.uint8}
"""The dtype of a vector's numbers."""

KV_BITS = {"8": (8, 8), "4": (4, 4), "k8v4": (8, 4)}
"""Bits of a key's numbers and of a value's, by the name of the setting."""

_LARGEST_SCALE = torch.finfo(torch.float16).max


class Codes(NamedTuple):
    """Vectors as whole numbers and scales: channel = number * scale of its group.

    Attributes:
        numbers: at 8 bits one number per channel. At 4 bits two numbers, 0 to 15, per byte: byte ``i`` of a group of
            ``g`` channels holds channel ``i`` in its low half and channel ``g / 2 + i`` in its high half, each with 8
            added to it.
        scales: one per group of channels.
        bits: 8 or 4.
    """

    numbers: Int8[Tensor, "B Hk S D"] | UInt8[Tensor, "B Hk S half_D"]
    scales: Float[Tensor, "B Hk S groups"]
    bits: int

    @property
    def dim(self) -> int:
        """Channels of a vector."""
        return self.numbers.shape[-1] * (8 // self.bits)


def check_bits(kv_bits: object) -> str | None:
    """The name of a setting: ``"8"``, ``"4"`` or ``"k8v4"``; ``None``, or 16, for the model's dtype.

    Raises:
        InputError: there is no such setting.
    """
    if kv_bits is None or (isinstance(kv_bits, int | str) and not isinstance(kv_bits, bool)):
        name = str(kv_bits)
        if name in KV_BITS or name in ("None", "16"):
            return name if name in KV_BITS else None
    raise InputError(
        f"kv_bits={kv_bits!r:.40} is no number of bits that slots can have: give 8, 4, k8v4 (keys in 8 bits, values "
        "in 4), or 16 for the model's dtype."
    )


def check_dim(dim: int, bits: int) -> None:
    """Refuse a head dim that cannot be packed.

    Raises:
        UnsupportedModelError: it is odd, and two numbers go into a byte.
    """
    if bits == 4 and dim % 2:
        raise UnsupportedModelError(
            f"The model's head dim is {dim}, and at 4 bits two channels share a byte. Give `kv_bits=8`, which takes "
            "every head dim."
        )


def group_size(dim: int) -> int:
    """The number of channels that share a scale: 64 or 32 if the head dim is a multiple of it, otherwise all.

    Kernels read whole vectors of a group, and of half a group at 4 bits, so no other divisor will do.
    """
    return next((size for size in (64, 32) if dim % size == 0), dim)


def groups(dim: int) -> int:
    """The number of a vector's scales."""
    return dim // group_size(dim)


def encode(x: Float[Tensor, "*B D"], bits: int) -> Codes:
    """Round vectors to codes. A group that holds NaN or an infinity is coded as zeros.

    In float32: ``scale = float16(max |x| / greatest)``, at most the largest finite float16, and ``code = round(x /
    scale)`` with halves to even, at most the greatest. A scale of 0 has codes 0.

    Args:
        x: vectors. At 4 bits their length must be even.
        bits: 8 or 4.
    """
    dim, greatest = x.shape[-1], GREATEST[bits]
    grouped = x.float().unflatten(-1, (-1, group_size(dim)))
    largest: Tensor = grouped.abs().amax(dim=-1, keepdim=True)  # NaN if any channel is
    scales = (largest / greatest).clamp(max=_LARGEST_SCALE).half()
    scales = scales.masked_fill(~largest.isfinite(), 0.0)
    numbers = (grouped / scales.float()).round().clamp(-greatest, greatest).masked_fill(scales == 0, 0.0)
    if bits == 4:
        low, high = (numbers + 8).to(torch.uint8).chunk(2, dim=-1)
        return Codes((low | (high << 4)).flatten(-2), scales.squeeze(-1), bits)
    return Codes(numbers.to(torch.int8).flatten(-2), scales.squeeze(-1), bits)


def encode_keys(keys: Float[Tensor, "*B D"], bits: int) -> Codes:
    """Turn keys with `hadamard`, then round them to codes."""
    return encode(hadamard(keys.float()), bits)


def decode(codes: Codes, dtype: torch.dtype) -> Float[Tensor, "*B D"]:
    """The vectors that codes stand for, computed in float32."""
    numbers = codes.numbers.unflatten(-1, (codes.scales.shape[-1], -1))
    if codes.bits == 4:
        numbers = torch.cat([numbers & 15, numbers >> 4], dim=-1).to(torch.int8) - 8
    return _finite((numbers * codes.scales.float()[..., None]).flatten(-2), dtype)


def _finite(x: Float[Tensor, "*B D"], dtype: torch.dtype) -> Float[Tensor, "*B D"]:
    """Decoded numbers in a dtype. What rounding has made larger than float16 can hold becomes its largest number."""
    return x.clamp(-_LARGEST_SCALE, _LARGEST_SCALE).to(dtype) if dtype == torch.float16 else x.to(dtype)


def hadamard(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    """Vectors multiplied with an orthonormal, symmetric Hadamard matrix, which is its own inverse.

    The matrix has a block for each power of two in the head dim, the largest first: 80 = 64 + 16. Blocks are
    Sylvester's. The sums run in float32 by halves, ``(a + b, a - b)`` at distances 1, 2, 4 ..., and are multiplied with
    ``size ** -0.5`` at the end, so that each implementation rounds alike.

    Args:
        x: vectors; the result has their dtype.
    """
    turned = [_sylvester(part) for part in x.float().split(_powers(x.shape[-1]), dim=-1)]
    found: Tensor = turned[0] if len(turned) == 1 else torch.cat(turned, dim=-1)
    return found.to(x.dtype)


def _sylvester(x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
    size, distance = x.shape[-1], 1
    while distance < size:
        a, b = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        distance *= 2
    found: Tensor = x * size**-0.5
    return found


@functools.cache
def _powers(dim: int) -> list[int]:
    """The powers of two that add up to a number, the largest first."""
    return [1 << i for i in reversed(range(dim.bit_length())) if dim >> i & 1]


def blank(like: Float[Tensor, "*B _ D"], slots: int, bits: int) -> Codes:
    """Codes of zeros for so many slots.

    Args:
        like: vectors that show channels, device, and the axes before the slots.
        slots: slots in each place of these axes.
        bits: 8 or 4.

    Raises:
        UnsupportedModelError: the head dim cannot be packed.
    """
    *rows, _, dim = like.shape
    check_dim(dim, bits)
    scales = like.new_zeros((*rows, slots, groups(dim)), dtype=torch.float16)
    return Codes(like.new_zeros((*rows, slots, dim * bits // 8), dtype=NUMBERS[bits]), scales, bits)


class CodedSlots(LazySlots):
    """Slots whose keys and values are codes.

    ``keys`` and ``values`` are copies in the model's dtype, keys turned back. Only `write` changes the codes.

    Attributes:
        coded_keys: codes of the keys after `hadamard`.
        coded_values: codes of the values.
        dtype: the model's dtype.
    """

    coded_keys: Codes
    coded_values: Codes
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: Codes, values: Codes, positions: Int[Tensor, "B Hk S"], dtype: torch.dtype) -> CodedSlots:
        """Slots with these codes.

        Args:
            keys: codes of the keys after `hadamard`.
            values: codes of the values.
            positions: true positions.
            dtype: the model's dtype.
        """
        made = cls(*nothing(positions), positions)
        made.coded_keys, made.coded_values, made.dtype = keys, values, dtype
        return made

    def copy_keys(self) -> Float[Tensor, "B Hk S D"]:
        """Make a copy of the keys, turned back."""
        return _finite(hadamard(decode(self.coded_keys, torch.float32)), self.dtype)

    def copy_values(self) -> Float[Tensor, "B Hk S E"]:
        """Make a copy of the values."""
        return decode(self.coded_values, self.dtype)

    def rotated(self) -> Slots:
        """Copies side by side in which the keys are still multiplied with the Hadamard matrix, as queries must be."""
        return Slots(decode(self.coded_keys, self.dtype), self.values, self.positions)

    def write(
        self, slot: Int[Tensor, "B Hk 1"], keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"]
    ) -> Bool[Tensor, "B Hk 1"]:
        """Write one token of each head into the given slots. Return which heads can use theirs, see `finite`."""
        self.forget()
        for x, held, code in ((keys, self.coded_keys, encode_keys), (values, self.coded_values, encode)):
            for target, content in zip(held[:2], code(x, held.bits)[:2], strict=True):
                target.scatter_(2, slot[..., None].expand(content.shape), content)
        return finite(keys, values)


def finite(keys: Float[Tensor, "B Hk T D"], values: Float[Tensor, "B Hk T E"]) -> Bool[Tensor, "B Hk T"]:
    """Whether tokens may take a slot: a token with NaN or an infinity in a head leaves its slot in this head empty."""
    return (keys.isfinite().all(dim=-1)) & (values.isfinite().all(dim=-1))
