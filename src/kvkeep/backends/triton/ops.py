"""The kernels of decode and of slots as functions of tensors; each returns ``None`` and does nothing if it cannot run.

None of them asks the device for a number, and no shape depends on one, so all can be part of a CUDA graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.added import Added, Limits
from kvkeep.backends.triton import gpu
from kvkeep.backends.wanted import Wanted
from kvkeep.types import AttentionOptions, Slots

_ENDLESS = 2**31 - 1
_NOTHING = Wanted(counts=0)
_KINDS = {None: 1, "last": 2, "low": 3}


def attend(
    query: Float[Tensor, "B Hq 1 D"],
    slots: Slots,
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: Wanted | None,
) -> list[Tensor] | None:
    """Attention of one token per row; the results are those of `kvkeep.backends.native.ops.attend`.

    Cost:
        two kernels: `decode.attend_split` and `merge.merge`.
    """
    keys, values, _ = slots
    if not gpu.runs(query, *slots, now) or not _takes(query, keys, values):
        return None
    from kvkeep.backends.triton import merge

    scratch = Scratch(query, slots, now, options, keeps=wanted is not None)
    scratch.fill()
    kind = _KINDS[wanted.second] if wanted else 0
    results = [_output(query, values)]
    results += [keys.new_empty(keys.shape[:3], dtype=torch.float32) for _ in range(min(kind, 2))]
    _launch(
        merge.merge,
        (scratch.heads,),
        **scratch.tensors(results[0]),
        **_row(wanted or _NOTHING, now),
        mass=results[min(kind, 1)],
        extra=results[-1],
        theta=1.0 if wanted is None else wanted.theta,
        KIND=kind,
        LIVE=wanted is not None and wanted.live,
    )
    return [results[0].to(query.dtype), *results[1:]]


def step(
    query: Float[Tensor, "B Hq 1 D"],
    slots: Slots,
    new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]],
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: Wanted | None,
    added: Added,
    limits: Limits,
) -> Float[Tensor, "B Hq 1 E"] | None:
    """`Backend.step`; ``wanted`` says how the rows count, ``None`` if there are no sums.

    Cost:
        two kernels: `decode.attend_split` and `merge.merge_evict`.
    """
    keys, values, positions = slots
    if not gpu.runs(query, *slots, *new, now, *added.states) or not _takes(query, *new, keys, values):
        return None
    from kvkeep.backends.triton import merge

    scratch = Scratch(query, slots, now, options, keeps=wanted is not None)
    scratch.fill(new)
    out = _output(query, values)
    total, other = (*added.states, positions, positions)[:2]
    lost = total if wanted is None or added.lost is None else added.lost
    _launch(
        merge.merge_evict,
        (scratch.heads,),
        **scratch.tensors(out),
        **_row(wanted or _NOTHING, now),
        **_limits(limits),
        slots=scratch.slots,
        total=total,
        other=other,
        **_heads("state", total),
        lost=lost,
        **_heads("lost", lost),
        LOSES=lost is not total,
        keep=float((wanted or _NOTHING).decay),
        STATES=len(added.states),
        REPORTS=wanted is not None,
        BY_SUM=added.is_score,
    )
    return out.to(query.dtype)


def write(
    store: Slots, new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]], now: Int[Tensor, "B 1"]
) -> Int[Tensor, "B Hk 1"] | None:
    """`Backend.append`, where the new token has the dtype of the slots."""
    keys, values, positions = store
    if not gpu.runs(*store, *new, now) or not _takes(keys, values, *new):
        return None
    from kvkeep.backends.triton import slots

    B, Hk, S = positions.shape
    found = torch.empty((B, Hk, 1), dtype=torch.int64, device=keys.device)
    _launch(
        slots.append,
        (B * Hk,),
        **_store(*store),
        **_new(*new),
        now=now,
        now_row=now.stride(0),
        slots=found,
        SCAN=gpu.scan_tile(S),
    )
    return found


def evict(positions: Int[Tensor, "B Hk S"], scores: Float[Tensor, "B Hk S"] | None, limits: Limits) -> bool | None:
    """`Backend.expire` if the limits have a window, then `Backend.evict` if there are scores."""
    scored = positions if scores is None else scores
    if not gpu.runs(positions, scored, limits.seen) or (scores is not None and scores.dtype != torch.float32):
        return None
    from kvkeep.backends.triton import slots

    B, Hk, S = positions.shape
    _launch(
        slots.evict,
        (B * Hk,),
        **_limits(limits),
        positions=positions,
        **_heads("position", positions),
        scores=scored,
        **_heads("score", scored),
        Hk=Hk,
        S=S,
        window=limits.window or _ENDLESS,
        SCAN=gpu.scan_tile(S),
        SCORED=scores is not None,
    )
    return True


class Scratch:
    """Memory between the two kernels of a decode step (see `decode`), with logits if it ``keeps`` them; arguments."""

    def __init__(self, query: Tensor, slots: Slots, now: Tensor, options: AttentionOptions, *, keeps: bool) -> None:
        self.query, self.store, self.options, self.keeps = query, slots, options, keeps
        (B, Hk, S, D), E = slots.keys.shape, slots.values.shape[-1]
        self.G, self.S = query.shape[1] // Hk, S
        self.sizes = gpu.decode_sizes(query.device, D * slots.keys.element_size(), S)
        self.splits = max(1, -(-(S - self.sizes.slots) // self.sizes.split))  # a rest of a tile is no split
        self.heads, parts = B * Hk, B * Hk * self.splits * self.G
        self.slots = query.new_empty(self.heads, dtype=torch.int32)
        self.both = {
            "mixes": query.new_empty(parts * E, dtype=torch.float32),
            "bounds": query.new_empty(parts * 2, dtype=torch.float32),
            "logits": query.new_empty(self.heads * self.G * S if keeps else 1, dtype=torch.float32),
            "positions": slots.positions,
            **_heads("position", slots.positions),
            "now": now,
            "now_row": now.stride(0),
            "window": options.window or _ENDLESS,
        } | {"Hk": Hk, "S": S, "G": self.G, "E": E, "BLOCK_E": gpu.power(E)}

    def fill(self, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Run the first kernel, which writes a new token into its slot before it attends."""
        from kvkeep.backends.triton import decode

        _launch(
            decode.attend_split,
            (self.heads, self.splits),
            **{**self.both, **_store(*self.store)},
            **_new(*(new or self.store[:2])),
            query=self.query,
            **_heads("query", self.query),
            slots=self.slots,
            scaling=float(self.options.scaling),
            softcap=float(self.options.softcap or 0.0),
            BLOCK_G=gpu.power(self.G),
            TILE=self.sizes.slots,
            SPLIT=self.sizes.split,
            SCAN=gpu.scan_tile(self.S),
            CAPPED=self.options.softcap is not None,
            KEEPS=self.keeps,
            APPENDS=new is not None,
            WIDE=gpu.interprets(),
            num_warps=self.sizes.warps,
            num_stages=self.sizes.stages,
        )

    def tensors(self, out: Tensor) -> dict[str, Any]:
        """Arguments of the second kernel."""
        sinks, group = self.options.sinks, gpu.power(self.G, 1)
        return {
            **self.both,
            "out": out,
            "splits": self.splits,
            "sinks": self.both["bounds"] if sinks is None else sinks.detach().float().contiguous(),
            "SINKS": sinks is not None,
            "BLOCK_G": group,
            "TILE": gpu.scan_tile(self.S, group),
        }


def _takes(query: Tensor, *others: Tensor) -> bool:
    """Whether there are kernels for these dtypes and head dims and this group; if not, log why."""
    reason, group = gpu.misfit(query, *others), query.shape[1] // others[0].shape[1]
    if reason is None and group > gpu.MAX_GROUP:
        reason = f"{group} query heads for each KV head, more than {gpu.MAX_GROUP}"
    if reason is not None:
        gpu.notice(reason)
    return reason is None


def _output(query: Tensor, values: Tensor) -> Tensor:
    """Memory for the output; float32 for the interpreter, which truncates where bfloat16 should round."""
    dtype = torch.float32 if gpu.interprets() else query.dtype
    return query.new_empty((*query.shape[:3], values.shape[-1]), dtype=dtype)


def _row(wanted: Wanted, now: Tensor) -> dict[str, Any]:
    """How a row counts, as the kernels take it."""
    return {
        **_either("counted", "counts", wanted.counts, now, dtype=torch.int64),
        **_either("gains", "gain", 1.0 if wanted.gain is None else wanted.gain, now, dtype=torch.float32),
        **_either("newest", "last", wanted.last, now, dtype=torch.int64),
        "TEMPERED": wanted.gain is not None,
        "log_decay": math.log2(wanted.decay) if wanted.decay > 0 else -math.inf,
    }


def _limits(limits: Limits) -> dict[str, Any]:
    """Limits as the kernels take them."""
    recent, stay = limits.recent, limits.stay
    return {
        "ages": limits.seen,
        "age_row": limits.seen.stride(0),
        "first_ones": limits.sinks,
        **_either("recents", "recent", recent, limits.seen),
        "recent_row": recent.stride(0) if isinstance(recent, Tensor) else 0,
        **_either("limits", "limit", stay, limits.seen),
        **(_heads("limit", stay) if isinstance(stay, Tensor) else {"limit_row": 0, "limit_head": 0}),
        "SLIDES": limits.window is not None,
    }


def _either(
    table: str, number: str, value: int | float | Tensor, unread: Tensor, *, dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """A table, dense if a dtype is given, or one number for all; then ``unread`` takes the place of the table."""
    if not isinstance(value, Tensor):
        return {table: unread, number: value, table.upper(): False}
    return {table: value if dtype is None else value.to(dtype).contiguous(), number: 0, table.upper(): True}


def _store(keys: Tensor, values: Tensor, positions: Tensor) -> dict[str, Any]:
    """Slots, their strides and sizes; `BLOCK_D` and `BLOCK_E` are the powers of two that head dims are padded to."""
    (_, Hk, S, D), E = keys.shape, values.shape[-1]
    return {
        "keys": keys,
        **_heads("key", keys),
        "key_slot": keys.stride(2),
        "values": values,
        **_heads("value", values),
        "value_slot": values.stride(2),
        "positions": positions,
        **_heads("position", positions),
    } | {"Hk": Hk, "S": S, "D": D, "E": E, "BLOCK_D": gpu.power(D), "BLOCK_E": gpu.power(E)}


def _new(keys: Tensor, values: Tensor) -> dict[str, Any]:
    """A token's key and value, and their strides."""
    return {"new_keys": keys, **_heads("new_key", keys), "new_values": values, **_heads("new_value", values)}


def _heads(name: str, tensor: Tensor) -> dict[str, int]:
    """Strides from row to row and from head to head; the latter is 0 where one is for all heads."""
    return {f"{name}_row": tensor.stride(0), f"{name}_head": tensor.stride(1) if tensor.shape[1] > 1 else 0}


def _launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    device = next(value for value in arguments.values() if isinstance(value, Tensor))
    with torch.cuda.device_of(device):
        kernel[grid](**{"num_warps": gpu.SCAN_WARPS, **arguments})
