"""Conversations as sessions of kvkeep: what counts as a failure, whose time it is, and what stays on the server."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress

import pytest

pytest.importorskip("httpx")

import httpx

from kvkeep_lab.loadtest.client import Target
from kvkeep_lab.loadtest.plan import Arrival, Ask
from kvkeep_lab.loadtest.running import send

ANSWER = 'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: [DONE]\n\n'
TALK = Arrival(0.0, (Ask("Hi", 4), Ask("And?", 4)))


@pytest.fixture
def server(monkeypatch):
    """A server of sessions. `answers` holds other answers, by "DELETE", "sessions" (to make one) or "completions"."""

    class Server:
        def __init__(self):
            self.answers, self.open = {}, set()

        async def answer(self, request):
            key = "DELETE" if request.method == "DELETE" else request.url.path.rpartition("/")[2]
            if key in self.answers:
                return await self.answers[key](request)
            return self.usual(request)

        def usual(self, request):
            if request.method == "DELETE":
                self.open.discard(request.url.path.rpartition("/")[2])
            elif request.url.path.endswith("/sessions"):
                self.open.add(json.loads(request.content)["id"])
                return httpx.Response(201)
            return httpx.Response(200, text=ANSWER)

    made = Server()
    monkeypatch.setattr(
        Target, "client", lambda target: httpx.AsyncClient(transport=httpx.MockTransport(made.answer), timeout=5.0)
    )
    return made


def talk(*arrivals):
    return asyncio.run(send(Target(url="http://server/v1"), arrivals or [TALK], sessions=True))


def failing(kind):
    async def answer(request):
        raise kind("failed", request=request)

    return answer


def test_a_session_is_made_and_deleted(server):
    assert [outcome.error for outcome in talk()] == [None, None]
    assert server.open == set()


def test_a_session_that_cannot_be_deleted_is_no_failure_of_its_answers(server):
    server.answers["DELETE"] = failing(httpx.ReadError)
    assert [outcome.error for outcome in talk()] == [None, None]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (httpx.ReadTimeout, "timeout"),
        (httpx.ConnectTimeout, "timeout"),
        (httpx.ConnectError, "no connection"),
        (httpx.ReadError, "connection lost"),
    ],
)
def test_a_session_that_cannot_be_made_fails_as_a_turn_does(server, kind, name):
    server.answers["sessions"] = failing(kind)
    assert [outcome.error for outcome in talk()] == [name]


def test_the_time_that_a_session_takes_to_be_made_is_the_servers(server):
    """A slow server must not look like a client that sends too late."""
    made = 0.0

    async def make(request):
        nonlocal made
        made = time.perf_counter()
        return server.usual(request)

    server.answers["sessions"] = make
    first, second = talk()
    assert first.sent <= made <= first.times[0] <= first.ended <= second.sent


def test_a_run_that_is_stopped_leaves_no_session(server):
    """Some are read, one is just being made, and deletions take their time."""

    async def run():
        busy, waiting = asyncio.Event(), 0

        async def hang(request):
            nonlocal waiting
            answer = server.usual(request)
            waiting += 1
            if waiting == 3:
                busy.set()
            await asyncio.sleep(60)
            return answer

        async def make(request):
            return await hang(request) if len(server.open) == 2 else server.usual(request)

        async def delete(request):
            await asyncio.sleep(0.05 * len(server.open))
            return server.usual(request)

        server.answers |= {"completions": hang, "sessions": make, "DELETE": delete}
        run = asyncio.create_task(send(Target(url="http://server/v1"), [TALK] * 3, sessions=True))
        await asyncio.wait_for(busy.wait(), 30)
        assert len(server.open) == 3
        run.cancel()  # as Ctrl-C does
        with suppress(asyncio.CancelledError):
            await run
        assert server.open == set()

    asyncio.run(run())
