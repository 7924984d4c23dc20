"""The kernel as functions of tensors; each returns ``None`` and does nothing if the kernel cannot do it.

The kernel gets bare addresses and cannot check anything itself. So each function first checks all that the kernel
relies on: devices, dtypes, shapes and strides.
"""

from __future__ import annotations

import ctypes
import struct
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.native import checks
from kvkeep.backends.native.build import native
from kvkeep.backends.native.turn import Turn
from kvkeep.backends.protocol import Added, Limits
from kvkeep.backends.wanted import Wanted
from kvkeep.types import AttentionOptions, Budget, Slots

_KINDS = {None: 1, "last": 2, "low": 3}
_NOTHING = Wanted()
_ATTEND = struct.Struct("8q 3q 4q 4q 3q 2q 2q q 3q 3q q q 2q 5d 3q")
_WRITE = struct.Struct("8q 4q 4q 3q 3q 3q 2q q")
_SLOTS = struct.Struct("4q 3q 3q 3q q 3q 4q")
_STEP = struct.Struct("3q 3q 2q 3q 3q 3q 4q d")
LAST = 2**31 - 1
"""The largest position: the kernel counts positions in 32 bits."""


def attend(
    query: Float[Tensor, "B Hq 1 D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    now: Int[Tensor, "B 1"],
    positions: Int[Tensor, "B #Hk S"],
    *,
    options: AttentionOptions,
    wanted: Wanted | None,
    turn: Turn | None = None,
) -> list[Tensor] | None:
    """Attention of one token per row, in one pass over keys and values; with a ``turn`` keys are unrotated.

    A padded query (position -1), and a query that sees nothing, give zeros. `AttentionOptions.top` is ignored.

    Returns:
        The output ``(B, Hq, 1, E)`` in the query's dtype; if wanted, then the mass and the second field of the report,
        ``(B, Hk, S)`` float32.
    """
    library = library_for(query, keys, values, now, positions)
    if library is None or not checks.attendable(
        query, keys, values, now, positions, options=options, wanted=wanted, turn=turn
    ):
        return None
    positions, now = _as(positions, torch.int32), _as(now, torch.int64)
    call = _attention(query, (keys, values, positions), now, options=options, wanted=wanted, turn=turn)
    return None if library.kvkeep_attend(call.packed) else call.results


def step(
    token: tuple[Float[Tensor, "B Hq 1 D"], Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    slots: Slots,
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: Wanted | None,
    added: Added,
    limits: Limits,
    turn: Turn | None = None,
) -> Float[Tensor, "B Hq 1 E"] | None:
    """`Backend.step` in one pass over keys and values, where both windows are the same.

    ``wanted`` asks for the mass alone; it is ``None`` if the policy has no sums. With a ``turn`` the slots' keys are
    unrotated, and the token is rotated to its position.
    """
    (query, *new), (keys, values, positions) = token, slots
    library = library_for(query, *slots, *new, now, limits.seen, *added.states)
    if library is None or not checks.attendable(
        query, keys, values, now, positions, options=options, wanted=wanted, turn=turn
    ):
        return None
    if not checks.writable(*slots, token[1:], now) or not checks.addable(added, positions, wanted):
        return None
    if not checks.countable(positions, limits.seen, limits.recent, limits.stay):
        return None
    now, seen = _as(now, torch.int64), _as(limits.seen, torch.int64)
    recents, recent = _either(_bounded(limits.recent), torch.int64)
    most, limit = _either(_bounded(limits.stay), torch.int64)
    total, other = (*added.states, None, None)[:2]
    call = _attention(query, slots, now, options=options, wanted=wanted, turn=turn, reports=False)
    packed = call.packed + _STEP.pack(
        *(new[0].data_ptr(), *new[0].stride()[:2]),
        *(new[1].data_ptr(), *new[1].stride()[:2]),
        *(pointer(total), pointer(other)),
        *((0, 0) if total is None else total.stride()[:2]),
        *(added.is_score, seen.data_ptr(), seen.stride(0), _bounded(limits.sinks)),
        *(pointer(recents), 0 if recents is None else recents.stride(0), recent),
        *(pointer(most), *((0, 0) if most is None else _strides(most)), limit),
        1.0 if wanted is None else wanted.decay,
    )
    return None if library.kvkeep_step(packed) else call.results[0]


def write(
    keys: Float[Tensor, "B Hk capacity D"],
    values: Float[Tensor, "B Hk capacity E"],
    positions: Int[Tensor, "B Hk capacity"],
    *,
    new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    now: Int[Tensor, "B 1"],
) -> Int[Tensor, "B Hk 1"] | None:
    """`Backend.append`, where the new token has the dtype of the slots."""
    library = library_for(keys, values, positions, *new, now)
    new_keys, new_values = new
    if library is None or not checks.writable(keys, values, positions, new, now):
        return None
    B, Hk, S = positions.shape
    now = _as(now, torch.int64)
    slot = torch.empty((B, Hk, 1), dtype=torch.int64)
    call = _WRITE.pack(
        *(B, Hk, S, keys.shape[-1], values.shape[-1], keys.element_size(), values.element_size()),
        torch.get_num_threads(),
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(positions.data_ptr(), *positions.stride()[:2]),
        *(new_keys.data_ptr(), *new_keys.stride()[:2]),
        *(new_values.data_ptr(), *new_values.stride()[:2]),
        *(now.data_ptr(), now.stride(0), slot.data_ptr()),
    )
    return None if library.kvkeep_write(call) else slot


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


class _Attention(NamedTuple):
    """Arguments of attention.

    Attributes:
        packed: numbers and addresses.
        results: the output, and the fields of the report.
        tensors: other tensors that lie at the addresses; they must live as long as the call.
    """

    packed: bytes
    results: list[Tensor]
    tensors: tuple[Tensor | None, ...]


def _attention(
    query: Float[Tensor, "B Hq 1 D"],
    slots: tuple[Float[Tensor, "B Hk S D"], Float[Tensor, "B Hk S E"], Int[Tensor, "B #Hk S"]],
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: Wanted | None,
    turn: Turn | None,
    reports: bool = True,
) -> _Attention:
    """Pack the arguments of attention; without ``reports`` the kernel keeps the mass to itself."""
    (keys, values, positions), (B, Hq, _, D) = slots, query.shape
    Hk, S = keys.shape[1:3]
    kind = _KINDS[wanted.second] if wanted else 0
    results = [query.new_empty((B, Hq, 1, values.shape[-1]))]
    results += [torch.empty((B, Hk, S), dtype=torch.float32) for _ in range(min(kind, 2) if reports else 0)]
    out, mass, second = (*(result.data_ptr() for result in results), 0, 0)[:3]
    wanted = wanted or _NOTHING
    sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
    counted, counts = _either(wanted.counts, torch.int64)
    gains, gain = _either(1.0 if wanted.gain is None else wanted.gain, torch.float32)
    newest, last = _either(wanted.last, torch.int64)
    packed = _ATTEND.pack(
        *(B, Hk, Hq // Hk, S, D, values.shape[-1], torch.get_num_threads(), checks.TYPES[keys.dtype]),
        *(query.data_ptr(), *query.stride()[:2]),
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(positions.data_ptr(), positions.stride(0), positions.stride(1) if positions.shape[1] > 1 else 0),
        *(now.data_ptr(), now.stride(0)),
        *(out, pointer(sinks), min(options.window or 0, LAST)),
        *(kind, mass, second),
        *(pointer(counted), counts, pointer(gains), wanted.gain is not None),
        *(pointer(newest), last, wanted.live),
        *(options.scaling, options.softcap or 0.0, gain, wanted.decay, wanted.theta),
        *((0, 0, 0) if turn is None else turn.packed()),
    )
    return _Attention(packed, results, (sinks, counted, gains, newest, *(turn or ())))


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
    seen = None if seen is None else _as(seen, torch.int64)
    recents, newest = _either(_bounded(recent), torch.int64)
    limits, most = _either(_bounded(limit), torch.int64)
    packed = _SLOTS.pack(
        *(*positions.shape, torch.get_num_threads()),
        *(positions.data_ptr(), *positions.stride()[:2]),
        *(pointer(seen), 0 if seen is None else seen.stride(0), _bounded(window)),
        *(pointer(scores), *((0, 0) if scores is None else scores.stride()[:2]), _bounded(sinks)),
        *(pointer(recents), 0 if recents is None else recents.stride(0), newest),
        *(pointer(limits), *((0, 0) if limits is None else _strides(limits)), most),
    )
    return _Call(packed, (seen, recents, limits))


def _strides(limits: Int[Tensor, "B #Hk"]) -> tuple[int, int]:
    """From row to row and from head to head; the latter is 0 where one number is for all heads."""
    return limits.stride(0), limits.stride(1) if limits.shape[1] > 1 else 0


def _as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in this dtype; a comparison is cheaper than a conversion to the same dtype."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def _bounded(value: Budget) -> Budget:
    """The value, limited so that the kernel can subtract it from a position without an overflow."""
    return value.to(torch.int64).clamp(-LAST, LAST) if isinstance(value, Tensor) else max(-LAST, min(value, LAST))


def _either(value: int | float | Tensor, dtype: torch.dtype) -> tuple[Tensor | None, int | float]:
    """A dense tensor of this dtype and 0, or ``None`` and one number for all."""
    return (value.to(dtype).contiguous(), 0) if isinstance(value, Tensor) else (None, value)


def pointer(tensor: Tensor | None) -> int:
    """The tensor's address; 0 for none."""
    return 0 if tensor is None else tensor.data_ptr()


def library_for(*tensors: Tensor) -> ctypes.CDLL | None:
    """The kernel, if the tensors are ordinary ones in main memory, dense in the last axis, without gradients."""
    library = native().library
    if library is None or torch.compiler.is_compiling():
        return None
    differentiates = torch.is_grad_enabled()
    for tensor in tensors:
        if type(tensor) is not Tensor or not tensor.is_cpu or tensor.layout is not torch.strided:
            return None
        if tensor.stride(-1) != 1 or (differentiates and tensor.requires_grad):
            return None
    return library
