"""Bodies, headers and connections that are wrong in every way are refused clearly, and the engine goes on."""

from __future__ import annotations

import json
import logging
import socket
import time
from contextlib import suppress

import pytest

from .running import HELLO, WAIT_S, httpx, serve

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POSTS = (CHAT, TEXT, "/tokenize", "/detokenize", "/v1/responses", "/v1/sessions")
DEEP = 100_000
LONG = 10**6


def nested(levels, pair="[]"):
    return b'{"messages": ' + pair[0].encode() * levels + pair[1].encode() * levels + b"}"


RAW = {
    "nothing": b"",
    "white space": b" \n",
    "null": b"null",
    "a number": b"5",
    "a text": b'"x"',
    "a list": b"[]",
    "half an object": b'{"messages": [',
    "two objects": b"{}{}",
    "no JSON": b"hello",
    "single quotes": b"{'messages': []}",
    "a comma": b'{"prompt": "x",}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "infinity": b'{"prompt": "x", "temperature": -Infinity}',
    "a huge float": b'{"prompt": "x", "temperature": 1e999}',
    "a huge integer": b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    "deep lists": nested(DEEP),
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "levels that can be read": nested(150),
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "zero bytes": b"\0" * 100,
    "a byte order mark": b"\xef\xbb\xbf[]",
    "a lone surrogate": b'{"prompt": "\\ud83d", "messages": [{"role": "user", "content": "\\ud83d"}]}',
    "a surrogate as a name": b'{"\\ud83d": 1, "polic\\ud83d": 2}',
    "a surrogate as a model": b'{"model": "\\ud83d", "prompt": "x"}',
    "a surrogate as a stop": b'{"prompt": "x", "stop": "\\udc00", "input": "\\udc00"}',
    "many names": json.dumps({f"name{n}": n for n in range(20_000)}).encode(),
    "a long name": b'{"' + b"p" * LONG + b'": 1}',
    "long role": json.dumps({"messages": [{"role": "x" * LONG, "content": "y"}]}).encode(),
    "a gzip": b"\x1f\x8b\x08\x00" + b"x" * 50,
}


def message(**fields):
    return {"messages": [{**HELLO[0], **fields}]}


ODD = [[], {}, "", "x", 0, -1, 1.5, True, None, [[]], [{}], [None], {"a": 1}, 2**70, -(2**70), "\0", "\x1b[31m"]
NAMES = (
    "messages",
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "logit_bias",
    "pins",
    "policy",
    "budget",
    "stream_options",
)
WRONG = {f"{name}={str(value)[:12]!r}": {name: value} for name in NAMES for value in ODD}
WRONG |= {
    "control characters": message(content="\0\x01\x1b[2J\r\n\x7f"),
    "a bidi override": message(content="\u202e\u2066 abc"),
    "special tokens": message(content="<|end|><|begin|><|user|>" * 20),
    "a role that breaks the template": message(role="user|> {{ 7 * 7 }}"),
    "a template": message(content="{{ ''.__class__.__mro__ }}{% for x in range(10**9) %}a{% endfor %}"),
    "nothing to say": message(content=""),
    "white space": message(content=" \n\t "),
    "content of parts": message(content=[{"type": "text", "text": "a"}] * 1000),
    "content of null": message(content=None),
    "content of lists": message(content=[["a"]]),
    "many messages": {"messages": HELLO * 3000},
    "many stops": {"stop": [str(n) for n in range(3000)]},
    "a long stop": {"stop": "x" * 100_000},
    "an empty stop": {"stop": ["a", ""]},
    "many choices": {"n": 128},
    "too many choices": {"n": 10**9},
    "biases": {"logit_bias": {str(n): 1 for n in range(5000)}},
    "a bias of NaN as text": {"logit_bias": {"NaN": 1}},
    "a bias of nothing": {"logit_bias": {"": 1}},
    "a bias of Arabic digits": {"logit_bias": {"٣": 1}},
    "pins of one": {"pins": [[1]]},
    "pins of three": {"pins": [[1, 2, 3]]},
    "pins of texts": {"pins": [["a", "b"]]},
    "negative pins": {"pins": [[-5, 2]]},
    "huge pins": {"pins": [[0, 2**62]]},
    "many pins": {"pins": [[n, n + 1] for n in range(0, 2000, 2)]},
    "a policy of a module": {"policy": "subprocess:Popen:args=ls"},
    "a policy of a path": {"policy": "../../etc/passwd"},
    "a long policy": {"policy": "h2o:" + "x" * 100_000},
    "a policy with a long file": {"policy": "triattention:calibration=" + "x" * 5000},
    "a policy with a line": {"policy": "h2o\nFAKE LOG LINE"},
    "a policy with huge options": {"policy": "h2o:recent=999999999999999999999999"},
    "a policy of its own rows": {"policy": "pyramidkv"},
    "a budget of 2^62": {"budget": 2**62},
    "a ratio of nothing": {"keep_ratio": 0},
    "a ratio of little": {"keep_ratio": 1e-300},
    "a negative guard": {"guard": -1e-300},
    "a seed of 2^63": {"seed": 2**63},
    "a seed of -2^63": {"seed": -(2**63)},
    "tokens beyond all positions": {"max_tokens": 2**31},
    "a hot temperature": {"temperature": 1e308},
    "a session of a path": {"session_id": "../../secret"},
    "a session of a kilometre": {"session_id": "x" * 100_000},
    "a tool": {"tools": [{"type": "function", "function": {"name": "x"}}]},
    "a format": {"response_format": {"type": "json_object"}},
}


@pytest.fixture(scope="module")
def server():
    with serve(
        max_new_tokens=4, max_model_len=1500, max_body_bytes=2 * 2**20, read_timeout_s=1.5, request_timeout_s=30.0
    ) as running:
        yield running


@pytest.fixture(autouse=True)
def _goes_on(server, caplog):
    """After each attack all rows are back, the answer is the usual one, and nothing has failed in the log."""
    with caplog.at_level(logging.WARNING):
        yield
    assert server.idle()
    assert server.chat(max_tokens=1).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def shown(answer):
    """The status of an answer that was refused as it should be, or worked."""
    assert answer.status_code < 500 or answer.status_code == 503, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert error["message"]
        assert len(error["message"]) < 700
        assert "Traceback" not in error["message"]
        assert 'File "' not in error["message"]
    return answer.status_code


@pytest.mark.slow
def test_bodies_that_are_no_request(server):
    for name, raw in RAW.items():
        for path in POSTS:
            status = shown(server.client.post(path, content=raw, headers={"Content-Type": "application/json"}))
            allowed = (201, 400, 404) if path == "/v1/sessions" else (200, 400) if path == "/tokenize" else (400, 404)
            assert status in allowed, (name, path, status)


@pytest.mark.slow
def test_fields_that_are_wrong(server):
    """Each of them in a chat and, where it has the name, in a completion."""
    assert len(WRONG) > 200
    for name, body in WRONG.items():
        fields = {"max_tokens": 1, "messages": HELLO, **body}
        raw = json.dumps(fields).encode()
        status = shown(server.client.post(CHAT, content=raw))
        assert status in (200, 400, 404), (name, status)


PROMPTS = [
    *(
        [],
        [[]],
        [[], []],
        [""],
        ["a", 1],
        [1, "a"],
        [1.5],
        [True],
        [-1],
        [10**9],
        [2**70],
        [[1, [2]]],
        {"a": 1},
        5,
        True,
    ),
    *([[1]] * 200, ["a"] * 129, "", " ", "\0", "x" * 60_000, [5] * 5000),
]


@pytest.mark.slow
def test_prompts_that_are_wrong(server):
    for prompt in PROMPTS:
        for more in ({}, {"echo": True, "logprobs": 1}, {"stream": True}):
            raw = json.dumps({"prompt": prompt, "max_tokens": 1, **more}).encode()
            assert shown(server.client.post(TEXT, content=raw)) in (200, 400)
    for tokens in ([], [-1], [10**9], [2**70], ["a"], "a", None, [True], [[1]]):
        assert shown(server.post("/detokenize", {"tokens": tokens})) in (200, 400)


def test_bodies_that_are_too_large(server):
    large = b'{"prompt": "' + b"x" * (3 * 2**20) + b'"}'
    assert shown(server.client.post(TEXT, content=large)) == 413

    def pieces():
        for _ in range(60):
            yield b"x" * 2**16

    with suppress(httpx.WriteError, httpx.RemoteProtocolError):  # the server may close before all of it was sent
        assert shown(server.client.post(TEXT, content=pieces())) == 413


@pytest.mark.long
def test_headers_of_all_kinds(server):
    for headers in (
        {"Content-Type": "application/json; charset=utf-8"},
        {"Content-Encoding": "gzip"},
        {"Authorization": "Bearer " + "x" * 5000},
        {"X-Request-Id": "a" * 8000},
        {"Host": "localhost"},
        {"X-Forwarded-For": "1.2.3.4"},
        {"Accept": "application/xml"},
        {"Expect": "100-continue"},
        {"Origin": server.url},
    ):
        answer = server.client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers=headers)
        assert shown(answer) == 200
        assert "access-control-allow-origin" not in answer.headers


def sent(server, data, *, close=None):
    """What comes back for some bytes."""
    with server.raw() as sock:
        sock.sendall(data)
        found = b""
        try:
            if close is not None:
                sock.shutdown(close)
            while piece := sock.recv(65536):
                found += piece
        except OSError:
            pass
        return found


def head(path=CHAT, length=None, *more):
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Connection: close", *more]
    return "\r\n".join([*lines, *([] if length is None else [f"Content-Length: {length}"]), "", ""]).encode()


@pytest.mark.parametrize(
    "data",
    [
        b"\r\n\r\n",
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nA: " + b"x" * 200_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head(CHAT, "abc"),
        head(CHAT, -5),
        head(CHAT, "5\r\nContent-Length: 6") + b"{}   ",
        head(CHAT, None, "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n",
        head(CHAT, None, "Transfer-Encoding: chunked", "Content-Length: 2") + b"2\r\n{}\r\n0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 5000 + b"\r\n",
    ],
    ids=lambda data: repr(data[:30]),
)
def test_bytes_that_are_no_http(server, data):
    found = sent(server, data, close=socket.SHUT_WR)
    assert found == b"" or found.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in found.split(b"\r\n")[0]
    assert b"Traceback" not in found


@pytest.mark.slow
def test_slow_clients_are_let_go(server):
    """Heads and bodies that never end; meanwhile others are served."""
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    starts = [b"POST /v1/ch", head(CHAT, 100), head(CHAT, len(body)) + body[:10], b""]
    open_ones = [server.raw() for _ in starts]
    try:
        for sock, start in zip(open_ones, starts, strict=True):
            sock.sendall(start)
        assert server.chat(max_tokens=1).status_code == 200
        ends = []
        for sock in open_ones:
            sock.settimeout(10)
            ends.append(b"".join(iter(lambda sock=sock: sock.recv(65536), b"")))
        assert ends[0] == ends[3] == b""
        assert all(end.startswith(b"HTTP/1.1 408") for end in ends[1:3])
    finally:
        for sock in open_ones:
            sock.close()


def test_a_client_that_does_not_read_is_let_go(server):
    body = json.dumps({"messages": HELLO, "max_tokens": 1400, "stream": True, "ignore_eos": True, "n": 4}).encode()
    with server.raw() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(head(CHAT, len(body)) + body)
        end = time.monotonic() + WAIT_S
        while not server.engine.busy:
            assert time.monotonic() < end
            time.sleep(0.005)
    assert server.idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_frees_its_row(server, stream):
    body = json.dumps({"messages": HELLO, "max_tokens": 1400, "ignore_eos": True, "stream": stream, "n": 3}).encode()
    for _ in range(3):
        with server.raw() as sock:
            sock.sendall(head(CHAT, len(body)) + body)
            end = time.monotonic() + WAIT_S
            while not server.engine.n_running and time.monotonic() < end:
                time.sleep(0.005)
            assert server.engine.n_running
        assert server.idle()


def test_half_closed_and_pipelined(server):
    body = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
    one = head(CHAT, len(body)).replace(b"Connection: close\r\n", b"") + body
    assert sent(server, one + head(CHAT, len(body)) + body).count(b"HTTP/1.1 200") == 2
    sent(server, one, close=socket.SHUT_WR)
    sent(server, head(CHAT, len(body)) + body[:5], close=socket.SHUT_WR)


def test_many_connections_at_once(server):
    open_ones = [server.raw() for _ in range(200)]
    try:
        assert server.chat(max_tokens=1).status_code == 200
    finally:
        for sock in open_ones:
            sock.close()


def test_a_full_queue_says_when_to_come_back():
    with serve(rows=1, max_queue=1) as server, server.raw() as one, server.raw() as two:
        body = json.dumps({"messages": HELLO, "max_tokens": 10**5, "ignore_eos": True}).encode()
        for sock in (one, two):
            sock.sendall(head(CHAT, len(body)) + body)
        end = time.monotonic() + WAIT_S
        while server.queue.active < 2 and time.monotonic() < end:
            time.sleep(0.01)
        answer = server.chat(max_tokens=1)
        assert server.refused(answer, 429)["code"] == "queue_full"
        assert int(answer.headers["retry-after"]) >= 1
        assert "4 texts at once" in server.refused(server.chat(n=4))["message"]
        for sock in (one, two):
            sock.close()
        assert server.idle()


@pytest.mark.slow
def test_a_request_waits_and_runs_for_so_long():
    body = {"max_tokens": 10**5, "ignore_eos": True}
    with serve(rows=1, queue_timeout_s=0.3) as server:
        with server.client.stream("POST", CHAT, json={"messages": HELLO, **body, "stream": True}) as first:
            lines = first.iter_lines()  # who drops it closes the connection
            next(lines)
            assert "No row was free" in server.refused(server.chat(max_tokens=1), 429)["message"]
        assert server.idle()
    with serve(rows=1, request_timeout_s=3.0) as server:
        assert server.refused(server.chat(**body), 503)["code"] == "timeout"
        streamed = server.chat(**body, stream=True)
        assert streamed.status_code == 200
        assert '"code":"timeout"' in streamed.text
        assert server.idle()


@pytest.mark.long
@pytest.mark.parametrize("path", [__file__, "/no/such/file.pt"])
def test_a_client_does_not_find_out_which_files_there_are(server, path):
    policy = f"triattention:calibration={path}"
    for answer in (
        server.chat(policy=policy),
        server.complete(policy=policy),
        server.post("/v1/sessions", {"policy": policy}),
        server.post("/v1/responses", {"input": "a", "policy": policy}),
    ):
        assert "names a file, which a request must not do" in server.refused(answer)["message"]
