"""Limits of keys: the same for one server and for a router before two replicas."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from contextlib import contextmanager

import pytest

from .routed import fronted
from .running import HELLO, NAME, WAIT_S, checkpoint, events, httpx, keys, model, serve

from kvkeep import Engine, Request, SamplingParams  # isort: skip  the server's modules need fastapi
from kvkeep.server.request_queue import RequestQueue  # isort: skip
from kvkeep.server.errors import RefusalError  # isort: skip
from kvkeep.server.rate_limits import RateLimits  # isort: skip
from kvkeep.server.settings import ServerSettings  # isort: skip

CHAT, COMPLETE, RESPOND = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ANNA, BERT = ({"Authorization": f"Bearer {key}"} for key in ("key-of-anna", "key-of-bert"))
ENDLESS = {"prompt": "A", "max_tokens": 1900, "ignore_eos": True}
KINDS = ("one server", "two replicas")


@contextmanager
def limited(kind, *, rows=2, folder=None, **settings):
    """One server, or two replicas, with two keys and their limits; the clock of the limits stands still."""
    settings["keys"] = keys("key-of-anna", "key-of-bert")
    engine = {"session_dir": folder} if folder else {}
    with serve(rows=rows, engine=engine, **settings) if kind == KINDS[0] else fronted(rows=rows, **settings) as running:
        running.owners = [settings["keys"].owner(who["Authorization"]) for who in (ANNA, BERT)]
        running.now = 100.0
        running.limits._clock = lambda: running.now
        yield running


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(params=KINDS, scope="module")
def ample(request):
    """Limits that no test reaches, so that all tokens are counted; one request of a key at a time."""
    with limited(request.param, key_requests=1, key_tokens=10**9) as running:
        yield running


def spent(running, owner=0):
    return running.limits._spent.get(running.owners[owner], (0, 0))[0]


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@contextmanager
def busy(running, count, who=BERT):
    """Rows that are taken, by as many endless streams."""
    clients = [httpx.Client(base_url=running.url, timeout=WAIT_S, headers=who) for _ in range(count)]
    streams = [client.stream("POST", COMPLETE, json={**ENDLESS, "stream": True}) for client in clients]
    for one in streams:
        assert one.__enter__().status_code == 200
    try:
        yield
    finally:
        for one, client in zip(streams, clients, strict=True):
            one.__exit__(None, None, None)
            client.close()


def at_once(count, work):
    """What some threads return that begin together, in the order of their ends."""
    found, gate = [], threading.Barrier(count)

    def run():
        gate.wait()
        found.append(work())

    threads = [threading.Thread(target=run) for _ in range(count)]
    for one in threads:
        one.start()
    return threads, found


@pytest.mark.long
def test_twenty_clients_of_one_key_at_once_are_let_in_up_to_the_limit(kind):
    def ask():
        body = {"prompt": "A", "max_tokens": 2, "ignore_eos": True}
        return httpx.post(running.url + COMPLETE, json=body, headers=ANNA, timeout=WAIT_S)

    with limited(kind, rows=1, key_requests=5) as running:
        with busy(running, 1 if kind == KINDS[0] else 2):
            threads, found = at_once(20, ask)
            until(lambda: len(found) >= 15)
            assert {one.status_code for one in found} == {429}
            assert len(found) == 15
            assert running.limits._active[running.owners[0]] == 5
            assert running.refused(ask(), 429)["code"] == "key_requests"
        for one in threads:
            one.join(WAIT_S)
        assert sorted(one.status_code for one in found) == [200] * 5 + [429] * 15
        until(lambda: not running.limits._active)
        assert ask().status_code == 200


def timeless(text, headers):
    """A refusal without the seconds to wait, which depend on how long the test took."""
    assert f"Try again in {headers['retry-after']} s." in text
    return re.sub(r"in \d+ s", "in n s", text), {**headers, "retry-after": "", "content-length": ""}


@pytest.mark.slow
def test_refusals_are_the_same_and_other_keys_are_not_concerned():
    found = {}
    for kind in KINDS:
        with limited(kind, key_requests=1, key_tokens=10) as running, busy(running, 1):
            short = {"messages": HELLO, "max_tokens": 1}
            requests = running.post(CHAT, short, headers=BERT)
            assert running.post(CHAT, {**short, "max_tokens": 10, "ignore_eos": True}, headers=ANNA).status_code == 200
            tokens = running.post(CHAT, short, headers=ANNA)
            assert running.post("/v1/sessions", {"id": "trip"}, headers=ANNA).status_code == 201  # runs no model
            assert running.client.get("/v1/models", headers=ANNA).status_code == 200
            for one in (requests, tokens):
                running.refused(one, 429)
            found[kind] = [(one.text, {**one.headers, "date": ""}) for one in (requests, tokens)]
    assert found[KINDS[0]][0] == found[KINDS[1]][0]
    assert timeless(*found[KINDS[0]][1]) == timeless(*found[KINDS[1]][1])
    (requests, head), (tokens, _) = found[KINDS[0]]
    assert (json.loads(requests)["error"]["code"], head["retry-after"]) == ("key_requests", "1")
    assert json.loads(tokens)["error"]["code"] == "key_tokens"


@pytest.mark.slow
def test_a_client_that_comes_back_when_it_was_told_is_let_in(kind):
    with limited(kind, key_tokens=6) as running:
        running.client.headers.update(ANNA)
        for _ in range(3):
            assert running.complete(max_tokens=9, ignore_eos=True).status_code == 200
            refused = running.complete()
            assert running.refused(refused, 429)["code"] == "key_tokens"
            running.now += int(refused.headers["retry-after"])
        assert running.complete(max_tokens=1).status_code == 200


def used(usage):
    """The tokens of an answer that count."""
    names = ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    cached = usage[f"{names[0]}_tokens_details"]["cached_tokens"]
    return usage[f"{names[0]}_tokens"] - cached + usage[f"{names[1]}_tokens"]


@pytest.mark.slow
def test_tokens_are_those_of_the_usage(ample):
    ample.client.headers.update(ANNA)
    ample.post("/v1/sessions", {"id": "trip"})
    turn = {"messages": HELLO, "session_id": "trip", "max_tokens": 3}
    respond = {"input": "Once upon a time", "max_output_tokens": 20}
    scores = {"prompt": ["Once upon a time", "A dog"], "echo": True, "logprobs": 1, "max_tokens": 0}
    for path, body in (
        *((CHAT, {"messages": HELLO, "max_tokens": n}) for n in (1, 2, 20)),
        *((CHAT, turn), (CHAT, turn), (RESPOND, respond), (COMPLETE, scores)),
        (COMPLETE, {"prompt": "A dog", "max_tokens": 18, "ignore_eos": True}),
    ):
        before, answer = spent(ample), ample.post(path, body)
        assert answer.status_code == 200, answer.text
        dropped = 2 if body is scores else 0  # a token of each prompt, which is written and not shown
        assert spent(ample) - before == used(answer.json()["usage"]) + dropped, body
    before = spent(ample)
    answer = ample.post(COMPLETE, {"prompt": ["A dog", "A cat"], "n": 2, "max_tokens": 9, "stream": True})
    assert spent(ample) - before >= len([one for one in events(answer) if one["choices"][0]["text"]])
    assert spent(ample, 1) == 0


@pytest.mark.slow
def test_one_request_after_the_other_is_never_refused(ample):
    """A slot is free before its client can know that the answer is complete."""
    ample.client.headers.update(ANNA)
    last = ("data: [DONE]", "event: response.incomplete", "event: response.completed")  # a text may end by itself
    other = httpx.Client(base_url=ample.url, timeout=WAIT_S, headers=ANNA)
    with other:
        for _ in range(2):
            for path, body in (
                (COMPLETE, {"prompt": "A", "max_tokens": 2}),
                (COMPLETE, {"prompt": "A", "max_tokens": 2, "stream": True}),
                (RESPOND, {"input": "A", "max_output_tokens": 2, "stream": True}),
                (COMPLETE, {"prompt": "A", "max_tokens": -2}),
                (CHAT, {"messages": HELLO, "session_id": "nobody"}),
            ):
                with ample.client.stream("POST", path, json=body) as answer:
                    seen = []
                    for line in answer.iter_lines():
                        seen.append(line)
                        if line.startswith(last):  # clients stop reading there
                            break
                    assert answer.status_code in (200, 400, 404), seen
                    assert "stream" not in body or seen[-1].startswith(last), (answer.status_code, seen)
                    assert other.post(COMPLETE, json={"prompt": "B", "max_tokens": 1}).status_code == 200


@pytest.mark.slow
def test_streams_that_clients_break_off_count_and_free_their_slot(ample):
    ample.client.headers.update(ANNA)
    for _ in range(2):
        before, seen = spent(ample), 0
        with ample.client.stream("POST", COMPLETE, json={**ENDLESS, "stream": True}) as answer:
            for line in answer.iter_lines():
                seen += bool(line)
                if seen == 20:
                    break
        until(lambda: not ample.limits._active)
        assert spent(ample) - before >= seen


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_answers_that_nobody_reads_count_while_they_run_and_free_their_slot(ample, stream):
    body = json.dumps({**ENDLESS, "stream": stream}).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {ANNA['Authorization']}\r\n"
    head += "Content-Type: application/json\r\n"
    for _ in range(2):
        before = spent(ample)
        with ample.raw() as sock:
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            until(lambda: spent(ample) > before + 100)  # noqa: B023
        until(lambda: not ample.limits._active)
        assert before + 100 < spent(ample) < before + ENDLESS["max_tokens"]


class Sum:
    """A meter that adds up."""

    def __init__(self):
        self.tokens, self.ended = 0, False

    def spend(self, tokens):
        self.tokens += tokens

    def end(self):
        self.ended = True


def meter_of(leave, prompt, **sampling):
    """The meter of an answer, after a coroutine function of the engine, the queue and the queue's run has left it."""

    async def answered(engine):
        meter, queue = Sum(), RequestQueue(engine, ServerSettings(name=NAME))
        stream = engine.astream(Request(prompt=prompt, sampling=SamplingParams(max_new_tokens=20, **sampling)))
        await leave(engine, queue, queue.run([stream], meter))
        return meter

    with Engine(model(), checkpoint().tokenizer, budget=96, rows=1) as engine:
        return asyncio.run(answered(engine))


def test_what_was_written_and_not_yet_taken_counts():
    async def leave(engine, queue, run):
        assert await anext(run) is None
        while engine.busy:  # all tokens are on their way
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await run.aclose()

    meter = meter_of(leave, "A", min_new_tokens=20)
    assert meter.tokens > 20
    assert meter.ended


@pytest.mark.slow
def test_keys_that_do_not_exist_are_not_counted(kind):
    with limited(kind, key_requests=1, key_tokens=50) as running:
        for n in range(30):
            headers = {"Authorization": f"Bearer nobody-{n}"} if n else {}
            assert running.refused(running.post(CHAT, {"messages": HELLO}, headers=headers), 401)
        assert not running.limits._active
        assert not running.limits._spent
        assert running.post(CHAT, {"messages": HELLO, "max_tokens": 1}, headers=ANNA).status_code == 200


@pytest.mark.slow
def test_a_server_without_keys_has_one_limit_for_everybody(kind):
    with (serve if kind == KINDS[0] else fronted)(rows=1, key_tokens=20) as running:
        assert running.complete(max_tokens=20, ignore_eos=True).status_code == 200
        assert running.refused(running.complete(), 429)["code"] == "key_tokens"


@pytest.mark.long
def test_refusals_are_in_the_metrics(kind):
    with limited(kind, key_tokens=1) as running:
        running.client.headers.update(ANNA)
        assert [running.complete().status_code for _ in range(3)] == [200, 429, 429]
        where = 'replica="router",' if kind == KINDS[1] else ""
        lines = running.client.get("/metrics").text.splitlines()
        assert f'kvkeep_requests_refused_total{{{where}code="key_tokens",model_name="{NAME}"}} 2.0' in lines
        assert len([one for one in lines if one.startswith("# TYPE kvkeep_requests_refused_total ")]) == 1


@pytest.mark.parametrize("path", [f"{COMPLETE}/", f"/{COMPLETE}", f"{COMPLETE}?a=b", COMPLETE.replace("c", "%63")])
def test_no_spelling_of_a_path_gets_around_the_limits(kind, path):
    with limited(kind, key_tokens=1) as running:
        found = [running.post(path, {"prompt": "A", "max_tokens": 2}, headers=ANNA).status_code for _ in range(2)]
    assert found in ([200, 429], [307, 307], [404, 404])


@pytest.fixture
def mortal(tmp_path):
    """Replicas that a test may kill, behind a router that lets a key run one request."""
    with fronted(folder=tmp_path, key_requests=1, key_tokens=10**9) as running:
        running.limits._clock = lambda: 100.0
        yield running


def talk(running):
    return running.chat(session_id="trip")


def test_a_replica_that_dies_frees_the_slot_and_what_it_wrote_counts(mortal):
    with mortal.client.stream("POST", COMPLETE, json={**ENDLESS, "stream": True}) as answer:
        lines = answer.iter_lines()
        seen = [next(lines) for _ in range(21)]
        mortal.replicas.dead.update(one for one, engine in mortal.engines.items() if engine.n_running)
        assert "replica_lost" in "".join(lines)
    assert mortal.limits._spent["everybody"][0] >= len([one for one in seen if one])
    assert not mortal.limits._active
    assert mortal.complete().status_code == 200


@pytest.mark.long
def test_a_request_that_waits_for_its_session_counts_once_and_until_its_end(mortal):
    """Its first replica refuses it, because the session's holder has not ended yet; the router tries again."""
    assert mortal.post("/v1/sessions", {"id": "trip"}).status_code == 201
    assert talk(mortal).status_code == 200
    (home,) = [one for one, app in mortal.replicas.apps.items() if app.state.sessions.holds("everybody", "trip")]
    sessions = mortal.replicas.apps[({"one", "two"} - {home}).pop()].state.sessions
    tried, active, take, ask = [], [], sessions._leases.take, mortal.replicas.ask

    def not_yet(name):
        tried.append(name)
        return take(name) if len(tried) > 2 else False

    async def noted(replica, request):
        async for message in ask(replica, request):
            active.append(mortal.limits._active.get("everybody", 0))
            yield message

    sessions._leases.take, mortal.replicas.ask = not_yet, noted
    mortal.replicas.dead.add(home)
    assert talk(mortal).status_code == 200
    assert len(tried) == 3
    assert set(active[:-2]) == {1}
    assert not mortal.limits._active


def test_a_replica_alone_does_not_count_what_its_router_counts(mortal):
    """Replicas have the same settings, and would refuse the second request of two at once."""
    app = mortal.replicas.apps["one"]
    app.state.limits.begin("everybody")  # all that a key may
    mortal.replicas.dead.add("two")
    assert mortal.complete().status_code == 200
    assert not app.state.limits._spent


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def wait_of(limits):
    with pytest.raises(RefusalError) as found:
        limits.begin("a")
    return int(found.value.headers["Retry-After"])


@pytest.mark.parametrize("tokens", [1, 7, 60, 100, 999, 10**6])
@pytest.mark.parametrize("over", [0, 1, 30, 59, 60, 61, 12345])
def test_whoever_waits_as_told_is_let_in_and_nobody_much_earlier(clock, tokens, over):
    limits = RateLimits(None, tokens, clock=clock)
    limits.begin("a").spend(tokens + over)
    wait = wait_of(limits)
    clock.now += max(0.0, over * 60 / tokens - 0.01)
    wait_of(limits)
    assert wait <= math.ceil(over * 60 / tokens) + 1
    clock.now = wait
    limits.begin("a")


def test_no_edge_of_a_minute_doubles_what_a_key_may_use(clock):
    limits, let_in = RateLimits(None, 600, clock=clock), []
    for second in range(40, 100):
        clock.now = float(second)
        for _ in range(5):
            try:
                limits.begin("a").spend(100)
            except RefusalError:
                continue
            let_in.append(second)
    assert len(let_in) * 100 <= 600 + 600 + 100  # what was saved up, a minute's share, and one that began below it


def test_the_last_token_of_the_limit_refuses_and_the_one_before_does_not(clock):
    limits = RateLimits(None, 100, clock=clock)
    limits.begin("a").spend(99)
    meter = limits.begin("a")
    meter.spend(1)
    assert wait_of(limits) == 1
    limits.begin("b")


def test_an_end_that_is_told_twice_counts_once():
    limits = RateLimits(2, None)
    first, _ = limits.begin("a"), limits.begin("a")
    for _ in range(3):
        first.end()
    limits.begin("a")
    with pytest.raises(RefusalError):
        limits.begin("a")
    assert dict(limits._active) == {"a": 2}
