"""Cut a prompt into chunks of tokens, not of columns, so that padding never moves a cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

Step: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Takes queries, keys, values ``(B, H, n, D)`` and which of the ``n`` columns are real; returns the output."""


def in_chunks(
    step: Step,
    query: Float[Tensor, "B Hq T D"],
    keys: Float[Tensor, "B Hk T D"],
    values: Float[Tensor, "B Hk T E"],
    *,
    real: Bool[Tensor, "B T"] | None,
    size: int,
) -> Float[Tensor, "B Hq T E"]:
    """Run ``step`` on ``size`` real tokens of each row at a time and put the outputs back in their columns."""
    T = query.shape[2]
    if size >= T:
        return step(query, keys, values, real)
    if real is None:
        parts = zip(*(x.split(size, dim=2) for x in (query, keys, values)), strict=True)
        return torch.cat([step(q, k, v, None) for q, k, v in parts], dim=2)
    order = real.int().argsort(dim=1, descending=True, stable=True)  # real tokens first, in their order
    front = [x.gather(2, order[:, None, :, None].expand_as(x)).split(size, dim=2) for x in (query, keys, values)]
    pieces = zip(*front, real.gather(1, order).split(size, dim=1), strict=True)
    out = torch.cat([step(q, k, v, r) for q, k, v, r in pieces], dim=2)
    return torch.empty_like(out).scatter_(2, order[:, None, :, None].expand_as(out), out)
