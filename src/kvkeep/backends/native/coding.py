"""Slots that hold codes, as the kernel takes them."""

from __future__ import annotations

import struct
from typing import TypeAlias

import torch
from torch import Tensor

from kvkeep.kv.slot_codec import NUMBERS, CodedSlots, Codes
from kvkeep.types import Slots

Coding: TypeAlias = tuple[Codes, Codes]
"""Codes of the keys and of the values."""

_CODED = struct.Struct("3q 3q 3q 3q")
_NONE = bytes(_CODED.size)


def coding_of(slots: Slots) -> tuple[Slots, Coding | None]:
    """The numbers of slots that hold codes, in place of keys and values, and the codes; ``None``: they hold none."""
    if not isinstance(slots, CodedSlots):
        return slots, None
    keys, values = slots.coded_keys, slots.coded_values
    return Slots(keys.numbers, values.numbers, slots.positions), (keys, values)


def packed(coding: Coding | None) -> bytes:
    """Two structs `Coded` of the kernel."""
    if coding is None:
        return _NONE
    (keys, key_scales, key_bits), (values, value_scales, value_bits) = coding
    return _CODED.pack(
        *(key_bits, keys.shape[-1] * 8 // key_bits // key_scales.shape[-1]),
        *(key_scales.data_ptr(), *key_scales.stride()[:3]),
        *(value_bits, values.shape[-1] * 8 // value_bits // value_scales.shape[-1]),
        *(value_scales.data_ptr(), *value_scales.stride()[:3]),
    )


def scales_of(coding: Coding | None) -> tuple[Tensor, ...]:
    """The scales of keys and values."""
    return () if coding is None else (coding[0].scales, coding[1].scales)


def decodable(codes: Codes, slots: tuple[int, int, int], dim: int) -> bool:
    """Whether dtypes and shapes of codes are those that are promised to the kernel.

    Args:
        codes: the codes.
        slots: rows, KV heads, and slots of each.
        dim: channels of a vector.
    """
    numbers, scales, bits = codes
    if scales.dtype != torch.float16 or numbers.dtype != NUMBERS.get(bits) or numbers.shape != (*slots, dim * bits / 8):
        return False
    groups = scales.shape[-1]
    return groups > 0 and scales.shape == (*slots, groups) and dim % groups == 0 and dim // groups * bits % 8 == 0
