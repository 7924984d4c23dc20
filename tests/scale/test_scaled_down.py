"""Ray Serve takes a replica away while it answers. `make test-ray` runs this."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
import rayjobs
from serving import TALK, free_port, replicas

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own warnings are no errors of ours

TOKENS = 800
SOON_S = 8.0
SERVER = """
import sys
from kvkeep.scale import cluster
from kvkeep.scale.ray_serve import ENGINES, application
port, folder = sys.argv[1:]
with cluster.joined(None, cpus=2):
    import ray
    from ray import serve
    from ray.serve._private.common import DeploymentID
    from ray.serve.context import _get_global_client
    serve.start(http_options={"port": int(port)})
    chat = application(replicas=2, name="tiny", session_dir=folder, budget=96, rows=4)
    serve.run(chat, name="chat", route_prefix="/", external_scaler_enabled=True)
    print("ready", flush=True)
    for line in sys.stdin:
        controller = _get_global_client()._controller
        ray.get(controller.update_deployment_replicas.remote(DeploymentID(ENGINES, "chat"), int(line)))
        print("told", flush=True)
    serve.shutdown()
"""
"""Two replicas, whose number is then read from the standard input, and asked for as an external scaler does it."""


class Scaled:
    """A server whose number of replicas can be changed."""

    def __init__(self, folder):
        self.sessions, port = folder / "sessions", free_port()
        (folder / "server.py").write_text(SERVER)
        command = [sys.executable, folder / "server.py", str(port), self.sessions]
        with (folder / "said").open("w") as said:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=said, text=True
            )
        try:
            self.hear("ready")
        except AssertionError:
            self.process.kill()
            raise
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def hear(self, word):
        while word not in (line := self.process.stdout.readline()):
            assert line, "the server has ended"

    def scale(self, number):
        self.process.stdin.write(f"{number}\n")
        self.process.stdin.flush()
        self.hear("told")

    def body(self, name, tokens=8):
        messages = [{"role": "user", "content": "And then?"}]
        return {
            "messages": messages,
            "session_id": name,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }

    def turn(self, name):
        """The text of a turn, which must come soon."""
        start = time.monotonic()
        answer = self.http.post(TALK, json=self.body(name))
        assert answer.status_code == 200, answer.text
        assert time.monotonic() - start < SOON_S
        return answer.json()["choices"][0]["message"]["content"]

    def fork(self, name, copy):
        assert self.http.post(f"/v1/sessions/{name}/fork", json={"id": copy}).status_code == 201

    def card(self, name):
        return self.http.get(f"/v1/sessions/{name}").json()

    def home(self, name):
        """The replica that has the file of a session."""
        found = list(self.sessions.glob(f"replica-*/*--{name}.kvkeep"))
        return found[0].parent.name if found else None

    def end(self):
        others = rayjobs.family(self.process.pid)
        self.http.close()
        self.process.stdin.close()
        assert self.process.wait(120) == 0
        rayjobs.wait_for(lambda: not rayjobs.alive(others))


class Answer(threading.Thread):
    """A long answer of a session.

    Attributes:
        lines: its events.
    """

    def __init__(self, scaled, name):
        super().__init__(daemon=True)
        self._scaled, self._body = scaled, {**scaled.body(name, TOKENS), "stream": True}
        self.begun, self.lines = threading.Event(), []
        self.start()
        assert self.begun.wait(120)

    def run(self):
        with self._scaled.http.stream("POST", TALK, json=self._body) as answer:
            for line in answer.iter_lines():
                self.begun.set()
                self.lines += [line] if line.startswith("data: ") else []

    def check(self):
        """Check that it is whole."""
        self.join(120)
        assert self.lines[-1] == "data: [DONE]"
        assert json.loads(self.lines[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


@pytest.fixture
def scaled(ray, tmp_path):
    pytest.importorskip("ray.serve", reason="Ray Serve is not installed: make test-ray")
    made = Scaled(tmp_path)
    yield made
    if made.process.poll() is None:
        made.end()


def made_on_both(scaled):
    """A session on each replica, of which each has a turn; a copy that is to be busy; and the text of the next turn."""
    texts = {}
    for name in ("left", "right"):
        assert scaled.http.post("/v1/sessions", json={"id": name}).status_code == 201
        scaled.turn(name)
        scaled.fork(name, f"{name}-busy")
        scaled.fork(name, f"{name}-twin")
        texts[name] = scaled.turn(f"{name}-twin")
    assert scaled.home("left") != scaled.home("right")
    return texts


def test_sessions_of_a_replica_that_is_taken_away_go_on_while_it_answers(scaled):
    texts = made_on_both(scaled)
    homes = {name: scaled.home(name) for name in texts}
    seen = {name: scaled.card(f"{name}-busy")["seen_tokens"] for name in texts}
    answers = {name: Answer(scaled, f"{name}-busy") for name in texts}
    scaled.scale(1)
    moved = rayjobs.wait_for(lambda: [name for name in texts if scaled.card(name) and scaled.home(name) != homes[name]])
    assert answers[moved[0]].is_alive()
    assert {name: scaled.turn(name) for name in texts} == texts
    assert scaled.home(f"{moved[0]}-busy") == homes[moved[0]]
    assert answers[moved[0]].is_alive()
    for name, answer in answers.items():
        answer.check()
        assert scaled.card(f"{name}-busy")["seen_tokens"] > seen[name] + TOKENS
        scaled.turn(f"{name}-busy")
    assert scaled.turn(f"{moved[0]}-twin")
    rayjobs.wait_for(lambda: [scaled.home("left")] == [one.name for one in scaled.sessions.glob("replica-*")])
    names = {one["id"] for one in scaled.http.get("/v1/sessions").json()["data"]}
    assert names == {f"{name}{more}" for name in texts for more in ("", "-busy", "-twin")}


def test_a_replica_that_is_killed_while_it_hands_over_loses_no_answered_turn(scaled):
    texts = made_on_both(scaled)
    homes = {name: scaled.home(name) for name in texts}
    busy = {name: scaled.card(f"{name}-busy") for name in texts}
    answers = {name: Answer(scaled, f"{name}-busy") for name in texts}
    running = {f"replica-{name}": pid for pid, name in replicas(scaled.process.pid, scaled.sessions).items()}
    scaled.scale(1)
    moved = rayjobs.wait_for(lambda: [name for name in texts if scaled.card(name) and scaled.home(name) != homes[name]])
    os.kill(running[homes[moved[0]]], signal.SIGKILL)
    assert {name: scaled.turn(name) for name in texts} == texts
    answers[moved[0]].join(120)
    assert json.loads(answers[moved[0]].lines[-2].removeprefix("data: "))["error"]["code"] == "replica_lost"
    after = scaled.card(f"{moved[0]}-busy")
    assert (after["messages"], after["seen_tokens"]) == (busy[moved[0]]["messages"], busy[moved[0]]["seen_tokens"])
    for name in texts:
        answers[name].join(120)
        scaled.turn(f"{name}-busy")
        scaled.turn(f"{name}-twin")
