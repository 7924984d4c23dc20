"""The kernels' functions on tensors. Each says ``None`` when the kernels cannot do it, and then has done nothing.

None of them asks the device for a number or makes a shape depend on one, so all can be part of a CUDA graph.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.protocol import Added, Limits
from kvkeep.backends.triton import blocks, switch
from kvkeep.backends.triton.launch import (
    ENDLESS,
    NOTHING,
    Scratch,
    launch,
    limits_of,
    new_of,
    output,
    row,
    store_of,
    takes,
)
from kvkeep.backends.wanted import Wanted
from kvkeep.types import AttentionOptions, Slots

_KINDS = {None: 1, "last": 2, "low": 3}


def attend(
    query: Float[Tensor, "B Hq 1 D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    now: Int[Tensor, "B 1"],
    positions: Int[Tensor, "B #Hk S"],
    *,
    options: AttentionOptions,
    wanted: Wanted | None,
) -> list[Tensor] | None:
    """Attention of one token per row; the arguments and results are those of `kvkeep.backends.native.ops.attend`.

    Cost:
        two kernels: `decode.attend_split` and `decode.merge`.
    """
    if not switch.runs(query, keys, values, now, positions) or not takes(query, keys, values):
        return None
    from kvkeep.backends.triton import decode

    scratch = Scratch(query, keys, values, keeps=wanted is not None)
    scratch.fill(query, keys, values, now, positions, options=options)
    kind = _KINDS[wanted.second] if wanted else 0
    results = [output(query, values)]
    results += [keys.new_empty(keys.shape[:3], dtype=torch.float32) for _ in range(min(kind, 2))]
    launch(
        decode.merge,
        (scratch.heads,),
        **scratch.tensors(results[0], positions, now, options),
        **row(wanted or NOTHING, now),
        mass=results[min(kind, 1)],
        extra=results[-1],
        theta=1.0 if wanted is None else wanted.theta,
        KIND=kind,
        LIVE=wanted is not None and wanted.live,
        num_warps=blocks.SCAN_WARPS,
    )
    return [results[0].to(query.dtype), *results[1:]]


def step(
    query: Float[Tensor, "B Hq 1 D"],
    store: Slots,
    new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: Wanted | None,
    added: Added,
    limits: Limits,
) -> Float[Tensor, "B Hq 1 E"] | None:
    """The whole decode step, in place: append, attend, update the sums, evict.

    Args:
        query: new queries.
        store: keys, values and positions of the slots.
        new: the new token's key and value.
        now: its position, -1 for padding.
        options: of the model's attention.
        wanted: how the row counts; ``None`` if there are no sums.
        added: the policy's state.
        limits: what may stay.

    Cost:
        two kernels: `decode.attend_split` and `fuse.merge_evict`.
    """
    keys, values, positions = store
    if not switch.runs(query, *store, *new, now, *added.states) or not takes(query, *new, keys, values):
        return None
    from kvkeep.backends.triton import fuse

    scratch = Scratch(query, keys, values, keeps=wanted is not None)
    scratch.fill(query, keys, values, now, positions, options=options, new=new)
    out = output(query, values)
    total, other = (*added.states, positions, positions)[:2]
    launch(
        fuse.merge_evict,
        (scratch.heads,),
        **scratch.tensors(out, positions, now, options),
        **row(wanted or NOTHING, now),
        **limits_of(limits),
        slots=scratch.slots,
        total=total,
        other=other,
        state_row=total.stride(0),
        state_head=total.stride(1),
        keep=float((wanted or NOTHING).decay),
        STATES=len(added.states),
        REPORTS=wanted is not None,
        BY_SUM=added.is_score,
        num_warps=blocks.SCAN_WARPS,
    )
    return out.to(query.dtype)


def write(
    keys: Float[Tensor, "B Hk capacity D"],
    values: Float[Tensor, "B Hk capacity E"],
    positions: Int[Tensor, "B Hk capacity"],
    *,
    new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    now: Int[Tensor, "B 1"],
) -> Int[Tensor, "B Hk 1"] | None:
    """Put one token per row into the empty slot of each head, in place, and say which slot it was."""
    if not switch.runs(keys, values, positions, *new, now) or not takes(keys, values, *new):
        return None
    from kvkeep.backends.triton import slots

    B, Hk, S = positions.shape
    D, E = keys.shape[-1], values.shape[-1]
    found = torch.empty((B, Hk, 1), dtype=torch.int64, device=keys.device)
    launch(
        slots.append,
        (B * Hk,),
        **store_of(keys, values, positions),
        **new_of(*new),
        now=now,
        now_row=now.stride(0),
        slots=found,
        Hk=Hk,
        S=S,
        D=D,
        E=E,
        BLOCK_D=blocks.power(D),
        BLOCK_E=blocks.power(E),
        SCAN=min(blocks.SCAN, blocks.power(S)),
        num_warps=blocks.SCAN_WARPS,
    )
    return found


def evict(positions: Int[Tensor, "B Hk S"], scores: Float[Tensor, "B Hk S"] | None, limits: Limits) -> bool | None:
    """Empty, in place, what has expired, and then the weakest slot of every head that holds more than its limit.

    The order is that of `scores.weakest` after `scores.protect`. Without scores nothing but expiry happens.
    """
    scored = positions if scores is None else scores
    if not switch.runs(positions, scored, limits.seen) or (scores is not None and scores.dtype != torch.float32):
        return None
    from kvkeep.backends.triton import slots

    B, Hk, S = positions.shape
    strides = limits_of(limits)
    strides["seen"], strides["seen_row"] = strides.pop("ages"), strides.pop("age_row")
    strides["sinks"] = strides.pop("first_ones")
    launch(
        slots.evict,
        (B * Hk,),
        **strides,
        positions=positions,
        position_row=positions.stride(0),
        position_head=positions.stride(1),
        scores=scored,
        score_row=scored.stride(0),
        score_head=scored.stride(1),
        Hk=Hk,
        S=S,
        window=limits.window or ENDLESS,
        SCAN=min(blocks.SCAN, blocks.power(S)),
        SCORED=scores is not None,
        num_warps=blocks.SCAN_WARPS,
    )
    return True
