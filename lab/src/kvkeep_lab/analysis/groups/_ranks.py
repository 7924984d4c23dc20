"""Numbers about ranks, shares, correlations and column sums, in float64; ``None`` for a number that is undefined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvkeep_lab.analysis.measure import AttentionRows, Context

_NORMAL_95 = 1.96
"""Standard errors on either side that contain 95 % of a normal distribution."""


@dataclass(frozen=True)
class Fit:
    """A straight line through log value over log rank.

    Attributes:
        slope: the slope; a power law ``value ∝ rank^-s`` has slope ``-s``.
        r2: share of the variance of the log values that the line explains.
        first: first rank of the fit, counted from 1.
        last: last rank of the fit.
    """

    slope: float
    r2: float
    first: int
    last: int


def ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ranks from 1 for the smallest; equal values share the mean of their ranks."""
    _, which, counts = values.double().unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    middle: Tensor = last - (counts.double() - 1) / 2
    return middle[which]


def pearson(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float | None:
    """Return Pearson's correlation; ``None`` for fewer than 3 pairs, if one side is constant or if a value is NaN."""
    if len(x) < 3:
        return None
    x, y = x.double() - x.double().mean(), y.double() - y.double().mean()
    scale = x.norm() * y.norm()
    if not float(scale) > 1e-12:
        return None
    return max(-1.0, min(1.0, float(x @ y / scale)))


def spearman(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float | None:
    """Return Pearson's correlation of the ranks; ``None`` for fewer than 3 pairs, or if one side is constant."""
    return pearson(ranks(x), ranks(y))


def partial(x: Float[Tensor, " n"], y: Float[Tensor, " n"], given: Float[Tensor, "n c"]) -> float | None:
    """Return the correlation of the residuals of ``x`` and ``y`` after a linear fit on ``given`` and a constant.

    ``None`` if there are fewer pairs than columns of ``given`` and 3, or if the fit leaves next to nothing of one side.
    """
    if len(x) < given.shape[1] + 3:
        return None
    controls = torch.cat([torch.ones(len(x), 1, dtype=torch.float64), given.double()], dim=1)
    both = torch.stack([x.double(), y.double()], dim=1)
    left = both - controls @ torch.linalg.lstsq(controls, both).solution
    spread = (both - both.mean(dim=0)).norm(dim=0)
    if bool((left.norm(dim=0) <= 1e-6 * spread.clamp(min=1e-12)).any()):
        return None
    return pearson(left[:, 0], left[:, 1])


def interval(correlation: float | None, n: int, controls: int = 0) -> list[float] | None:
    """Return the 95 % interval of a correlation over ``n`` pairs by Fisher's transformation.

    ``None`` without a correlation, or for too few pairs.
    """
    free = n - controls - 3
    if correlation is None or free < 1:
        return None
    middle, half = math.atanh(max(-0.999999, min(0.999999, correlation))), _NORMAL_95 / math.sqrt(free)
    return [math.tanh(middle - half), math.tanh(middle + half)]


def power_law(values: Float[Tensor, " n"], first: int = 10, last: int = 1000) -> Fit | None:
    """Fit log value over log rank by least squares, largest value first; values of 0 are left out.

    Args:
        values: the values, in any order.
        first: first rank of the fit, from 1.
        last: last rank of the fit.

    Returns:
        The fit; ``None`` if fewer than 3 positive values are in that range.
    """
    found = values.double().sort(descending=True).values
    found = found[found > 0][first - 1 : last]
    if len(found) < 3:
        return None
    x = torch.arange(first, first + len(found), dtype=torch.float64).log()
    y = found.log()
    slope = float((x - x.mean()) @ (y - y.mean()) / (x - x.mean()).square().sum())
    correlation = pearson(x, y)
    return Fit(slope, 0.0 if correlation is None else correlation**2, first, first + len(found) - 1)


def hill(values: Float[Tensor, " n"], share: float = 0.1) -> float | None:
    """Return Hill's estimate of ``a`` in ``P(value > x) ∝ x^-a``, from the largest ``share`` of the values.

    A power law over ranks with slope ``-s`` has ``a = 1 / s``. The threshold is the value just below the tail.

    Values of 0 are left out. ``None`` if the tail has fewer than two values or all of them, or if it is as large as the
    threshold throughout.
    """
    found = values.double().sort(descending=True).values
    found = found[found > 0]
    k = int(share * len(found) + 1e-9)
    if k < 2 or k >= len(found):
        return None
    excess = float((found[:k] / found[k]).log().mean())
    return 1.0 / excess if excess > 0 else None


def top_share(values: Float[Tensor, "*rows n"], share: float) -> Float[Tensor, "*rows"]:
    """Return the part of each row's sum in its largest ``floor(share · n)`` values, at least one.

    It is 0 for a row of zeros.
    """
    k = max(1, int(share * values.shape[-1] + 1e-9))
    values = values.double()
    return values.topk(k, dim=-1).values.sum(dim=-1) / values.sum(dim=-1).clamp(min=1e-300)


def uniform_mass(n: int, windows: Sequence[int | None]) -> Float[Tensor, "L n"]:
    """Return column sums of uniform causal attention per layer: ``H_n - H_j`` for ``j = 0 … n - 1`` without a window.

    They are also the expected column sums under exchangeable logits.

    Args:
        n: number of rows and of keys.
        windows: of the layers, see `Context.windows`.
    """
    return torch.stack([_uniform_mass(n, n if window is None else min(window, n)) for window in windows])


def _uniform_mass(n: int, window: int) -> Float[Tensor, " n"]:
    """Return the sums for one layer: key ``j`` gets a part of each of the rows ``j … j + window - 1``."""
    per_row = 1.0 / torch.arange(1, n + 1, dtype=torch.float64).clamp(max=window)
    left = per_row.flip(0).cumsum(0).flip(0)  # of all rows from j on
    left[: n - window] -= left[window:].clone()
    return left


def jaccard(one: Tensor, other: Tensor) -> Float[Tensor, "..."]:
    """Return common members over all members of two sets given as masks; 1 for two empty sets."""
    common, either = (one & other).sum(dim=-1).double(), (one | other).sum(dim=-1).double()
    return torch.where(either > 0, common / either.clamp(min=1), torch.ones_like(common))


def chance_jaccard(n: int, k: int) -> float:
    """Return the Jaccard index of two random sets of ``k`` out of ``n`` with as many common members as expected.

    ``k`` is 1 or more.
    """
    common = k * k / n
    return common / (2 * k - common)


def log_places(n: int, most: int = 60) -> list[int]:
    """Return at most ``most`` ranks from 1 to ``n``, evenly spread on a logarithmic axis."""
    steps = torch.linspace(0, math.log(n), most, dtype=torch.float64).exp().round().long()
    places: list[int] = steps.clamp(1, n).unique().tolist()
    return places


def histogram(positions: Int[Tensor, " n"], length: int, bins: int) -> list[float]:
    """Return the share of positions in each of ``bins`` equal parts of ``0 … length - 1``; all 0 without positions."""
    counts = torch.bincount(positions.long() * bins // length, minlength=bins).double()
    shares: list[float] = (counts / counts.sum().clamp(min=1)).tolist()
    return shares


def rounded(values: Sequence[float] | Tensor, digits: int = 6) -> list[float]:
    """Return numbers for JSON, with ``digits`` significant digits."""
    plain = values.tolist() if isinstance(values, Tensor) else values
    return [float(f"{value:.{digits}g}") for value in plain]


# -- sums over columns -------------------------------------------------------------------------------------------------


class ColumnSums:
    """The attention that every key receives from all rows, per layer and query head.

    Attributes:
        sums: the accumulated mass, in float64.
    """

    sums: Float[Tensor, "L Hq T"]

    def __init__(self, context: Context) -> None:
        self.sums = torch.zeros(context.n_layers, context.n_heads, context.n_tokens, dtype=torch.float64)

    def add(self, rows: AttentionRows) -> None:
        """Add some rows of one layer."""
        part = rows.weights.sum(dim=1)
        self.sums[rows.layer, :, : part.shape[-1]] += part


def by_kind(
    values: Float[Tensor, "*rows T"], tokens: Int[Tensor, " T"]
) -> tuple[Float[Tensor, "*rows V"], Int[Tensor, " V"], Int[Tensor, " V"]]:
    """Return sums over the places of each kind of token.

    Returns:
        The sums, the kinds as token ids in rising order, and the number of places of each kind.
    """
    kinds, which, counts = tokens.unique(sorted=True, return_inverse=True, return_counts=True)
    sums = torch.zeros(*values.shape[:-1], len(kinds), dtype=torch.float64)
    sums.index_add_(-1, which, values.double())
    return sums, kinds, counts
