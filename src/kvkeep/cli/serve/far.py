"""``kvkeep serve --ray-replicas``: engines are replicas on Ray Serve, and this process is the router before them."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

from kvkeep.cli import console
from kvkeep.cli.serve.request import Request
from kvkeep.cli.workers import PROCESS_BYTES, room_for, whole
from kvkeep.engine.admission import DEFAULT_ROWS
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models.load import embedded
from kvkeep.planning.plan import plan
from kvkeep.result_files import in_full
from kvkeep.scale.cluster import Need, joined, last_words, own_cpus
from kvkeep.scale.ray_serve import deployment, need_serve
from kvkeep.scale.ray_serve_replica import Facts, Recipe
from kvkeep.server.router import make_front
from kvkeep.server.settings import Settings

_OURS = re.compile(r"kvkeep\.errors\.\w+: (.+)")


@runtime_checkable
class Answering(Protocol):
    """Answers requests until a signal ends it."""

    def __call__(self, app: Any, name: str, rows: int, row_bytes: int, more: str = "") -> bool:
        """Answer; return whether Ctrl-C has ended it.

        Args:
            app: the application.
            name: the model's name.
            rows, row_bytes: how many conversations run at once, and the bytes of each.
            more: said about them.
        """


def engine_options(request: Request) -> dict[str, Any]:
    """The options of the engine."""
    slots = ("policy", "budget", "kv_memory", "prefill_chunk", "layer_budget", "head_budget", "kv_bits", "positions")
    rest = ("guard", "host_rows", "prefix_memory", "session_memory", "session_dir")
    return {"rows": request.max_rows, **{name: getattr(request, name) for name in (*slots, *rest)}}


def serve_far(request: Request, settings: Settings, *, longest: int | None, answer: Answering) -> bool:
    """Serve with replicas; return whether Ctrl-C has ended it.

    Args:
        request: the options of the command.
        settings: of the server.
        longest: the most tokens of a sequence.
        answer: answers requests.

    Raises:
        InputError: there is no cluster, its nodes have other versions, or the replicas do not fit or cannot start.
    """
    assert request.replicas is not None
    least, _ = request.replicas
    console.progress(f"starting {console.count(least, 'replica')} …")
    cpus = own_cpus(request.replicas[1], request.threads) * request.replicas[1]
    with joined(request.ray_address, cpus=cpus):
        need, device = _need(request, longest)
        if settings.session_dir is not None:
            settings = replace(settings, session_dir=str(in_full(settings.session_dir).resolve()))
        with _running(request, _recipe(request, settings, device), need) as handle:
            replicas, facts = asyncio.run(_begun(handle))
            front = make_front(replicas, settings, request.allow_origin, prefixes=request.prefix_memory > 0)
            more = f" on each of {console.count(least, 'replica')}"
            return answer(front, settings.name, facts.rows, facts.row_bytes, more)


def _need(request: Request, longest: int | None) -> tuple[Need, str]:
    """What a replica takes, and the device that it uses, after a check that all replicas fit.

    Raises:
        InputError: nodes have other versions than this process, or the replicas do not fit.
    """
    assert request.replicas is not None
    return room_for(
        request.replicas[1],
        _bytes(request, longest),
        device=request.device,
        threads=request.threads,
        address=request.ray_address,
        what="replica",
        option="ray_replicas",
    )


def _bytes(request: Request, longest: int | None) -> int:
    """Main memory of a replica, as ``kvkeep plan`` counts it; 0 for a model that cannot be planned."""
    names = ("kv_bits", "layer_budget", "head_budget", "prefill_chunk", "positions", "dtype")
    options: dict[str, Any] = {name: getattr(request, name) for name in names}
    try:
        made = plan(request.model or embedded(), request.policy, request.budget, context=longest, **options)
    except KVKeepError:
        return 0
    slots = request.kv_memory or (request.max_rows or DEFAULT_ROWS) * made.bounded.row_bytes
    kept = (request.session_memory or 0) + request.prefix_memory
    return PROCESS_BYTES + slots + kept + (made.bounded.weight_bytes if request.load_in is None else 0)


def _recipe(request: Request, settings: Settings, device: str) -> Recipe:
    """What replicas are made from."""
    options = engine_options(request)
    del options["session_dir"]
    return Recipe(
        model=whole(request.model),
        settings=settings,
        engine=options,
        dtype=request.dtype,
        device=device,
        load_in=request.load_in,
        threads=request.threads,
        allow_pickle=request.allow_pickle,
        tool_form=request.tool_form,
    )


@contextmanager
def _running(request: Request, recipe: Recipe, need: Need) -> Iterator[Any]:
    """The handle of replicas that run until the block ends.

    Raises:
        InputError: replicas of this name run already, or they cannot start.
    """
    assert request.replicas is not None
    serve, name = need_serve(), f"kvkeep-{re.sub('[^A-Za-z0-9_.-]', '-', recipe.settings.name)}"
    resources: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus}
    resources |= {"memory": need.memory} if need.memory else {}
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # what a user must know, errors and answers say
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})
    if name in serve.status().applications:
        raise InputError(
            f"The cluster runs an application {name} already. End the command that serves it, or give another "
            f"`served_name`. If that command was killed, end what it has left with serve.delete({name!r}) in Python."
        )
    made = deployment(request.replicas, resources=resources, grace_s=request.grace).bind(recipe)
    try:
        try:
            handle = serve.run(made, name=name, route_prefix=None, logging_config={"log_level": "ERROR"})
        except RuntimeError as error:
            raise InputError(f"The replicas cannot start: {_reason(serve, name, error)}") from error
        yield handle
    finally:
        serve.delete(name)


def _reason(serve: Any, name: str, error: RuntimeError) -> str:
    """Why replicas have not started: what kvkeep says of it, or the end of a traceback."""
    status = serve.status().applications.get(name)
    said = [one.message for one in status.deployments.values()] if status else []
    found = [reason for text in (*said, str(error)) for reason in _OURS.findall(text)]
    return str(found[-1]) if found else f"{last_words(error)}. Ray's logs of the nodes say more."


async def _begun(handle: Any) -> tuple[Any, Facts]:
    """The replicas, and what one says of itself, after a check that all have the same weights.

    Raises:
        InputError: they have not.
    """
    from kvkeep.scale.ray_serve_router import RayReplicas

    replicas = RayReplicas(handle)
    first, *others = await replicas.facts()
    for one in others:
        if one.weights != first.weights:
            raise InputError("Replicas have different weights under one name. Give every node the same files.")
    return replicas, first
