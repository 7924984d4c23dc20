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
    """Remember in this process which replicas a deployment has now, in place of those noted before.

    Args:
        place: the deployment's id, as text.
        replicas: name of a replica → its rows; 0 if they are not known yet.
    """
    _KNOWN[place] = dict(replicas)


def drop(place: str, replica: str) -> None:
    """Forget a replica that has ended; nothing happens if it is not among those of its deployment.

    Args:
        place: the deployment's id, as text.
        replica: the replica's name.
    """
    _KNOWN[place] = {name: rows for name, rows in of(place).items() if name != replica}


def of(place: str) -> Mapping[str, int]:
    """Return the replicas of a deployment of which this process knows, by name, with the rows of each.

    Args:
        place: the deployment's id, as text.
    """
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
