"""The numbers of a row, as pure functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

TENTHS = 10


def nll(logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"]) -> Float[Tensor, "B T"]:
    """Negative log-likelihood of each target, in nats and float32."""
    return -logits.float().log_softmax(dim=-1).gather(-1, targets[..., None]).squeeze(-1)


def kl(full: Float[Tensor, "B V"], bounded: Float[Tensor, "B V"]) -> Float[Tensor, " B"]:
    """KL(full ‖ bounded) of two next-token distributions given as logits, in nats and float32; never below 0."""
    p, q = full.float().log_softmax(dim=-1), bounded.float().log_softmax(dim=-1)
    terms = (p.exp() * (p - q)).masked_fill(p == -torch.inf, 0.0)  # tokens that the full cache rules out add 0
    return terms.sum(dim=-1).clamp(min=0.0)


def position_buckets(length: int, first: int = 64) -> list[tuple[int, int]]:
    """Ranges ``[start, stop)`` of target positions from 1 to ``length``, which double after ``first``."""
    edges = [1]
    edge = first
    while edge < length:
        edges.append(edge)
        edge *= 2
    return list(zip(edges, [*edges[1:], length], strict=True))


def tenth_of(share: float) -> int:
    """The tenth that a share in [0, 1] falls into, from 0 to 9."""
    return min(TENTHS - 1, int(share * TENTHS))


def kept_by_tenth(positions: Int[Tensor, "B Hk S"], lengths: Sequence[int]) -> Float[Tensor, "B 10"]:
    """Share of the kept tokens in each tenth of each row's text, averaged over heads.

    Args:
        positions: true positions in the slots, -1 for empty slots; positions beyond a row's length do not count.
        lengths: number of tokens of each row's text.
    """
    n = torch.tensor(lengths, device=positions.device)[:, None, None]
    inside = (positions >= 0) & (positions < n)
    tenth = torch.where(inside, positions * TENTHS // n, TENTHS).long()
    counts = torch.zeros(*positions.shape[:2], TENTHS + 1, device=positions.device)
    counts.scatter_add_(-1, tenth, torch.ones_like(tenth, dtype=counts.dtype))
    shares = counts[..., :TENTHS] / counts[..., :TENTHS].sum(dim=-1, keepdim=True).clamp(min=1)
    return shares.mean(dim=1)


def past(probabilities: Float[Tensor, "B Hk R T"]) -> Float[Tensor, "B Hk R T"]:
    """The probabilities without each row's own token: the part that a cache can hold when the row arrives."""
    R, T = probabilities.shape[-2:]
    return probabilities.tril(diagonal=T - R - 1)


def own(probabilities: Float[Tensor, "B Hk R T"]) -> Float[Tensor, "B Hk R"]:
    """Each row's attention to its own token, which no policy can lose."""
    R, T = probabilities.shape[-2:]
    return probabilities.diagonal(offset=T - R, dim1=-2, dim2=-1)


def held(probabilities: Float[Tensor, "B Hk T"], positions: Int[Tensor, "B Hk S"]) -> Float[Tensor, "B Hk"]:
    """The part of one row's attention on the tokens in the slots (-1 = empty)."""
    mass = probabilities.gather(-1, positions.long().clamp(min=0))
    return mass.masked_fill(positions < 0, 0.0).sum(dim=-1)


def best_dynamic(probabilities: Float[Tensor, "B Hk R T"], budget: int) -> Float[Tensor, "B Hk R"]:
    """The most attention that each row's own token and its best ``budget`` past tokens can hold."""
    before = past(probabilities)
    return before.topk(min(budget, before.shape[-1]), dim=-1).values.sum(dim=-1) + own(probabilities)


def best_static(probabilities: Float[Tensor, "B Hk R T"], budget: int) -> Float[Tensor, "B Hk R"]:
    """The attention that the best fixed set in hindsight holds: ``budget`` tokens with the largest sums over all
    rows.
    """
    before = past(probabilities)
    chosen = before.sum(dim=-2).topk(min(budget, before.shape[-1]), dim=-1).indices
    return before.gather(-1, chosen[:, :, None].expand(-1, -1, before.shape[-2], -1)).sum(dim=-1) + own(probabilities)
