"""Attention of many tokens per row in the kernel.

The kernel takes bare addresses. `checks.readable` makes sure that everything it relies on holds.
"""

from __future__ import annotations

import struct

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.attention_stats import Statistic
from kvkeep.backends.native import checks
from kvkeep.backends.native.packing import LAST, library_for, pointer
from kvkeep.backends.wanted import sums_wanted
from kvkeep.kv.slot_codec import pieces
from kvkeep.types import AttentionOptions, Report, Slots

_SHAPE = struct.Struct("8q 4q")
_PIECE = struct.Struct("q 4q 4q 3q")
_REST = struct.Struct("4q 4q 2q 2q 3d")
_NO_PIECE = bytes(_PIECE.size)


def attend(
    query: Float[Tensor, "B Hq T D"],
    slots: Slots,
    now: Int[Tensor, "B T"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "B Hq T E"], Report] | None:
    """`Backend.attend` of several tokens; ``None`` if the kernel cannot do it. `AttentionOptions.top` is ignored.

    A padded query (position -1), and a query that sees nothing, give zeros.
    """
    found = attend_twice(query, slots, now, statistic=statistic, options=options, again=None)
    return None if found is None else found[:2]


def attend_twice(
    query: Float[Tensor, "B Hq T D"],
    slots: Slots,
    now: Int[Tensor, "B T"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
    again: Float[Tensor, "B Hq T D"] | None,
) -> tuple[Float[Tensor, "B Hq T E"], Report, Float[Tensor, "B Hk S"]] | None:
    """`Backend.attend_twice` of several tokens; ``None`` if the kernel cannot do it. See `attend`.

    Args:
        query: queries of the first reading.
        slots: keys, values and positions.
        now: positions of the queries.
        statistic: what to report about the first reading.
        options: arguments of the model's attention.
        again: queries of the second reading; ``None``: there is none, and the last tensor is empty.
    """
    parts = pieces(slots)
    library = library_for(query, *(tensor for part in parts for tensor in part))
    if library is None:
        return None
    if not all(checks.readable(query, *part[:2], now, part.positions, options=options) for part in parts):
        return None
    if (wanted := sums_wanted(statistic, now)) is None:
        return None
    (B, Hq, T, D), (Hk, E), S = query.shape, parts[0].values.shape[1::2], slots.positions.shape[2]
    now, parts = (
        now.to(torch.int64).contiguous(),
        tuple(part._replace(positions=part.positions.int()) for part in parts),
    )
    sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
    every = [*wanted.masses, *wanted.lows]
    weights = torch.stack(every).float().contiguous() if every else None
    gain = None if wanted.gain is None else wanted.gain.float().contiguous()
    out, sums = query.new_empty((B, Hq, T, E)), torch.empty((len(every), B, Hk, S), dtype=torch.float32)
    second = None if again is None else again.to(query.dtype).contiguous()
    shares = torch.empty((B, Hk, 0 if second is None else S), dtype=torch.float32)
    packed = _SHAPE.pack(
        *(B, Hk, Hq // Hk, T, D, E, torch.get_num_threads(), checks.TYPES[query.dtype]),
        *(query.data_ptr(), *query.stride()[:3]),
    )
    packed += _NO_PIECE * (2 - len(parts)) + b"".join(map(_piece, parts))
    packed += _REST.pack(
        *(now.data_ptr(), out.data_ptr(), pointer(sinks), min(options.window or 0, LAST)),
        *(len(wanted.masses), len(wanted.lows), pointer(weights), sums.data_ptr()),
        *(pointer(gain), wanted.live, pointer(second), shares.data_ptr()),
        *(options.scaling, options.softcap or 0.0, wanted.theta),
    )
    if library.kvkeep_prefill(packed):
        return None
    return out, Report(dict(zip(statistic.fields, sums, strict=True))), shares


def _piece(slots: Slots) -> bytes:
    """Keys and values that lie together, with their positions: per head, or one row of them for all heads."""
    keys, values, positions = slots
    step = positions.stride(1) if positions.shape[1] > 1 else 0
    return _PIECE.pack(
        keys.shape[2],
        *(keys.data_ptr(), *keys.stride()[:3]),
        *(values.data_ptr(), *values.stride()[:3]),
        *(positions.data_ptr(), positions.stride(0), step),
    )
