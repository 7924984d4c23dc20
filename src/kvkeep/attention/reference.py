"""The definition of attention over slots: the whole matrix in float64, nothing clever.

Every other implementation is tested against this one. It allocates (B, Hq, T, S) and is meant for tests.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep import scores
from kvkeep.statistic import Rows, Statistic
from kvkeep.types import AttentionOptions, Report


def probabilities(
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk S D"],
    query_positions: Int[Tensor, "B T"],
    key_positions: Int[Tensor, "B Hk S"],
    options: AttentionOptions,
) -> Float[Tensor, "B Hk G T S"]:
    """Softmax over the keys that each query row can see; rows that see nothing are zero.

    A key is visible when its slot is occupied, its position is not after the query's, and it lies inside the
    sliding window. Padded query rows (position -1) see nothing.
    """
    B, Hq, T, D = query.shape
    Hk, S = keys.shape[1:3]
    grouped = query.double().reshape(B, Hk, Hq // Hk, T, D)
    logits = torch.einsum("bhgtd,bhsd->bhgts", grouped, keys.double()) * options.scaling
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    distance = query_positions[:, None, :, None] - key_positions[:, :, None, :]
    visible = (key_positions[:, :, None, :] >= 0) & (distance >= 0)
    if options.window is not None:
        visible = visible & (distance < options.window)
    logits = logits.masked_fill(~visible[:, :, None], -torch.inf)
    if options.sinks is not None:
        sink = options.sinks.double().reshape(1, Hk, Hq // Hk, 1, 1).expand(B, -1, -1, T, 1)
        logits = torch.cat([logits, sink], dim=-1)
    p = logits.softmax(dim=-1)[..., :S].nan_to_num(0.0)
    if options.top is None or T > 1:
        return p
    return scores.only_top(p, key_positions == query_positions[:, :, None], options.top)


def attend(
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk S D"],
    values: Float[Tensor, "B Hk S E"],
    query_positions: Int[Tensor, "B T"],
    key_positions: Int[Tensor, "B Hk S"],
    *,
    statistic: Statistic,
    options: AttentionOptions,
) -> tuple[Float[Tensor, "B Hq T E"], Report]:
    """Attention output and the policy's report, in float64. The arguments are those of `cpu.attend`."""
    p = probabilities(query, keys, query_positions, key_positions, options)
    out = torch.einsum("bhgts,bhse->bhgte", p, values.double()).flatten(1, 2)
    rows = Rows(p, statistic.selects(query_positions), query_positions, key_positions)
    return out, Report(statistic.reduce(rows))
