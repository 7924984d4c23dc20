"""The work of ``kvkeep serve``: check the settings, load the model, and serve until a signal ends it.

Importing this module imports torch, transformers and fastapi.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import typer

from kvkeep import budget as budgets
from kvkeep.cache.layer_layout import Layout
from kvkeep.cli import console
from kvkeep.cli.loading import check_weights, writer_of
from kvkeep.cli.serve.far import Answering, engine_options, serve_far
from kvkeep.cli.serve.keys import read_keys
from kvkeep.cli.serve.request import Request
from kvkeep.engine import Engine
from kvkeep.engine.prefix_cache import check_prefix_memory
from kvkeep.engine.request import checked_guard
from kvkeep.engine.sampling_params import Sampling, whole_within
from kvkeep.engine.swapping import MOST_HOST_ROWS
from kvkeep.errors import InputError
from kvkeep.models import threads
from kvkeep.models.device import enough_memory, parse_device
from kvkeep.models.load import Checkpoint, embedded, find, quiet
from kvkeep.openai.messages import ToolUse
from kvkeep.policies.registry import parse as parse_policy
from kvkeep.scale.cluster import check_ray
from kvkeep.scale.ray_serve import need_serve
from kvkeep.server.app import make_app
from kvkeep.server.middleware import log
from kvkeep.server.model import Served, tool_use_of
from kvkeep.server.run import Place, Server, check_tls, listen, settle
from kvkeep.server.settings import Keys, Settings

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def run(request: Request) -> None:
    """Serve a model.

    Raises:
        KVKeepError: a setting, the model or the address cannot be used.
    """
    _check_numbers(request)
    place, keys = _place(request), read_keys(request.key_file)
    if request.replicas is not None:
        check_ray(request.ray_address)
        need_serve()
    with quiet(), threads.restored(), enough_memory(parse_device(request.device)):
        checkpoint, limit = _checkpoint(request)
        tool_use = tool_use_of(checkpoint, request.tool_form)
        settings = _settings(request, keys, limit)
        if request.check:
            typer.echo("The settings can be used.")
            return
        _remark(request, settings)
        socket = listen(place)
        with socket:
            if request.replicas is None:
                interrupted = _serve_here(checkpoint, tool_use, settings, place, socket, request)
            else:
                interrupted = serve_far(request, settings, longest=limit, answer=_answer(place, socket, request))
    if interrupted:
        raise typer.Exit(console.INTERRUPTED)


def _serve_here(
    checkpoint: Checkpoint, tool_use: ToolUse, settings: Settings, place: Place, socket: Any, request: Request
) -> bool:
    """Serve with an engine in this process; return whether Ctrl-C has ended it."""
    writer = writer_of(checkpoint, request)
    with Engine(writer.model, checkpoint.tokenizer, **engine_options(request)) as engine:
        app = make_app(Served(engine, checkpoint, tool_use=tool_use), settings, request.allow_origin)
        return _answer(place, socket, request)(app, settings.name, engine.rows, engine.row_bytes)


def _answer(place: Place, socket: Any, request: Request) -> Answering:
    """A function that answers requests until a signal ends it."""

    def answer(app: Any, name: str, rows: int, row_bytes: int, more: str = "") -> bool:
        _log(request.access_log)
        port = 0 if place.unix_socket else socket.getsockname()[1]

        def ready() -> None:
            size = f"{console.count(rows, 'conversation')} of {console.show_bytes(row_bytes)} at once{more}"
            console.err().print(f"{name} at {place.url(port)}/v1: {size}. Ctrl-C ends.", soft_wrap=True)

        server = Server(app, place, ready)
        settle()
        asyncio.run(server.serve([socket]))
        return server.interrupted

    return answer


def _check_numbers(request: Request) -> None:
    """Refuse numbers that are out of range.

    Raises:
        InputError: one is.
    """
    seconds = {"queue_timeout": request.queue_timeout, "request_timeout": request.request_timeout}
    for name, value in (seconds | {"read_timeout": request.read_timeout, "grace": request.grace}).items():
        if not 0 < value < 10**9:
            raise InputError(f"{name}={value:g} is no time; give seconds above 0.")
    least = {"max_queue": (request.max_queue, 0), "key_requests": (request.key_requests, 1)}
    least |= {"key_tokens": (request.key_tokens, 1), "max_model_len": (request.max_model_len, 2)}
    for name, (number, low) in least.items():
        if number is not None and number < low:
            raise InputError(f"{name}={number} is less than {low}.")
    if not 0 <= request.port <= 65535:
        raise InputError(f"port={request.port} is outside 0 … 65535; 0 takes any free one.")
    Sampling(max_new_tokens=request.max_new_tokens)


def _settings(request: Request, keys: Keys, limit: int | None) -> Settings:
    """The settings of the web side."""
    return Settings(
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
    )


def _place(request: Request) -> Place:
    place = Place(
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


def _checkpoint(request: Request) -> tuple[Checkpoint, int | None]:
    """The model's configuration and tokenizer, after all checks that need no weights, and the longest sequence.

    Raises:
        KVKeepError: something cannot be used.
    """
    policy = parse_policy(request.policy)
    numbers = {"max_rows": request.max_rows, "kv_memory": request.kv_memory}
    for name, number in numbers.items():
        if number is not None:
            budgets.check_one(number, name)
    budgets.check_one(request.budget)
    checked_guard(request.guard)
    whole_within("host_rows", request.host_rows, 0, MOST_HOST_ROWS)
    check_prefix_memory(request.prefix_memory, request.prefill_chunk)
    check_weights(request)
    name = request.model or embedded()
    console.progress(f"loading {name} …")
    checkpoint = find(name, allow_pickle=request.allow_pickle)
    layout = Layout.of(
        *(checkpoint.config, policy),
        layer_budget=request.layer_budget,
        head_budget=request.head_budget,
        kv_bits=request.kv_bits,
        positions=request.positions,
    )
    layout.slots(request.budget)
    trained = checkpoint.trained_length if layout.rotation is None else None
    return checkpoint, request.max_model_len or trained


def _remark(request: Request, settings: Settings) -> None:
    """Print a note where anybody in the network could use the model."""
    if request.unix_socket is None and request.host not in _LOOPBACK and not settings.keys.owners:
        console.note(f"anybody who reaches {request.host} can use the model; --key-file asks for keys")


def _log(access: bool) -> None:
    """Write the log to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False
    log.setLevel(logging.INFO if access else logging.ERROR)
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)
