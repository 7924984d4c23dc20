"""Percentiles of times."""

from __future__ import annotations

import math
from collections.abc import Sequence

SHARES = (50.0, 90.0, 99.0)
"""Percentiles that are shown."""


def percentile(sorted_values: Sequence[float], share: float) -> float:
    """Return the value below or at which this share in percent of all values lies; there has to be a value."""
    return sorted_values[max(0, math.ceil(share / 100 * len(sorted_values)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, percentiles and maximum; ``None`` without values."""
    if not values:
        return None
    ordered = sorted(values)
    middle = {f"p{share:g}": percentile(ordered, share) for share in SHARES}
    return {"mean": math.fsum(ordered) / len(ordered), **middle, "max": ordered[-1]}
