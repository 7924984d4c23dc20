"""Means over what is defined, numbers as text, and values in equal parts of a text."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of what is neither ``None`` nor NaN; ``None`` if nothing is left."""
    defined = [value for value in values if value is not None and not math.isnan(value)]
    return sum(defined) / len(defined) if defined else None


def show(value: float | None, digits: int = 2) -> str:
    """A number as text, or that there is none."""
    return "none" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A share as text."""
    return "none" if value is None else f"{100 * value:.1f} %"


def in_bins(values: Float[Tensor, "*m n"], bins: int) -> Float[Tensor, "*m bins"]:
    """Means over ``bins`` parts of the last axis that are equal to within one place."""
    edges = (torch.arange(bins + 1) * values.shape[-1]) // bins
    sums = torch.nn.functional.pad(values.double().cumsum(dim=-1), (1, 0))
    return (sums[..., edges[1:]] - sums[..., edges[:-1]]) / (edges[1:] - edges[:-1])
