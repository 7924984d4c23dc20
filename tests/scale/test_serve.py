"""A server of replicas on Ray Serve, which are killed under load. `make test-ray` runs these."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import rayjobs
from serving import TALK, Served, free_port, talk

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are no errors of ours

CLIENTS, TURNS = 64, 6
PAGE = """
import sys
from kvkeep.scale import cluster
with cluster.joined(None, cpus=2):
    from ray import serve as start
    start.start(http_options={"port": PORT})
    if True:
        CODE
    print("ready", flush=True)
    sys.stdin.readline()
    start.shutdown()
"""
"""The page's code on a cluster of its own, at a free port, until somebody says that it may end."""


@pytest.fixture(scope="module")
def served(ray, tmp_path_factory):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: make test-ray")
    made = Served(tmp_path_factory.mktemp("served"), "--budget", 96, "--max-rows", 8)
    yield made
    if made.process.poll() is None:
        made.end()


def homes(served):
    """Session → its replica, by the files of sessions."""
    found = served.sessions.glob("replica-*/*.kvkeep")
    return {path.name.split("--")[1].split(".")[0]: path.parent.name.removeprefix("replica-") for path in found}


def test_sixty_four_clients_and_a_replica_that_is_killed_in_mid_load(served):
    served.wait_for(2)
    noted = {}

    async def kill(clients):
        while min(one.turns for one in clients) < 2:
            await asyncio.sleep(0.05)
        noted["before"] = homes(served)
        pid, name = next(iter(served.replicas().items()))
        noted["killed"] = name
        os.kill(pid, signal.SIGKILL)

    clients = asyncio.run(talk(served.url, CLIENTS, TURNS, kill))
    before, after = noted["before"], homes(served)
    lost = {one.name for one in clients if before[one.name] == noted["killed"]}
    assert len(before) == CLIENTS
    assert 0 < len(lost) < CLIENTS
    assert all(after[name] == home for name, home in before.items() if name not in lost)  # they stay
    assert noted["killed"] not in after.values()
    failed = [(one, error) for one in clients for error in one.errors]
    for one, (status, error) in failed:  # answers in flight, one for each session
        assert one.name in lost
        assert (status, error["code"], error["type"]) == (503, "replica_lost", "server_error")
        assert set(error) == {"message", "type", "param", "code"}
    assert all(len(one.errors) <= 1 for one in clients)
    assert all(one.turns + len(one.errors) == TURNS for one in clients)
    served.wait_for(2)  # it is replaced


def test_health_and_metrics_are_of_all_replicas(served):
    served.wait_for(2)
    health = served.health()
    assert (health["status"], health["rows"], health["rows_free"]) == ("ready", 16, 16)
    text = httpx.get(f"{served.url}/metrics", timeout=30).text
    assert "kvkeep_replicas 2" in text.splitlines()
    for name in health["replicas"]:
        assert f'kvkeep_rows{{replica="{name}",model_name="embedded"}} 8.0' in text.splitlines()


def test_a_stream_whose_replica_is_killed_ends_with_an_error(served):
    served.wait_for(2)
    body = {"prompt": "A dog", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        busy = next(name for name, one in served.health()["replicas"].items() if one["rows_free"] < one["rows"])
        (pid,) = [pid for pid, name in served.replicas().items() if name == busy]
        os.kill(pid, signal.SIGKILL)
        events = [line for line in lines if line.startswith("data: ")]
    assert events.pop() == "data: [DONE]"
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "replica_lost"
    assert (
        httpx.post(f"{served.url}/v1/completions", json={"prompt": "A", "max_tokens": 2}, timeout=60).status_code == 200
    )


def test_a_client_that_leaves_frees_its_row(served):
    served.wait_for(2)
    body = {"prompt": "A dog", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=120) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert served.health()["rows_free"] == 15
    rayjobs.wait_for(lambda: served.health()["rows_free"] == 16)


def test_sessions_outlive_the_command(served, tmp_path):
    """SIGTERM ends the command and all that it has started; another one goes on with its sessions."""
    served.wait_for(2)
    if "talk-0" not in homes(served):
        asyncio.run(talk(served.url, 1, 1))
    names = homes(served)
    assert served.end() == 0, served.said
    assert "Traceback" not in served.said
    again = Served(served.sessions.parent, "--budget", 96, "--max-rows", 8, replicas="1")
    try:
        body = {"messages": [{"role": "user", "content": "And?"}], "session_id": "talk-0", "max_tokens": 2}
        answer = httpx.post(f"{again.url}{TALK}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        found = httpx.get(f"{again.url}/v1/sessions", timeout=60).json()["data"]
        assert {one["id"] for one in found} == set(names)
    finally:  # a killed command takes its cluster along
        others = rayjobs.family(again.process.pid)
        again.process.kill()
        again.process.wait()
        rayjobs.wait_for(lambda: not rayjobs.alive(others))


def test_the_application_of_the_page_runs(ray, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "scale.md"
    _, code = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    code = code.replace('"Qwen/Qwen3-0.6B", replicas=(1, 4)', 'replicas=1, name="tiny", keys=["0123456789"]')
    code = code.replace("/shared/sessions", str(tmp_path)).replace("budget=1024, rows=16", "budget=96, rows=2")
    port = free_port()
    around = PAGE.replace("PORT", str(port)).replace("CODE", "\n        ".join(code.splitlines()))
    (tmp_path / "page.py").write_text(around)
    page = subprocess.Popen([sys.executable, tmp_path / "page.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        while b"ready" not in (line := page.stdout.readline()):
            assert line, "the script has ended"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}/chat", timeout=60) as client:
            assert client.get("/health").json()["rows"] == 2
            assert client.get("/v1/models").status_code == 401
            client.headers["Authorization"] = "Bearer 0123456789"
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            assert client.post("/v1/sessions", json={"id": "a"}).status_code == 201
            body = {"prompt": "A dog", "max_tokens": 4, "stream": True}
            assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    finally:
        page.communicate(b"\n", timeout=rayjobs.STUCK_S)
    assert page.returncode == 0


def test_replicas_follow_the_rows_that_are_free(ray, tmp_path):
    served = Served(tmp_path, "--budget", 96, "--max-rows", 2, replicas="1-2")
    try:
        served.wait_for(1)
        body = {"prompt": "A dog", "max_tokens": 1900, "ignore_eos": True}

        async def load():
            async with httpx.AsyncClient(base_url=served.url, timeout=300) as client:
                running = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(12)]
                end = time.monotonic() + 180
                while len((await client.get("/health")).json()["replicas"]) < 2:
                    assert time.monotonic() < end, served.said
                    if all(one.done() for one in running):
                        running = [asyncio.ensure_future(client.post("/v1/completions", json=body)) for _ in range(12)]
                    await asyncio.sleep(0.5)
                for one in running:
                    one.cancel()
                await asyncio.gather(*running, return_exceptions=True)

        asyncio.run(load())
        assert set(served.health()["replicas"]) == set(served.replicas().values())
    finally:
        assert served.end() == 0, served.said
