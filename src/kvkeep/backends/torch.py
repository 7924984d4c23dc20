"""A step in plain torch, for any device, and for everything that compiled kernels do not do.

Attention works in blocks of query rows: whatever the prompt's length, the matrix of probabilities exists for one block
at a time (about `BLOCK_BYTES`). Rows of a prompt that no statistic counts go through torch's fused attention, which
never makes this matrix. Softmax and statistics are float32. In decode, half-precision keys and values are widened a
block of slots at a time, so the store is never copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kvkeep.attention_stats import ProbabilityRows, Statistic
from kvkeep.backends.base import AttentionInputs, Backend, SlotLimits
from kvkeep.kv import ranking
from kvkeep.types import EMPTY, AttentionOptions, Budget, Report, Slots

BLOCK_BYTES = 32 * 2**20
"""Size of one block of logits, which has at least one query row: large enough that Python's overhead vanishes, small
enough to bound memory."""

WIDEN_SLOTS = 256
"""Slots of half-precision keys or values that are widened to float32 at a time in decode."""

_HIDDEN = torch.finfo(torch.float32).min
"""The logit of a hidden key: with minus infinity a row that sees nothing would be NaN."""


class TorchBackend(Backend):
    """Plain torch, on any device and in any dtype.

    Cost of `attend`:
        ``2·B·Hq·T·S·(D + E)`` FLOPs (half of it for a causal chunk); peak extra memory about three blocks.
    """

    name = "torch"

    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend and reduce the policy's statistic, block by block of query rows.

        Rows without a report use torch's attention.
        """
        query, (keys, values, key_positions), query_positions, options, statistic = inputs
        B, Hq, T, D = query.shape
        Hk, S = keys.shape[1:3]
        grouped = query.reshape(B, Hk, Hq // Hk, T, D)
        selected = statistic.selects(query_positions)
        wide = torch.promote_types(query.dtype, torch.float32)
        if T > 1:
            keys, values = keys.to(wide), values.to(wide)  # one layer of a prompt, widened once for all blocks
            key_positions = _agreed(key_positions)
        out = query.new_empty((B, Hk, Hq // Hk, T, values.shape[-1]))
        sums = {name: torch.zeros((B, Hk, S), dtype=torch.float32, device=query.device) for name in statistic.fields}
        # torch's fused attention knows neither soft caps nor sinks
        plain = T > 1 and options.softcap is None and options.sinks is None
        silent = _silent(selected, statistic) if plain else 0
        # a block is bounded by its mask, of which torch's attention makes floats, 4 bytes each
        for block in _blocks(0, silent, 4 * B * S * (1 if key_positions.shape[1] == 1 else Hq)):
            n = S - T + block.stop  # keys after the block's last row are in its future
            hidden = _hidden(query_positions[:, block], key_positions[:, :, :n], options.window, decode=False)
            fused = _fused(grouped[:, :, :, block], keys[:, :, :n], values[:, :, :n], hidden, options.scaling)
            out[:, :, :, block] = fused.to(out.dtype)
        for block in _blocks(silent, T, 4 * B * Hq * S):
            n = S - T + block.stop
            hidden = _hidden(query_positions[:, block], key_positions[:, :, :n], options.window, decode=T == 1)
            p = _softmax(_logits(grouped[:, :, :, block], keys[:, :, :n], options), hidden, options.sinks)
            if options.top is not None and T == 1:
                p = ranking.only_top(p, key_positions == query_positions[:, :, None], options.top)
            mixed = _mix(p, values[:, :, :n])
            if T == 1 and not _is_finite(mixed):  # 0 × NaN from an empty slot
                mixed = _mix(p, values.masked_fill((key_positions < 0)[..., None], 0.0))
            out[:, :, :, block] = mixed.to(out.dtype)
            if sums:
                part = ProbabilityRows(p, selected[:, block], query_positions[:, block], key_positions[:, :, :n])
                for name, reduced in statistic.reduce(part).items():
                    statistic.join(sums[name][:, :, :n], reduced, name)
        return out.flatten(1, 2), Report(sums)

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Write one token per row into an empty slot of each head, in place, and return the slots; see
        `kvkeep.types.EMPTY`.
        """
        # an empty slot has position -1, the smallest
        slot: Int[Tensor, "B Hk 1"] = slots.positions.argmin(dim=-1, keepdim=True)
        B, Hk, _ = slot.shape
        rows, heads = torch.arange(B, device=slot.device)[:, None, None], torch.arange(Hk, device=slot.device)[:, None]
        slots.keys[rows, heads, slot] = keys.to(slots.keys.dtype)
        slots.values[rows, heads, slot] = values.to(slots.values.dtype)
        new = now.to(slots.positions.dtype)[:, :, None].expand(slot.shape)
        slots.positions.scatter_(2, slot, new)
        return slot

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty the slots that a sliding window has passed, in place."""
        positions.copy_(ranking.expire(positions, seen, window))

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Return whether a head holds more than its limit; on a GPU always ``True``, since the answer would take a
        wait.
        """
        return positions.device.type != "cpu" or bool(_over(positions, limit).any())

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: SlotLimits) -> None:
        """Empty the weakest slot of every head over its limit, in place."""
        victim = ranking.weakest(limits.ranked(score, positions), positions)
        emptied = positions.gather(-1, victim).masked_fill(_over(positions, limits.stay), EMPTY)
        positions.scatter_(-1, victim, emptied)


def _over(positions: Int[Tensor, "B Hk S"], limit: Budget) -> Bool[Tensor, "B Hk 1"]:
    """Return for each head whether it holds more tokens than its limit."""
    held = (positions >= 0).sum(dim=-1, keepdim=True)
    return held > (limit if isinstance(limit, int) else limit[:, :, None])


def _is_finite(x: Tensor) -> bool:
    """Return whether all numbers are finite; on a GPU always ``False``, since the host would have to wait for the
    answer.
    """
    return x.device.type == "cpu" and bool(x.isfinite().all())


def _agreed(positions: Int[Tensor, "B H S"]) -> Int[Tensor, "B H2 S"]:
    """Return the positions of one head, ``(B, 1, S)``, if all heads of each row hold the same, so that one mask serves
    all; else the positions as they are.
    """
    first = positions[:, :1]
    return first if torch.equal(positions, first.expand_as(positions)) else positions


def _blocks(start: int, stop: int, row_bytes: int) -> Iterator[slice]:
    """Yield slices of the rows from ``start`` to ``stop``, as many rows at a time as `BLOCK_BYTES` hold."""
    rows = max(1, BLOCK_BYTES // row_bytes)
    for first in range(start, stop, rows):
        yield slice(first, min(first + rows, stop))


def _silent(selected: Bool[Tensor, "B T"], statistic: Statistic) -> int:
    """Return the number of query rows before the first one that the statistic counts in any row of the batch; all of
    them if it counts none, or has no fields.
    """
    if not statistic.fields:
        return selected.shape[1]
    counted = selected.any(dim=0).nonzero()
    return int(counted[0]) if len(counted) else selected.shape[1]


def _fused(
    query: Float[Tensor, "B Hk G T D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    hidden: Bool[Tensor, "B H 1 T S"],
    scaling: float,
) -> Float[Tensor, "B Hk G T E"]:
    """Run torch's fused attention, in the dtype of the keys. A query from which all keys are hidden sees all of them
    instead, so that its output is finite.
    """
    shown = ~(hidden & ~hidden.all(dim=-1, keepdim=True))
    # one mask serves all query heads if all KV heads hold the same positions
    mask = shown.expand(-1, -1, query.shape[2] if shown.shape[1] > 1 else 1, -1, -1).flatten(1, 2)
    wide = query.to(keys.dtype).flatten(1, 2)
    out: Tensor = scaled_dot_product_attention(wide, keys, values, mask, scale=scaling, enable_gqa=True)
    return out.view(*query.shape[:4], -1)


def _hidden(
    query_positions: Int[Tensor, "B T"],
    key_positions: Int[Tensor, "B H S"],
    window: int | None,
    *,
    decode: bool,
) -> Bool[Tensor, "B H 1 T S"]:
    """Return which keys are hidden from each query. In decode, the query is the newest token and no key is later."""
    k = key_positions[:, :, None, None, :]
    q = query_positions[:, None, None, :, None]
    hidden = k < 0 if decode else (k < 0) | (k > q)
    return hidden if window is None else hidden | (k <= q - window)


def _logits(
    query: Float[Tensor, "B Hk G T D"], keys: Float[Tensor, "B Hk S D"], options: AttentionOptions
) -> Float[Tensor, "B Hk G T S"]:
    """Return scaled and soft-capped logits in float32, or in float64 for float64 models."""
    B, Hk, G, T, D = query.shape
    q = query.to(torch.promote_types(query.dtype, torch.float32)).mul(options.scaling).reshape(B, Hk, G * T, D)
    if keys.dtype == q.dtype:
        logits = q @ keys.mT
    else:
        logits = torch.cat([q @ part.float().mT for part in keys.split(WIDEN_SLOTS, dim=2)], dim=-1)
    if options.softcap is not None:
        logits = torch.tanh(logits / options.softcap) * options.softcap
    return logits.view(B, Hk, G, T, -1)


def _softmax(
    logits: Float[Tensor, "B Hk G T S"], hidden: Bool[Tensor, "B H 1 T S"], sinks: Float[Tensor, " Hq"] | None
) -> Float[Tensor, "B Hk G T S"]:
    """Return the softmax over the visible keys; ``logits`` are changed in place. With sinks the probabilities add up to
    less than 1.

    A row that sees nothing becomes uniform, not NaN; no statistic counts it.
    """
    logits = logits.masked_fill_(hidden, _HIDDEN)
    if sinks is None:
        return logits.softmax(dim=-1)
    B, Hk, G, T, S = logits.shape
    extra = sinks.to(logits.dtype).reshape(1, Hk, G, 1, 1).expand(B, Hk, G, T, 1)
    return torch.cat([logits, extra], dim=-1).softmax(dim=-1)[..., :S]


def _mix(p: Float[Tensor, "B Hk G T S"], values: Float[Tensor, "B Hk S E"]) -> Float[Tensor, "B Hk G T E"]:
    """Return the values weighted by the probabilities and summed over the keys, in the dtype of the probabilities."""
    B, Hk, G, T, S = p.shape
    flat = p.reshape(B, Hk, G * T, S)
    if values.dtype == flat.dtype:
        out = flat @ values
    else:
        parts = zip(flat.split(WIDEN_SLOTS, dim=-1), values.split(WIDEN_SLOTS, dim=2), strict=True)
        out = torch.stack([weight @ part.float() for weight, part in parts]).sum(dim=0)
    return out.view(B, Hk, G, T, -1)
