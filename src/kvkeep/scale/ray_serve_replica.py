"""A replica of a server: a model, an engine, and the application of `kvkeep serve` in one process of Ray Serve."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeep.engine import Engine
from kvkeep.errors import KVKeepError
from kvkeep.models import threads
from kvkeep.models.load import embedded, find, quiet, read_weights
from kvkeep.models.weight_hash import fingerprint
from kvkeep.scale import ray_serve_replicas
from kvkeep.scale.ray_serve_replicas import ReplicaFacts
from kvkeep.server.app import make_app, use_threads
from kvkeep.server.model import ServedModel, tool_use_of
from kvkeep.server.placement import SESSION
from kvkeep.server.replicas import Received, replay
from kvkeep.server.run import settle
from kvkeep.server.session_leases import SharedFolder
from kvkeep.server.session_registry import Handover
from kvkeep.server.settings import ServerSettings


@dataclass(frozen=True, kw_only=True)
class ReplicaRecipe:
    """What a replica is made from. It travels to the replica's process, so it is small.

    Attributes:
        model: a hub name or a folder that every node has; ``None``: the embedded model.
        settings: of the application; its ``session_dir`` is the folder that all replicas share.
        engine: options of the engine, without ``session_dir``.
        dtype, device, load_in: how weights are read.
        threads: of torch.
        allow_pickle: whether weights may be read from pickles.
        tool_form: how the model calls tools.
    """

    model: str | None
    settings: ServerSettings
    engine: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    device: str = "auto"
    load_in: str | None = None
    threads: int | None = None
    allow_pickle: bool = False
    tool_form: str = "auto"


class Replica:
    """Answers requests that a router sends, with an engine of its own.

    Ray Serve makes it, asks for its health and its numbers, and ends it by `__del__`.

    Args:
        recipe: what it is made from.
        name: by which the router knows it; by default the one that Ray Serve has given it.

    Raises:
        KVKeepError: the model or the session folder cannot be used, or not one row fits.
    """

    def __init__(self, recipe: ReplicaRecipe, name: str | None = None) -> None:
        self._name = name or _own_name()
        self._ready = False
        self._leases: SharedFolder | None = None
        self._handover: Handover | None = None
        settings = recipe.settings
        if settings.session_dir is not None:
            self._leases = SharedFolder(Path(settings.session_dir).expanduser(), f"replica-{self._name}")
            settings = dataclasses.replace(settings, session_dir=str(self._leases.own))
        with quiet():
            checkpoint = find(recipe.model or embedded(), allow_pickle=recipe.allow_pickle)
            model = read_weights(checkpoint, recipe.dtype, recipe.device, load_in=recipe.load_in)
            threads.use(model, recipe.threads)
            self._weights = fingerprint(model)
            options = {**recipe.engine, "session_dir": settings.session_dir}
            self._engine = Engine(model, checkpoint.tokenizer, **options)
        served = ServedModel(self._engine, checkpoint, tool_use=tool_use_of(checkpoint, recipe.tool_form))
        self._app = make_app(served, settings, leases=self._leases)
        settle()
        if self._leases is not None and name is None:
            self._handover = Handover(self._app.state.sessions, _staying(self._name))

    async def ask(self, to: str, request: Received) -> AsyncGenerator[Any, None]:
        """Yield the messages of an answer; ``None`` alone if the request is for another replica, which has ended.

        Args:
            to: the replica that the router has chosen.
            request: the request.
        """
        if to != self._name:
            yield None
            return
        if not self._ready:
            use_threads()
            self._ready = True
        messages = replay(self._app, request)
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()

    async def holds(self, to: str, kind: str, owner: str, name: str) -> bool:
        """Return whether this replica holds a session or an answer."""
        holder = self._app.state.sessions if kind == SESSION else self._app.state.responses
        return to == self._name and bool(holder.holds(owner, name))

    async def facts(self) -> ReplicaFacts:
        """Return the replica's facts: its weights, rows, bytes per row and process id."""
        return ReplicaFacts(self._weights, self._engine.rows, self._engine.row_bytes, os.getpid())

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the statistics that Ray Serve passes to routers."""
        return {"rows": self._engine.rows}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Ray Serve tells `kvkeep.scale.ray_serve_replicas.by_free_rows`."""
        return {"rows": self._engine.rows, "busy": self._engine.n_running + self._engine.n_waiting}

    def __del__(self) -> None:
        """Write all sessions and let other replicas take them. Ray Serve has waited for the requests."""
        if (engine := self.__dict__.pop("_engine", None)) is None:
            return
        if self._handover is not None:
            self._handover.end()
        with suppress(KVKeepError):  # a full disk: sessions go on from their last files
            engine.close()
        if self._leases is not None:
            self._leases.close()


def _own_name() -> str:
    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _staying(name: str) -> Callable[[], bool]:
    """Tells whether this replica takes requests.

    Ray Serve tells a replica that it is about to end only after its last answer. But it tells all routers at once, and
    a handle has one. As long as Ray Serve has not told of the replica, the replica is starting.
    """
    from ray import serve

    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, app_name=context.app_name).options()  # makes the router
    told = False

    def stays() -> bool:
        nonlocal told
        here = name in ray_serve_replicas.of(str(handle.deployment_id))
        told = told or here
        return here or not told

    return stays
