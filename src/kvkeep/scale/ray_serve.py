"""A server of several replicas on Ray Serve: an application of its own, or a part of one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvkeep.engine.engine import Engine
from kvkeep.errors import InputError, KVKeepError, pip_install
from kvkeep.models.adapters import weights_of_all
from kvkeep.models.load import quiet
from kvkeep.parameters import GRACE
from kvkeep.scale import EXTRA, ray_serve_replicas
from kvkeep.scale.cluster import need_ray
from kvkeep.scale.driver import ModelRecipe
from kvkeep.scale.ray_serve_replicas import ReplicaFacts
from kvkeep.server.app import make_app, use_threads
from kvkeep.server.model import ServedModel, tool_use_of
from kvkeep.server.replicas import SESSION, Received, replay
from kvkeep.server.router import make_router
from kvkeep.server.run import settle
from kvkeep.server.session_leases import SharedFolder
from kvkeep.server.session_registry import Handover
from kvkeep.server.settings import ApiKeys, ServerSettings, owner_of

# A replica of a server: a model, an engine, and the application of `kvkeep serve` in one process of Ray Serve.


@dataclass(frozen=True, kw_only=True)
class ReplicaRecipe:
    """What a replica is made from. It travels to the replica's process, so it is small.

    Attributes:
        model: the model; every node has its folder.
        settings: of the application; its ``session_dir`` is the folder that all replicas share.
        engine: options of the engine, without ``session_dir``.
        tool_form: how the model calls tools.
    """

    model: ModelRecipe
    settings: ServerSettings
    engine: Mapping[str, Any] = field(default_factory=dict)
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
        """Load the model, and make the engine and the application.

        A replica keeps its sessions in a folder of its own inside `session_dir`. Without `name` it is one
        that Ray Serve has made: it has the name that Ray Serve gave it, and hands these sessions over before it ends.
        """
        self._name = name or _own_name()
        self._ready = False
        self._leases: SharedFolder | None = None
        self._handover: Handover | None = None
        settings = recipe.settings
        if settings.session_dir is not None:
            self._leases = SharedFolder(Path(settings.session_dir).expanduser(), f"replica-{self._name}")
            settings = dataclasses.replace(settings, session_dir=str(self._leases.own))
        with quiet():
            writer = recipe.model.load()
            checkpoint = writer.checkpoint
            self._weights = weights_of_all(writer.model)
            options = {**recipe.engine, "session_dir": settings.session_dir}
            self._engine = Engine(writer.model, checkpoint.tokenizer, **options)
        served = ServedModel(self._engine, checkpoint, tool_use=tool_use_of(checkpoint, recipe.tool_form))
        self._app = make_app(served, settings, leases=self._leases)
        settle()
        if self._leases is not None and name is None:  # Ray Serve has made it, and tells when it is about to end
            self._handover = Handover(self._app.state.sessions, _staying(self._name))

    async def ask(self, to: str, request: Received) -> AsyncGenerator[Any, None]:
        """Yield the messages (of ASGI) with which this replica's application answers a request.

        If the request is for another replica, which has ended, yield ``None`` alone.

        Args:
            to: the replica that the router has chosen.
            request: the request.
        """
        if to != self._name:
            yield None
            return
        if not self._ready:  # the threads belong to the loop that runs here
            use_threads()
            self._ready = True
        messages = replay(self._app, request)
        try:
            async for message in messages:
                yield message
        finally:
            await messages.aclose()

    async def holds(self, to: str, kind: str, owner: str, name: str) -> bool:
        """Return whether this replica holds a session or an answer.

        Args:
            to: the replica that is meant; if that is another one, the result is ``False``.
            kind: `SESSION`, or anything else for an answer.
            owner: whose it is.
            name: its name.
        """
        holder = self._app.state.sessions if kind == SESSION else self._app.state.responses
        return to == self._name and bool(holder.holds(owner, name))

    async def facts(self) -> ReplicaFacts:
        """Return the replica's facts: its weights, rows, bytes per row and process id."""
        return ReplicaFacts(self._weights, self._engine.rows, self._engine.row_bytes, os.getpid())

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return under ``rows`` how many sequences the engine runs at once; Ray Serve passes it to routers."""
        return {"rows": self._engine.rows}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return under ``rows`` how many sequences the engine runs at once, under ``busy`` the requests that run or
        wait, for `kvkeep.scale.ray_serve_replicas.by_free_rows`.
        """
        return {"rows": self._engine.rows, "busy": self._engine.n_running + self._engine.n_waiting}

    def __del__(self) -> None:
        """End the replica: write all its sessions and let others take them. Ray Serve has waited for its requests."""
        # Ray Serve calls this, and then Python again, also where `__init__` has failed
        if (engine := self.__dict__.pop("_engine", None)) is None:
            return
        if self._handover is not None:
            self._handover.end()
        with suppress(KVKeepError):  # a full disk: sessions go on from their last files
            engine.close()
        if self._leases is not None:
            self._leases.close()


def _own_name() -> str:
    """Return the name that Ray Serve has given to the replica in which this runs."""

    from ray import serve

    return str(serve.get_replica_context().replica_id.unique_id)


def _staying(name: str) -> Callable[[], bool]:
    """Return a function that tells whether this replica, of this name, still takes requests.

    Ray Serve tells a replica that it is about to end only after its last answer. But it tells all routers at once, and
    a handle has one. As long as Ray Serve has not told of the replica, the replica is starting.
    """
    from ray import serve

    context = serve.get_replica_context()
    handle = serve.get_deployment_handle(context.deployment, app_name=context.app_name).options()  # makes the router
    told = False

    def stays() -> bool:
        """Return ``False`` once Ray Serve, which has told of the replica before, tells of it no more."""
        nonlocal told
        here = name in ray_serve_replicas.of(str(handle.deployment_id))
        told = told or here
        return here or not told

    return stays


# The application: replicas, and a router in front of them.

ENGINES, DOOR = "engines", "door"
"""Names of the deployments."""
OLDEST = (2, 60)
"""The version of Ray whose routers, numbers of replicas and policies this module knows."""
_MOST_AT_ONCE = 10**6  # the application itself bounds its queue
_LOOK_S, _TOLD_S = 0.2, 2.0
"""Seconds between looks at whether a replica has ended its requests, and between its reports."""
_UP_S = 5.0
"""Seconds for which replicas must be too few before another one is started."""
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}
"""Of a replica: threads of torch that spin while they wait would take the cores from the server's own."""


def need_serve() -> Any:
    """Import Ray Serve, and return its package.

    Raises:
        InputError: Ray Serve is not installed, or is too old.
    """
    ray = need_ray()
    try:
        from ray import serve
    except ImportError as error:  # Ray without its part for servers
        raise InputError(f"Ray Serve is not installed: {pip_install(EXTRA)}.") from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise InputError(f"This is Ray {ray.__version__}, and replicas need {oldest}: {pip_install(EXTRA)}.")
    return serve


def application(
    model: str | None = None,
    *,
    replicas: int | tuple[int, int] = 1,
    name: str | None = None,
    keys: Sequence[str] = (),
    session_dir: str | None = None,
    settings: Mapping[str, Any] | None = None,
    dtype: str = "auto",
    resources: Mapping[str, Any] | None = None,
    **engine: Any,
) -> Any:
    """Return a Ray Serve application with OpenAI's API: ``serve.run(application("a model", replicas=2))``.

    Its ingress is the router. Keys of clients are part of the application, and so in the memory of the cluster.

    Args:
        model: a hub name or a folder that every node has; the embedded model by default.
        replicas: their number, or the least and the most of them; see `kvkeep.scale.ray_serve_replicas.by_free_rows`.
        name: the model's name in the API; ``model`` by default.
        keys: that clients must show; without any, everybody is served.
        session_dir: a folder that all nodes see under this path. With it, sessions outlive their replica.
        settings: further fields of `kvkeep.server.settings.ServerSettings`. Without keys, ``allowed_hosts`` has the
            names by which clients reach Serve's proxy; ``localhost`` is always one.
        dtype: of the weights, see `kvkeep.load`.
        resources: what a replica takes, as arguments of ``ray.remote``, e.g. ``{"num_gpus": 1}``; one CPU by default.
        engine: options of `kvkeep.Engine`, such as ``policy``, ``budget`` and ``rows``.

    Raises:
        InputError: Ray Serve is not installed, or a number is out of range.
    """
    serve = need_serve()
    own = ServerSettings(
        name=name or model or "embedded",
        keys=ApiKeys({key: owner_of(key) for key in keys}),
        session_dir=session_dir,
        **{"allowed_hosts": ("*",) if keys else (), **(settings or {})},
    )
    device = "cuda" if (resources or {}).get("num_gpus") else "cpu"
    engines = deployment(replicas, resources={"num_cpus": 1, **(resources or {})}).bind(
        ReplicaRecipe(model=ModelRecipe(model=model, dtype=dtype, device=device), settings=own, engine=engine)
    )
    prefixes = shares_beginnings(engine)

    # a builder, which is called in the process of the ingress: the router itself cannot travel
    def build() -> Any:
        return _door(own, prefixes=prefixes)

    door = serve.deployment(serve.ingress(build)()).options(
        name=DOOR,
        num_replicas=1,
        max_ongoing_requests=_MOST_AT_ONCE,
        ray_actor_options={"num_cpus": 0},  # all are for replicas
    )
    return door.bind(engines)


def shares_beginnings(engine: Mapping[str, Any]) -> bool:
    """Return whether replicas with these options of the engine keep beginnings of prompts, or conversations, so that a
    request is best sent to a replica that has read its beginning.
    """
    chats = bool(engine.get("conversation_memory")) and engine.get("conversations") != "fresh"
    return bool(engine.get("prefix_memory")) or chats


def deployment(
    replicas: int | tuple[int, int],
    *,
    resources: Mapping[str, Any],
    grace_s: float = GRACE.default,
) -> Any:
    """Return the deployment of `Replica` for Ray Serve, to be bound to a `kvkeep.scale.ray_serve.ReplicaRecipe`.

    Args:
        replicas: their number, or the least and the most of them: Ray Serve then changes it by load.
        resources: what each takes, as arguments of ``ray.remote``.
        grace_s: seconds that running requests have to end when a replica shall end.

    Raises:
        InputError: Ray Serve is not installed, or a number is out of range.
    """
    serve = need_serve()
    from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

    least, most = (replicas, replicas) if isinstance(replicas, int) else replicas
    if not 1 <= least <= most:
        raise InputError(f"`replicas={replicas}` is out of range; give 1 or more, or the least and the most of them.")
    router = RequestRouterConfig(
        request_router_class="kvkeep.scale.ray_serve_router:ByName", request_routing_stats_period_s=_TOLD_S
    )
    number: dict[str, Any] = {"num_replicas": least}
    if least < most:
        policy = AutoscalingPolicy(policy_function="kvkeep.scale.ray_serve_replicas:by_free_rows")
        limits = {"min_replicas": least, "max_replicas": most, "upscale_delay_s": _UP_S}
        number = {"autoscaling_config": AutoscalingConfig(**limits, metrics_interval_s=_TOLD_S, policy=policy)}
    return serve.deployment(Replica).options(
        name=ENGINES,
        max_ongoing_requests=_MOST_AT_ONCE,
        max_constructor_retry_count=1,  # a model that cannot be loaded is not loaded again and again
        graceful_shutdown_timeout_s=grace_s,
        graceful_shutdown_wait_loop_s=_LOOK_S,
        request_router_config=router,
        ray_actor_options={"runtime_env": {"env_vars": _ENVIRONMENT}, **resources},
        **number,
    )


def _door(settings: ServerSettings, *, prefixes: bool) -> Any:
    """Return the router in front of the replicas as an ASGI application. Call this in the process of its deployment.

    Args:
        settings: of the application.
        prefixes: whether a request is best sent to a replica that has read its beginning.
    """
    from ray import serve

    from kvkeep.scale.ray_serve_router import RayReplicas

    handle = serve.get_deployment_handle(ENGINES, app_name=serve.get_replica_context().app_name)
    replicas = RayReplicas(handle)
    router = make_router(replicas, settings, prefixes=prefixes)

    async def unprefixed(scope: Any, receive: Any, send: Any) -> None:
        """Pass a request to the router without the application's own path prefix, which replicas do not have."""
        # a first request may come before Ray Serve has told this process of any replica
        if scope["type"] == "http" and not replicas.here():
            await replicas.facts()
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(prefix):
            scope = {**scope, "path": scope["path"].removeprefix(prefix) or "/", "root_path": ""}
        await router(scope, receive, send)

    return unprefixed
