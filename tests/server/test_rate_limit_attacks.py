"""Requests that look as if they got around the limits of keys, and ends of requests in the order of a die."""

from __future__ import annotations

import asyncio
import json
import random

import pytest

from .running import HELLO, NAME, httpx
from .test_rate_limits import ANNA, CHAT, COMPLETE, KINDS, RESPOND, limited, meter_of, spent, until

from kvkeep.server.errors import RefusalError  # isort: skip
from kvkeep.server.router import make_router  # isort: skip
from kvkeep.server.middleware import AuthMiddleware  # isort: skip
from kvkeep.server.rate_limits import RateLimits  # isort: skip
from kvkeep.server.replicas import replay  # isort: skip
from kvkeep.server.replicas import LostError  # isort: skip
from kvkeep.server.settings import ServerSettings  # isort: skip

SPELLINGS = [f"{COMPLETE}{end}" for end in ("/", "//", "?a=b", "%0A", "%0D%0A", "%00", "%20", "%2F", ";a", "/.", "#a")]
SPELLINGS += [f"/{COMPLETE}", COMPLETE.replace("c", "%63"), COMPLETE.upper(), f"/v1/%2e%2e{COMPLETE}"]
SHORT = {"prompt": "A", "max_tokens": 2}


@pytest.fixture(params=KINDS, scope="module")
def one_each(request):
    """One request of a key at a time, and its first token is its last one within a minute."""
    with limited(request.param, key_requests=1, key_tokens=1) as running:
        running.client.headers.update(ANNA)
        yield running


@pytest.fixture
def fresh(one_each):
    until(lambda: not one_each.limits._active)
    one_each.limits._spent.clear()
    return one_each


@pytest.mark.parametrize("path", SPELLINGS)
def test_no_spelling_of_a_path_gets_around_the_limits(fresh, path):
    found = [fresh.post(path, SHORT).status_code for _ in range(2)]
    assert found in ([200, 429], [307, 307], [404, 404])
    assert bool(spent(fresh)) == (200 in found)


def test_a_path_with_a_line_break_is_shown_in_one_line_and_needs_a_key_before(fresh):
    error = fresh.refused(fresh.client.get("/health%0A"), 404)
    assert error["message"].startswith("GET /health?: a path ends with a line break")
    fresh.refused(fresh.client.get("/health%0A", headers={"Authorization": ""}), 401)


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "POSTED"])
@pytest.mark.parametrize("path", [CHAT, COMPLETE, RESPOND])
def test_other_methods_run_nothing_and_count_nothing(fresh, method, path):
    answer = fresh.client.request(method, path, json={**SHORT, "messages": HELLO, "input": "A"})
    assert answer.status_code in (404, 405), answer.text
    assert not spent(fresh)


def raw(running, *heads):
    """What the server answers to requests in one packet, the last one of which closes the connection."""
    body = json.dumps(SHORT).encode()
    rest = f" HTTP/1.1\r\nHost: localhost\r\nAuthorization: {ANNA['Authorization']}\r\n"
    rest += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    ends = [b""] * (len(heads) - 1) + [b"Connection: close\r\n"]
    with running.raw() as sock:
        sock.sendall(
            b"".join(f"{head}{rest}".encode() + end + b"\r\n" + body for head, end in zip(heads, ends, strict=True))
        )
        return b"".join(iter(lambda: sock.recv(2**16), b""))


@pytest.mark.parametrize("head", [f"post {COMPLETE}", f"POST http://b{COMPLETE}", f"POST //b{COMPLETE}"])
def test_no_strange_first_line_runs_anything(fresh, head):
    answer = raw(fresh, head)
    assert answer.split(b" ", 2)[1] in (b"400", b"404", b"405"), answer
    assert not spent(fresh)


def test_no_header_and_no_entry_of_a_body_stands_for_a_meter_or_an_owner(fresh):
    owners = ("x-kvkeep-held", "x-kvkeep-owner", "owner", "meter", "state", "kvkeep.used", "x-http-method-override")
    more = [*dict.fromkeys(owners, "1").items(), ("authorization", ANNA["Authorization"].upper())]
    headers = [*ANNA.items(), *more, ("x-forwarded-for", "1.2.3.4"), ("x-real-ip", "1.2.3.4")]
    plain = httpx.Client(base_url=fresh.url, timeout=60)
    with plain:
        found = [plain.post(COMPLETE, json=SHORT, headers=headers).status_code for _ in range(2)]
        assert found == [200, 429]
        for name in ("meter", "owner", "state", "kvkeep.used", "user"):
            assert plain.post(COMPLETE, json={**SHORT, name: {"tokens": -(10**9)}}, headers=ANNA).status_code == 429
    assert set(fresh.limits._spent) == {fresh.owners[0]}


def test_requests_in_one_packet_are_answered_one_after_the_other(fresh):
    fresh.limits._tokens, before = 10**9, fresh.limits._tokens
    try:
        answer = raw(fresh, *[f"POST {COMPLETE}"] * 4)
        assert answer.count(b"HTTP/1.1 200 ") == 4
        assert spent(fresh) >= 4 * 3
    finally:
        fresh.limits._tokens = before


@pytest.mark.long
def test_several_prompts_are_one_request_and_count_whole(fresh):
    answer = fresh.post(COMPLETE, {"prompt": ["A dog", "A cat"], "n": 2, "max_tokens": 3, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    used = answer.json()["usage"]
    cached = used["prompt_tokens_details"]["cached_tokens"]
    assert spent(fresh) >= used["prompt_tokens"] - cached + 4 * 3
    assert fresh.post(COMPLETE, SHORT).status_code == 429


# events that nobody took


def test_the_first_event_counts_for_a_client_that_leaves_when_its_row_is_there():
    """The first event may come before the row is seen, and has all tokens of the prompt."""

    async def leave(engine, queue, run):
        started = queue._started

        async def late_look(streams, events):
            while events.empty():
                await asyncio.sleep(0.001)
            return await started(streams, events)

        queue._started = late_look
        assert await anext(run) is None
        await run.aclose()

    meter = meter_of(leave, "A B C D E F G")
    assert meter.tokens > 7
    assert meter.ended


# random ends


class Die:
    """An application that does as a die decides, and a client that does so too."""

    def __init__(self, seed, limits):
        self.draw, self.limits, self.most = random.Random(seed), limits, 0

    async def pause(self):
        for _ in range(self.draw.randrange(4)):
            await asyncio.sleep(0)
        if self.draw.random() < 0.05:
            raise self.draw.choice((RuntimeError("bad"), RefusalError(400, "No."), asyncio.CancelledError(), OSError()))

    async def app(self, scope, receive, send):
        meter = scope["state"]["meter"]
        await self.pause()
        for _ in range(self.draw.randrange(5)):
            meter.spend(self.draw.randrange(40))
            await self.pause()
        if self.draw.random() < 0.5:
            meter.end()
        status = self.draw.choice((200, 200, 200, 400, 503))
        await send({"type": "http.response.start", "status": status, "headers": []})
        for more in (True, True, False):
            await self.pause()
            await send({"type": "http.response.body", "body": b"a", "more_body": more})
            meter.spend(self.draw.randrange(3))
        if self.draw.random() < 0.5:
            meter.end()

    async def send(self, message):
        await self.pause()

    def receive(self):
        parts = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive():
            for part in parts:
                return part
            if self.draw.random() < 0.8:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        return receive

    async def client(self, app):
        scope = {"type": "http", "method": "POST", "path": COMPLETE, "headers": [], "query_string": b"", "state": {}}
        task = asyncio.ensure_future(app(scope, self.receive(), self.send))
        for _ in range(self.draw.randrange(40)):
            await asyncio.sleep(0)
            self.most = max(self.most, *self.limits._active.values(), 0)
        if self.draw.random() < 0.3:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def crowd(self, app):
        await asyncio.gather(*(self.client(app) for _ in range(12)))


class Mortal:
    """Replicas of an application which end as a die decides."""

    def __init__(self, die):
        self.die, self.app = die, AuthMiddleware(die.app, ServerSettings(name=NAME), RateLimits(1, 1))

    def here(self):
        return {"one": 2, "two": 2}

    async def ask(self, replica, request):
        if self.die.draw.random() < 0.1:
            raise LostError(replica, reached=False)
        messages = replay(self.app, request)
        try:
            async for message in messages:
                yield message
                if self.die.draw.random() < 0.05:
                    raise LostError(replica)
        finally:
            await messages.aclose()

    async def holds(self, replica, kind, owner, name):
        return False


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("error")
def test_nothing_runs_once_all_requests_have_ended_however_they_ended(kind, monkeypatch):
    monkeypatch.setattr("kvkeep.server.router._PAUSE_S", 0)
    monkeypatch.setattr("kvkeep.server.middleware.log.disabled", True)
    refused = done = 0
    for seed in range(40):
        settings, found = ServerSettings(name=NAME, key_requests=4, key_tokens=10**4), []
        if kind == KINDS[0]:
            limits = RateLimits(4, 10**4, clock=lambda: 0.0)
            die = Die(seed, limits)
            app = AuthMiddleware(die.app, settings, limits)
        else:
            die = Die(seed, None)
            app = make_router(Mortal(die), settings)
            limits = die.limits = app.state.limits
        limits.refused.append(found.append)
        asyncio.run(die.crowd(app))
        assert not limits._active
        assert die.most <= 4
        assert all(used >= 0 for used, _ in limits._spent.values())
        refused, done = refused + len(found), done + bool(limits._spent)
    assert refused > 40
    assert done > 30
