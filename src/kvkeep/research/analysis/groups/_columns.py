"""Column sums of attention, and sums over the tokens of a kind."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep.research.analysis.measure import Context, Rows


class ColumnSums:
    """What every key receives from all rows, per layer and query head.

    Attributes:
        sums: the accumulated mass, in float64.
    """

    sums: Float[Tensor, "L Hq T"]

    def __init__(self, context: Context) -> None:
        self.sums = torch.zeros(context.n_layers, context.n_heads, context.n_tokens, dtype=torch.float64)

    def add(self, rows: Rows) -> None:
        """Add some rows of one layer."""
        part = rows.weights.sum(dim=1)
        self.sums[rows.layer, :, : part.shape[-1]] += part


def by_kind(
    values: Float[Tensor, "*rows T"], tokens: Int[Tensor, " T"]
) -> tuple[Float[Tensor, "*rows V"], Int[Tensor, " V"], Int[Tensor, " V"]]:
    """Sums over the places of each kind of token.

    Returns:
        The sums, the kinds as token ids in rising order, and how often each occurs.
    """
    kinds, which, counts = tokens.unique(sorted=True, return_inverse=True, return_counts=True)
    sums = torch.zeros(*values.shape[:-1], len(kinds), dtype=torch.float64)
    sums.index_add_(-1, which, values.double())
    return sums, kinds, counts
