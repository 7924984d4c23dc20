"""Answers on their way from a replica's process: none begins too early, breaks off unsaid, or waits for ever."""

import asyncio

import pytest

pytest.importorskip("fastapi")

from kvkeep.server.errors import GoneError, RefusalError
from kvkeep.server.replicas import USED, Received, Used, headers_of, replay
from kvkeep.server.router import Relay

LOST = RefusalError(503, "It has ended.", code="replica_lost")


def start(kind=b"application/json", status=200, *more):
    return {"type": "http.response.start", "status": status, "headers": [(b"content-type", kind), *more]}


def piece(body=b"x", more=True):
    return {"type": "http.response.body", "body": body, "more_body": more}


async def of(*messages):
    for message in messages:
        yield message


class Client:
    def __init__(self, *, slow=False, **options):
        self.got, self.begun, self._slow = [], [], slow
        self.relay = Relay(self._take, **{"write_s": 0.05, "named": False, **options}, begins=self.begun.append)

    async def _take(self, message):
        if self._slow:
            await asyncio.sleep(60)
        self.got.append(message)

    def run(self, *messages, unless=None):
        return asyncio.run(self.relay.run(of(*messages), unless=unless))

    def broken(self):
        return asyncio.run(self.relay.broken(LOST))


def test_an_answer_is_sent_as_it_came():
    client, messages = Client(), (start(), piece(), piece(b"", more=False))
    assert client.run(*messages)
    assert client.got == list(messages)
    assert client.begun == [200]


class Meter:
    def __init__(self):
        self.tokens, self.ends = 0, 0

    def spend(self, tokens):
        self.tokens += tokens

    def end(self):
        self.ends += 1


def test_what_was_used_is_told_and_not_sent():
    meter = Meter()
    client = Client(meter=meter)
    told = {**piece(), USED: Used(tokens=2)}, {"type": USED, USED: Used(tokens=16)}, {**piece(b""), USED: Used(1, True)}
    assert client.run(start(), *told, piece(b"", more=False))
    assert (meter.tokens, meter.ends) == (19, 1)
    assert client.got == [start(), piece(), piece(b""), piece(b"", more=False)]


def test_what_is_used_travels_with_the_answer_or_by_itself_if_it_is_much():
    async def app(scope, receive, send):
        meter = scope["state"]["meter"]
        await send(start())
        for _ in range(2):
            meter.spend(3)
        await send(piece())
        for _ in range(20):
            meter.spend(1)
        meter.end()
        await send(piece(b"", more=False))

    async def whole():
        return [message async for message in replay(app, Received("POST", "/"))]

    first, *others = asyncio.run(whole())
    assert first == start()
    assert others == [
        {**piece(), USED: Used(6)},
        {"type": USED, USED: Used(16)},
        {**piece(b"", more=False), USED: Used(4, ended=True)},
    ]


def test_nothing_is_sent_before_the_first_piece_or_with_the_header():
    client = Client()
    assert client.run(start())
    assert client.got == []
    assert not client.broken()
    held = (b"x-held", b"1")
    assert not client.run(start(b"text/plain", 503, held), piece(), unless="x-held")
    assert client.got == []
    assert client.run(start(b"text/plain", 503, held), piece(), unless=None)
    assert [message.get("status") for message in client.got] == [503, None]
    assert client.begun == [200, 503, 503]


@pytest.mark.parametrize("named", [False, True])
def test_a_stream_that_breaks_off_ends_with_the_error(named):
    client = Client(named=named)
    client.run(start(b"text/event-stream; charset=utf-8"), piece())
    assert client.broken()
    last = client.got[-1]
    assert not last["more_body"]
    assert b"replica_lost" in last["body"]
    assert last["body"].startswith(b"event: error\n") == named
    assert last["body"].endswith(b"data: [DONE]\n\n") != named


def test_a_part_of_another_answer_ends_its_connection():
    client = Client()
    client.run(start(), piece())
    with pytest.raises(GoneError):
        client.broken()


def test_a_client_that_does_not_read_is_given_up():
    with pytest.raises(GoneError):
        Client(slow=True).run(start(), piece())


def test_a_client_that_leaves_reaches_the_application():
    told = []

    async def app(scope, receive, send):
        told.append((scope["method"], scope["path"], (await receive())["body"]))
        try:
            await send(start())
            told.append((await receive())["type"])
        except asyncio.CancelledError:
            told.append("cancelled")
            raise

    async def leave():
        messages = replay(app, Received("POST", "/a", body=b"{}"))
        assert (await anext(messages))["status"] == 200
        await asyncio.sleep(0)
        await messages.aclose()

    asyncio.run(leave())
    assert told[0] == ("POST", "/a", b"{}")
    assert told[1] in ("cancelled", "http.disconnect")


def test_an_application_that_fails_fails_here():
    async def app(scope, receive, send):
        await send(start())
        raise ValueError("broken")

    async def whole():
        return [message async for message in replay(app, Received("GET", "/"))]

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(whole())


def test_headers_of_the_connection_stay_behind():
    found = [(b"Host", b"a"), (b"Transfer-Encoding", b"chunked"), (b"Connection", b"close"), (b"expect", b"x")]
    assert headers_of(found) == ((b"host", b"a"),)
