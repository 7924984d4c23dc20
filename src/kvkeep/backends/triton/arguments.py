"""How tensors and numbers become arguments of the kernels, by name."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvkeep.backends.added import Limits
from kvkeep.backends.triton import gpu
from kvkeep.backends.wanted import Wanted
from kvkeep.kv.slot_codec import CodedSlots, Codes
from kvkeep.types import Slots


def row(wanted: Wanted, now: Tensor) -> dict[str, Any]:
    """The weights of query rows in a statistic's sums, as arguments of a kernel."""
    return {
        **either("counted", "counts", wanted.counts, now, dtype=torch.int64),
        **either("gains", "gain", 1.0 if wanted.gain is None else wanted.gain, now, dtype=torch.float32),
        **either("newest", "last", wanted.last, now, dtype=torch.int64),
        "TEMPERED": wanted.gain is not None,
        "log_decay": math.log2(wanted.decay) if wanted.decay > 0 else -math.inf,
    }


def limits(limits: Limits) -> dict[str, Any]:
    """Limits as the kernels take them."""
    recent, stay = limits.recent, limits.stay
    return {
        "ages": limits.seen,
        "age_row": limits.seen.stride(0),
        "first_ones": limits.sinks,
        **either("recents", "recent", recent, limits.seen),
        **_per_head("recent", recent),
        **either("limits", "limit", stay, limits.seen),
        **_per_head("limit", stay),
        "SLIDES": limits.window is not None,
    }


def _per_head(name: str, value: int | Tensor) -> dict[str, int]:
    """Strides of a table of rows and heads; one number for all has none."""
    return heads(name, value) if isinstance(value, Tensor) else {f"{name}_row": 0, f"{name}_head": 0}


def either(
    table: str, number: str, value: int | float | Tensor, unread: Tensor, *, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """A table, dense if a dtype is given, or one number for all; then ``unread`` takes the place of the table."""
    if not isinstance(value, Tensor):
        return {table: unread, number: value, table.upper(): False}
    return {table: value if dtype is None else value.to(dtype).contiguous(), number: 0, table.upper(): True}


def store(slots: Slots) -> dict[str, Any]:
    """Slots, their strides and sizes; `BLOCK_D` and `BLOCK_E` are the powers of two that head dims are padded to."""
    (keys, *_), (values, *_) = lying(slots)
    Hk, S, (D, E) = keys.shape[1], keys.shape[2], dims(slots)
    return {
        "keys": keys,
        **heads("key", keys),
        "key_slot": keys.stride(2),
        "values": values,
        **heads("value", values),
        "value_slot": values.stride(2),
        "positions": slots.positions,
        **heads("position", slots.positions),
    } | {"Hk": Hk, "S": S, "D": D, "E": E, "BLOCK_D": gpu.power(D), "BLOCK_E": gpu.power(E)}


def lying(slots: Slots) -> tuple[Codes, Codes]:
    """Keys and values as they lie in memory; numbers that are no codes have 16 bits, and stand for scales as well."""
    if isinstance(slots, CodedSlots):
        return slots.coded_keys, slots.coded_values
    return Codes(slots.keys, slots.keys, 16), Codes(slots.values, slots.values, 16)


def dims(slots: Slots) -> tuple[int, int]:
    """Channels of a key and of a value."""
    if isinstance(slots, CodedSlots):
        return slots.coded_keys.dim, slots.coded_values.dim
    return slots.keys.shape[-1], slots.values.shape[-1]


def codes(slots: Slots) -> dict[str, Any]:
    """Scales, their strides, bits, and channels that share a scale."""
    found: dict[str, Any] = {}
    for name, (_, scales, bits), dim in zip(("key", "value"), lying(slots), dims(slots), strict=True):
        found |= {
            f"{name}_scales": scales,
            **heads(f"{name}_scale", scales),
            f"{name}_scale_slot": scales.stride(2),
            f"{name.upper()}_BITS": bits,
            f"{name.upper()}_GROUP": 1 if bits == 16 else dim // scales.shape[-1],
        }
    return found


def new(keys: Tensor, values: Tensor) -> dict[str, Any]:
    """A token's key and value, and their strides."""
    return {"new_keys": keys, **heads("new_key", keys), "new_values": values, **heads("new_value", values)}


def heads(name: str, tensor: Tensor) -> dict[str, int]:
    """Strides from row to row and from head to head; the latter is 0 where one is for all heads."""
    return {f"{name}_row": tensor.stride(0), f"{name}_head": tensor.stride(1) if tensor.shape[1] > 1 else 0}
