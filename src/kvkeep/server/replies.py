"""Answers as JSON, and the end of work for clients that have gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request, Response
from starlette.types import Message

from kvkeep.server.errors import GoneError, RefusalError
from kvkeep.server.limits import Meter

_T = TypeVar("_T")


def encoded(value: object) -> bytes:
    """JSON in UTF-8. Half of a character, which UTF-8 does not have, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """An answer with a JSON body."""
    return Response(encoded(value), status, dict(headers or {}), "application/json")


def refused(refusal: RefusalError) -> Response:
    """The answer to a request that is refused."""
    return reply(refusal.body, refusal.status, refusal.headers)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Do some work for a client, and cancel it when the client closes the connection.

    Raises:
        GoneError: the client has closed the connection.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise GoneError
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def owner_of(request: Request) -> str:
    """The owner of the key with which a request came."""
    return str(request.state.owner)


def meter_of(request: Request) -> Meter:
    """What a request that runs the model tells of its use."""
    found: Meter = request.state.meter
    return found


def ends(message: Message) -> bool:
    """Whether a message is the last piece of an answer."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


async def gone(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
