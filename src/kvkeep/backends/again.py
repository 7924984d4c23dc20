"""A prompt read again after itself, without reading it: its own queries, turned ahead, against all of its keys.

Under rotary positions the query at position ``p + n`` is the query at ``p``, turned by the constant angle of ``n``
positions. So the attention that each key would receive in a second reading follows from queries and keys that exist
while the prompt is read. The matrix exists for one block of query rows at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.rotary import Rotation
from kvkeep.types import AttentionOptions, Slots

BLOCK_BYTES = {"cpu": 2**22, "other": 2**25}
"""Size of one block of logits, of which about four exist at once: on a CPU they should stay in its caches."""

LEAST_ROWS = 16
"""Query rows of the smallest block. With fewer of them the products of matrices take longer."""


def turned(
    query: Float[Tensor, "B Hq T D"], length: Int[Tensor, "B #Hk"], rotation: Rotation | None
) -> Float[Tensor, "B Hq T D"]:
    """The queries as they would be ``length`` positions later; unchanged if the model does not rotate them."""
    if rotation is None:
        return query
    by = length.repeat_interleave(query.shape[1] // length.shape[1], dim=1)
    return rotation.ahead(query, by)


def reread(
    query: Float[Tensor, "B Hq T D"],
    slots: Slots,
    now: Int[Tensor, "B T"],
    *,
    length: Int[Tensor, "B #Hk"],
    rotation: Rotation | None,
    options: AttentionOptions,
) -> Float[Tensor, "B Hk S"]:
    """See `kvkeep.backends.Backend.reread`. On a CPU one head of one row comes after the other."""
    again, (B, Hk, S, _) = turned(query, length, rotation), slots.keys.shape
    if query.device.type != "cpu":
        return _rate(query, again, slots, now, options)
    G, found = query.shape[1] // Hk, query.new_empty((B, Hk, S), dtype=torch.float32)
    positions = slots.positions.expand(B, Hk, S)
    for row, head in itertools.product(range(B), range(Hk)):
        b, h, g = slice(row, row + 1), slice(head, head + 1), slice(head * G, head * G + G)
        mine = replace(options, sinks=None if options.sinks is None else options.sinks[g])
        held = Slots(slots.keys[b, h], slots.values[b, h], positions[b, h])
        found[b, h] = _rate(query[b, g], again[b, g], held, now[b], mine)
    return found


def _rate(
    query: Float[Tensor, "B Hq T D"],
    again: Float[Tensor, "B Hq T D"],
    slots: Slots,
    now: Int[Tensor, "B T"],
    options: AttentionOptions,
) -> Float[Tensor, "B Hk S"]:
    """The largest share that each key gets from the queries of the second reading, block by block."""
    B, Hq, T, D = query.shape
    Hk, S = slots.keys.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = slots.keys.to(wide)
    first, second = (x.to(wide).reshape(B, Hk, Hq // Hk, T, D) for x in (query, again))
    empty = _bias(slots.positions[:, :, None, None] < 0, wide)
    counts = torch.where(now >= 1, 0.0, torch.inf).to(wide)[:, None, None]
    found = torch.full((B, Hk, S), -torch.inf, dtype=wide, device=query.device)
    for part in _blocks(T, S * B * Hq * keys.element_size(), query.device):
        n = S - T + part.stop  # keys after the block's last row are in its future
        seen = _logits(first[:, :, :, part], keys[:, :, :n], options)
        known = _total(seen, _bias(_hidden(slots.positions[:, :, :n], now[:, part], options), wide), options)
        logits = _logits(second[:, :, :, part], keys, options).add_(empty)
        total = torch.logaddexp(logits.logsumexp(dim=-1), known).add_(counts[..., part])
        torch.maximum(found, logits.sub_(total[..., None]).flatten(2, 3).amax(dim=2), out=found)
    return found.exp().float()


def _blocks(T: int, row_bytes: int, device: torch.device) -> Iterator[slice]:
    """The rows of each block."""
    size = BLOCK_BYTES["cpu" if device.type == "cpu" else "other"]
    rows = max(LEAST_ROWS, size // row_bytes)
    return (slice(start, min(start + rows, T)) for start in range(0, T, rows))


def _bias(hidden: Bool[Tensor, "*A"], dtype: torch.dtype) -> Float[Tensor, "*A"]:
    """Minus infinity for hidden keys, to be added: on a CPU this is many times as fast as filling by a mask."""
    return torch.where(hidden, -torch.inf, 0.0).to(dtype)


def _logits(
    query: Float[Tensor, "B Hk G T D"], keys: Float[Tensor, "B Hk S D"], options: AttentionOptions
) -> Float[Tensor, "B Hk G T S"]:
    """Scaled and soft-capped logits."""
    logits = (query.flatten(2, 3) * options.scaling @ keys.mT).view(*query.shape[:4], -1)
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


def _hidden(
    positions: Int[Tensor, "B #Hk S"], now: Int[Tensor, "B T"], options: AttentionOptions
) -> Bool[Tensor, "B #Hk 1 T S"]:
    """Whether a key is hidden from a row of the first reading."""
    keys, rows = positions[:, :, None, None], now.to(positions.dtype)[:, None, None, :, None]
    hidden = (keys < 0) | (keys > rows)
    return hidden if options.window is None else hidden | (keys <= rows - options.window)


def _total(
    logits: Float[Tensor, "B Hk G T S"], bias: Float[Tensor, "B #Hk 1 T S"], options: AttentionOptions
) -> Float[Tensor, "B Hk G T"]:
    """The log of the sum of exponentials over all keys that a row sees, and of the model's sink."""
    total = logits.add_(bias).logsumexp(dim=-1)
    if options.sinks is None:
        return total
    return torch.logaddexp(total, options.sinks.to(total.dtype).view(1, *total.shape[1:3], 1))
