"""How a server is operated: TLS, unix sockets, web pages, drains, the log, and the same names everywhere."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import threading
import time

import processes
import pytest
import typer

from kvkeep.cli import serve as own
from kvkeep.cli.main import app
from kvkeep.errors import InputError
from kvkeep.server.run import ServerAddress, check_tls, listen

from .running import HELLO, WAIT_S, httpx, keys, serve
from .test_hostile import CHAT, head

PAGE = "https://chat.example"


def certificate(folder, name="own"):
    """A certificate of this machine and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    words = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run(["openssl", *words, *names, "-out", cert, "-keyout", key], check=True, capture_output=True)
    return cert, key


def ready(process, err, pattern):
    end = time.monotonic() + WAIT_S
    while not (found := re.search(pattern, err.read_text() if err.exists() else "")):
        assert process.is_alive(), err.read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    return found[0]


def end(process, err):
    os.kill(process.pid, signal.SIGTERM)
    process.join(WAIT_S)
    assert process.exitcode == 0, err.read_text()
    assert "Traceback" not in err.read_text()


@pytest.mark.slow
def test_https_with_files(tmp_path):
    cert, key = certificate(tmp_path)
    err = tmp_path / "err"
    process = processes.kvkeep("serve", "--port", "0", "--tls-cert", cert, "--tls-key", key, err=err)
    url = ready(process, err, r"https://\S+(?=/v1)")
    trusted = ssl.create_default_context(cafile=cert)
    with httpx.Client(base_url=url, verify=trusted, timeout=WAIT_S) as client:
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{url}/health")
    with pytest.raises(httpx.HTTPError):
        httpx.get(url.replace("https", "http") + "/health", timeout=5)
    end(process, err)


def test_files_of_tls_that_do_not_fit(tmp_path):
    (cert, _), (_, other) = certificate(tmp_path), certificate(tmp_path, "other")
    with pytest.raises(InputError, match="no certificate and key"):
        check_tls(ServerAddress(tls_cert=str(cert), tls_key=str(other)))
    with pytest.raises(InputError, match="give both"):
        check_tls(ServerAddress(tls_key=str(other)))


@pytest.mark.slow
def test_a_unix_socket(tmp_path):
    path, err = tmp_path / "kvkeep.sock", tmp_path / "err"
    process = processes.kvkeep("serve", "--unix-socket", path, err=err)
    ready(process, err, r"unix:\S+")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(InputError, match="cannot be used"):
        listen(ServerAddress(unix_socket=str(path)))  # somebody answers there
    transport = httpx.HTTPTransport(uds=str(path))
    with httpx.Client(base_url="http://kvkeep", transport=transport, timeout=WAIT_S) as client:
        assert client.get("/health").json()["status"] == "ready"
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200
    end(process, err)


def test_a_unix_socket_that_a_killed_server_has_left_is_replaced(tmp_path):
    path = str(tmp_path / "left.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    with listen(ServerAddress(unix_socket=path)) as made:
        assert made.getsockname() == path
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="cannot be used"):
        listen(ServerAddress(unix_socket=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.long
@pytest.mark.parametrize("origins", [(), (PAGE,)])
def test_web_pages_of_other_origins(origins):
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    with serve(origins=origins, keys=keys("anna-anna")) as server:
        before = server.client.options(CHAT, headers=asks)
        answer = server.client.get("/health", headers={"Origin": PAGE})
        evil = server.client.get("/health", headers={"Origin": "https://evil.example"})
    allowed = [one.headers.get("access-control-allow-origin") for one in (before, answer, evil)]
    assert allowed == ([PAGE, PAGE, None] if origins else [None, None, None])
    assert before.status_code == (200 if origins else 403)


@pytest.mark.slow
def test_a_server_that_drains_says_so_and_finishes_what_runs():
    with serve(rows=2) as server:
        answers = []
        first = threading.Thread(target=lambda: answers.append(server.chat(max_tokens=100, ignore_eos=True)))
        first.start()
        while not server.engine.n_running:
            time.sleep(0.005)
        server.queue.draining = True
        refused = server.chat()
        assert server.refused(refused, 503)["message"].startswith("The server is about to end")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.client.get("/health").status_code == 503
        live = server.client.get("/health", params={"check": "live"})
        assert (live.status_code, live.json()["status"]) == (200, "draining")
        first.join(WAIT_S)
        assert answers[0].json()["usage"]["completion_tokens"] == 100


def test_the_numbers_of_health_and_the_queue():
    with serve(rows=1, max_queue=1) as server:
        assert server.client.get("/health").json() == {
            "status": "ready",
            "rows": 1,
            "rows_free": 1,
            "waiting": 0,
            "row_bytes": server.engine.row_bytes,
        }
        body = json.dumps({"messages": HELLO, "max_tokens": 10**5, "ignore_eos": True}).encode()
        with server.raw() as one, server.raw() as two:
            for sock in (one, two):
                sock.sendall(head(CHAT, len(body)) + body)
            limit = time.monotonic() + WAIT_S
            while (found := server.client.get("/health").json())["waiting"] < 1 or found["rows_free"]:
                assert time.monotonic() < limit
            refused = server.chat()
            assert server.refused(refused, 429)["code"] == "queue_full"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert server.idle()


def test_the_log_has_a_line_for_each_request_and_no_text(caplog):
    secret = "a very secret dog"
    with caplog.at_level(logging.INFO, "kvkeep.access"), serve(keys=keys("anna-anna")) as server:
        headers = {"Authorization": "Bearer anna-anna"}
        body = {"messages": [{"role": "user", "content": secret}], "max_tokens": 1, "policy": secret}
        server.post(CHAT, body, headers=headers)
        server.post("/v1/completions", {"prompt": secret, "max_tokens": 1}, headers=headers)
        server.client.get(f"/v1/models/%1b[31m{'x' * 500}", headers=headers)
        server.client.get("/v1/models", params={"key": secret})
    lines = [record.getMessage() for record in caplog.records if record.name == "kvkeep.access"]
    assert [line.split()[2:5:2] for line in lines[:2]] == [["POST", "400"], ["POST", "200"]]
    assert " 404 " in lines[2]
    assert "\x1b" not in lines[2]
    assert " 401 " in lines[3]
    text = "".join(lines)
    assert secret not in text
    assert "anna-anna" not in text


def test_flags_variables_and_the_file_have_the_same_names():
    command = typer.main.get_command(app).commands["serve"]
    for one in command.params:
        if one.name in ("config", "check", "help"):
            continue
        flags = [flag for flag in one.opts if flag.startswith("--")]
        name = one.name.replace("_", "-")
        assert one.param_type_name == "argument" or f"--{name}" in flags, one.opts
        for spelling in (name, one.name):
            assert own._known(spelling, "f", {one.name for one in command.params}) == one.name
    assert {"auto_envvar_prefix": "KVKEEP"}.items() <= command.context_settings.items()
