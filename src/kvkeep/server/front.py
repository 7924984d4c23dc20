"""The router before several replicas of a server: each request goes whole to one of them, and its answer back.

It has no routes of its own but three that ask all replicas: health, metrics, and the list of sessions.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from kvkeep.errors import InputError
from kvkeep.openai.messages import decoded
from kvkeep.server import summing
from kvkeep.server.app import answer_to
from kvkeep.server.bodies import received
from kvkeep.server.errors import GoneError, RefusalError
from kvkeep.server.gate import Gate
from kvkeep.server.holders import SESSION, Places, Wish, wish_of
from kvkeep.server.leases import HELD
from kvkeep.server.limits import Limits
from kvkeep.server.metrics import Refusals
from kvkeep.server.relay import Relay
from kvkeep.server.replaying import Received, headers_of
from kvkeep.server.replicas import LostError, MissedError, Replicas
from kvkeep.server.replies import ends, owner_of, reply, unless_gone
from kvkeep.server.settings import Settings

_ANSWER_S = 5.0
"""Seconds in which a replica must answer a question about itself."""
_HELD_S, _PAUSE_S = 10.0, 0.2
"""Seconds for which a session is waited for whose holder is about to end, and between two tries."""
_TRIES = 5
_LATE_S = 30.0
"""Seconds after the time-out of requests at which a replica that has not ended its answer is given up."""
_METRICS = "text/plain; version=0.0.4; charset=utf-8"


class Front:
    """Sends each request to a replica.

    Args:
        replicas: the replicas.
        settings: of the server.
        prefixes: whether replicas keep common beginnings of prompts.

    Attributes:
        refusals: counts what the router itself refuses for the limits of keys.
        draining: whether new requests are refused, because the router is about to end.
    """

    def __init__(self, replicas: Replicas, settings: Settings, *, prefixes: bool = False) -> None:
        self._replicas, self._settings, self._prefixes = replicas, settings, prefixes
        self._places, self.refusals = Places(), Refusals(settings.name)
        self.draining = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        request = Request(scope, receive)
        sums = {"/health": self._health, "/metrics": self._metrics, "/v1/sessions": self._sessions}
        if request.method == "GET" and (summed := sums.get(scope["path"])) is not None:
            await (await summed(request))(scope, receive, send)
            return
        if self.draining:
            raise RefusalError(503, "The server is about to end: it takes no requests.", headers={"Retry-After": "5"})
        asked = await _received(request, self._settings)
        wish = await self._wish(asked)
        owner, named = owner_of(request), asked.path == "/v1/responses"

        def begins(status: int) -> None:
            if status in (404, 503) and wish.held is not None:
                self._places.forget((wish.held[0], owner, wish.held[1]))  # another one may hold it

        meter, write_s = scope["state"].get("meter"), self._settings.read_timeout_s
        relay = Relay(send, write_s=write_s, named=named, begins=begins, meter=meter)
        try:
            await unless_gone(request, self._answer(owner, asked, wish, relay))
        except GoneError:
            if not relay.begun:
                raise

    async def _answer(self, owner: str, asked: Received, wish: Wish, relay: Relay) -> None:
        """Let a replica answer. One that ends with the request, or hangs, is an error for the client."""
        limit = self._settings.request_timeout_s + _LATE_S
        try:
            async with asyncio.timeout(limit):
                await self._tried(owner, asked, wish, relay)
        except (LostError, TimeoutError) as error:
            refusal = _lost() if isinstance(error, LostError) else _hung(limit)
            if not await relay.broken(refusal):
                raise refusal from error

    async def _tried(self, owner: str, asked: Received, wish: Wish, relay: Relay) -> None:
        """Let a replica answer. One that ends before it has the request is replaced, and a held session waited for.

        Raises:
            LostError: the replica has ended with the request or broken its answer off, or several have ended before
                they had it.
        """
        end, tries = time.monotonic() + _HELD_S, 0
        while True:
            replica = await self._place(owner, wish)
            try:
                async with self._taken(owner, wish, replica), aclosing(self._replicas.ask(replica, asked)) as messages:
                    if await relay.run(messages, unless=HELD if time.monotonic() < end else None):
                        break
            except MissedError:
                tries += 1
                if tries == _TRIES:
                    raise
            await asyncio.sleep(_PAUSE_S)
        if not relay.ended:
            raise LostError(replica)

    @asynccontextmanager
    async def _taken(self, owner: str, wish: Wish, replica: str) -> AsyncIterator[None]:
        """Keep for a replica what a request takes there: rows, and the name of the session that it makes.

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

    async def _wish(self, asked: Received) -> Wish:
        """What a request needs of its replica."""
        try:
            many = len(asked.body) > 2**18
            body = await asyncio.to_thread(decoded, asked.body) if many else decoded(asked.body or b"{}")
        except (ValueError, RecursionError, InputError):
            body = {}  # its replica says what is wrong
        return wish_of(asked.method, asked.path, body, prefixes=self._prefixes)

    async def _place(self, owner: str, wish: Wish) -> str:
        """The replica for a request.

        Raises:
            RefusalError: there is none.
        """
        here = self._here()
        if wish.held is None:
            return self._places.choose(wish, here)
        kind, name = wish.held
        found = await self._holder(kind, owner, name)
        if found is None:
            found = self._places.choose(wish, self._here())
            self._places.note((kind, owner, name), found)
        return found

    async def _holder(self, kind: str, owner: str, name: str) -> str | None:
        """The replica that holds something. All are asked if it is not known."""
        key = (kind, owner, name)
        if (found := self._places.find(key, self._here())) is not None:
            return found
        here = list(self._here())
        answers = await asyncio.gather(*(self._holds(one, key) for one in here))
        known = self._places.find(key, self._here())  # somebody else may have found, or chosen it meanwhile
        found = next((one for one, holds in zip(here, answers, strict=True) if holds), known)
        if found is not None:
            self._places.note(key, found)
        return found

    async def _elsewhere(self, key: tuple[str, str, str], replica: str) -> bool:
        """Whether another replica holds something now. What the router knows of it may be long gone."""
        other = await self._holder(*key)
        return other is not None and other != replica and await self._holds(other, key)

    async def _holds(self, replica: str, key: tuple[str, str, str]) -> bool:
        try:
            async with asyncio.timeout(_ANSWER_S):
                return await self._replicas.holds(replica, *key)
        except (LostError, TimeoutError):
            return False

    def _here(self) -> Mapping[str, int]:
        """The replicas that take requests.

        Raises:
            RefusalError: there are none.
        """
        if not (here := self._replicas.here()):
            raise RefusalError(503, "No replica of the model runs now. Try again in 5 s.", headers={"Retry-After": "5"})
        return here

    async def _health(self, request: Request) -> Response:
        """Sum the rows of all replicas up."""
        asked = await _received(request, self._settings)
        found = await self._all(replace(asked, query=b"check=live"))
        body, status = summing.health({one: json.loads(raw) for one, raw in found.items()}, draining=self.draining)
        return reply(body, 200 if request.query_params.get("check") == "live" else status)

    async def _metrics(self, request: Request) -> Response:
        """Show the metrics of all replicas, each by its name."""
        found = await self._all(await _received(request, self._settings))
        text = summing.metrics({one: raw.decode() for one, raw in found.items()}, self.refusals.text())
        return Response(text, headers={"Content-Type": _METRICS})

    async def _sessions(self, request: Request) -> Response:
        """List the sessions of a key on all replicas.

        Raises:
            RefusalError: no replica says which it has.
        """
        self._here()
        if not (found := await self._all(await _received(request, self._settings))):
            raise RefusalError(
                503, "No replica could list its sessions. Try again in 5 s.", headers={"Retry-After": "5"}
            )
        return reply(summing.sessions({one: json.loads(raw) for one, raw in found.items()}))

    async def _all(self, asked: Received) -> dict[str, bytes]:
        """Ask all replicas the same; return the bodies of those that answer."""
        here = list(self._replicas.here())
        found = await asyncio.gather(*(self._body(one, asked) for one in here))
        return {one: body for one, body in zip(here, found, strict=True) if body is not None}

    async def _body(self, replica: str, asked: Received) -> bytes | None:
        """The body of a replica's answer; ``None`` if it does not answer well."""
        parts, ended = [], False
        try:
            async with asyncio.timeout(_ANSWER_S), aclosing(self._replicas.ask(replica, asked)) as messages:
                async for message in messages:
                    if message.get("status", 200) != 200:
                        return None
                    parts.append(message.get("body", b""))
                    ended = ends(message)
        except (LostError, TimeoutError):
            return None
        return b"".join(parts) if ended else None


def make_front(
    replicas: Replicas, settings: Settings, origins: Sequence[str] = (), *, prefixes: bool = False
) -> FastAPI:
    """The application that sends requests to replicas.

    Args:
        replicas: the replicas.
        settings: of the server.
        origins: origins of web pages that may call it.
        prefixes: whether replicas keep common beginnings of prompts.
    """
    app = FastAPI(title="kvkeep", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.desk = front = Front(replicas, settings, prefixes=prefixes)
    app.mount("/", front)
    for kind in (RefusalError, GoneError, ClientDisconnect, HTTPException):
        app.add_exception_handler(kind, answer_to)
    app.state.limits = limits = Limits(settings.key_requests, settings.key_tokens)
    limits.refused.append(front.refusals.note)
    app.add_middleware(Gate, settings=settings, limits=limits)
    if origins:
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    return app


async def _received(request: Request, settings: Settings) -> Received:
    """The request as it travels to a replica."""
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
    message = (
        "The replica that ran the request has ended. Send the request again; a session goes on from its last turn."
    )
    return RefusalError(503, message, code="replica_lost", headers={"Retry-After": "1"})


def _hung(seconds: float) -> RefusalError:
    message = f"The replica has not ended its answer within {seconds:g} s, and was given up. Send the request again."
    return RefusalError(503, message, code="timeout", headers={"Retry-After": "1"})
