"""The definition of a step on slots: the whole matrix in float64, and slots of one head after the other.

Every other backend is tested against this one. It allocates (B, Hq, T, S) and is meant for tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvkeep.attention_stats import ProbabilityRows
from kvkeep.backends import base
from kvkeep.backends.base import AttentionInputs, Backend, SecondReading, SlotLimits
from kvkeep.kv import ranking
from kvkeep.types import EMPTY, AttentionOptions, Budget, Report, Slots


def visible(
    query_positions: Int[Tensor, "B T"], key_positions: Int[Tensor, "B #Hk S"], window: int | None
) -> Bool[Tensor, "B #Hk T S"]:
    """Return which keys each query can see.

    A key is visible when its slot is occupied, its position is not after the query's, and it lies inside the
    sliding window. Padded query rows (position -1) see nothing.
    """
    distance = query_positions[:, None, :, None] - key_positions[:, :, None, :]
    seen: Tensor = (key_positions[:, :, None, :] >= 0) & (distance >= 0)
    return seen if window is None else seen & (distance < window)


def logits(
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk S D"],
    sees: Bool[Tensor, "#B #Hk T S"],
    options: AttentionOptions,
) -> Float[Tensor, "B Hk G T S"]:
    """Return scaled and soft-capped products in the dtype of the arguments; minus infinity where a row does not see
    a key.
    """
    grouped = query.unflatten(1, (keys.shape[1], -1))
    found: Tensor = torch.einsum("bhgtd,bhsd->bhgts", grouped, keys).mul_(options.scaling)
    if options.softcap is not None:
        found = options.softcap * torch.tanh(found / options.softcap)
    return found.masked_fill(~sees[:, :, None], -torch.inf)


def softmax(
    found: Float[Tensor, "B Hk G T S"], sinks: Float[Tensor, " Hq"] | None = None
) -> Float[Tensor, "B Hk G T S"]:
    """Return the softmax over the keys. A learned sink of each query head takes its part of the sum, but has no entry
    in the result.

    Rows that see nothing are NaN.
    """
    if sinks is None:
        return found.softmax(dim=-1)
    extra = sinks.to(found.dtype).view(found.shape[1:3])[None, :, :, None, None].expand(*found.shape[:-1], 1)
    return torch.cat([found, extra], dim=-1).softmax(dim=-1)[..., :-1]


def probabilities(
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk S D"],
    query_positions: Int[Tensor, "B T"],
    key_positions: Int[Tensor, "B Hk S"],
    options: AttentionOptions,
) -> Float[Tensor, "B Hk G T S"]:
    """Return the softmax in float64 over the keys that each query row can see; rows that see nothing are zero.

    With ``options.top``, a single query keeps its largest probabilities only.
    """
    sees = visible(query_positions, key_positions, options.window)
    blind = ~sees.any(dim=-1)[:, :, None, :, None]  # and no NaN but this: one in a key shows
    p = softmax(logits(query.double(), keys.double(), sees, options), options.sinks).masked_fill(blind, 0.0)
    if options.top is None or query.shape[2] > 1:
        return p
    return ranking.only_top(p, key_positions == query_positions[:, :, None], options.top)


def attend(inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
    """Return the attention output and the policy's report, in float64."""
    query, (keys, values, positions), now, options, statistic = inputs
    positions = positions.expand(keys.shape[:3])
    empty = (positions < 0)[..., None]
    p = probabilities(query, keys.masked_fill(empty, 0.0), now, positions, options)
    out = torch.einsum("bhgts,bhse->bhgte", p, values.masked_fill(empty, 0.0).double()).flatten(1, 2)
    return out, Report(statistic.reduce(ProbabilityRows(p, statistic.selects(now), now, positions)))


def reread(inputs: AttentionInputs, again: SecondReading) -> Float[Tensor, "B Hk S"]:
    """Compute `Backend.reread` with whole matrices, and return it in float64."""
    query, slots, now, options, _ = inputs
    keys, positions = slots.keys.double(), slots.positions.expand(slots.keys.shape[:3])
    keys = keys.masked_fill((positions < 0)[..., None], 0.0)
    there = (positions >= 0)[:, :, None].expand(-1, -1, query.shape[2], -1)
    first = logits(query.double(), keys, visible(now, positions, options.window), options)
    second = logits(base.turned(query, again).double(), keys, there, options)
    total = torch.cat([first, second], dim=-1)
    if options.sinks is not None:
        sinks = options.sinks.double().view(total.shape[1:3])[None, :, :, None, None].expand(*total.shape[:-1], 1)
        total = torch.cat([total, sinks], dim=-1)
    share = (second - total.logsumexp(dim=-1, keepdim=True)).exp()
    counts = (now >= 1)[:, None, None, :, None]
    return torch.where(counts & there[:, :, None], share, 0.0).amax(dim=(2, 3))


class ReferenceBackend(Backend):
    """The definition, with the output rounded to the query's dtype and the report to float32."""

    name = "reference"

    def attend(self, inputs: AttentionInputs) -> tuple[Float[Tensor, "B Hq T E"], Report]:
        """Attend by `attend` of this module, with the output in the query's dtype. Padded rows give zeros."""
        out, report = attend(inputs)
        return out.to(inputs.query.dtype), Report({name: sums.float() for name, sums in report.sums.items()})

    def reread(self, inputs: AttentionInputs, again: SecondReading) -> Float[Tensor, "B Hk S"]:
        """Compute `reread` of this module, in float32."""
        return reread(inputs, again).float()

    def append(
        self, slots: Slots, keys: Float[Tensor, "B Hk 1 D"], values: Float[Tensor, "B Hk 1 E"], now: Int[Tensor, "B 1"]
    ) -> Int[Tensor, "B Hk 1"]:
        """Write one token per row into the first empty slot of each head, in place, and return the slots."""
        chosen = (slots.positions == EMPTY).int().argmax(dim=-1, keepdim=True)
        for row, heads in enumerate(chosen.tolist()):
            for head, (slot,) in enumerate(heads):
                slots.keys[row, head, slot] = keys[row, head, 0]
                slots.values[row, head, slot] = values[row, head, 0]
                slots.positions[row, head, slot] = now[row, 0]
        return chosen

    def expire(self, positions: Int[Tensor, "B Hk S"], seen: Int[Tensor, " B"], window: int) -> None:
        """Empty the slots that a sliding window has passed, in place."""
        positions.copy_(ranking.expire(positions, seen, window))

    def is_over(self, positions: Int[Tensor, "B Hk S"], limit: Budget) -> bool:
        """Return whether a head holds more than its limit."""
        stay = torch.as_tensor(limit, device=positions.device).expand(positions.shape[:2])
        return bool(((positions >= 0).sum(dim=-1) > stay).any())

    def evict(self, positions: Int[Tensor, "B Hk S"], score: Float[Tensor, "B Hk S"], limits: SlotLimits) -> None:
        """Empty the weakest slot of every head over its limit, without `ranking.weakest`, so that each checks the
        other.
        """
        ranked = limits.ranked(score, positions)
        B, Hk, _ = positions.shape
        stay = torch.as_tensor(limits.stay, device=positions.device).expand(B, Hk)
        for row in range(B):
            for head in range(Hk):
                held = [slot for slot, position in enumerate(positions[row, head].tolist()) if position >= 0]
                if len(held) > stay[row, head]:
                    worth = [(float(ranked[row, head, slot]), int(positions[row, head, slot]), slot) for slot in held]
                    positions[row, head, min(worth)[-1]] = EMPTY
