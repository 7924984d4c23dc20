"""What ``kvkeep plan --measure`` finds out about a device: the speed of its memory, and of products with weights."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kvkeep.planning.bandwidth import BUFFER_BYTES, Bandwidth, measure_bandwidth, measure_products
from kvkeep.planning.cost import Cost
from kvkeep.planning.plan import Plan

FEW, MOST = 32, 1024
"""Rows up to which weights are too many for the processor's caches while products are measured, and the most rows."""


@dataclass(frozen=True)
class Measured:
    """A bandwidth and the device on which it was measured."""

    bandwidth: Bandwidth
    device: str


def measured(made: Plan, place: torch.device) -> tuple[Plan, Measured]:
    """A plan with the speeds of a device.

    Products are measured for each number of rows that the plan speaks of. Those with quantised weights are not, since
    packages make them that the plan does not need.

    Raises:
        InputError: the device has no room for the buffers.
    """
    found = Measured(measure_bandwidth(place), str(place))
    setting = made.setting
    width = setting.outline.shape.hidden
    known = not (setting.scheme or setting.weights_memory)
    rows = {n for one in (made.full, made.bounded) if known for n in rows_of(made, one)}
    products = {n: _products(place, setting.weights_dtype, n, width) for n in sorted(rows)}
    return replace(made, bandwidth=found.bandwidth.best, products=products), found


def _products(place: torch.device, dtype: torch.dtype, rows: int, width: int) -> float:
    """The speed of products with any number of rows. Where arithmetic is all that counts, it falls as rows grow."""
    some = min(rows, MOST)
    size = BUFFER_BYTES * FEW // max(FEW, some)
    return measure_products(place, dtype, some, width=width, size_bytes=size) * some / rows


def rows_of(made: Plan, one: Cost) -> list[int]:
    """The numbers of rows of which a plan says the speed under one kind of cache."""
    return sorted({1, made.rows or 1, most_rows(made, one) or 1})


def most_rows(made: Plan, one: Cost) -> int:
    """The rows that fit into the memory; 0 if it is not known."""
    return 0 if made.memory is None else one.most_rows(made.memory)


def speeds(made: Plan, found: Measured | None) -> dict[str, object] | None:
    """The speeds of a device as plain data."""
    if made.bandwidth is None:
        return None
    if found is None:
        return {"bytes_per_s": made.bandwidth, "source": "given"}
    return {
        "bytes_per_s": made.bandwidth,
        "source": "measured",
        "device": found.device,
        "read_bytes_per_s": found.bandwidth.read,
        "copy_bytes_per_s": found.bandwidth.copy,
        "weight_bytes_per_s": {str(rows): speed for rows, speed in made.products.items()},
    }
