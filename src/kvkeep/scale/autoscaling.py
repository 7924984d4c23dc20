"""The number of replicas that a load needs, by rows. Ray Serve's controller imports this module, so it is small."""

from __future__ import annotations

from typing import Any

FULL = 0.8
"""The share of rows that may be taken before another replica is started."""


def by_free_rows(context: Any) -> tuple[int | float, dict[str, Any]]:
    """The number of replicas with which a fifth of all rows would be free. Requests that wait count as rows.

    Ray Serve rounds it up, keeps it within its limits, and waits before it changes anything.

    Args:
        context: a ``ray.serve.config.AutoscalingContext`` with the numbers of
            `kvkeep.scale.ray_serve_replica.Replica.record_autoscaling_stats`.
    """
    found = context.aggregated_metrics or {}
    rows, busy = (list(found.get(name, {}).values()) for name in ("rows", "busy"))
    if not rows or not sum(rows):  # no replica has told yet
        return context.target_num_replicas, {}
    return sum(busy) / FULL / (sum(rows) / len(rows)), {}
