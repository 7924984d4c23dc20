"""What the kernels take, from tensors: pointers, strides, sizes, and the scratch between them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kvkeep.backends.protocol import Limits
from kvkeep.backends.triton import blocks, switch
from kvkeep.backends.wanted import Wanted
from kvkeep.types import AttentionOptions

TYPES = (torch.float32, torch.bfloat16, torch.float16)

ENDLESS = 2**31 - 1
NOTHING = Wanted(counts=0)


class Scratch:
    """What the two kernels of a step hand to each other; the layout is in `decode`."""

    def __init__(self, query: Tensor, keys: Tensor, values: Tensor, *, keeps: bool) -> None:
        B, Hk, S, D = keys.shape
        G, E = query.shape[1] // Hk, values.shape[-1]
        self.sizes = blocks.decode(keys.device, D * keys.element_size(), S)
        self.splits = max(1, -(-(S - self.sizes.slots) // self.sizes.split))  # a rest of a tile is no split
        self.heads, self.keeps = B * Hk, keeps
        self.shape = {"G": G, "E": E, "Hk": Hk, "S": S}
        parts = self.heads * self.splits * G
        self.mixes = keys.new_empty(parts * E, dtype=torch.float32)
        self.bounds = keys.new_empty(parts * 2, dtype=torch.float32)
        self.logits = keys.new_empty(self.heads * G * S if keeps else 1, dtype=torch.float32)
        self.slots = keys.new_empty(self.heads, dtype=torch.int32)

    def fill(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        now: Tensor,
        positions: Tensor,
        *,
        options: AttentionOptions,
        new: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        """Read all slots; with a new token, write it into its slot first."""
        from kvkeep.backends.triton import decode

        D = keys.shape[-1]
        launch(
            decode.attend_split,
            (self.heads, self.splits),
            **self.shape,
            **store_of(keys, values, positions),
            **new_of(*(new or (keys, values))),
            query=query,
            query_row=query.stride(0),
            query_head=query.stride(1),
            now=now,
            now_row=now.stride(0),
            mixes=self.mixes,
            bounds=self.bounds,
            logits=self.logits,
            slots=self.slots,
            scaling=float(options.scaling),
            softcap=float(options.softcap or 0.0),
            window=options.window or ENDLESS,
            D=D,
            BLOCK_G=blocks.power(self.shape["G"]),
            BLOCK_D=blocks.power(D),
            BLOCK_E=blocks.power(self.shape["E"]),
            TILE=self.sizes.slots,
            SPLIT=self.sizes.split,
            SCAN=min(blocks.SCAN, blocks.power(self.shape["S"])),
            CAPPED=options.softcap is not None,
            KEEPS=self.keeps,
            APPENDS=new is not None,
            WIDE=switch.interprets(),
            num_warps=self.sizes.warps,
            num_stages=self.sizes.stages,
        )

    def tensors(self, out: Tensor, positions: Tensor, now: Tensor, options: AttentionOptions) -> dict[str, Any]:
        """What the second kernel takes."""
        group = blocks.power(self.shape["G"], 1)
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        return {
            **self.shape,
            "out": out,
            "mixes": self.mixes,
            "bounds": self.bounds,
            "logits": self.logits,
            "splits": self.splits,
            "positions": positions,
            **heads_of("position", positions),
            "now": now,
            "now_row": now.stride(0),
            "sinks": self.bounds if sinks is None else sinks,
            "SINKS": sinks is not None,
            "window": options.window or ENDLESS,
            "BLOCK_G": group,
            "BLOCK_E": blocks.power(self.shape["E"]),
            "TILE": min(blocks.power(self.shape["S"]), blocks.merge_tile(group)),
        }


def output(query: Tensor, values: Tensor) -> Tensor:
    """Memory for the output; in float32 for the interpreter, which cuts numbers off that bfloat16 should round."""
    dtype = torch.float32 if switch.interprets() else query.dtype
    return query.new_empty((*query.shape[:3], values.shape[-1]), dtype=dtype)


def row(wanted: Wanted, now: Tensor) -> dict[str, Any]:
    """How a row counts, in the kernels' words; a table that is not there is never read."""
    counted, gains, newest = (
        (value.to(dtype).contiguous() if isinstance(value, Tensor) else None)
        for value, dtype in ((wanted.counts, torch.int64), (wanted.gain, torch.float32), (wanted.last, torch.int64))
    )
    return {
        "counted": now if counted is None else counted,
        "COUNTED": counted is not None,
        "counts": wanted.counts if counted is None else 0,
        "gains": now if gains is None else gains,
        "GAINS": gains is not None,
        "gain": 1.0 if gains is not None or wanted.gain is None else float(wanted.gain),
        "TEMPERED": wanted.gain is not None,
        "newest": now if newest is None else newest,
        "NEWEST": newest is not None,
        "last": wanted.last if newest is None else 0,
        "log_decay": math.log2(wanted.decay) if wanted.decay > 0 else -math.inf,
    }


def limits_of(limits: Limits) -> dict[str, Any]:
    """What may stay, in the kernels' words."""
    recents = limits.recent if isinstance(limits.recent, Tensor) else None
    stay = limits.stay if isinstance(limits.stay, Tensor) else None
    return {
        "ages": limits.seen,
        "age_row": limits.seen.stride(0),
        "first_ones": limits.sinks,
        "recents": limits.seen if recents is None else recents,
        "recent_row": 0 if recents is None else recents.stride(0),
        "RECENTS": recents is not None,
        "recent": 0 if recents is not None else limits.recent,
        "limits": limits.seen if stay is None else stay,
        "limit_row": 0 if stay is None else stay.stride(0),
        "limit_head": 0 if stay is None or stay.shape[1] == 1 else stay.stride(1),
        "LIMITS": stay is not None,
        "limit": 0 if stay is not None else limits.stay,
        "SLIDES": limits.window is not None,
    }


def store_of(keys: Tensor, values: Tensor, positions: Tensor) -> dict[str, Any]:
    """Slots and their strides."""
    return {
        "keys": keys,
        **heads_of("key", keys),
        "key_slot": keys.stride(2),
        "values": values,
        **heads_of("value", values),
        "value_slot": values.stride(2),
        "positions": positions,
        **heads_of("position", positions),
    }


def new_of(keys: Tensor, values: Tensor) -> dict[str, Any]:
    """A token's key and value, and their strides."""
    return {"new_keys": keys, **heads_of("new_key", keys), "new_values": values, **heads_of("new_value", values)}


def heads_of(name: str, tensor: Tensor) -> dict[str, int]:
    """Strides from row to row and from head to head, where there may be one head for all."""
    return {f"{name}_row": tensor.stride(0), f"{name}_head": tensor.stride(1) if tensor.shape[1] > 1 else 0}


def takes(query: Tensor, *others: Tensor) -> bool:
    """Whether dtypes and head dims are among those that there are kernels for; if not, say so once."""
    dtypes = {tensor.dtype for tensor in (query, *others)}
    dim = max(tensor.shape[-1] for tensor in (query, *others))
    group = query.shape[1] // others[0].shape[1]
    if len(dtypes) > 1 or query.dtype not in TYPES:
        switch.notice(f"dtypes {', '.join(sorted(map(str, dtypes)))}")
    elif dim > blocks.MAX_DIM:
        switch.notice(f"a head dim of {dim}, more than {blocks.MAX_DIM}")
    elif group > blocks.MAX_GROUP:
        switch.notice(f"{group} query heads for each KV head, more than {blocks.MAX_GROUP}")
    else:
        return True
    return False


def launch(kernel: Any, grid: tuple[int, ...], **arguments: Any) -> None:
    """Run a kernel on the device of its first tensor."""
    device = next(value for value in arguments.values() if isinstance(value, Tensor))
    with torch.cuda.device_of(device):
        kernel[grid](**arguments)
