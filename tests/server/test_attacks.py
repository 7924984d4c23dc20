"""Races around sessions, and bodies between right and wrong: each has one clear end, and rows and names come back."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from .running import HELLO, events, serve
from .test_hostile import CHAT, DEEP, head, sent, shown


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sessions"))
    with serve(engine={"session_dir": folder}, session_dir=folder, max_model_len=2000, max_sessions=40) as running:
        yield running


@pytest.fixture(autouse=True)
def _goes_on(server):
    yield
    assert server.idle()
    for one in server.client.get("/v1/sessions").json()["data"]:
        server.client.delete(f"/v1/sessions/{one['id']}")
    assert server.chat(max_tokens=1).status_code == 200


@contextmanager
def answering(server, name):
    """A session with a turn, of which another turn is being streamed."""
    assert server.post("/v1/sessions", {"id": name}).status_code == 201
    assert server.chat(session_id=name, max_tokens=4).status_code == 200
    body = {"messages": HELLO, "session_id": name, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", CHAT, json=body) as answer:
        lines = answer.iter_lines()
        for line in lines:
            if '"content":"' in line and '"content":""' not in line:
                break
        yield lines


@pytest.mark.slow
def test_a_fork_while_an_answer_is_streamed_has_the_last_finished_turn(server):
    with answering(server, "busy"):
        found = server.post("/v1/sessions/busy/fork", {"id": "copy"})
        assert found.status_code == 201
        assert len(found.json()["messages"]) == 2
        assert server.chat(session_id="copy", max_tokens=3).status_code == 200
    assert server.idle()
    assert len(server.client.get("/v1/sessions/busy").json()["messages"]) == 2


@pytest.mark.long
@pytest.mark.parametrize("route", ["rewind", "save", "restore"])
def test_other_routes_while_an_answer_is_streamed(server, route):
    with answering(server, "busy"):
        status = shown(server.post(f"/v1/sessions/busy/{route}", {}))
        assert status in (200, 400, 404, 409)
    assert server.idle()
    assert server.chat(session_id="busy", max_tokens=2).status_code == 200


@pytest.mark.long
def test_a_session_that_is_deleted_ends_its_stream_with_an_error(server):
    with answering(server, "busy") as lines:
        assert server.client.delete("/v1/sessions/busy").status_code == 200
        rest = [line for line in lines if line]
        assert '"error"' in rest[-2]
        assert "its session was deleted" in rest[-2]
        assert rest[-1] == "data: [DONE]"
        assert server.post("/v1/sessions", {"id": "busy"}).status_code == 201


@pytest.mark.slow
def test_deletes_turns_forks_and_saves_of_one_name_at_once(server):
    """Whoever comes too late is told so; nobody waits for ever."""
    routes = [("POST", "/v1/sessions", {"id": "race"}), ("DELETE", "/v1/sessions/race", None)]
    routes += [("POST", f"/v1/sessions/race/{one}", {}) for one in ("fork", "rewind", "save", "restore")]
    routes += [("GET", "/v1/sessions/race/positions", None)]
    routes += [("POST", CHAT, {"messages": HELLO, "session_id": "race", "max_tokens": 2})] * 3

    def ask(place):
        method, path, body = routes[place % len(routes)]
        return shown(server.client.request(method, path, json=body))

    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(ask, range(120)))
    assert found <= {200, 201, 400, 404, 409, 429, 503}


@pytest.mark.parametrize(
    "name", ["..", "../x", "a/b", "\0", "x" * 65, "\ud800", "", " ", "ä", "a\nb", "%2e%2e", 5, ["a"], {}]
)
def test_names_that_are_no_names(server, name):
    server.post("/v1/sessions", {"id": "good"})
    raw = json.dumps({"id": name}).encode()
    for path in ("/v1/sessions", "/v1/sessions/good/fork"):
        assert shown(server.client.post(path, content=raw)) == 400
    raw = json.dumps({"messages": HELLO, "session_id": name, "max_tokens": 1}).encode()
    assert shown(server.client.post(CHAT, content=raw)) in (400, 404)


@pytest.mark.long
@pytest.mark.parametrize("name", ["%67ood", "g%6Fod"])
def test_an_escaped_name_is_the_name(server, name):
    server.post("/v1/sessions", {"id": "good"})
    assert server.client.get(f"/v1/sessions/{name}").json()["id"] == "good"


def deep(levels):
    return '{"properties": {"a": ' * levels + '{"type": "null"}' + "}}" * levels


SCHEMAS = [
    {"structured_outputs": {"json": deep(2000)}},
    {"structured_outputs": {"json": deep(DEEP)}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": json.loads(deep(90))}}},
    {"structured_outputs": {"json": '{"$ref": "#"}'}},
    {"structured_outputs": {"json": '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'}},
    {"structured_outputs": {"json": '{"allOf": [{"$ref": "#"}]}'}},
    {"structured_outputs": {"regex": "(" * 2000 + "a" + ")" * 2000}},
    {"structured_outputs": {"regex": "(a{1000}){1000}"}},
]


@pytest.mark.long
@pytest.mark.parametrize("body", SCHEMAS, ids=lambda body: str(body)[:60])
def test_schemas_that_are_deep_or_turn_in_circles(server, body):
    pytest.importorskip("llguidance")
    assert shown(server.chat(**body, max_tokens=3)) in (200, 400)


BODIES = [
    ({"max_tokens": 0}, 400),
    ({"max_completion_tokens": 0}, 400),
    *(({"seed": seed}, 200) for seed in (-1, -2, 1 - 2**63)),
    ({"seed": -(2**63)}, 400),
    ({"seed": 2**63 - 1}, 200),
    ({"seed": 2**63}, 400),
    ({"n": 129}, 400),
    ({"n": 2**62}, 400),
    ({"stop": ""}, 400),
    ({"stop": []}, 200),
    ({"stop": ["", "a"]}, 400),
    ({"logit_bias": {"999999": 1}}, 400),
    ({"logit_bias": {"-1": 1}}, 400),
    ({"logit_bias": {"1": 101}}, 400),
    ({"logit_bias": {"1" * 400: 1}}, 400),
    ({"logit_bias": {"1": True}}, 400),
    ({"min_tokens": 9}, 400),
    ({"top_logprobs": 21, "logprobs": True}, 400),
    ({"model": "\ud83d"}, 404),
]


@pytest.mark.parametrize(("body", "status"), BODIES, ids=lambda value: str(value)[:40])
def test_numbers_and_texts_at_their_limits(server, body, status):
    for stream in (False, True):
        raw = json.dumps({"messages": HELLO, "max_tokens": 4, **body, "stream": stream}).encode()
        answer = server.client.post(CHAT, content=raw)
        assert shown(answer) == status, answer.text


def test_the_last_of_two_fields_with_one_name_counts(server):
    raw = b'{"messages": 5, "max_tokens": "x", "messages": %b, "max_tokens": 2}' % json.dumps(HELLO).encode()
    assert server.client.post(CHAT, content=raw).json()["usage"]["completion_tokens"] <= 2


BODY = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()


def test_a_client_that_waits_to_be_asked_for_the_body_is_asked(server):
    with server.raw() as sock:
        sock.sendall(head(CHAT, len(BODY), "Expect: 100-continue"))
        assert sock.recv(4096).startswith(b"HTTP/1.1 100")
        sock.sendall(BODY)
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_http_of_1996(server):
    old = head(CHAT, len(BODY)).replace(b"HTTP/1.1", b"HTTP/1.0") + BODY
    assert sent(server, old).split(b"\r\n")[0].endswith(b"200 OK")
    streamed = json.dumps({"messages": HELLO, "max_tokens": 2, "stream": True}).encode()
    old = head(CHAT, len(streamed)).replace(b"HTTP/1.1", b"HTTP/1.0") + streamed
    found = sent(server, old)
    assert found.rstrip().endswith(b"data: [DONE]")
    assert b"chunked" not in found


def test_a_websocket_is_an_ordinary_request(server):
    lines = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    with server.raw() as sock:
        sock.sendall((lines + key).encode())
        assert sock.recv(4096).startswith(b"HTTP/1.1 200")


def test_a_length_that_is_too_small_leaves_no_second_request(server):
    """The rest of the body is no request of its own that is run."""
    before = server.client.get("/v1/sessions").json()["data"]
    smuggled = b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    found = sent(server, head(CHAT, 2) + b"{}" + smuggled)
    assert found.count(b"HTTP/1.1 ") == 1
    assert server.client.get("/v1/sessions").json()["data"] == before


@pytest.mark.slow
def test_streams_that_are_left_at_once_in_great_number(server):
    def leave(_):
        body = json.dumps({"messages": HELLO, "max_tokens": 1500, "ignore_eos": True, "stream": True}).encode()
        with server.raw() as sock:
            sock.sendall(head(CHAT, len(body)) + body)

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(leave, range(64)))
    assert server.idle()
    assert threading.active_count() < 150
    end = time.monotonic() + 60
    while server.engine.n_waiting and time.monotonic() < end:
        time.sleep(0.01)
    assert events(server.chat(max_tokens=2, stream=True))
