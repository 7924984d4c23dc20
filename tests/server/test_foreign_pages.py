"""Requests that a browser sends for a foreign web page are refused, by the server and by the router."""

import pytest
import typer.testing

from kvkeep.cli.main import app
from kvkeep.server.settings import host_name

from .routed import fronted
from .running import HELLO, keys, serve

CHAT = "/v1/chat/completions"
BODY = {"messages": HELLO, "max_tokens": 1}
PAGE = "https://page.example"


@pytest.fixture(scope="module", params=["server", "router"])
def server(request):
    with serve() if request.param == "server" else fronted() as running:
        yield running


def status(server, path="/metrics", body=None, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if body is None:
        return server.client.get(path, headers=headers).status_code
    return server.client.post(path, json=body, headers=headers).status_code


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "0.0.0.0", "localhost.evil.example", "", "[::2]"]
)
def test_foreign_hosts_are_refused(server, host):
    for path in ("/", "/metrics", "/v1/sessions", "/health"):
        assert status(server, path, host=host) == 403
    assert status(server, CHAT, BODY, host=host) == 403


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:80", "localhost."])
def test_names_of_this_machine_are_answered(server, host):
    assert status(server, host=host) == 200


@pytest.mark.long
def test_pages_of_other_origins_are_refused(server):
    own = server.url
    for origin in ("http://evil.example", "null", "http://localhost:3000", "https://[", own + "0"):
        assert status(server, CHAT, BODY, origin=origin) == 403
        assert status(server, origin=origin) == 403
    assert status(server, CHAT, BODY, origin=own, sec_fetch_site="same-origin") == 200
    assert status(server, sec_fetch_site="cross-site") == 403
    assert status(server, CHAT, BODY, sec_fetch_site="cross-site") == 403
    assert status(server, sec_fetch_site="none") == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", "text/json"]
)
def test_bodies_that_are_not_said_to_be_json_are_refused(server, kind):
    headers = {"Content-Type": kind}
    for path in (CHAT, "/v1/sessions", "/v1/sessions/x/rewind", "/tokenize"):
        answer = server.client.post(path, content=b'{"turns": 1}', headers=headers)
        assert "application/json" in server.refused(answer, 415)["message"]
    assert server.client.post(CHAT, content=iter([b"{}"]), headers=headers).status_code == 415
    assert server.client.post("/v1/sessions/x/rewind", headers=headers).status_code == 404  # no body


def test_a_link_opens_the_page():
    with serve() as server:
        assert status(server, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate") == 200
        assert status(server, "/metrics", sec_fetch_site="cross-site", sec_fetch_mode="navigate") == 403


@pytest.mark.long
def test_pages_that_are_allowed_and_hosts_that_are_named():
    with serve(origins=(PAGE,), allowed_hosts=("chat.example",)) as server:
        assert status(server, CHAT, BODY, origin=PAGE, sec_fetch_site="cross-site", host="chat.example:80") == 200
        assert status(server, origin="https://evil.example") == 403
    with serve(allowed_hosts=("*",), keys=keys("anna-anna")) as server:
        anna = {"authorization": "Bearer anna-anna"}
        assert status(server, host="any.example", **anna) == 200
        assert status(server, host="any.example", origin="https://any.example", **anna) == 200
        assert status(server, host="any.example", origin="http://evil.example", **anna) == 403


def test_a_host_has_a_name_and_perhaps_a_port():
    found = {"A.example:80": "a.example", "[::1]": "[::1]", "[::1]:80": "[::1]", "a.": "a", "": "", "a:b": "a:b"}
    assert {host: host_name(host) for host in found} == found


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--host", "0.0.0.0"), "--allowed-host"),
        (("--host", "0.0.0.0", "--allowed-host", "chat.example"), "can be used"),
        (("--host", "127.0.0.2"), "can be used"),
        (("--allowed-host", "http://chat.example"), "is no host"),
    ],
)
def test_a_server_beyond_loopback_has_keys_or_names(words, said):
    found = typer.testing.CliRunner().invoke(app, ["serve", *words, "--check"])
    assert said in " ".join(found.output.split())
