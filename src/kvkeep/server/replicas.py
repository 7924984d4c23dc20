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
        """Return the replicas that take requests now: name → its number of rows (0 while that is not known)."""

    def ask(self, replica: str, request: Received) -> AsyncGenerator[Message, None]:
        """Send a request to a replica, and yield the ASGI messages of its answer. To the replica, closing the generator
        means that the client has left.

        Raises:
            LostError: the replica has ended; ``reached`` says whether it had the request.
        """

    async def holds(self, replica: str, kind: str, owner: str, name: str) -> bool:
        """Ask a replica whether it has, open in its own process, the session or the stored answer of an owner with a
        name.

        Args:
            replica: the replica.
            kind: `SESSION` or `RESPONSE`.
            owner: the owner of the key.
            name: the name.

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
        """Return a new ASGI scope of the request, with which an application can be called. Its body is not part of
        it.
        """
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
        """Send a message of the answer to the router, with the use of the request, if any, that was not reported
        yet.
        """
        if self._untold != Used():
            message, self._untold = {**message, USED: self._untold}, Used()
        self._put(message)


async def replay(app: ASGIApp, request: Received) -> AsyncGenerator[Message, None]:
    """Run an application on a request that was received elsewhere, and yield the ASGI messages of its answer, in which
    its use travels to the router's meter as well (see `USED`). Closing the generator tells the application that the
    client has left, and cancels it. What the application raises is raised.
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
    """Return the headers that a router forwards with a request: names in lower case, without those that concern only
    the connection to the router.
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
    """Find out from a request's path and body what it needs of its replica: a session or answer that one holds, the
    name of a session that it makes, beginnings of its prompt, and rows.

    Whatever is wrong with the body is ignored here; the replica reports it.

    Args:
        method, path, body: of the request.
        prefixes: whether to compute fingerprints of the prompt's beginnings; without, ``beginnings`` is empty.
    """
    parts = [part[:_LONGEST] for part in path.strip("/").split("/")]
    fresh = _text(body, "id")
    if parts[:2] == ["v1", "sessions"]:
        if len(parts) == 2:
            # also as held: the replica that has a session of this name refuses another
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
    """Return hashes of the beginnings of a body's prompt or messages, of 512 characters, 1024 and so on, up to 64 of
    them, the longest first; none for a shorter prompt.

    The policy and the budget are part of each hash, since only prompts under the same ones share memory.
    """
    # of a chat, a completion, and /v1/responses
    prompt = next((body[name] for name in ("messages", "prompt", "input") if body.get(name)), "")
    text = prompt if isinstance(prompt, str) else _written(prompt)
    running, digests = hashlib.sha256(repr((body.get("policy"), body.get("budget"))).encode("utf-8", "replace")), []
    # whole pieces alone: a shorter last one would end elsewhere in the next turn
    for start in range(0, min(len(text) - _PIECE + 1, _PIECE * _MOST_PIECES), _PIECE):
        running.update(text[start : start + _PIECE].encode("utf-8", "surrogatepass"))
        digests.append(running.copy().digest()[:16])
    return digests[::-1]


def _written(prompt: object) -> str:
    """Return a prompt of messages, texts or token ids as JSON text, message by message, of which two prompts that begin
    alike have a common beginning. It ends soon after the longest beginning that is hashed.
    """
    text = ""
    for message in prompt if isinstance(prompt, list) else [prompt]:
        text += f"{json.dumps(message)}, "
        if len(text) > _PIECE * _MOST_PIECES:
            break
    return text


def _text(body: Mapping[str, Any], name: str) -> str | None:
    """Return a field of a body if it is a string of at most 128 characters, as names are; else ``None``."""
    value = body.get(name)
    return value if isinstance(value, str) and len(value) <= _LONGEST else None


def _rows(body: Mapping[str, Any]) -> int:
    """Return how many rows of the engine a body needs: one for each of the ``n`` choices of each prompt. A wrong ``n``
    counts as 1.
    """
    n, prompt = body.get("n"), body.get("prompt")
    # a list of numbers is one prompt of token ids
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
        """Return the replica that is known to hold a session or an answer; ``None`` if none is known, or if it is not
        among the replicas that take requests. What is found is forgotten last.

        Args:
            key: the session or answer.
            here: the replicas that take requests.
        """
        holder = self._known.get(key)
        if holder is None or holder not in here:
            return None
        self._known.move_to_end(key)
        return holder

    def note(self, key: Any, replica: str) -> None:
        """Remember which replica holds a session, an answer, or the beginning of a prompt. Beyond 65536 entries, those
        not used for longest are forgotten.

        Args:
            key: a `Key`, or the hash of a beginning.
            replica: the replica.
        """
        self._known[key] = replica
        self._known.move_to_end(key)
        while len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def forget(self, key: Key) -> None:
        """Forget which replica holds a session or an answer; do nothing if that is not known."""
        self._known.pop(key, None)

    @contextmanager
    def made(self, key: Key, replica: str) -> Iterator[bool]:
        """Reserve the name of a session for a replica while it makes it, until the context ends. Yield whether that is
        so: ``False`` if another replica is making a session of that name; then nothing is reserved.
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
        """Choose a replica for a request that can run anywhere: the one that has read the longest known beginning of
        its prompt, if it has a free row, otherwise the one with the smallest share of busy rows.

        The choice is remembered as the holder of all the prompt's beginnings. No row is counted as busy, see `taken`.

        Args:
            wish: the request.
            here: the replicas that take requests, one at least, with their rows.
        """
        # of equally busy ones the one that was chosen longest ago; 0 rows are not known yet, and count as one
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
        """Count this many more rows of a replica as busy until the context ends. Nothing is refused."""
        self.busy[replica] += rows
        try:
            yield
        finally:
            self.busy[replica] -= rows
            if not self.busy[replica]:
                del self.busy[replica]
