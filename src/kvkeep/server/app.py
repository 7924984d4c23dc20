"""The application: its routes, the steps that every request goes through, and the answers to failures."""

from __future__ import annotations

import asyncio
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
from kvkeep.server.errors import GoneError, RefusalError, refusal_of
from kvkeep.server.generate_routes import GenerateRoutes
from kvkeep.server.info_routes import InfoRoutes
from kvkeep.server.metrics import Metrics
from kvkeep.server.middleware import AuthMiddleware
from kvkeep.server.model import ServedModel
from kvkeep.server.page import add_page
from kvkeep.server.rate_limits import RateLimits
from kvkeep.server.request_queue import RequestQueue
from kvkeep.server.responses_routes import ResponsesRoutes
from kvkeep.server.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
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
from kvkeep.server.sse import refused
from kvkeep.version import __version__

_THREADS = 64
"""Threads in which prompts are tokenized and requests wait for the end of a step."""

Route: TypeAlias = Callable[[Request], Awaitable[Response]]


def make_app(
    served: ServedModel, settings: ServerSettings, origins: Sequence[str] = (), leases: Leases | None = None
) -> FastAPI:
    """The application that serves a model.

    Args:
        served: the model.
        settings: how clients are treated.
        origins: origins of web pages that may call it.
        leases: the rights to hold sessions, where several servers share them.
    """
    served = replace(served, longest=settings.max_model_len)
    desk = RequestQueue(served.engine, settings)
    app = FastAPI(title="kvkeep", version=__version__, docs_url=None, redoc_url=None, lifespan=_lifespan)
    looker, generator = InfoRoutes(served, desk, settings), GenerateRoutes(served, desk, settings)
    book = SessionRegistry(served.engine, settings.max_sessions, settings.session_dir, leases)
    talks = SessionRoutes(book, generator, settings)
    limits, metrics = (
        RateLimits(settings.key_requests, settings.key_tokens),
        Metrics(served.engine, desk, settings.name, book),
    )
    limits.refused.append(metrics.note_refusal)
    _add(app, "GET", "/metrics", metrics.show)
    _add(app, "GET", "/health", looker.health)
    _add(app, "GET", "/version", looker.version)
    _add(app, "GET", "/v1/models", looker.models)
    _add(app, "GET", "/v1/models/{name:path}", looker.model)
    _add(app, "POST", "/v1/chat/completions", talks.chat, ChatBody)
    _add(app, "POST", "/v1/completions", generator.completion, CompletionBody)
    _add(app, "POST", "/tokenize", looker.tokenize, TokenizeBody)
    _add(app, "POST", "/detokenize", looker.detokenize, DetokenizeBody)
    _add(app, "GET", "/tokenizer_info", looker.tokenizer_info)
    _add_sessions(app, talks)
    responder = ResponsesRoutes(served.engine, generator, desk, settings)
    app.state.desk, app.state.book, app.state.responder, app.state.limits = desk, book, responder, limits
    _add(app, "POST", "/v1/responses", responder.respond, ResponseBody)
    _add(app, "GET", "/v1/responses/{name}", responder.look)
    _add(app, "DELETE", "/v1/responses/{name}", responder.remove)
    if settings.page:
        add_page(app)
    for kind in (RefusalError, GoneError, ClientDisconnect, KVKeepError, HTTPException):
        app.add_exception_handler(kind, answer_to)
    app.add_middleware(AuthMiddleware, settings=settings, limits=limits)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


def _add_sessions(app: FastAPI, talks: SessionRoutes) -> None:
    """Add the routes of sessions."""
    one = "/v1/sessions/{name}"
    _add(app, "POST", "/v1/sessions", talks.make, SessionBody)
    _add(app, "GET", "/v1/sessions", talks.all)
    _add(app, "GET", one, talks.one)
    _add(app, "GET", f"{one}/positions", talks.positions)
    _add(app, "POST", f"{one}/fork", talks.fork, ForkBody)
    _add(app, "POST", f"{one}/rewind", talks.rewind, RewindBody)
    _add(app, "POST", f"{one}/pin", talks.pin, PinBody)
    _add(app, "POST", f"{one}/save", talks.save)
    _add(app, "POST", f"{one}/restore", talks.restore)
    _add(app, "DELETE", one, talks.remove)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    use_threads()
    yield


def use_threads() -> None:
    """Give the running loop the threads in which an application works."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS, "kvkeep-web"))


def _add(app: FastAPI, method: str, path: str, route: Route, body: type[Body] | None = None) -> None:
    """Add a route; its body is described in the OpenAPI document."""
    extra: dict[str, Any] = {}
    if body is not None:
        schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
        for name, part in schema.pop("$defs", {}).items():
            schema = _inlined(schema, name, part)
        extra = {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
    app.add_api_route(path, route, methods=[method], openapi_extra=extra, response_model=None)


def _inlined(schema: Any, name: str, part: object) -> Any:
    """A schema in which a part stands where it is referred to."""
    if isinstance(schema, dict):
        if schema.get("$ref") == f"#/components/schemas/{name}":
            return part
        return {key: _inlined(value, name, part) for key, value in schema.items()}
    return [_inlined(one, name, part) for one in schema] if isinstance(schema, list) else schema


async def answer_to(request: Request, error: Exception) -> Response:
    """The answer to a request that fails: the standard error object, never a traceback."""
    if isinstance(error, GoneError | ClientDisconnect):
        return Response(status_code=499)  # nobody reads it
    if isinstance(error, KVKeepError):
        error = refusal_of(error)
    if isinstance(error, HTTPException):
        paths = "see /openapi.json for all routes" if error.status_code == 404 else "see /openapi.json"
        what = f"{request.method} {request.url.path[:80]}"
        error = RefusalError(error.status_code, f"{what}: {error.detail}; {paths}.", headers=error.headers)
    assert isinstance(error, RefusalError)
    return refused(error)
