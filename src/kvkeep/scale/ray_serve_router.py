"""A router of Ray Serve that sends each request to the replica that it names. Importing it imports Ray Serve."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import ray.exceptions
from ray.serve.exceptions import RayServeException
from ray.serve.request_router import RequestRouter

from kvkeep.scale import ray_serve_replicas
from kvkeep.scale.ray_serve_replicas import ReplicaFacts
from kvkeep.server.replicas import LostError, Received


class ByName(RequestRouter):  # type: ignore[misc]  # Ray has no types here
    """Sends a request to the replica that its ``multiplexed_model_id`` names, and otherwise to any.

    A request for a replica that has ended reaches another one, which says so; see
    `kvkeep.scale.ray_serve.Replica.ask`.
    """

    def __init__(self, deployment_id: Any, *args: Any, **options: Any) -> None:
        super().__init__(deployment_id, *args, **options)
        self._place = str(deployment_id)

    def update_replicas(self, replicas: Any) -> None:
        """Take from Ray Serve the replicas that run now, and note them, with their rows, in
        `kvkeep.scale.ray_serve_replicas`.
        """
        super().update_replicas(replicas)
        rows = {replica.replica_id.unique_id: int(replica.routing_stats.get("rows", 0)) for replica in replicas}
        ray_serve_replicas.note(self._place, rows)

    def on_replica_actor_died(self, replica_id: Any) -> None:
        """Drop a replica whose process has ended, before Ray Serve sends a list without it."""
        super().on_replica_actor_died(replica_id)
        ray_serve_replicas.drop(self._place, replica_id.unique_id)

    async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
        """Return the replicas that may take a request, as a list of one list: the one that the request names, or all if
        it names none, or one that is not there.
        """
        wanted = pending_request.metadata.multiplexed_model_id if pending_request else ""
        named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == wanted]
        return [named or candidate_replicas]  # a list of lists: Ray Serve takes replicas of the first one if it can


# How the router reaches each replica of Ray Serve by its name. Importing this module imports Ray Serve.

_STARTING_S = 0.1
"""Seconds between two looks at whether a replica is there."""


class RayReplicas:
    """The replicas of a deployment of Ray Serve, see `kvkeep.server.replicas.Replicas`.

    Args:
        handle: of the deployment, whose replicas are `kvkeep.scale.ray_serve.Replica`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle, self._place = handle, str(handle.deployment_id)
        self._ended: set[str] = set()

    async def facts(self) -> list[ReplicaFacts]:
        """Ask all replicas for their facts, and return these. Wait first until Ray Serve has told this process of a
        replica.
        """
        # a handle learns of replicas with its first call
        await self._handle.facts.remote()
        while not self.here():
            await asyncio.sleep(_STARTING_S)
        return list(await asyncio.gather(*(self._send(replica, "facts") for replica in self.here())))

    def here(self) -> Mapping[str, int]:
        """Return the replicas that take requests, by name, with the rows of each; those found to have ended are left
        out.
        """
        told = ray_serve_replicas.of(self._place)
        self._ended &= told.keys()  # one of which Ray Serve no longer tells need not be left out
        return {name: rows for name, rows in told.items() if name not in self._ended}

    async def ask(self, replica: str, request: Received) -> AsyncGenerator[Any, None]:
        """Send a request to a replica, and yield the messages with which it answers.

        Raises:
            LostError: the replica has ended, with the request or before it had it, or Ray reports any other error.
        """
        messages = self._send(replica, "ask", replica, request, stream=True)
        try:
            async for message in messages:
                if message is None:
                    raise LostError(replica, reached=False)
                yield message
        except LostError:
            self._ended.add(replica)
            raise
        except (ray.exceptions.RayError, RayServeException) as error:
            if isinstance(error, ray.exceptions.ActorDiedError):  # after other errors the replica may live
                self._ended.add(replica)
            raise LostError(replica) from error
        finally:
            messages.cancel()  # a client that has gone away needs no more tokens

    async def holds(self, replica: str, kind: str, owner: str, name: str) -> bool:
        """Return whether a replica holds a session or an answer; it is asked without blocking the loop.

        The result is ``False`` as well if it has ended, and another one was asked in its place.

        Args:
            replica: the replica's name.
            kind: whether it is a session or an answer, see `kvkeep.server.replicas`.
            owner: whose it is.
            name: its name.

        Raises:
            LostError: the replica has ended, or Ray reports any other error.
        """
        try:
            return bool(await self._send(replica, "holds", replica, kind, owner, name))
        except (ray.exceptions.RayError, RayServeException) as error:
            raise LostError(replica) from error

    def _send(self, replica: str, method: str, *args: object, stream: bool = False) -> Any:
        """Call a method of a replica, and return the pending answer.

        The call gets a context, and so an id, of its own: Ray Serve gives all calls within one request the request's
        id, and confuses those that are under way at once.
        """
        called = getattr(self._handle.options(multiplexed_model_id=replica, stream=stream), method)
        return contextvars.Context().run(called.remote, *args)
