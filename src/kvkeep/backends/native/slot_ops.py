"""The kernel's functions on slots: write a token, expire, count, evict.

Each returns ``None`` and does nothing if the kernel cannot do it. The kernel takes bare addresses. `checks` makes sure
that everything it relies on holds.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from kvkeep.backends.native import checks, coding
from kvkeep.backends.native.packing import bounded, cast_to, either, library_for, pointer, strides
from kvkeep.types import Budget

_WRITE = struct.Struct("8q 4q 4q 3q 3q 3q 2q q q q")
_SLOTS = struct.Struct("4q 3q 3q 3q q 4q 4q")


def write(
    keys: Shaped[Tensor, "B Hk capacity _D"],
    values: Shaped[Tensor, "B Hk capacity _E"],
    positions: Int[Tensor, "B Hk S"],
    *,
    new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    now: Int[Tensor, "B 1"],
    starts: Int[Tensor, "B Hk"] | None = None,
    codes: coding.Coding | None = None,
) -> Int[Tensor, "B Hk 1"] | None:
    """`Backend.append`, where the new token has the dtype of the slots.

    With ``starts``, keys and values are pools as `kvkeep.kv.pooled_store.lying` shows them; with ``codes``, the codes'
    numbers.
    """
    library, pooled = library_for(keys, values, positions, *new, now, *coding.scales_of(codes)), starts is not None
    new_keys, new_values = new
    if library is None or not checks.writable(keys, values, positions, new, now, pooled=pooled, coding=codes):
        return None
    B, Hk, S = positions.shape
    now = cast_to(now, torch.int64)
    slot = torch.empty((B, Hk, 1), dtype=torch.int64)
    call = _WRITE.pack(
        *(B, Hk, S, new_keys.shape[-1], new_values.shape[-1], keys.element_size(), values.element_size()),
        torch.get_num_threads(),
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(positions.data_ptr(), *positions.stride()[:2]),
        *(new_keys.data_ptr(), *new_keys.stride()[:2]),
        *(new_values.data_ptr(), *new_values.stride()[:2]),
        *(now.data_ptr(), now.stride(0), slot.data_ptr(), pointer(starts)),
        checks.TYPES.get(new_keys.dtype, 0),
    )
    return None if library.kvkeep_write(call + coding.packed(codes) + bytes(16)) else slot


def expire(positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> bool | None:
    """`Backend.expire`."""
    library = library_for(positions, seen)
    if library is None or not checks.countable(positions, seen):
        return None
    call = _slots(positions, seen, window=window)
    return None if library.kvkeep_expire(call.packed) else True


def count_over(positions: Int[Tensor, "B Hk S"], limit: Budget) -> int | None:
    """The number of heads that hold more tokens than their limit."""
    library = library_for(positions)
    if library is None or not checks.countable(positions, limit=limit):
        return None
    call = _slots(positions, limit=limit)
    found = library.kvkeep_count_over(call.packed)
    return None if found < 0 else int(found)


def evict(
    positions: Int[Tensor, "B Hk S"],
    scores: Float[Tensor, "B Hk S"],
    seen: Int[Tensor, " B"],
    *,
    sinks: int,
    recent: Budget,
    limit: Budget,
) -> bool | None:
    """`Backend.evict`."""
    library = library_for(positions, scores, seen)
    if library is None or not checks.countable(positions, seen, recent, limit):
        return None
    if scores.dtype != torch.float32 or scores.shape != positions.shape:
        return None
    call = _slots(positions, seen, scores=scores, sinks=sinks, recent=recent, limit=limit)
    return None if library.kvkeep_evict(call.packed) else True


class _Call(NamedTuple):
    """Arguments of the functions on slots.

    Attributes:
        packed: numbers and addresses.
        tensors: what lies at the addresses, converted where needed; it must live as long as the call.
    """

    packed: bytes
    tensors: tuple[Tensor | None, ...]


def _slots(
    positions: Int[Tensor, "B Hk S"],
    seen: Int[Tensor, " B"] | None = None,
    *,
    window: int = 0,
    scores: Float[Tensor, "B Hk S"] | None = None,
    sinks: int = 0,
    recent: Budget = 0,
    limit: Budget = 0,
) -> _Call:
    """Pack the arguments of the functions on slots."""
    seen = None if seen is None else cast_to(seen, torch.int64)
    recents, newest = either(bounded(recent), torch.int64)
    limits, most = either(bounded(limit), torch.int64)
    packed = _SLOTS.pack(
        *(*positions.shape, torch.get_num_threads()),
        *(positions.data_ptr(), *positions.stride()[:2]),
        *(pointer(seen), 0 if seen is None else seen.stride(0), bounded(window)),
        *(pointer(scores), *((0, 0) if scores is None else scores.stride()[:2]), bounded(sinks)),
        *(pointer(recents), *((0, 0) if recents is None else strides(recents)), newest),
        *(pointer(limits), *((0, 0) if limits is None else strides(limits)), most),
    )
    return _Call(packed, (seen, recents, limits))
