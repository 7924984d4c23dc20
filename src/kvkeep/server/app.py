"""The application: its routes, the steps that every request goes through, and the answers to failures."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeAlias

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from kvkeep.errors import KVKeepError
from kvkeep.server.errors import GoneError, RefusalError
from kvkeep.server.generate_routes import GenerateRoutes
from kvkeep.server.info_routes import InfoRoutes, add_page
from kvkeep.server.metrics import Metrics
from kvkeep.server.middleware import IGNORED, AuthMiddleware
from kvkeep.server.model import ServedModel
from kvkeep.server.rate_limits import RateLimits
from kvkeep.server.request_queue import RequestQueue
from kvkeep.server.responses_routes import ResponsesRoutes
from kvkeep.server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    DropBody,
    ForkBody,
    PinBody,
    ResponseBody,
    RewindBody,
    SessionBody,
    TokenizeBody,
)
from kvkeep.server.session_leases import Leases
from kvkeep.server.session_registry import SessionRegistry
from kvkeep.server.session_routes import SessionRoutes
from kvkeep.server.settings import ServerSettings
from kvkeep.server.sse import answer_to
from kvkeep.version import __version__

_THREADS = 64
"""Threads in which prompts are tokenized and requests wait for the end of a step."""

Route: TypeAlias = Callable[[Request], Awaitable[Response]]


def make_app(
    served: ServedModel, settings: ServerSettings, origins: Sequence[str] = (), leases: Leases | None = None
) -> FastAPI:
    """Return the web application that serves a model: all routes, the check of keys, limits, and the answers to
    failures.

    Args:
        served: the model; its ``longest`` is replaced by the limit in ``settings``.
        settings: how clients are treated; ``adapters`` are replaced by the engine's.
        origins: origins of web pages that may call it, such as ``https://example.org``; ``*``: all.
        leases: the rights to hold sessions, where several servers share them; ``None``: this one is alone.
    """
    # what one knows of the other: the limit of the server, and the adapters of the engine
    served = replace(served, longest=settings.max_model_len)
    settings = replace(settings, adapters=served.engine.adapters)
    app = FastAPI(title="kvkeep", version=__version__, docs_url=None, redoc_url=None, lifespan=_lifespan)
    queue = RequestQueue(served.engine, settings)
    sessions = SessionRegistry(served.engine, settings.max_sessions, settings.session_dir, leases)
    limits, metrics = _counted(served, queue, sessions, settings)
    responses = ResponsesRoutes(served, queue, settings)
    _add_generation(app, GenerateRoutes(served, queue, sessions, settings), responses)
    _add_sessions(app, SessionRoutes(served, sessions, settings))
    _add_info(app, InfoRoutes(served, queue, settings), metrics)
    # for whoever runs the application, drains its queue, and asks what it holds
    app.state.queue, app.state.sessions, app.state.responses, app.state.limits = queue, sessions, responses, limits
    if settings.page:
        add_page(app)
    for kind in (RefusalError, GoneError, ClientDisconnect, KVKeepError, HTTPException):
        app.add_exception_handler(kind, answer_to)
    app.add_middleware(AuthMiddleware, settings=settings, limits=limits, origins=origins)
    if origins:  # added last, so it comes first: a browser's preflight has no key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[IGNORED]
        )
    return app


def _counted(
    served: ServedModel, queue: RequestQueue, sessions: SessionRegistry, settings: ServerSettings
) -> tuple[RateLimits, Metrics]:
    """Make the rate limits of keys and the metrics, and return both. From now on the metrics count each result of the
    queue, and each refusal of the queue and of the limits.
    """
    limits = RateLimits(settings.key_requests, settings.key_tokens)
    metrics = Metrics(served.engine, settings.name, sessions)
    queue.ended.append(metrics.note)
    for refused in (queue.refused, limits.refused):
        refused.append(metrics.note_refusal)
    return limits, metrics


def _add_generation(app: FastAPI, generate: GenerateRoutes, responses: ResponsesRoutes) -> None:
    """Add the routes that run the model (chats, completions, ``/v1/responses``), and those of stored responses."""
    _add(app, "POST", "/v1/chat/completions", generate.chat, ChatBody)
    _add(app, "POST", "/v1/completions", generate.completion, CompletionBody)
    _add(app, "POST", "/v1/responses", responses.respond, ResponseBody)
    _add(app, "GET", "/v1/responses/{name}", responses.look)
    _add(app, "DELETE", "/v1/responses/{name}", responses.remove)


def _add_info(app: FastAPI, info: InfoRoutes, metrics: Metrics) -> None:
    """Add the routes of metrics, health, version, models and the tokenizer."""
    _add(app, "GET", "/metrics", metrics.show)
    _add(app, "GET", "/health", info.health)
    _add(app, "GET", "/version", info.version)
    _add(app, "GET", "/v1/models", info.models)
    _add(app, "GET", "/v1/models/{name:path}", info.model)  # a path, as names of models have slashes
    _add(app, "POST", "/tokenize", info.tokenize, TokenizeBody)
    _add(app, "POST", "/detokenize", info.detokenize, DetokenizeBody)
    _add(app, "GET", "/tokenizer_info", info.tokenizer_info)


def _add_sessions(app: FastAPI, routes: SessionRoutes) -> None:
    """Add the routes by which clients make, change and delete sessions; their turns are chats."""
    path = "/v1/sessions/{name}"
    _add(app, "POST", "/v1/sessions", routes.make, SessionBody)
    _add(app, "GET", "/v1/sessions", routes.all)
    _add(app, "GET", path, routes.one)
    _add(app, "GET", f"{path}/positions", routes.positions)
    _add(app, "POST", f"{path}/fork", routes.fork, ForkBody)
    _add(app, "POST", f"{path}/rewind", routes.rewind, RewindBody)
    _add(app, "POST", f"{path}/pin", routes.pin, PinBody)
    _add(app, "POST", f"{path}/drop", routes.drop, DropBody)
    _add(app, "POST", f"{path}/save", routes.save)
    _add(app, "POST", f"{path}/restore", routes.restore)
    _add(app, "DELETE", path, routes.remove)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Give the event loop the threads in which the application works, when that starts; do nothing when it ends."""
    use_threads()
    yield


def use_threads() -> None:
    """Set the default executor of the running event loop, which `asyncio.to_thread` uses, to a new pool of 64
    threads.
    """
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "kvkeep-web"))


_IN_PATH = {"in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _add(app: FastAPI, method: str, path: str, route: Route, body: type[Body] | None = None) -> None:
    """Add a route to the application; one for GET also answers HEAD. The OpenAPI document shows the parameters of its
    path and the schema of its body, if it has one.
    """
    # said here, since a route of kvkeep reads its request itself
    named = re.findall(r"{(\w+)", path)
    extra: dict[str, Any] = {"parameters": [{**_IN_PATH, "name": name} for name in named]} if named else {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": {"application/json": {"schema": _schema_of(body)}}}
    app.add_api_route(path, route, methods=[method], openapi_extra=extra, response_model=None)
    if method == "GET":  # load balancers ask for the status alone
        app.add_api_route(path, route, methods=["HEAD"], include_in_schema=False, response_model=None)


@functools.cache  # a router and its replicas in one process have the same bodies
def _schema_of(body: type[Body]) -> dict[str, Any]:
    """Return the JSON schema of a body, with all references written out. It is made once, so nobody may change it."""
    schema: dict[str, Any] = body.model_json_schema(ref_template="#/components/schemas/{model}")
    for name, part in schema.pop("$defs", {}).items():
        # FastAPI does not put these definitions into the components of the document, where references lead
        schema = _inlined(schema, name, part)
    return schema


def _inlined(schema: Any, name: str, part: object) -> Any:
    """Return a copy of a JSON schema, or of a part of one, with a definition in place of each reference to it.

    Args:
        schema: the schema.
        name: the definition's name, as references have it.
        part: the definition.
    """
    if isinstance(schema, dict):
        if schema.get("$ref") == f"#/components/schemas/{name}":
            return part
        return {key: _inlined(value, name, part) for key, value in schema.items()}
    return [_inlined(item, name, part) for item in schema] if isinstance(schema, list) else schema
