"""The router before several replicas of a server: each request goes whole to one of them, and its answer back.

It has no routes of its own but three that ask all replicas: health, metrics, and the list of sessions.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from kvkeep.errors import InputError
from kvkeep.openai.messages import decoded
from kvkeep.server.errors import GoneError, RefusalError
from kvkeep.server.metrics import Refusals
from kvkeep.server.middleware import IGNORED, AuthMiddleware
from kvkeep.server.rate_limits import Meter, RateLimits
from kvkeep.server.replicas import (
    SESSION,
    USED,
    LostError,
    PlacementRequest,
    Places,
    Received,
    Replicas,
    Used,
    headers_of,
    wish_of,
)
from kvkeep.server.schemas import LARGE, received
from kvkeep.server.session_leases import HELD
from kvkeep.server.settings import ServerSettings
from kvkeep.server.sse import DONE, answer_to, ends, failed, owner_of, reply, unless_gone

# The messages of a replica's answer on their way to the client.


class Relay:
    """Sends a replica's answer on to the client. Nothing is sent before the first piece of its body is there.

    Args:
        send: sends messages to the client.
        write_s: seconds in which the client must take a piece.
        named: whether events of a stream have names.
        begins: called with the status of an answer before anything of it is sent.
        meter: is told of what the request uses; ``None``: the request does not count.

    Attributes:
        begun: whether something was sent.
        ended: whether the last piece was sent.
    """

    def __init__(
        self, send: Send, *, write_s: float, named: bool, begins: Callable[[int], object], meter: Meter | None = None
    ) -> None:
        self._send, self._write_s, self._named, self._begins, self._meter = send, write_s, named, begins, meter
        self._start: Message | None = None
        self.begun = self.ended = False

    async def run(self, messages: AsyncGenerator[Message, None], *, unless: str | None) -> bool:
        """Pass a replica's answer on to the client, piece by piece, and what it has used to the meter. Return ``True``
        when there are no more pieces, also if the last one is missing (see ``ended``); return ``False``, with nothing
        sent, if the answer has the header ``unless``.

        Args:
            messages: the ASGI messages of the answer.
            unless: the name of the header; ``None``: pass every answer on.

        Raises:
            GoneError: the client has gone, or does not take what is sent.
        """
        async for message in messages:
            self._count(message.pop(USED, None))
            if message["type"] == USED:
                continue
            if message["type"] == "http.response.start":
                self._begins(message["status"])
                if unless is not None and unless in Headers(raw=message["headers"]):
                    return False
                self._start = message  # sent with the first piece, so that an error before it still has a status
                continue
            if self._start is not None and not self.begun:
                self.begun = True
                await self._pass(self._start)
            await self._pass(message)
            self.ended = ends(message)
        return True

    async def broken(self, refusal: RefusalError) -> bool:
        """Tell the client that the answer has broken off: end its stream with the refusal as the last event, and return
        ``True``. Return ``False``, and send nothing, if nothing was sent yet, so that an ordinary error will do.

        Raises:
            GoneError: a part of an answer that is no stream was sent, to which no error can be added; or the client has
                gone.
        """
        if not self.begun:
            return False
        assert self._start is not None
        if not Headers(raw=self._start["headers"]).get("content-type", "").startswith("text/event-stream"):
            raise GoneError  # a part of an answer; the connection ends without the rest
        last = failed(refusal, named=self._named) + (b"" if self._named else DONE)
        await self._pass({"type": "http.response.body", "body": last, "more_body": False})
        return True

    def _count(self, used: Used | None) -> None:
        """Report what a message says of the request's use (its tokens, and whether it has ended) to the meter, if there
        are both.
        """
        if self._meter is None or used is None:
            return
        self._meter.spend(used.tokens)
        if used.ended:
            self._meter.end()

    async def _pass(self, message: Message) -> None:
        """Send a message to the client, who must take it within ``write_s`` seconds.

        Raises:
            GoneError: the client has gone, or is too slow.
        """
        try:
            async with asyncio.timeout(self._write_s):
                await self._send(message)
        except (OSError, TimeoutError) as error:
            raise GoneError from error


# Health, metrics and sessions of several replicas as one answer.


def health(answers: Mapping[str, Mapping[str, Any]], *, draining: bool) -> tuple[dict[str, Any], int]:
    """Return the body of the router's answer about its health, with that of each replica and the sums of their rows,
    and its HTTP status: 200 if a replica is ready and the router does not drain, else 503.

    Args:
        answers: replica → its health, as it has answered; those that did not answer are missing.
        draining: whether the router is about to end.
    """
    ready = any(replica["status"] == "ready" for replica in answers.values()) and not draining
    sums = {name: sum(replica[name] for replica in answers.values()) for name in ("rows", "rows_free", "waiting")}
    body = {
        "status": "draining" if draining else "ready" if ready else "starting",
        **sums,
        # of one row, and 0 without a replica
        "row_bytes": max((replica["row_bytes"] for replica in answers.values()), default=0),
        "replicas": {name: dict(answer) for name, answer in sorted(answers.items())},
    }
    return body, 200 if ready else 503


def metrics(answers: Mapping[str, str], own: str) -> str:
    """Merge the metrics of all replicas and of the router into one text for Prometheus, with a label ``replica`` on
    each sample, and with the number of replicas. Samples of one family stand together, under one description.

    Args:
        answers: replica → its metrics as text for Prometheus.
        own: those of the router.
    """
    families: dict[str, list[str]] = {}
    for replica, text in [*sorted(answers.items()), ("router", own)]:
        family, heads = "", list[str]()
        for line in text.splitlines():
            if line.startswith("#"):
                # "# HELP name text", then "# TYPE name kind"
                heads = [*heads, line] if heads and line.split(" ", 3)[2] == family else [line]
                family = line.split(" ", 3)[2]
                continue
            # the heads of the first replica stand for all: Prometheus takes one description of a family
            families.setdefault(family, list(heads)).append(_labelled(line, replica))
    count = ["# HELP kvkeep_replicas Replicas that answer.", "# TYPE kvkeep_replicas gauge"]
    lines = [line for family in families.values() for line in family]
    return "\n".join([*lines, *count, f"kvkeep_replicas {len(answers)}"]) + "\n"


def _labelled(sample: str, replica: str) -> str:
    """Return a line of Prometheus's text format, a sample with or without labels, with the label ``replica`` added
    first.
    """
    end = min(place for place in (sample.find("{"), sample.find(" ")) if place >= 0)
    name, rest = sample[:end], sample[end:]
    return f'{name}{{replica="{replica}"' + (f",{rest[1:]}" if rest[0] == "{" else f"}}{rest}")


def sessions(answers: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Merge the replicas' lists of sessions into one in the form of the API, in order of names. A session that several
    list, as they share a folder, stands in it once.
    """
    data = {entry["id"]: entry for listed in answers.values() for entry in listed["data"]}
    return {"object": "list", "data": [data[name] for name in sorted(data)]}


# The router itself: which replica gets a request, and what happens when that replica ends.

_ANSWER_S = 5.0
"""Seconds in which a replica must answer a question about itself."""
_HELD_S, _PAUSE_S = 10.0, 0.2
"""Seconds for which a session is waited for whose holder is about to end, and between two tries."""
_TRIES = 5
"""Replicas that may end before they have a request; then the request is refused."""
_LATE_S = 30.0
"""Seconds after the time-out of requests at which a replica that has not ended its answer is given up."""
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Router:
    """Sends each request to a replica.

    Args:
        replicas: the replicas.
        settings: of the server.
        prefixes: whether replicas keep common beginnings of prompts.

    Attributes:
        refusals: counts what the router itself refuses for the limits of keys.
        draining: whether new requests are refused, because the router is about to end.
    """

    def __init__(self, replicas: Replicas, settings: ServerSettings, *, prefixes: bool = False) -> None:
        self._replicas, self._settings, self._prefixes = replicas, settings, prefixes
        self._places, self.refusals = Places(), Refusals(settings.name)
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request: for health, metrics and the list of sessions ask all replicas, and pass any other one to
        one replica, and its answer back.

        Raises:
            RefusalError: the router drains, the body is refused, or no replica answers.
            GoneError: the client went before the answer began.
        """
        request = Request(scope, receive)
        sums = {"/health": self._health, "/metrics": self._metrics, "/v1/sessions": self._sessions}
        if request.method in ("GET", "HEAD") and (summed := sums.get(scope["path"])) is not None:
            await (await summed(request))(scope, receive, send)
            return
        if self.draining:
            raise RefusalError(503, "The server is about to end: it takes no requests.", headers={"Retry-After": "5"})
        forwarded = await _received(request, self._settings)
        wish = await self._wish(forwarded)
        owner, named = owner_of(request), forwarded.path == "/v1/responses"

        def begins(status: int) -> None:
            if status in (404, 503) and wish.held is not None:
                self._places.forget((wish.held[0], owner, wish.held[1]))  # another one may hold it

        meter, write_s = scope["state"].get("meter"), self._settings.read_timeout_s
        relay = Relay(send, write_s=write_s, named=named, begins=begins, meter=meter)
        try:
            await unless_gone(request, self._answer(owner, forwarded, wish, relay))
        except GoneError:
            if not relay.begun:  # else there is no other answer to give
                raise

    async def _answer(self, owner: str, forwarded: Received, wish: PlacementRequest, relay: Relay) -> None:
        """Forward a request to a replica, and its answer to the client. If the replica ends, or has not ended its
        answer 30 s after the time-out of requests, end an answer that has begun with an error.

        Raises:
            RefusalError: the replica died or hangs, and nothing of the answer was sent; or no replica takes the
                request.
        """
        limit = self._settings.request_timeout_s + _LATE_S
        try:
            async with asyncio.timeout(limit):
                await self._tried(owner, forwarded, wish, relay)
        except (LostError, TimeoutError) as error:
            refusal = _lost() if isinstance(error, LostError) else _hung(limit)
            if not await relay.broken(refusal):
                raise refusal from error

    async def _tried(self, owner: str, forwarded: Received, wish: PlacementRequest, relay: Relay) -> None:
        """Forward a request to a replica, and its answer to the client. Choose again if the replica ends before it has
        the request; and, for up to 10 s, while it answers that another one holds the session.

        Raises:
            LostError: the replica has ended with the request or broken its answer off, or 5 have ended before they had
                it.
            RefusalError: no replica takes requests, or the name of a new session is taken.
        """
        end, tries = time.monotonic() + _HELD_S, 0
        while True:
            replica = await self._place(owner, wish)
            try:
                async with (
                    self._taken(owner, wish, replica),
                    aclosing(self._replicas.ask(replica, forwarded)) as messages,
                ):
                    if await relay.run(messages, unless=HELD if time.monotonic() < end else None):
                        break
            except LostError as error:
                tries += 1
                if error.reached or tries == _TRIES:  # what it has done for the request cannot be known
                    raise
            await asyncio.sleep(_PAUSE_S)
        if not relay.ended:  # a replica that ends may also just stop sending
            raise LostError(replica)

    @asynccontextmanager
    async def _taken(self, owner: str, wish: PlacementRequest, replica: str) -> AsyncIterator[None]:
        """Count a request's rows as busy on a replica while the context lasts, and reserve the name of the session that
        it makes, if it makes one with a name.

        Raises:
            RefusalError: another replica has a session of this name, or is making it.
        """
        with self._places.taken(replica, wish.rows):
            if wish.fresh is None:
                yield
                return
            key = (SESSION, owner, wish.fresh)
            with self._places.made(key, replica) as mine:
                if not mine or await self._elsewhere(key, replica):
                    message = f"There is a session {wish.fresh} already. Choose another name."
                    raise RefusalError(409, message, param="id")
                self._places.note(key, replica)
                yield

    async def _wish(self, forwarded: Received) -> PlacementRequest:
        """Return what a request needs of its replica by its method, path and body, see `wish_of`. A body that is empty
        or cannot be read counts as ``{}``; what the path names, such as a session, is needed all the same.
        """
        try:
            many = len(forwarded.body) > LARGE
            # an empty body, as that of a GET, names nothing
            body = await asyncio.to_thread(decoded, forwarded.body) if many else decoded(forwarded.body or b"{}")
        except (ValueError, RecursionError, InputError):
            body = {}  # its replica says what is wrong
        return wish_of(forwarded.method, forwarded.path, body, prefixes=self._prefixes)

    async def _place(self, owner: str, wish: PlacementRequest) -> str:
        """Return the replica for a request: the one that holds the session or answer that it continues or asks about;
        if none does, or it names none, one that `Places.choose` chooses, which is then remembered as the holder of what
        the request names.

        Raises:
            RefusalError: no replica takes requests.
        """
        here = self._here()
        if wish.held is None:
            return self._places.choose(wish, here)
        kind, name = wish.held
        holder = await self._holder(kind, owner, name)
        if holder is None:
            # the request may be the one that makes it; else the replica says 404, and the place is forgotten again
            holder = self._places.choose(wish, self._here())  # others than before the replicas were asked
            self._places.note((kind, owner, name), holder)
        return holder

    async def _holder(self, kind: str, owner: str, name: str) -> str | None:
        """Return the replica that holds an owner's session or answer; ``None`` if none does. If it is not known, ask
        all replicas, and remember the answer; what is known is not asked again, and may be out of date.

        Raises:
            RefusalError: no replica takes requests.
        """
        key = (kind, owner, name)
        if (holder := self._places.find(key, self._here())) is not None:
            return holder
        here = list(self._here())
        answers = await asyncio.gather(*(self._holds(replica, key) for replica in here))
        known = self._places.find(key, self._here())  # somebody else may have found, or chosen it meanwhile
        holder = next((replica for replica, holds in zip(here, answers, strict=True) if holds), known)
        if holder is not None:
            self._places.note(key, holder)
        return holder

    async def _elsewhere(self, key: tuple[str, str, str], replica: str) -> bool:
        """Return whether a replica other than this one holds a session or an answer. The one that is known to is asked,
        since what the router remembers may be out of date.
        """
        other = await self._holder(*key)
        return other is not None and other != replica and await self._holds(other, key)

    async def _holds(self, replica: str, key: tuple[str, str, str]) -> bool:
        """Ask a replica whether it holds a session or an answer (kind, owner, name). One that has ended, or does not
        answer within 5 s, counts as not holding it.
        """
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._replicas.holds(replica, *key)
        except (LostError, TimeoutError):  # what it holds will be looked for again
            return False

    def _here(self) -> Mapping[str, int]:
        """Return the replicas that take requests now, one at least: name → its number of rows.

        Raises:
            RefusalError: no replica takes requests.
        """
        if not (here := self._replicas.here()):
            raise RefusalError(503, "No replica of the model runs now. Try again in 5 s.", headers={"Retry-After": "5"})
        return here

    async def _health(self, request: Request) -> Response:
        """Answer with the health of all replicas that answer and the sums of their rows, see `health`; with
        ``?check=live`` the status is always 200.
        """
        forwarded = await _received(request, self._settings)
        # GET, since a HEAD brings no body to sum up; without `check=live` a replica that drains would answer with an
        # error, and its rows would be missing
        answers = await self._all(replace(forwarded, method="GET", query=b"check=live"))
        body, status = health({replica: json.loads(raw) for replica, raw in answers.items()}, draining=self.draining)
        return reply(body, 200 if request.query_params.get("check") == "live" else status)

    async def _metrics(self, request: Request) -> Response:
        """Answer with the metrics of all replicas and of the router, labelled by replica."""
        # GET, since a HEAD brings no body
        answers = await self._all(replace(await _received(request, self._settings), method="GET"))
        text = metrics({replica: raw.decode() for replica, raw in answers.items()}, self.refusals.text())
        return Response(text, headers={"Content-Type": _METRICS})

    async def _sessions(self, request: Request) -> Response:
        """Answer with the names of the sessions of a key on all replicas that answer with status 200.

        Raises:
            RefusalError: no replica answers.
        """
        self._here()  # refuses if there is no replica at all
        if not (answers := await self._all(replace(await _received(request, self._settings), method="GET"))):
            raise RefusalError(
                503, "No replica could list its sessions. Try again in 5 s.", headers={"Retry-After": "5"}
            )
        return reply(sessions({replica: json.loads(raw) for replica, raw in answers.items()}))

    async def _all(self, forwarded: Received) -> dict[str, bytes]:
        """Send a request to all replicas at once, and return replica → body of the answer. Those without a whole answer
        with status 200 within 5 s are left out.
        """
        here = list(self._replicas.here())
        bodies = await asyncio.gather(*(self._body(replica, forwarded) for replica in here))
        return {replica: body for replica, body in zip(here, bodies, strict=True) if body is not None}

    async def _body(self, replica: str, forwarded: Received) -> bytes | None:
        """Send a request to a replica, and return the body of its answer; ``None`` if there is no whole answer with
        status 200 within 5 s.
        """
        parts, ended = [], False
        try:
            async with asyncio.timeout(_ANSWER_S), aclosing(self._replicas.ask(replica, forwarded)) as messages:
                async for message in messages:
                    if message.get("status", 200) != 200:
                        return None
                    parts.append(message.get("body", b""))
                    ended = ends(message)
        except (LostError, TimeoutError):
            return None
        return b"".join(parts) if ended else None


def make_router(
    replicas: Replicas, settings: ServerSettings, origins: Sequence[str] = (), *, prefixes: bool = False
) -> FastAPI:
    """Return the web application that clients reach before several replicas: it checks keys and limits, and sends each
    request to a replica.

    Args:
        replicas: the replicas.
        settings: of the server.
        origins: origins of web pages that may call it.
        prefixes: whether replicas keep common beginnings of prompts.
    """
    # without documents of its own: requests for them go to a replica, like all others
    app = FastAPI(title="kvkeep", docs_url=None, redoc_url=None, openapi_url=None)
    # as in make_app: the HTTP server tells app.state.queue that it drains
    app.state.queue = router = Router(replicas, settings, prefixes=prefixes)
    app.mount("/", router)
    for kind in (RefusalError, GoneError, ClientDisconnect, HTTPException):
        app.add_exception_handler(kind, answer_to)
    app.state.limits = limits = RateLimits(settings.key_requests, settings.key_tokens)
    limits.refused.append(router.refusals.note)
    app.add_middleware(AuthMiddleware, settings=settings, limits=limits, origins=origins)
    if origins:  # added last, so it comes first: a browser's preflight has no key
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=[IGNORED]
        )
    return app


async def _received(request: Request, settings: ServerSettings) -> Received:
    """Read a request with its whole body, within the limits of size and time, and return it as it is forwarded to a
    replica.

    Raises:
        RefusalError: the body is too large, or comes too slowly.
    """
    client = request.client
    return Received(
        method=request.method,
        path=request.scope["path"],
        query=request.scope["query_string"],
        headers=headers_of(request.headers.raw),
        body=await received(request, settings),
        client=None if client is None else (client.host, client.port),
    )


def _lost() -> RefusalError:
    """Return the refusal with status 503 for a request whose replica has ended before its answer was complete."""
    message = (
        "The replica that ran the request has ended. Send the request again; a session goes on from its last turn."
    )
    return RefusalError(503, message, code="replica_lost", headers={"Retry-After": "1"})


def _hung(seconds: float) -> RefusalError:
    """Return the refusal with status 503 for a request whose replica has not ended its answer within ``seconds``."""
    message = f"The replica has not ended its answer within {seconds:g} s, and was given up. Send the request again."
    return RefusalError(503, message, code="timeout", headers={"Retry-After": "1"})
