"""Attacks on the router: replicas that hang, names that are gone or asked for twice, folders and files of locks that
are not there any more, paths that no route has, keys that ask for what is not theirs."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from .routed import fronted
from .running import WAIT_S, keys

CHAT, COMPLETE, SESSIONS = "/v1/chat/completions", "/v1/completions", "/v1/sessions"


@pytest.fixture(scope="module")
def two():
    with fronted() as running:
        yield running


@pytest.fixture
def short(monkeypatch):
    """A router that gives replicas up soon."""
    from kvkeep.server import router

    monkeypatch.setattr(router, "_LATE_S", 0.5)
    with fronted(request_timeout_s=1.5) as running:  # long enough for what a replica sends before it hangs
        yield running


def made_apart(running, first, second):
    """Two sessions on different replicas."""
    homes = []
    for name in (first, second):
        assert running.post(SESSIONS, {"id": name}).status_code == 201
        homes += [one for one, app in running.replicas.apps.items() if app.state.sessions.holds("everybody", name)]
    assert len(set(homes)) == 2
    return homes


def holders(running, name):
    return [one for one, app in running.replicas.apps.items() if app.state.sessions.holds("everybody", name)]


def hanging(*messages):
    """A replica that says so much and then nothing more."""

    async def app(scope, receive, send):
        for message in messages:
            await send(message)
        await asyncio.sleep(2 * WAIT_S)

    return app


def begun(kind):
    start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]}
    return start, {"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True}


def replace_all(running, app):
    running.replicas.apps.update(dict.fromkeys(running.replicas.apps, app))


@pytest.mark.long
def test_a_replica_that_hangs_before_its_answer_is_given_up(short):
    replace_all(short, hanging())
    error = short.refused(short.complete(), 503)  # the replica would hang longer than the client waits
    assert (error["code"], "not ended its answer within 2 s" in error["message"]) == ("timeout", True)
    assert not short.queue._places.busy


@pytest.mark.slow
def test_a_stream_that_hangs_ends_with_the_error(short):
    replace_all(short, hanging(*begun(b"text/event-stream")))
    answer = short.complete(stream=True)
    assert answer.status_code == 200
    *_, last, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"


@pytest.mark.long
def test_a_replica_that_runs_says_itself_that_a_request_takes_too_long():
    with fronted(request_timeout_s=0.2) as running:
        error = running.refused(running.complete(max_tokens=1500, ignore_eos=True), 503)
    assert (error["code"], "took longer than 0.2 s" in error["message"]) == ("timeout", True)


def broken_off(*messages):
    """A replica whose answer ends in its midst."""

    async def app(scope, receive, send):
        for message in messages:
            await send(message)

    return app


@pytest.mark.long
@pytest.mark.parametrize("messages", [(), begun(b"application/json")[:1]])
def test_an_answer_without_a_body_is_an_error_and_hides_no_other_replica(messages):
    with fronted() as running:
        running.replicas.apps["one"] = broken_off(*messages)
        assert list(running.client.get("/health").json()["replicas"]) == ["two"]
        assert "kvkeep_replicas 1" in running.client.get("/metrics").text
        assert running.client.get(SESSIONS).json()["data"] == []
        replace_all(running, broken_off(*messages))
        assert running.refused(running.complete(), 503)["code"] == "replica_lost"
        running.refused(running.client.get(SESSIONS), 503)


def test_a_stream_that_breaks_off_ends_with_the_error(two):
    apps = dict(two.replicas.apps)
    replace_all(two, broken_off(*begun(b"text/event-stream")))
    text = two.complete(stream=True).text
    two.replicas.apps.update(apps)
    assert text.endswith("data: [DONE]\n\n")
    assert '"code":"replica_lost"' in text


@pytest.mark.long
def test_a_name_that_was_deleted_or_refused_is_free_for_forks(two):
    made_apart(two, "gone", "stem")
    assert two.client.delete(f"{SESSIONS}/gone").status_code == 200
    assert two.post(f"{SESSIONS}/stem/fork", {"id": "gone"}).status_code == 201
    for n in range(2):  # one of them on the other replica
        two.refused(two.post(SESSIONS, {"id": f"bad-{n}", "budget": -1}))
        assert two.post(f"{SESSIONS}/stem/fork", {"id": f"bad-{n}"}).status_code == 201
    two.refused(two.post(f"{SESSIONS}/nobody/fork", {"id": "later"}), 404)
    assert two.post(SESSIONS, {"id": "later"}).status_code == 201
    for one in two.client.get(SESSIONS).json()["data"]:
        two.client.delete(f"{SESSIONS}/{one['id']}")


def test_forks_of_two_replicas_to_one_name_make_it_once(two):
    made_apart(two, "left", "right")
    slow, found = two.replicas.ask, []

    async def ask(replica, request):
        await asyncio.sleep(0.05)  # both are on their way before one arrives
        async for message in slow(replica, request):
            yield message

    def fork(name):
        found.append(two.post(f"{SESSIONS}/{name}/fork", {"id": "both"}).status_code)

    two.replicas.ask = ask
    threads = [threading.Thread(target=fork, args=(name,)) for name in ("left", "right") * 3]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    del two.replicas.ask
    assert sorted(found) == [201, *[409] * 5]
    assert len(holders(two, "both")) == 1
    end = time.monotonic() + WAIT_S
    while two.queue._places._makers and time.monotonic() < end:  # the name is let go after the answer has been sent
        time.sleep(0.01)
    assert not two.queue._places._makers
    for name in ("left", "right", "both"):
        two.client.delete(f"{SESSIONS}/{name}")


@pytest.mark.parametrize("line", [b"OPTIONS * HTTP/1.1", b"GET http://elsewhere/v1/models HTTP/1.1"])
def test_targets_that_are_no_path_get_the_error_object(two, line):
    with two.raw() as sock:
        sock.sendall(line + b"\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "not_found_error"


@pytest.mark.long
@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"a":' * 5000,
        b'{"id": "\\ud800", "session_id": "\\ud800", "previous_response_id": "\\ud800"}',
        b'{"n": NaN}',
        b'{"id": 1, "n": ' + b"9" * 4300 + b"}",
        b'{"session_id": {"a": 1}, "previous_response_id": [1], "id": true, "n": [1], "prompt": {"a": 1}}',
        b'{"previous_response_id": "' + b"r" * 100_000 + b'", "id": 1, "input": "a"}',
        b'{"policy": [1], "prompt": "' + b"a" * 600 + b'", "input": "' + b"a" * 600 + b'"}',
        b"\xff\xfe",
    ],
)
def test_hostile_bodies_are_refused_by_a_replica_and_leave_nothing(two, body):
    for path in (CHAT, COMPLETE, "/v1/responses", SESSIONS, f"{SESSIONS}/x/fork", f"{SESSIONS}/x/rewind"):
        answer = two.client.post(path, content=body)
        two.refused(answer, 404 if answer.status_code == 404 else 400)
    assert not two.queue._places.busy


@pytest.mark.parametrize("path", ["a%2Fb", "%2e%2e%2fx", "%00", "%ff", "%ed%a0%80", "/fork", "x/y/z/fork", "a" * 5000])
def test_strange_names_of_sessions_are_unknown(two, path):
    two.refused(two.client.get(f"{SESSIONS}/{path}"), 404)


def test_a_list_that_no_replica_gives_is_an_error_and_not_empty(tmp_path):
    with fronted(folder=tmp_path / "sessions") as running:
        replace_all(running, hanging())
        (tmp_path / "sessions").rename(tmp_path / "elsewhere")
        running.replicas.dead.update(("one", "two"))
        running.refused(running.client.get(SESSIONS), 503)
        (tmp_path / "elsewhere").rename(tmp_path / "sessions")


@pytest.mark.long
def test_a_shared_folder_that_is_gone_is_said_in_words(tmp_path):
    root = tmp_path / "sessions"
    with fronted(folder=root) as running:
        root.rename(tmp_path / "elsewhere")
        for answer in (running.client.get(f"{SESSIONS}/x"), running.post(SESSIONS, {"id": "x"})):
            assert "session folder cannot be read" in running.refused(answer, 500)["message"]
        assert "could list" in running.refused(running.client.get(SESSIONS), 503)["message"]
        (tmp_path / "elsewhere").rename(root)
        assert running.post(SESSIONS, {"id": "x"}).status_code == 201


@pytest.mark.long
def test_a_key_reaches_nothing_of_another_key():
    with fronted(keys=keys("key-of-anna", "key-of-bert")) as running:
        running.client.headers["Authorization"] = "Bearer key-of-anna"
        assert running.post(SESSIONS, {"id": "trip"}).status_code == 201
        body = {"input": "Once", "max_output_tokens": 1}
        answer = running.post("/v1/responses", body).json()["id"]
        running.client.headers["Authorization"] = "Bearer key-of-bert"
        for path in (f"{SESSIONS}/trip", f"{SESSIONS}/trip/positions", f"/v1/responses/{answer}"):
            running.refused(running.client.get(path), 404)
        for path in (f"{SESSIONS}/trip", f"/v1/responses/{answer}"):
            running.refused(running.client.delete(path), 404)
        for what in ("fork", "rewind"):
            running.refused(running.post(f"{SESSIONS}/trip/{what}"), 404)
        running.refused(running.post("/v1/responses", {**body, "previous_response_id": answer}), 404)
        assert running.post(SESSIONS, {"id": "trip"}).status_code == 201
