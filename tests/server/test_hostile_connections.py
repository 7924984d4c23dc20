"""Connections, heads and paths that are wrong in every way, and far too many of them; the engine goes on."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest

from .running import HELLO, keys, serve
from .test_hostile import CHAT, TEXT, head, sent, shown

BODY = json.dumps({"messages": HELLO, "max_tokens": 1}).encode()
MANY = 1000


@pytest.fixture(scope="module")
def server():
    options = {"max_new_tokens": 4, "max_model_len": 1500, "read_timeout_s": 3.0, "request_timeout_s": 30.0}
    with serve(keys=keys("anna-anna"), session_dir=None, **options) as running:
        running.client.headers["Authorization"] = "Bearer anna-anna"
        yield running


@pytest.fixture(autouse=True)
def _goes_on(server):
    yield
    assert server.idle()
    assert server.chat(max_tokens=1).status_code == 200


def chat(*lines, body=BODY, length=True, line=f"POST {CHAT} HTTP/1.1"):
    """A request as bytes: its first line, its headers, its body."""
    found = [
        line,
        "Host: localhost",
        "Authorization: Bearer anna-anna",
        "Content-Type: application/json",
        "Connection: close",
    ]
    found += lines
    found += [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([*found, "", ""]).encode("utf-8", "surrogateescape") + body


LINES = {
    "no version": "POST /v1/models",
    "version 0.9": "GET /v1/models HTTP/0.9",
    "version 1.0": "GET /v1/models HTTP/1.0",
    "version 2": "GET /v1/models HTTP/2",
    "lower case": "get /v1/models http/1.1",
    "no path": "GET  HTTP/1.1",
    "a star": "OPTIONS * HTTP/1.1",
    "a whole URL": "GET http://evil.example/v1/models HTTP/1.1",
    "CONNECT": "CONNECT evil.example:443 HTTP/1.1",
    "TRACE": "TRACE /v1/models HTTP/1.1",
    "PRI": "PRI * HTTP/2.0",
    "a method of 1000 letters": f"{'G' * 1000} /v1/models HTTP/1.1",
    "a method of signs": "<>{} /v1/models HTTP/1.1",
    "tabs": "GET\t/v1/models\tHTTP/1.1",
    "two spaces": "GET  /v1/models  HTTP/1.1",
    "a zero byte": "GET /v1/\0models HTTP/1.1",
    "a control character": "GET /v1/\x07models HTTP/1.1",
    "a lone surrogate": "GET /v1/\udcff HTTP/1.1",
    "a line in the path": "GET /v1/models\nX: y HTTP/1.1",
    "a fragment": "GET /v1/models#x HTTP/1.1",
    "a query of 50 kB": f"GET /v1/models?{'a=b&' * 12000} HTTP/1.1",
    "half an escape": "GET /v1/models/%f HTTP/1.1",
    "no UTF-8": "GET /v1/models/%ff%fe HTTP/1.1",
    "an escaped zero": "GET /v1/sessions/%00 HTTP/1.1",
    "an escaped line": "GET /v1/sessions/a%0d%0aX:%20y HTTP/1.1",
    "up": "GET /v1/../../../etc/passwd HTTP/1.1",
    "escaped up": "GET /v1/sessions/%2e%2e%2f%2e%2e%2fetc%2fpasswd HTTP/1.1",
    "twice escaped up": "GET /v1/sessions/%252e%252e%252f HTTP/1.1",
    "backslashes": "GET /v1/sessions/..\\..\\secret HTTP/1.1",
    "many slashes": f"GET {'/' * 5000} HTTP/1.1",
    "a websocket": "GET /v1/chat/completions HTTP/1.1\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13",
    "h2c": "GET /v1/models HTTP/1.1\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__",
}
HEADERS = {
    "no host": (f"POST {CHAT} HTTP/1.1", ()),
    "two hosts": (None, ("Host: y",)),
    "a folded line": (None, ("X: a", " b")),
    "no colon": (None, ("nothing",)),
    "no name": (None, (": x",)),
    "a space before the colon": (None, ("X : y",)),
    "a name of signs": (None, ("X(y): z",)),
    "a zero byte": (None, ("X: a\0b",)),
    "control characters": (None, ("X: \x1b[2J\x07",)),
    "latin letters": (None, ("X: \udce9\udcff",)),
    "a bare line feed": (None, ("X: a\nY: b",)),
    "a bare carriage return": (None, ("X: a\rY: b",)),
    "60 kB": (None, ("X: " + "a" * 60_000,)),
    "2000 lines": (None, tuple(f"X{n}: y" for n in range(2000))),
    "the same key twice": (None, ("Authorization: Bearer anna-anna",)),
    "another key as well": (None, ("Authorization: Bearer evil-evil",)),
    "an empty type": (None, ("Content-Type:",)),
    "a type of signs": (None, ("Content-Type: application/json; charset=\\u0000",)),
    "UTF-7": (None, ("Content-Type: application/json; charset=utf-7",)),
    "a form": (None, ("Content-Type: multipart/form-data; boundary=x",)),
    "brotli": (None, ("Content-Encoding: br",)),
    "expect more": (None, ("Expect: 200-maybe",)),
    "a range": (None, ("Range: bytes=0-1,1-0,-5",)),
    "a proxy's words": (None, ("X-Forwarded-For: ' OR 1=1 --", "X-Forwarded-Proto: gopher", 'Forwarded: for="_x"')),
    "another method": (None, ("X-HTTP-Method-Override: DELETE",)),
    "cookies": (None, ("Cookie: " + "a=b; " * 5000,)),
    "keep alive for ever": (None, ("Keep-Alive: timeout=999999999999999999999",)),
    "te": (None, ("TE: trailers, chunked;q=nan",)),
}
SIZES = {
    "longer than sent": ("Content-Length: 999999",),
    "shorter than sent": ("Content-Length: 5",),
    "negative": ("Content-Length: -1",),
    "with a plus": ("Content-Length: +5",),
    "hexadecimal": ("Content-Length: 0x10",),
    "a float": ("Content-Length: 1e3",),
    "Arabic digits": ("Content-Length: ٣",),
    "empty": ("Content-Length:",),
    "of 30 digits": ("Content-Length: " + "9" * 30,),
    "of 3000 digits": ("Content-Length: " + "9" * 3000,),
    "twice": ("Content-Length: 5", "Content-Length: 6"),
    "in a list": ("Content-Length: 5, 5",),
    "chunked and a length": ("Transfer-Encoding: chunked", "Content-Length: 5"),
    "chunked twice": ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
    "chunked, and not": ("Transfer-Encoding: chunked, identity",),
    "gzip, chunked": ("Transfer-Encoding: gzip, chunked",),
    "chunked in quotes": ('Transfer-Encoding: "chunked"',),
    "chunked with a tab": ("Transfer-Encoding:\tchunked",),
    "chunked of nothing": ("Transfer-Encoding: chunked",),
    "xchunked": ("Transfer-Encoding: xchunked",),
}
CHUNKS = {
    "a huge size": b"FFFFFFFFFFFFFFFFF\r\nx",
    "a negative size": b"-1\r\nx\r\n",
    "no end": b"2\r\n{}\r\n",
    "a long extension": b"2;" + b"x" * 70_000 + b"\r\n{}\r\n0\r\n\r\n",
    "trailers": b"2\r\n{}\r\n0\r\nAuthorization: Bearer evil\r\nX: y\r\n\r\n",
    "a wrong end": b"2\r\n{}XX0\r\n\r\n",
    "bytes one by one": b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n",
    "another request": b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n",
}


def polite(found):
    """Whether what came back is nothing, or an answer that is no failure of the server."""
    status = found.split(b"\r\n")[0]
    assert found == b"" or status.startswith(b"HTTP/1.1 "), found[:200]
    assert not status.startswith(b"HTTP/1.1 5") or status.startswith(b"HTTP/1.1 503"), found[:500]
    assert b"Traceback" not in found
    assert b"root:" not in found
    return status


def test_there_are_enough_of_them():
    from .test_hostile import POSTS, PROMPTS, RAW, WRONG

    assert len(LINES) + len(HEADERS) + len(SIZES) + len(CHUNKS) > 80
    assert len(RAW) * len(POSTS) + len(WRONG) + 3 * len(PROMPTS) + 80 > 500


def test_first_lines(server):
    for name, line in LINES.items():
        found = sent(server, chat(body=b"", length=False, line=line), close=socket.SHUT_WR)
        status = polite(found)
        assert b" 200" not in status or b"models" in found or b"object" in found, name


def test_header_lines(server):
    for name, (line, lines) in HEADERS.items():
        raw = chat(*lines) if line is None else f"{line}\r\nContent-Length: 2\r\n\r\n{{}}".encode()
        polite(sent(server, raw, close=socket.SHUT_WR)), name


def test_sizes_of_bodies(server):
    for name, lines in SIZES.items():
        polite(sent(server, chat(*lines, length=False), close=socket.SHUT_WR)), name
    for name, raw in CHUNKS.items():
        found = sent(server, chat("Transfer-Encoding: chunked", length=False, body=raw), close=socket.SHUT_WR)
        polite(found), name
        assert found.count(b"HTTP/1.1 200") <= 1, name


def test_keys_in_every_wrong_form(server):
    wrong = ("", "Bearer", "Bearer ", "bearer  ", "Basic anna-anna", "anna-anna", "Bearer anna-anna x")
    wrong += ("Bearer Anna-anna", "Bearer anna", "Bearer " + "a" * 9000, "Bearer \udcff\udcfe")
    wrong += ("Bearer anna-anna,Bearer anna-anna", "Token anna-anna")
    for key in wrong:
        for path in ("/v1/models", "/metrics", "/openapi.json", "/tokenizer_info", "/version", "/v1/nothing"):
            raw = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: {key}\r\n\r\n"
            found = sent(server, raw.encode("utf-8", "surrogateescape"))
            assert found.startswith(b"HTTP/1.1 401"), (key, path, found[:80])


@pytest.mark.slow
def test_prompts_of_ten_megabytes(server):
    large = "dog " * (10 * 2**18)
    for path, body in (
        (TEXT, {"prompt": large}),
        (TEXT, {"prompt": large, "echo": True, "logprobs": 1}),
        (CHAT, {"messages": [{"role": "user", "content": large}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 2**20}] * 10}),
        (TEXT, {"prompt": [5] * 2**18}),
        ("/v1/responses", {"input": large}),
    ):
        start = time.monotonic()
        assert shown(server.post(path, {**body, "max_tokens": 1})) in (400, 413)
        assert time.monotonic() - start < 10  # nobody tokenizes what is too long at a glance


@pytest.mark.slow
def test_a_thousand_connections_at_once(server):
    """Idle ones, begun heads and begun bodies; others are served meanwhile, and all are let go."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = min(MANY, (hard - 200) // 2)  # both ends are in this process
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * many + 200), hard))
    starts = (b"", b"POST /v1/ch", head(CHAT, 100), chat()[:-20])
    try:
        with ExitStack() as open_ones:
            made = [open_ones.enter_context(server.raw()) for _ in range(many)]
            for number, one in enumerate(made):
                one.sendall(starts[number % len(starts)])
            assert server.chat(max_tokens=1).status_code == 200
            for one in made:
                one.settimeout(20)
                with suppress(OSError):
                    while one.recv(65536):
                        pass
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
def test_heads_that_come_byte_by_byte(server):
    raw = chat()
    with server.raw() as one:
        end = time.monotonic() + 60
        with suppress(OSError):
            for byte in raw:
                one.send(bytes([byte]))
                time.sleep(0.05)
                assert time.monotonic() < end


@pytest.mark.slow
def test_pipelined_good_and_bad_ones(server):
    keep = chat().replace(b"Connection: close\r\n", b"")
    bad = chat(body=b"{").replace(b"Connection: close\r\n", b"")
    found = sent(server, keep + bad + keep + chat())
    assert found.count(b"HTTP/1.1 200") == 3
    assert found.count(b"HTTP/1.1 400") == 1
    found = sent(server, keep * 50 + b"GARBAGE\r\n\r\n" + keep)
    assert found.count(b"HTTP/1.1 200") == 50


def test_a_stream_whose_client_has_stopped_sending(server):
    """A socket that is closed for writing counts as one that has gone, or gets its whole answer; no row stays taken."""
    body = json.dumps({"messages": HELLO, "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    found = sent(server, chat(body=body), close=socket.SHUT_WR)
    assert b" 500 " not in found


def test_clients_that_vanish_without_a_word(server):
    """A connection that is reset while it streams."""
    body = json.dumps({"messages": HELLO, "max_tokens": 1400, "ignore_eos": True, "stream": True}).encode()

    def vanish():
        one = server.raw()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        one.sendall(chat(body=body))
        one.recv(100)
        one.close()

    threads = [threading.Thread(target=vanish) for _ in range(20)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert server.idle()


PATHS = ("", ".", "..", "%2e%2e", "a/b", "a%2fb", "\x00", "%00", "x" * 300, "A B", "ä", "%ff", "a--b", "-", "_")


def test_names_of_sessions_and_answers(server):
    for name in PATHS:
        for method, path in (
            ("GET", f"/v1/sessions/{name}"),
            ("DELETE", f"/v1/sessions/{name}"),
            ("POST", f"/v1/sessions/{name}/save"),
            ("POST", f"/v1/sessions/{name}/restore"),
            ("POST", f"/v1/sessions/{name}/fork"),
            ("GET", f"/v1/responses/{name}"),
            ("GET", f"/v1/models/{name}"),
        ):
            raw = chat(body=b"", line=f"{method} {path} HTTP/1.1")
            status = polite(sent(server, raw, close=socket.SHUT_WR))
            assert b" 201" not in status, (method, path)
