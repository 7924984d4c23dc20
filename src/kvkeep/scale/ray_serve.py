"""A server of several replicas on Ray Serve: an application of its own, or a part of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvkeep.errors import InputError, pip_install
from kvkeep.scale import EXTRA
from kvkeep.scale.cluster import need_ray
from kvkeep.scale.ray_serve_replica import Replica, ReplicaRecipe
from kvkeep.server.router import make_router
from kvkeep.server.settings import ApiKeys, ServerSettings, owner_of

ENGINES, DOOR = "engines", "door"
"""Names of the deployments."""
OLDEST = (2, 60)
"""The version of Ray whose routers, numbers of replicas and policies this module knows."""
_MOST_AT_ONCE = 10**6  # the application itself bounds its queue
_LOOK_S, _TOLD_S = 0.2, 2.0
_UP_S = 5.0
_ENVIRONMENT = {"OMP_WAIT_POLICY": "passive"}


def need_serve() -> Any:
    """Import Ray Serve and return its package.

    Raises:
        InputError: it is not installed, or is too old.
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
    """Build a Ray Serve application with OpenAI's API: ``serve.run(application("a model", replicas=2))``.

    Its ingress is the router. Keys of clients are part of the application, and so in the memory of the cluster.

    Args:
        model: a hub name or a folder that every node has; the embedded model by default.
        replicas: their number, or the least and the most of them; see `kvkeep.scale.ray_serve_replicas.by_free_rows`.
        name: the model's name in the API; ``model`` by default.
        keys: that clients must show; without any, everybody is served.
        session_dir: a folder that all nodes see under this path. With it, sessions outlive their replica.
        settings: further fields of `kvkeep.server.settings.ServerSettings`.
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
        **(settings or {}),
    )
    device = "cuda" if (resources or {}).get("num_gpus") else "cpu"
    engines = deployment(replicas, resources={"num_cpus": 1, **(resources or {})}).bind(
        ReplicaRecipe(model=model, settings=own, engine=engine, dtype=dtype, device=device)
    )
    prefixes = bool(engine.get("prefix_memory"))

    def build() -> Any:
        return _door(own, prefixes=prefixes)

    door = serve.deployment(serve.ingress(build)()).options(
        name=DOOR, num_replicas=1, max_ongoing_requests=_MOST_AT_ONCE, ray_actor_options={"num_cpus": 0}
    )
    return door.bind(engines)


def deployment(
    replicas: int | tuple[int, int],
    *,
    resources: Mapping[str, Any],
    grace_s: float = 30.0,
) -> Any:
    """Build the deployment of replicas, to be bound to a `kvkeep.scale.ray_serve_replica.ReplicaRecipe`.

    Args:
        replicas: their number, or the least and the most of them.
        resources: what each takes, as arguments of ``ray.remote``.
        grace_s: seconds that running requests have when a replica shall end.

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
        max_constructor_retry_count=1,
        graceful_shutdown_timeout_s=grace_s,
        graceful_shutdown_wait_loop_s=_LOOK_S,
        request_router_config=router,
        ray_actor_options={"runtime_env": {"env_vars": _ENVIRONMENT}, **resources},
        **number,
    )


def _door(settings: ServerSettings, *, prefixes: bool) -> Any:
    """Build the router, in the process of its deployment."""
    from ray import serve

    from kvkeep.scale.ray_serve_router import RayReplicas

    handle = serve.get_deployment_handle(ENGINES, app_name=serve.get_replica_context().app_name)
    replicas = RayReplicas(handle)
    router = make_router(replicas, settings, prefixes=prefixes)

    async def unprefixed(scope: Any, receive: Any, send: Any) -> None:
        """Take the application's own prefix off the path, which replicas do not have."""
        if scope["type"] == "http" and not replicas.here():
            await replicas.facts()
        prefix = scope.get("root_path", "")
        if prefix and scope["path"].startswith(prefix):
            scope = {**scope, "path": scope["path"].removeprefix(prefix) or "/", "root_path": ""}
        await router(scope, receive, send)

    return unprefixed
