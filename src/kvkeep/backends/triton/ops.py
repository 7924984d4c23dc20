"""The kernels of decode and of slots as functions of tensors; each returns ``None`` and does nothing if it cannot run.

None of them asks the device for a number, and no shape depends on one, so all can be part of a CUDA graph.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.backends.base import Added, SlotLimits, WantedReport
from kvkeep.backends.triton import launch
from kvkeep.kv.slot_codec import CodedSlots, KeyTransform, hadamard
from kvkeep.types import AttentionOptions, Slots

_ENDLESS = 2**31 - 1
"""A window that hides nothing: positions have 32 bits."""

_NOTHING = WantedReport(counts=0)
_KINDS = {None: 1, "last": 2, "low": 3}
"""The second field of a report → the kernel's number for it; 0: no report."""


def attend(
    query: Float[Tensor, "B Hq 1 D"],
    slots: Slots,
    now: Int[Tensor, "B 1"],
    *,
    options: AttentionOptions,
    wanted: WantedReport | None,
) -> list[Tensor] | None:
    """Compute attention of one token per row, with the results of `kvkeep.backends.native.ops.attend`.

    Return ``None`` if no kernel can do it.

    Cost:
        two kernels: `decode.attend_split` and `decode.merge`. Over codes, a product of the query with
        `kvkeep.kv.slot_codec`' matrix before.
    """
    if isinstance(slots, CodedSlots):
        # without rows: what is looked at are the number of heads, the head dims and the dtype, and codes have others
        like = query.new_empty((0, slots.positions.shape[1], *launch.dims(slots)))
        if not _runs_over(slots, query, now) or not _takes(query, like):
            return None
        query = _transformed(query, slots.transform, 1).to(query.dtype)
    elif not launch.runs(query, *slots, now) or not _takes(query, slots.keys, slots.values):
        return None
    from kvkeep.backends.triton import decode  # here and below, as it imports Triton

    scratch = Scratch(query, slots, now, options, keeps=wanted is not None)
    scratch.fill()
    kind = _KINDS[wanted.second] if wanted else 0
    results = [_output(query, launch.dims(slots)[1])]
    results += [query.new_empty(scratch.shape, dtype=torch.float32) for _ in range(min(kind, 2))]
    _launch(
        decode.merge,
        (scratch.heads,),
        **scratch.tensors(results[0]),
        **launch.row(wanted or _NOTHING, now),
        mass=results[min(kind, 1)],  # what the kind does not write is any tensor of the results
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
    wanted: WantedReport | None,
    added: Added,
    limits: SlotLimits,
) -> Float[Tensor, "B Hq 1 E"] | None:
    """Run `Backend.step` and return the output; ``None``, with nothing changed, if the kernels cannot.

    ``wanted`` says how the rows count in the policy's sums; ``None``: there are no sums.

    Cost:
        two kernels: `decode.attend_split` and `decode.merge_evict`.
    """
    if isinstance(slots, CodedSlots):
        return None
    keys, values, positions = slots
    if not launch.runs(query, *slots, *new, now, *added.states) or not _takes(query, *new, keys, values):
        return None
    from kvkeep.backends.triton import decode

    scratch = Scratch(query, slots, now, options, keeps=wanted is not None)
    scratch.fill(new)
    out = _output(query, values.shape[-1])
    total, other = (*added.states, positions, positions)[:2]  # what the policy does not have is any tensor
    lost = total if wanted is None or added.lost is None else added.lost
    _launch(
        decode.merge_evict,
        (scratch.heads,),
        **scratch.tensors(out),
        **launch.row(wanted or _NOTHING, now),
        **launch.limits(limits),
        slots=scratch.slots,
        total=total,
        other=other,
        **launch.heads("state", total),
        lost=lost,
        **launch.heads("lost", lost),
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
    """Write a new token per row into an empty slot of each head, in place, quantized if the slots are, and return the
    slots; ``None``, with nothing changed, if no kernel can.
    """
    if isinstance(store, CodedSlots):
        return _write_codes(store, new, now)
    keys, values, positions = store
    if not launch.runs(*store, *new, now) or not _takes(keys, values, *new):
        return None
    from kvkeep.backends.triton import slots

    B, Hk, S = positions.shape
    found = torch.empty((B, Hk, 1), dtype=torch.int64, device=keys.device)
    _launch(
        slots.append,
        (B * Hk,),
        **launch.store(store),
        **launch.new(*new),
        now=now,
        now_row=now.stride(0),
        slots=found,
        SCAN=launch.scan_tile(S),
    )
    return found


def _write_codes(
    slots: CodedSlots, new: tuple[Float[Tensor, "B Hk 1 D"], Float[Tensor, "B Hk 1 E"]], now: Int[Tensor, "B 1"]
) -> Int[Tensor, "B Hk 1"] | None:
    """Write the new token's codes into a free slot of each head, and return the slots; ``None`` if no kernel can do
    it.
    """
    if not _runs_over(slots, *new, now) or not _takes(*new):
        return None
    from kvkeep.backends.triton.slots import append_codes

    (B, Hk, S), arranged = slots.positions.shape, launch.codes(slots)
    found = torch.empty((B, Hk, 1), dtype=torch.int64, device=now.device)
    key = _transformed(new[0], slots.transform, -1)
    # this kernel works on groups, and has blocks of these
    lying = {name: value for name, value in launch.store(slots).items() if not name.startswith("BLOCK")}
    _launch(
        append_codes,
        (B * Hk,),
        **lying,
        **arranged,
        **launch.new(key, new[1]),
        now=now,
        now_row=now.stride(0),
        slots=found,
        SCAN=launch.scan_tile(S),
        KEY_BLOCK=launch.power(arranged["KEY_GROUP"] * slots.coded_keys.bits // 8),
        VALUE_BLOCK=launch.power(arranged["VALUE_GROUP"] * slots.coded_values.bits // 8),
    )
    return found


def evict(positions: Int[Tensor, "B Hk S"], scores: Float[Tensor, "B Hk S"] | None, limits: SlotLimits) -> bool | None:
    """Expire if the limits have a window, evict if there are scores, and return ``True``.

    Return ``None``, with nothing changed, if no kernel can.
    """
    scored = positions if scores is None else scores  # without scores any tensor: it is not read
    if not launch.runs(positions, scored, limits.seen) or (scores is not None and scores.dtype != torch.float32):
        return None
    from kvkeep.backends.triton import slots

    B, Hk, S = positions.shape
    _launch(
        slots.evict,
        (B * Hk,),
        **launch.limits(limits),
        positions=positions,
        **launch.heads("position", positions),
        scores=scored,
        **launch.heads("score", scored),
        Hk=Hk,
        S=S,
        window=limits.window or _ENDLESS,
        SCAN=launch.scan_tile(S),
        SCORED=scores is not None,
    )
    return True


class Scratch:
    """Memory between the two kernels of a decode step (see `decode`), with logits if it ``keeps`` them; arguments."""

    def __init__(self, query: Tensor, slots: Slots, now: Tensor, options: AttentionOptions, *, keeps: bool) -> None:
        self.query, self.store, self.options, self.keeps = query, slots, options, keeps
        (B, Hk, S), (D, E) = launch.lying(slots)[0].numbers.shape[:3], launch.dims(slots)
        self.shape = B, Hk, S
        self.G, self.S = query.shape[1] // Hk, S
        bits = launch.lying(slots)[0].bits
        self.sizes = launch.decode_sizes(query.device, D * query.element_size(), S, bits)
        self.splits = max(1, -(-(S - self.sizes.slots) // self.sizes.split))  # a rest of a tile is no split
        self.heads, parts = B * Hk, B * Hk * self.splits * self.G
        self.slots = query.new_empty(self.heads, dtype=torch.int32)
        self.both = {
            "mixes": query.new_empty(parts * E, dtype=torch.float32),
            "bounds": query.new_empty(parts * 2, dtype=torch.float32),
            "logits": query.new_empty(self.heads * self.G * S if keeps else 1, dtype=torch.float32),
            "positions": slots.positions,
            **launch.heads("position", slots.positions),
            "now": now,
            "now_row": now.stride(0),
            "window": options.window or _ENDLESS,
        } | {"Hk": Hk, "S": S, "G": self.G, "E": E, "BLOCK_E": launch.power(E)}

    def fill(self, new: tuple[Tensor, Tensor] | None = None) -> None:
        """Run the first kernel, which fills this memory: it attends in splits. A new token (key and value) is written
        into a free slot before, and ``slots`` receives the slots.
        """
        from kvkeep.backends.triton import decode

        _launch(
            decode.attend_split,
            (self.heads, self.splits),
            **{**self.both, **launch.store(self.store), **launch.codes(self.store)},  # merged: they share names
            **launch.new(*(new or (self.query, self.query))),  # without APPENDS they are not read
            query=self.query,
            **launch.heads("query", self.query),
            slots=self.slots,
            scaling=float(self.options.scaling),
            softcap=float(self.options.softcap or 0.0),
            BLOCK_G=launch.power(self.G),
            TILE=self.sizes.slots,
            SPLIT=self.sizes.split,
            SCAN=launch.scan_tile(self.S),
            CAPPED=self.options.softcap is not None,
            KEEPS=self.keeps,
            APPENDS=new is not None,
            WIDE=launch.interprets(),
            num_warps=self.sizes.warps,
            num_stages=self.sizes.stages,
        )

    def tensors(self, out: Tensor) -> dict[str, Any]:
        """Return the arguments that both second kernels share, with ``out`` for the output."""
        sinks, group = self.options.sinks, launch.power(self.G, 1)
        return {
            **self.both,
            "out": out,
            "splits": self.splits,
            "sinks": self.both["bounds"] if sinks is None else sinks.detach().float().contiguous(),
            "SINKS": sinks is not None,
            "BLOCK_G": group,
            "TILE": launch.scan_tile(self.S, group),
        }


def _takes(query: Tensor, *others: Tensor) -> bool:
    """Return whether kernels take the dtypes and head dims of all these tensors, and the number of query heads for each
    head of ``others[0]``; if not, log why, once for each reason.
    """
    reason, group = launch.misfit(query, *others), query.shape[1] // others[0].shape[1]
    if reason is None and group > launch.MAX_GROUP:
        reason = f"{group} query heads for each KV head, more than {launch.MAX_GROUP}"
    if reason is not None:
        launch.notice(reason)
    return reason is None


@functools.cache
def _matrix(dim: int, device: torch.device) -> Float[Tensor, "D D"]:
    """Return the matrix of `kvkeep.kv.slot_codec.hadamard` for a head dim, float32 on a device, made once."""
    with torch.inference_mode(False):  # it outlives the mode in which it is first asked for
        return hadamard(torch.eye(dim)).to(device)


def turned(x: Float[Tensor, "B H 1 D"]) -> Float[Tensor, "B H 1 D"]:
    """Return float32 vectors after `kvkeep.kv.slot_codec.hadamard`, by one matrix product: fewer kernels."""
    found: Tensor = x @ _matrix(x.shape[-1], x.device)
    return found


def _transformed(x: Float[Tensor, "B H 1 D"], transform: KeyTransform, sign: int) -> Float[Tensor, "B H 1 D"]:
    """Return queries (``sign`` 1) or keys (-1) after `kvkeep.kv.slot_codec.KeyTransform`, in float32."""
    return transform.reflected(turned(transform.scaled(x.float(), sign)))


def _runs_over(slots: CodedSlots, *others: Tensor) -> bool:
    """Return whether kernels can read these quantized slots and the other tensors, see `launch.runs`."""
    of_rows = slots.transform.of_rows.values()
    return launch.runs(*others, *slots.coded_keys[:2], *slots.coded_values[:2], slots.positions, *of_rows)


def _output(query: Tensor, width: int) -> Tensor:
    """Allocate the output, ``(B, Hq, T, width)``, in the query's dtype; in float32 for the interpreter, which truncates
    where bfloat16 should round.
    """
    dtype = torch.float32 if launch.interprets() else query.dtype
    return query.new_empty((*query.shape[:3], width), dtype=dtype)


def _launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    device = next(value for value in arguments.values() if isinstance(value, Tensor))
    with torch.cuda.device_of(device):
        kernel[grid](**{"num_warps": launch.SCAN_WARPS, **arguments})
