"""What a policy can ask attention to report, each with the reduction that defines it.

A statistic is reduced block by block inside attention, so the full (rows × keys) matrix never exists.
Probabilities are averaged over the query heads of a group first, then summed over rows, always in float32.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor


@dataclass(frozen=True)
class Statistic(abc.ABC):
    """Base of all statistics.

    Attributes:
        rows: query rows of a step that count: -1 all, 0 none, ``w`` the last ``w`` of each sequence.
    """

    rows: int

    def selects(self, query_positions: Int[Tensor, "B T"]) -> Bool[Tensor, "B T"]:
        """Which query rows count; padded rows (position -1) never do."""
        real = query_positions >= 0
        if self.rows < 0:
            return real
        last = query_positions.amax(dim=1, keepdim=True)
        return real & (query_positions > last - self.rows)

    @abc.abstractmethod
    def reduce(
        self, probabilities: Float[Tensor, "B Hk G T S"], selected: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B Hk S"]:
        """Reduce a block of rows; the results of blocks add up."""


@dataclass(frozen=True)
class Nothing(Statistic):
    """No report: the policy does not look at attention."""

    rows: int = 0

    def reduce(
        self, probabilities: Float[Tensor, "B Hk G T S"], selected: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B Hk S"]:
        """Zeros; attention does not call this."""
        return probabilities.new_zeros(probabilities.shape[:2] + probabilities.shape[-1:])


@dataclass(frozen=True)
class Mass(Statistic):
    """The attention probability that each key received, summed over rows."""

    rows: int = -1

    def reduce(
        self, probabilities: Float[Tensor, "B Hk G T S"], selected: Bool[Tensor, "B T"]
    ) -> Float[Tensor, "B Hk S"]:
        """Group mean, then the sum over the selected rows."""
        B, Hk, G, T, S = probabilities.shape
        if T == 1:
            return probabilities.squeeze(3).mean(dim=2) * selected[:, None]
        weights = selected.to(probabilities.dtype).repeat(1, G)[:, None, None, :] / G  # (B, 1, 1, G·T)
        return (weights @ probabilities.reshape(B, Hk, G * T, S)).squeeze(2)
