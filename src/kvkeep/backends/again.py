"""A prompt read again after itself, without reading it: its own queries, turned ahead, against all of its keys.

Under rotary positions the query at position ``p + n`` is the query at ``p``, turned by the constant angle of ``n``
positions. So the attention that each key would receive in a second reading follows from queries and keys that exist
while the prompt is read. The matrix exists for one block of query rows at a time.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.rotary.ranks import Rotation
from kvkeep.types import AttentionOptions, Slots

BLOCK_BYTES = 16 * 2**20
"""Size of one block of logits, of which about four exist at once."""


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
    """See `kvkeep.backends.Backend.reread`."""
    B, Hq, T, D = query.shape
    Hk, S = slots.keys.shape[1:3]
    wide = torch.promote_types(query.dtype, torch.float32)
    keys = slots.keys.to(wide).mT
    first, second = (x.to(wide).view(B, Hk, Hq // Hk, T, D) for x in (query, turned(query, length, rotation)))
    empty = (slots.positions < 0)[:, :, None, None]
    found = torch.full((B, Hk, S), -torch.inf, dtype=wide, device=query.device)
    rows = max(1, BLOCK_BYTES // (keys.element_size() * B * Hq * S))
    for part in (slice(start, start + rows) for start in range(0, T, rows)):
        known = _total(_logits(first[:, :, :, part], keys, options), _hidden(slots, now[:, part], options), options)
        logits = _logits(second[:, :, :, part], keys, options).masked_fill_(empty, -torch.inf)
        share = logits - torch.logaddexp(logits.logsumexp(dim=-1), known)[..., None]
        counts = (now[:, part] >= 1)[:, None, None, :, None]
        torch.maximum(found, share.masked_fill_(~counts, -torch.inf).amax(dim=(2, 3)), out=found)
    return found.exp().float()


def _logits(
    query: Float[Tensor, "B Hk G T D"], keys: Float[Tensor, "B Hk D S"], options: AttentionOptions
) -> Float[Tensor, "B Hk G T S"]:
    """Scaled and soft-capped logits."""
    logits = (query.flatten(2, 3) * options.scaling @ keys).view(*query.shape[:4], -1)
    return logits if options.softcap is None else options.softcap * torch.tanh(logits / options.softcap)


def _hidden(slots: Slots, now: Int[Tensor, "B T"], options: AttentionOptions) -> Bool[Tensor, "B #Hk 1 T S"]:
    """Whether a key is hidden from a row of the first reading."""
    keys, rows = slots.positions[:, :, None, None], now[:, None, None, :, None]
    hidden = (keys < 0) | (keys > rows)
    return hidden if options.window is None else hidden | (keys <= rows - options.window)


def _total(
    logits: Float[Tensor, "B Hk G T S"], hidden: Bool[Tensor, "B #Hk 1 T S"], options: AttentionOptions
) -> Float[Tensor, "B Hk G T"]:
    """The log of the sum of exponentials over all keys that a row sees, and of the model's sink."""
    total = logits.masked_fill_(hidden, -torch.inf).logsumexp(dim=-1)
    if options.sinks is None:
        return total
    return torch.logaddexp(total, options.sinks.to(total.dtype).view(1, *total.shape[1:3], 1))
