"""Answers as JSON and as server-sent events, and the end of work for clients that have gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from kvkeep.engine.request import Result
from kvkeep.errors import KVKeepError
from kvkeep.openai import responses
from kvkeep.server.errors import GoneError, RefusalError, refusal_of
from kvkeep.server.rate_limits import Meter

_T = TypeVar("_T")


def encoded(value: object) -> bytes:
    """Return a value as compact JSON in UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes a question mark.

    Raises:
        ValueError: a number is no number of JSON, such as an infinity.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def reply(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an HTTP response with a value as its JSON body."""
    return Response(encoded(value), status, dict(headers or {}), "application/json")


def refused(refusal: RefusalError) -> Response:
    """Return the HTTP response to a request that is refused: its status, OpenAI's error object, and its headers."""
    return reply(refusal.body, refusal.status, refusal.headers)


async def answer_to(request: Request, error: Exception) -> Response:
    """Return the response to a request that fails: the standard error object, never a traceback.

    A client that has gone gets status 499 and an empty body.

    Args:
        request: the request.
        error: of kvkeep, a `RefusalError`, an HTTP error, or that the client has gone; no other may come.
    """
    if isinstance(error, GoneError | ClientDisconnect):
        return Response(status_code=499)  # nobody reads it; logs show it, as nginx's do
    if isinstance(error, KVKeepError):
        error = refusal_of(error)
    if isinstance(error, HTTPException):
        paths = "see /openapi.json for all routes" if error.status_code == 404 else "see /openapi.json"
        what = f"{request.method} {request.url.path[:80]}"
        error = RefusalError(error.status_code, f"{what}: {error.detail}; {paths}.", headers=error.headers)
    assert isinstance(error, RefusalError)
    return refused(error)


async def unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Await some work for a client and return its result, or raise its error. If the client closes the connection
    before the work is done, cancel it. The request's body must have been read before.

    Raises:
        GoneError: the client has closed the connection.
    """
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():  # first, as both may be: an answer that is there is not thrown away
            return task.result()
        raise GoneError
    finally:
        for waiting in (task, watch):
            waiting.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


def owner_of(request: Request) -> str:
    """Return the name of the owner of the key with which a request came, as the middleware has stored it."""
    return str(request.state.owner)


def meter_of(request: Request) -> Meter:
    """Return the meter of a request that runs the model, which the middleware or a router has stored with it."""
    meter: Meter = request.state.meter
    return meter


def ends(message: Message) -> bool:
    """Return whether an ASGI message is the last piece of an answer's body."""
    return message["type"] == "http.response.body" and not message.get("more_body", False)


async def gone(request: Request) -> None:
    """Wait until the client has closed the connection. The body must have been read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


# Answers that are sent while they are written, as server-sent events.

Chunks: TypeAlias = AsyncGenerator[Mapping[str, Any], None]
"""The JSON objects of an answer."""
After: TypeAlias = Callable[[], Awaitable[object]]
"""What is done when an answer is complete."""
_LOOKS = 4
"""Looks at a stream within the shortest of its times."""
_PING = b": still reading\n\n"
DONE = b"data: [DONE]\n\n"
"""The last event of a stream without names of events."""
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter: nginx would collect the pieces


class EventStream(Response):
    """An answer that is sent piece by piece. A client that leaves, or does not read, ends it.

    Args:
        request: the request.
        chunks: the JSON objects of the answer.
        ping_s: seconds without an object after which a comment is sent.
        write_s: seconds in which the client must take a piece.
        done: whether a last event says that the answer is complete.
        named: whether each event has the name of its object's ``type``.
        headers: more headers.
    """

    def __init__(
        self,
        request: Request,
        chunks: Chunks,
        *,
        ping_s: float,
        write_s: float,
        done: bool = True,
        named: bool = False,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(status_code=200, headers={**_HEADERS, **(headers or {})}, media_type="text/event-stream")
        del self.headers["content-length"]  # 0 for the empty body; nobody knows the length of a stream
        self._request, self._chunks, self._ping_s, self._write_s = request, chunks, ping_s, write_s
        self._done, self._named = done, named
        self._sent = 0.0
        self._sending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, until it is complete, or the client leaves or does not read in time, which is no error. The
        chunks are closed then.
        """
        self._sent = time.monotonic()
        work = [self._write(send), self._watch(send), gone(self._request)]
        writing, *_ = tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                with suppress(GoneError):  # a client that has left is no failure; anything else is raised here
                    writing.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._chunks.aclose()

    async def _write(self, send: Send) -> None:
        """Send the head of the answer, an event for each chunk, and the end. If the chunks fail with an error of kvkeep
        or a refusal, that is the last event but ``[DONE]``.
        """
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for chunk in self._chunks:
                await self._send(send, _event(chunk, named=self._named))
        except (RefusalError, KVKeepError) as error:
            refusal = error if isinstance(error, RefusalError) else refusal_of(error)
            await self._send(send, failed(refusal, named=self._named))
        if self._done:
            await self._send(send, DONE)
        self._sending = True  # no comment after the end
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _watch(self, send: Send) -> None:
        """Send a comment to the client whenever no chunk has come for ``ping_s`` seconds. Return, and by that end the
        answer, when the client has not taken a piece within ``write_s`` seconds.
        """
        while True:
            await asyncio.sleep(min(self._ping_s, self._write_s) / _LOOKS)
            waited = time.monotonic() - self._sent
            # a send that waits for the client must not be joined by a comment, which would wait as well
            if self._sending and waited > self._write_s:
                return
            if not self._sending and waited > self._ping_s:
                await self._send(send, _PING)

    async def _send(self, send: Send, piece: bytes) -> None:
        """Send a piece, and record for `_watch` when it began and that the client has taken it.

        Raises:
            GoneError: the client has closed the connection.
        """
        self._sent, self._sending = time.monotonic(), True
        try:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        except OSError as error:
            raise GoneError from error
        self._sending = False


def _event(value: Mapping[str, Any], *, named: bool) -> bytes:
    """Return an object as a server-sent event of one line of JSON; with ``named``, under the name of its ``type``."""
    name = f"event: {value['type']}\n".encode() if named else b""
    return b"%bdata: %b\n\n" % (name, encoded(value))


def failed(refusal: RefusalError, *, named: bool) -> bytes:
    """Return the server-sent event that tells of a failure after the stream has begun: OpenAI's error object; with
    ``named``, under the name ``error``.
    """
    return _event({"type": "error", **refusal.body} if named else refusal.body, named=named)


async def begun(chunks: Chunks) -> Chunks:
    """Wait for the empty first chunk of a stream, which says that its request has a row, take it off, and return the
    same stream.

    A failure before it is raised here, while the answer can still have a status of its own; the stream is then closed.
    """
    try:
        await anext(chunks)
    except BaseException:
        await chunks.aclose()
        raise
    return chunks


async def followed(chunks: Chunks, after: After) -> Chunks:
    """Yield the chunks, then call and await ``after``, but not if the stream fails or is closed before its end. The
    chunks are closed in any case.
    """
    try:
        async for chunk in chunks:
            yield chunk
        await after()
    finally:
        await chunks.aclose()


# The numbers of an answer: tokens as OpenAI's API counts them, and what kvkeep kept of them.


def usage_of(results: Sequence[Result], n: int) -> dict[str, Any]:
    """Return ``usage`` of an answer: OpenAI's counts of tokens, and kvkeep's own numbers under ``kvkeep``.

    Args:
        results: the results, ``n`` in a row for each prompt.
        n: texts of each prompt.
    """
    return {**responses.usage(results, n), "kvkeep": kept_of(results)}


def kept_of(results: Sequence[Result]) -> dict[str, Any]:
    """Return kvkeep's own numbers of an answer: tokens seen, kept (at most the budget) and dropped on request, and
    bytes of the rows, as sums over its texts; and, as means over them, the shares of attention that evicted tokens
    carried, for the prompt and for new tokens (``None`` if unknown).
    """
    return {
        "kept_tokens": sum(min(result.budget, _seen(result) - result.dropped_tokens) for result in results),
        "seen_tokens": sum(map(_seen, results)),
        "dropped_tokens": sum(result.dropped_tokens for result in results),
        "kv_bytes": sum(result.memory_usage.allocated_bytes for result in results),
        "lost_mass": {
            "prompt": _mean([result.lost_mass.prompt for result in results]),
            "decode": _mean([result.lost_mass.decode for result in results]),
        },
    }


def _seen(result: Result) -> int:
    """Return how many tokens a request's memory has seen: its prompt, tokens that its client has left out and that were
    read before, and new ones.
    """
    return result.prompt_tokens + result.skipped_tokens + len(result.token_ids)


def _mean(shares: Sequence[float | None]) -> float | None:
    """Return the mean of the shares that are known; ``None`` if none is."""
    known = [share for share in shares if share is not None]
    return sum(known) / len(known) if known else None
