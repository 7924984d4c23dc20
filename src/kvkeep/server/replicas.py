"""The replicas of a server as their router sees them, and the request that travels to one of them.

A replica may live in another process. So a request is received whole, and a replica replays it to its own application.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

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
        """Return the replicas that take requests, each with its number of rows (0 while that is not known)."""

    def ask(self, replica: str, request: Received) -> AsyncGenerator[Message, None]:
        """Yield the messages with which a replica answers. Whoever closes the generator is a client that leaves.

        Raises:
            LostError: the replica has ended, with the request or before it had it.
        """

    async def holds(self, replica: str, kind: str, owner: str, name: str) -> bool:
        """Ask a replica whether it holds the session or the answer (``kind``) of an owner with a name.

        Raises:
            LostError: the replica has ended.
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
            "server": None,  # the router has checked the host already, see `AuthMiddleware`
        }


USED = "kvkeep.used"
"""The type of a message, and the name in other messages, for what a request has used since the last one."""
_MOST_UNTOLD = 16  # tokens; each message between processes costs time


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
        """Send a message to the router, with the use that has not been reported yet."""
        if self._untold != Used():
            message, self._untold = {**message, USED: self._untold}, Used()
        self._put(message)


async def replay(app: ASGIApp, request: Received) -> AsyncGenerator[Message, None]:
    """Run an application on a request, and yield the messages of its answer. Closing the generator counts as the
    client's leaving.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left, parts = asyncio.Event(), iter([{"type": "http.request", "body": request.body, "more_body": False}])

    async def receive() -> Message:
        for part in parts:  # an iterator of one part: the second call waits until the client leaves
            return part
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        meter.send(message)

    meter = _Away(messages.put_nowait)
    work = asyncio.ensure_future(app({**request.scope, "state": {"meter": meter}}, receive, send))
    work.add_done_callback(lambda _: messages.put_nowait(None))  # ends the loop also where the application has failed
    try:
        while (message := await messages.get()) is not None:
            yield message
        await work  # raises what the application has raised
    finally:
        left.set()
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


def headers_of(headers: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[bytes, bytes], ...]:
    """Return the headers that are forwarded with a request: lower-case names, without those of the connection
    itself.
    """
    dropped = (b"connection", b"expect", b"transfer-encoding", b"upgrade")
    return tuple((name.lower(), value) for name, value in headers if name.lower() not in dropped)


# Which replica takes a request: the one that holds its session or answer, one that has read its beginning, or the one
# with the most free rows.

Key: TypeAlias = tuple[str, str, str]
"""A kind of thing, its owner, and its name."""
SESSION, RESPONSE = "session", "response"
_MOST_KNOWN, _LONGEST = 2**16, 128
"""Things of which the router remembers the replica, and characters of a name."""
_PIECE, _MOST_PIECES = 512, 64
"""Characters between two beginnings of a prompt that are compared, and the number of beginnings."""


@dataclass(frozen=True)
class PlacementRequest:
    """What a request needs of its replica.

    Attributes:
        held: the kind and the name of the session or answer that it goes on with or asks about; ``None``: none.
        fresh: the name of the session that it makes; ``None``: it makes none, or one with a random name.
        beginnings: fingerprints of the prompt's beginnings, the longest first.
        rows: rows that it takes.
    """

    held: tuple[str, str] | None = None
    fresh: str | None = None
    beginnings: Sequence[bytes] = ()
    rows: int = 0


def wish_of(method: str, path: str, body: Mapping[str, Any], *, prefixes: bool = True) -> PlacementRequest:
    """Return what a request needs of its replica, judging by its path and body.

    Whatever is wrong with the body is ignored here; the replica reports it.

    Args:
        method, path, body: of the request.
        prefixes: whether to compute fingerprints of the prompt's beginnings.
    """
    parts = [part[:_LONGEST] for part in path.strip("/").split("/")]
    fresh = _text(body, "id")
    if parts[:2] == ["v1", "sessions"]:
        if len(parts) == 2:
            return PlacementRequest() if fresh is None else PlacementRequest(held=(SESSION, fresh), fresh=fresh)
        return PlacementRequest(held=(SESSION, parts[2]), fresh=fresh if parts[3:] == ["fork"] else None)
    if parts[:2] == ["v1", "responses"]:
        name = parts[2] if len(parts) > 2 else _text(body, "previous_response_id")
        if name is not None:
            return PlacementRequest(held=(RESPONSE, name), rows=int(method == "POST"))  # only an answer takes a row
    if (name := _text(body, "session_id")) is not None and path.endswith("/chat/completions"):
        return PlacementRequest(held=(SESSION, name), rows=1)
    if method != "POST" or parts[:1] != ["v1"]:
        return PlacementRequest()
    return PlacementRequest(beginnings=beginnings(body) if prefixes else (), rows=_rows(body))


def beginnings(body: Mapping[str, Any]) -> list[bytes]:
    """Return hashes of a prompt's beginnings in steps of 512 characters, the longest first; none for a shorter prompt.

    The policy and the budget are part of each hash, since only prompts under the same ones share memory.
    """
    prompt = next((body[name] for name in ("messages", "prompt", "input") if body.get(name)), "")
    text = prompt if isinstance(prompt, str) else _written(prompt)
    running, digests = hashlib.sha256(repr((body.get("policy"), body.get("budget"))).encode("utf-8", "replace")), []
    # whole pieces alone: a shorter last one would end elsewhere in the next turn
    for start in range(0, min(len(text) - _PIECE + 1, _PIECE * _MOST_PIECES), _PIECE):
        running.update(text[start : start + _PIECE].encode("utf-8", "surrogatepass"))
        digests.append(running.copy().digest()[:16])
    return digests[::-1]


def _written(prompt: object) -> str:
    """Return a prompt as JSON text, cut behind the longest prefix that is hashed."""
    text = ""
    for message in prompt if isinstance(prompt, list) else [prompt]:
        text += f"{json.dumps(message)}, "
        if len(text) > _PIECE * _MOST_PIECES:
            break
    return text


def _text(body: Mapping[str, Any], name: str) -> str | None:
    """Return a field of a body if it is a short string, as names are; else ``None``."""
    value = body.get(name)
    return value if isinstance(value, str) and len(value) <= _LONGEST else None


def _rows(body: Mapping[str, Any]) -> int:
    """Return the number of rows that a body needs: one for each choice of each prompt."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    return prompts * n if isinstance(n, int) and 0 < n <= 128 else prompts  # a replica refuses any other n


class Places:
    """What a router knows of replicas: who holds what, and how many rows are taken.

    Sessions, answers and beginnings that were not used for long are forgotten; replicas are asked again then.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Any, str] = OrderedDict()  # by a `Key`, or by the hash of a beginning
        self.busy: Counter[str] = Counter()
        self._makers: dict[Key, str] = {}
        self._making: Counter[Key] = Counter()
        self._turn: dict[str, int] = {}  # replica -> when it was chosen last, by a count of choices
        self._count = itertools.count(1)

    def find(self, key: Key, here: Mapping[str, int]) -> str | None:
        """Return the replica known to hold a session or an answer; ``None`` if none is known, or it has ended.

        This counts as a use.
        """
        holder = self._known.get(key)
        if holder is None or holder not in here:
            return None
        self._known.move_to_end(key)
        return holder

    def note(self, key: Any, replica: str) -> None:
        """Remember which replica holds something, and forget what was not used for longest."""
        self._known[key] = replica
        self._known.move_to_end(key)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forget which replica holds something."""
        self._known.pop(key, None)

    @contextmanager
    def made(self, key: Key, replica: str) -> Iterator[bool]:
        """Reserve the name of a session while a replica makes it. Yield ``False`` if another replica is making one of
        that name.
        """
        mine = self._makers.setdefault(key, replica) == replica
        self._making[key] += mine
        try:
            yield mine
        finally:
            self._making[key] -= mine
            if not self._making[key]:
                del self._making[key], self._makers[key]

    def choose(self, wish: PlacementRequest, here: Mapping[str, int]) -> str:
        """Choose a replica for a request that can run anywhere: one that has read the prompt's beginning and has a
        free row, else the emptiest.

        The replica is stored as the holder of the prompt's beginnings.
        """
        # of equally busy ones the one that was chosen longest ago
        emptiest = min(here, key=lambda name: (self.busy[name] / max(1, here[name]), self._turn.get(name, 0)))
        warm = next((name for key in wish.beginnings if (name := self._known.get(key)) in here), None)
        # a request that waits for a row takes longer than one that reads its prompt
        chosen = warm if warm is not None and self.busy[warm] < max(1, here[warm]) else emptiest
        for key in wish.beginnings:
            self.note(key, chosen)
        self._turn = {name: turn for name, turn in self._turn.items() if name in here} | {chosen: next(self._count)}
        return chosen

    @contextmanager
    def taken(self, replica: str, rows: int) -> Iterator[None]:
        """Count rows of a replica as busy until the context ends."""
        self.busy[replica] += rows
        try:
            yield
        finally:
            self.busy[replica] -= rows
            if not self.busy[replica]:
                del self.busy[replica]
