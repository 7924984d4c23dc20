"""The replicas of a server as their router sees them, and the request that travels to one of them.

A replica may live in another process. So a request is received whole, and a replica replays it to its own application.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from starlette.types import ASGIApp, Message, Scope


class LostError(Exception):
    """A replica has ended, or is about to.

    Attributes:
        reached: whether it had the request, which may then have had effects.
    """

    def __init__(self, replica: str, *, reached: bool = True) -> None:
        super().__init__(replica)
        self.reached = reached


@runtime_checkable
class Replicas(Protocol):
    """The replicas of a server."""

    def here(self) -> Mapping[str, int]:
        """Return the replicas that take requests, and the rows of each (0 where they are not known yet)."""

    def ask(self, replica: str, request: Received) -> AsyncGenerator[Message, None]:
        """Yield the messages with which a replica answers. Whoever closes the generator is a client that leaves.

        Raises:
            LostError: the replica has ended, with the request or before it had it.
        """

    async def holds(self, replica: str, kind: str, owner: str, name: str) -> bool:
        """Tell whether a replica holds a session or an answer.

        Raises:
            LostError: it has ended.
        """


# The request that travels, and what its replica tells of its use.


@dataclass(frozen=True)
class Received:
    """A whole request, small enough to travel between processes.

    Attributes:
        method, path, query: of its first line.
        headers: names in lower case, and values.
        body: all of it.
        client: the address of the client.
    """

    method: str
    path: str
    query: bytes = b""
    headers: tuple[tuple[bytes, bytes], ...] = ()
    body: bytes = b""
    client: tuple[str, int] | None = None

    @property
    def scope(self) -> Scope:
        """Return the request's ASGI scope, as an application takes it."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "scheme": "http",
            "method": self.method,
            "path": self.path,
            "raw_path": self.path.encode("utf-8", "surrogateescape"),
            "root_path": "",
            "query_string": self.query,
            "headers": list(self.headers),
            "client": self.client,
            "server": None,
        }


USED = "kvkeep.used"
"""The type of a message, and the name in other messages, for what a request has used since the last one."""
_MOST_UNTOLD = 16


@dataclass(frozen=True)
class Used:
    """What a request has used since it was told last.

    Attributes:
        tokens: tokens that were read or written.
        ended: whether it does not wait or run any more.
    """

    tokens: int = 0
    ended: bool = False


class _Away:
    """The meter of a request that a router counts. What it is told travels with the answer.

    Args:
        put: takes the messages of the answer.
    """

    def __init__(self, put: Callable[[Message], object]) -> None:
        self._put, self._untold = put, Used()

    def spend(self, tokens: int) -> None:
        self._untold = Used(self._untold.tokens + tokens, self._untold.ended)
        if self._untold.tokens >= _MOST_UNTOLD:
            self.send({"type": USED})

    def end(self) -> None:
        self._untold = Used(self._untold.tokens, ended=True)

    def send(self, message: Message) -> None:
        """Send a message, with all that was not told yet."""
        if self._untold != Used():
            message, self._untold = {**message, USED: self._untold}, Used()
        self._put(message)


async def replay(app: ASGIApp, request: Received) -> AsyncGenerator[Message, None]:
    """Yield the messages with which an application answers. Whoever closes the generator is a client that leaves."""
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left, parts = asyncio.Event(), iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> Message:
        for part in parts:
            return part
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        meter.send(message)

    meter = _Away(messages.put_nowait)
    work = asyncio.ensure_future(app({**request.scope, "state": {"meter": meter}}, receive, send))
    work.add_done_callback(lambda _: messages.put_nowait(None))
    try:
        while (message := await messages.get()) is not None:
            yield message
        await work
    finally:
        left.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def headers_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers to forward with a request, whose body is whole and whose connection is another one."""
    dropped = (b"connection", b"expect", b"transfer-encoding", b"upgrade")
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in dropped)
