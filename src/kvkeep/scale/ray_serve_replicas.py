"""The replicas of which Ray Serve has told this process, what one says of itself, and how many a load needs.

Ray Serve copies `kvkeep.scale.ray_serve_router.ByName` into processes, and its controller imports `by_free_rows`. So
this is a module apart that imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FULL = 0.8
"""The share of rows that may be taken before another replica is started."""


@dataclass(frozen=True)
class ReplicaFacts:
    """What a replica says of itself.

    Attributes:
        weights: a fingerprint of the model's weights.
        rows: number of sequences that it runs at once.
        row_bytes: bytes of a row.
        pid: number of its process.
    """

    weights: str
    rows: int
    row_bytes: int
    pid: int


# of the process: Ray Serve makes `ByName` itself, and hands nobody the object
_KNOWN: dict[str, Mapping[str, int]] = {}


def note(place: str, replicas: Mapping[str, int]) -> None:
    """Store the replicas of a deployment, with the rows of each; 0 for a number not known yet."""
    _KNOWN[place] = dict(replicas)


def drop(place: str, replica: str) -> None:
    """Remove a replica that has ended from those of its deployment."""
    _KNOWN[place] = {name: rows for name, rows in of(place).items() if name != replica}


def of(place: str) -> Mapping[str, int]:
    """Return the replicas of a deployment, with the rows of each; empty if none are known."""
    return _KNOWN.get(place, {})


def by_free_rows(context: Any) -> tuple[int | float, dict[str, Any]]:
    """Return the number of replicas that leaves a fifth of all rows free, and an empty state. Waiting requests count
    as rows.

    Ray Serve rounds it up, keeps it within its limits, and waits before it changes anything.

    Args:
        context: a ``ray.serve.config.AutoscalingContext`` with the numbers of
            `kvkeep.scale.ray_serve.Replica.record_autoscaling_stats`.
    """
    told = context.aggregated_metrics or {}
    rows, busy = (list(told.get(name, {}).values()) for name in ("rows", "busy"))
    if not rows or not sum(rows):  # no replica has told yet, so their number stays
        return context.target_num_replicas, {}
    return sum(busy) / FULL / (sum(rows) / len(rows)), {}  # rows per replica: their mean
