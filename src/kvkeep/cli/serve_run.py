"""The work of ``kvkeep serve``: check the settings, load the model, and serve until a signal ends it.

Importing this module imports torch, transformers and fastapi.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
import typer

from kvkeep import budget as budgets
from kvkeep.cache.layer_layout import Layout, default_policy
from kvkeep.cli import console
from kvkeep.cli.cluster import PROCESS_BYTES, model_recipe, room_for, whole_policy, whole_rule
from kvkeep.cli.files import refuse_device
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.serve import ServeOptions
from kvkeep.engine.admission import DEFAULT_ROWS, free_bytes
from kvkeep.engine.budget_guard import levels
from kvkeep.engine.engine import Engine
from kvkeep.engine.prefix_cache import check_prefix_memory
from kvkeep.engine.request import checked_guard
from kvkeep.engine.sampling_params import SamplingParams, whole_within
from kvkeep.engine.swapping import MOST_HOST_ROWS
from kvkeep.errors import InputError, KVKeepError
from kvkeep.models import threads
from kvkeep.models.adapters import check_folders
from kvkeep.models.checkpoint import Checkpoint
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import find, quiet
from kvkeep.models.tiny import embedded
from kvkeep.openai.messages import ToolUse
from kvkeep.planning.plan import plan
from kvkeep.policies import CONVERSATION, DEFAULT
from kvkeep.policies._keep_prompt import keeping
from kvkeep.policies.base import Policy
from kvkeep.policies.registry import parse as parse_policy
from kvkeep.policies.registry import spec
from kvkeep.result_files import in_full
from kvkeep.scale.cluster import Need, check_ray, joined, last_words, own_cpus
from kvkeep.scale.ray_serve import ReplicaRecipe, deployment, need_serve, shares_beginnings
from kvkeep.scale.ray_serve_replicas import ReplicaFacts
from kvkeep.server.app import make_app
from kvkeep.server.middleware import log
from kvkeep.server.model import ServedModel, tool_use_of
from kvkeep.server.router import make_router
from kvkeep.server.run import HttpServer, ServerAddress, check_tls, listen, settle
from kvkeep.server.settings import ApiKeys, ServerSettings, owner_of

# ``kvkeep serve --ray-replicas``: engines are replicas on Ray Serve, and this process is the router before them.

# an error of kvkeep in the traceback of a replica, which Ray Serve hands on as text
_OURS = re.compile(r"kvkeep\.errors\.\w+: (.+)")


@runtime_checkable
class Answering(Protocol):
    """Answers requests until a signal ends it."""

    def __call__(self, app: Any, name: str, rows: int, row_bytes: int, more: str = "") -> bool:
        """Answer requests until a signal ends this; return whether the signal was Ctrl-C.

        Args:
            app: the application.
            name: the model's name.
            rows, row_bytes: how many conversations run at once, and the bytes of each.
            more: a text about them, for the greeting.
        """


def engine_options(request: ServeOptions) -> dict[str, Any]:
    """Return the arguments of `Engine` that a server's options ask for, by name, with the memory for sessions."""
    slots = ("policy", "budget", "kv_memory", "prefill_chunk", "layer_budget", "head_budget", "kv_bits", "positions")
    rest = ("guard", "keep_prompt", "host_rows", "prefix_memory", "session_dir", "conversations", "conversation_ttl")
    most = session_bytes(request)
    kept: dict[str, int | None] = {"session_memory": most, "conversation_memory": _FILES * most}
    if request.session_dir is None:  # sessions that a client has named have no other place
        kept = {"session_memory": None, "conversation_memory": most}
    return {"rows": request.max_rows, **kept, **{name: getattr(request, name) for name in (*slots, *rest)}}


_MOST_KEPT = 4 * 2**30
"""The default main memory for idle sessions and conversations."""
_FILES = 8
"""Conversations in files may take so many times their main memory."""


def session_bytes(request: ServeOptions) -> int:
    """Return the bytes of main memory for idle sessions and conversations, of each replica.

    By default a share of what is free, at most `_MOST_KEPT` for all replicas together.
    """
    if request.session_memory is not None:
        return request.session_memory
    free, count = free_bytes(torch.device("cpu")), 1 if request.replicas is None else request.replicas[1]
    # all replicas may run on one machine
    return min(_MOST_KEPT, _MOST_KEPT if free is None else free // 4) // count


def serve_far(request: ServeOptions, settings: ServerSettings, *, longest: int | None, answer: Answering) -> bool:
    """Serve with replicas on Ray until a signal ends this; return whether the signal was Ctrl-C.

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
            # a replica may start in another folder
            settings = replace(settings, session_dir=str(in_full(settings.session_dir).resolve()))
        with _running(request, _recipe(request, settings, device), need) as handle:
            replicas, facts = asyncio.run(_begun(handle))
            router = make_router(
                replicas, settings, request.allow_origin, prefixes=shares_beginnings(engine_options(request))
            )
            more = f" on each of {console.count(least, 'replica')}"
            return answer(router, settings.name, facts.rows, facts.row_bytes, more)


def _need(request: ServeOptions, longest: int | None) -> tuple[Need, str]:
    """Return the resources that a replica needs and its device, after a check that the most replicas fit.

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


def _bytes(request: ServeOptions, longest: int | None) -> int:
    """Return the bytes of main memory of a replica, as ``kvkeep plan`` counts; 0 for a model that cannot be planned.

    Args:
        request: the options of the command.
        longest: the most tokens of a sequence; ``None`` for the model's trained length.
    """
    names = ("kv_bits", "layer_budget", "head_budget", "prefill_chunk", "positions", "dtype")
    options: dict[str, Any] = {name: getattr(request, name) for name in names}
    try:
        made = plan(request.model or embedded(), request.policy, request.budget, context=longest, **options)
    except KVKeepError:
        return 0
    slots = request.kv_memory or (request.max_rows or DEFAULT_ROWS) * made.bounded.row_bytes
    kept = session_bytes(request) + request.prefix_memory
    # nobody knows how many bytes weights of fewer bits take
    return PROCESS_BYTES + slots + kept + (made.bounded.weight_bytes if request.load_in is None else 0)


def _recipe(request: ServeOptions, settings: ServerSettings, device: str) -> ReplicaRecipe:
    """Return the recipe from which replicas are made: model, engine and server settings, on a device."""
    options = engine_options(request)
    # a replica may start in another folder
    options["policy"] = spec(whole_policy(parse_policy(request.policy)))
    options["head_budget"] = whole_rule(request.head_budget)
    # each replica gives its engine a folder of its own within the shared one
    del options["session_dir"]
    return ReplicaRecipe(
        model=model_recipe(request, device, request.adapter),
        settings=settings,
        engine=options,
        tool_form=request.tool_form,
    )


@contextmanager
def _running(request: ServeOptions, recipe: ReplicaRecipe, need: Need) -> Iterator[Any]:
    """Start replicas, and yield a handle of them. They are ended with the context.

    Raises:
        InputError: replicas of this name run already, or they cannot start.
    """
    assert request.replicas is not None
    serve, name = need_serve(), f"kvkeep-{re.sub('[^A-Za-z0-9_.-]', '-', recipe.settings.name)}"
    resources: dict[str, Any] = {"num_cpus": need.cpus, "num_gpus": need.gpus}
    resources |= {"memory": need.memory} if need.memory else {}
    logging.getLogger("ray.serve").setLevel(logging.CRITICAL)  # what a user must know, errors and answers say
    serve.start(proxy_location="Disabled", logging_config={"log_level": "ERROR"})  # HTTP is answered here
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
    """Return why replicas have not started: kvkeep's own error, or the end of a traceback.

    Args:
        serve: the module ``ray.serve``.
        name: of the application.
        error: what Ray Serve has raised.
    """
    status = serve.status().applications.get(name)
    said = [deployed.message for deployed in status.deployments.values()] if status else []
    found = [reason for text in (*said, str(error)) for reason in _OURS.findall(text)]
    return str(found[-1]) if found else f"{last_words(error)}. Ray's logs of the nodes say more."


async def _begun(handle: Any) -> tuple[Any, ReplicaFacts]:
    """Return the replicas behind a handle of Ray Serve and the facts of one, after a check that all have its weights.

    Raises:
        InputError: the replicas have different weights.
    """
    from kvkeep.scale.ray_serve_router import RayReplicas

    replicas = RayReplicas(handle)
    first, *others = await replicas.facts()
    for facts in others:
        if facts.weights != first.weights:
            raise InputError("Replicas have different weights under one name. Give every node the same files.")
    return replicas, first


# API keys from a file and from the environment.

VARIABLE = "KVKEEP_API_KEY"
_SHORTEST = 8  # characters of a key; a shorter one is guessed


def read_keys(file: str | None) -> ApiKeys:
    """Return the keys of a file, one per line as KEY or NAME KEY, and the key of the variable `VARIABLE`.

    There may be neither: without a file (``None``) and the variable the result has no keys.

    Raises:
        InputError: the file cannot be read, has no key, or has a line of another form.
    """
    found: dict[str, str] = {}
    if (key := os.environ.get(VARIABLE)) is not None:
        if not key.strip():
            raise InputError(f"{VARIABLE} is empty. Unset it, or give a key of {_SHORTEST} characters or more.")
        found[_checked(key.strip(), VARIABLE)] = owner_of(key.strip())
    if file is None:
        return ApiKeys(found)
    refuse_device(file, "file of keys")
    try:
        lines = in_full(file).read_text(encoding="utf-8-sig").splitlines()
    except OSError as error:
        raise InputError(f"--key-file {file} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise InputError(f"--key-file {file} is not UTF-8 text.") from error
    before = len(found)
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise InputError(f"--key-file {file}, line {number}: write KEY, or NAME KEY.")
        key = _checked(words[-1], f"--key-file {file}, line {number}")
        found[key] = words[0] if len(words) == 2 else owner_of(key)
    if len(found) == before:
        raise InputError(f"--key-file {file} has no key. Write one per line, or leave the option out.")
    return ApiKeys(found)


def _checked(key: str, where: str) -> str:
    """Return an API key as it is, after a check of its length and characters.

    Raises:
        InputError: it is too short, or has other characters than printable ASCII.
    """
    if len(key) < _SHORTEST or not key.isascii() or not key.isprintable():
        raise InputError(f"{where}: a key has {_SHORTEST} or more ASCII characters.")
    return key


def _is_loopback(host: str) -> bool:
    """Return whether a server is reached from its own machine alone, by a loopback address or ``localhost``."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _allowed_hosts(request: ServeOptions, keys: ApiKeys) -> tuple[str, ...]:
    """Return the names by which clients may call the server beside those of the loopback; ``*`` is any.

    Where clients show keys, any name will do: a foreign page has no key.

    Raises:
        InputError: others can reach the server without a key, and its names are not known.
    """
    if request.allowed_host or request.unix_socket is not None:
        return request.allowed_host or ("*",)
    if _is_loopback(request.host):
        return ()
    if not keys.owners:
        raise InputError(
            f"Anybody who reaches {request.host} could use the model, and any web page that they open as well. Ask for "
            "keys with `key_file`, or name the server's hosts with `allowed_host`."
        )
    return ("*",)


def run(request: ServeOptions) -> None:
    """Check the settings, and serve a model until a signal ends this; with ``--check`` only check.

    Raises:
        KVKeepError: a setting, the model or the address cannot be used.
    """
    SamplingParams(max_new_tokens=request.max_new_tokens)  # refuses a number that no answer can have
    place, keys = _place(request), read_keys(request.key_file)
    if request.replicas is not None:
        check_ray(request.ray_address)
        need_serve()
    with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
        request, checkpoint, limit = _checkpoint(request)
        tool_use = tool_use_of(checkpoint, request.tool_form)
        settings = _settings(request, keys, limit)
        if request.check:
            typer.echo("The settings can be used.")
            return
        _remark(request, settings, checkpoint)
        socket = listen(place)  # before weights are read: the address may be taken
        with socket:
            if request.replicas is None:
                interrupted = _serve_here(checkpoint, tool_use, settings, place, socket, request)
            else:
                interrupted = serve_far(request, settings, longest=limit, answer=_answer(place, socket, request))
    if interrupted:
        raise typer.Exit(console.INTERRUPTED)


def _serve_here(
    checkpoint: Checkpoint,
    tool_use: ToolUse,
    settings: ServerSettings,
    place: ServerAddress,
    socket: Any,
    request: ServeOptions,
) -> bool:
    """Serve with an engine in this process until a signal ends this; return whether the signal was Ctrl-C."""
    writer = writer_of(checkpoint, request, request.adapter)
    with Engine(writer.model, checkpoint.tokenizer, **engine_options(request)) as engine:
        app = make_app(ServedModel(engine, checkpoint, tool_use=tool_use), settings, request.allow_origin)
        return _answer(place, socket, request)(app, settings.name, engine.rows, engine.row_bytes)


def _answer(place: ServerAddress, socket: Any, request: ServeOptions) -> Answering:
    """Return a function that answers requests at a socket until a signal ends it; it sets up the log and says where."""

    def answer(app: Any, name: str, rows: int, row_bytes: int, more: str = "") -> bool:
        _log(request.access_log)
        port = 0 if place.unix_socket else socket.getsockname()[1]

        def ready() -> None:
            size = f"{console.count(rows, 'conversation')} of {console.show_bytes(row_bytes)} at once{more}"
            console.err().print(f"{name} at {place.url(port)}/v1: {size}. Ctrl-C ends.", soft_wrap=True)
            console.note("a request without a temperature gets OpenAI's, 1, where kvkeep generate takes 0")

        server = HttpServer(app, place, ready)
        settle()
        asyncio.run(server.serve([socket]))
        return server.interrupted

    return answer


def _settings(request: ServeOptions, keys: ApiKeys, limit: int | None) -> ServerSettings:
    """Return the settings of the server's HTTP side."""
    return ServerSettings(
        name=request.served_name or request.model or "embedded",
        keys=keys,
        max_new_tokens=request.max_new_tokens,
        max_model_len=limit,
        max_queue=request.max_queue,
        queue_timeout_s=request.queue_timeout,
        request_timeout_s=request.request_timeout,
        read_timeout_s=request.read_timeout,
        max_body_bytes=request.max_body,
        key_requests=request.key_requests,
        key_tokens=request.key_tokens,
        session_dir=request.session_dir,
        page=request.page,
        pin_system=request.pin_system,
        allowed_hosts=_allowed_hosts(request, keys),
    )


def _place(request: ServeOptions) -> ServerAddress:
    """Return the address that the options give, after a check of the TLS files. Nothing listens there yet."""
    place = ServerAddress(
        host=request.host,
        port=request.port,
        unix_socket=request.unix_socket,
        tls_cert=request.tls_cert,
        tls_key=request.tls_key,
        grace_s=request.grace,
        read_timeout_s=request.read_timeout,
    )
    check_tls(place)
    return place


def _checkpoint(request: ServeOptions) -> tuple[ServeOptions, Checkpoint, int | None]:
    """Return the request with a policy, the model without weights, and the longest sequence, after all other checks.

    The longest sequence is in tokens; ``None`` if nothing limits it.

    Raises:
        KVKeepError: something cannot be used.
    """
    named = parse_policy(request.policy) if request.policy else None
    numbers = {"max_rows": request.max_rows, "kv_memory": request.kv_memory}
    for name, number in numbers.items():
        if number is not None:
            budgets.check_one(number, name)
    budgets.check_one(request.budget)
    checked_guard(request.guard)
    whole_within("host_rows", request.host_rows, 0, MOST_HOST_ROWS)
    check_prefix_memory(request.prefix_memory, request.prefill_chunk)
    check_weights(request)
    check_folders(request.adapter)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    policy = keeping(named or _default_policy(checkpoint, request.device), request.keep_prompt)
    layout = Layout.of(
        *(checkpoint.config, policy),
        layer_budget=request.layer_budget,
        head_budget=request.head_budget,
        kv_bits=request.kv_bits,
        positions=request.positions,
    )
    # refuses a budget that the policy cannot work with
    layout.slots(request.budget)
    if request.guard is not None:
        levels(layout, request.budget, ())  # refuses a policy that cannot be guarded
    longest = checkpoint.max_model_len(slot_positions=layout.positions == "slot")
    return replace(request, policy=spec(policy)), checkpoint, request.max_model_len or longest


def _default_policy(checkpoint: Checkpoint, device: str) -> Policy:
    """Return the policy of a server for which none was named.

    On a CPU reading takes long, so conversations go on from memories that know of earlier messages. A GPU reads a
    conversation anew in little time, and records the steps of policies whose heads have equal budgets.
    """
    on_cpu = parse_device(device).type == "cpu"
    return default_policy(checkpoint.config, CONVERSATION) if on_cpu else parse_policy(DEFAULT)


def _remark(request: ServeOptions, settings: ServerSettings, checkpoint: Checkpoint) -> None:
    """Print a note if anybody in the network can use the model, and one if the model has no chat template."""
    if request.unix_socket is None and not _is_loopback(request.host) and not settings.keys.owners:
        console.note(f"anybody who reaches {request.host} can use the model; --key-file asks for keys")
    if checkpoint.tokenizer.chat_template is None:
        console.note(f"{settings.name} has no chat template, so it continues the messages of a chat as text")


def _log(access: bool) -> None:
    """Set up the server's log, to standard error: with ``access`` a line for each request, otherwise errors only."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if access else logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
