"""A router of Ray Serve that sends each request to the replica that it names. Importing it imports Ray Serve."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import RequestRouter

from kvkeep.scale import known


class ByName(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Sends a request to the replica that its ``multiplexed_model_id`` names, and otherwise to any.

    A request for a replica that has ended reaches another one, which says so; see `kvkeep.scale.replica.Replica.ask`.
    """

    def __init__(self, deployment_id: Any, *args: Any, **options: Any) -> None:
        super().__init__(deployment_id, *args, **options)
        self._place = str(deployment_id)

    def update_replicas(self, replicas: Any) -> None:
        """Note the replicas that run."""
        super().update_replicas(replicas)
        rows = {one.replica_id.unique_id: int(one.routing_stats.get("rows", 0)) for one in replicas}
        known.note(self._place, rows)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Note that a replica has ended, before Ray Serve tells it."""
        super().on_replica_actor_died(replica_id)
        known.drop(self._place, replica_id.unique_id)

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """The named replica, or all."""
        wanted = pending_request.metadata.multiplexed_model_id if pending_request else ""
        return [[one for one in candidate_replicas if one.replica_id.unique_id == wanted] or candidate_replicas]
