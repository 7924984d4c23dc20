"""A server on loopback in a thread of its own, with the embedded model, and what its clients send."""

from __future__ import annotations

import functools
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from comparable_model import DTYPE

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
httpx = pytest.importorskip("httpx")

import kvkeep  # noqa: E402
from kvkeep.models.load import find, quiet, read_weights  # noqa: E402
from kvkeep.models.tiny import embedded  # noqa: E402
from kvkeep.server.app import make_app  # noqa: E402
from kvkeep.server.model import ServedModel, tool_use_of  # noqa: E402
from kvkeep.server.run import HttpServer, ServerAddress, listen  # noqa: E402
from kvkeep.server.settings import ApiKeys, ServerSettings, owner_of  # noqa: E402

NAME = "tiny"
HELLO = [{"role": "user", "content": "Once upon a time"}]
WAIT_S = 60.0
ANSWER = 64
"""Tokens of an answer that does not say how many: by itself the model goes on for hundreds."""
JSON = {"Content-Type": "application/json"}


@functools.cache
def checkpoint(folder=None):
    with quiet():
        return find(folder or embedded())


@functools.cache
def model(folder=None, adapters=()):
    with quiet():
        # answers are compared with those of requests alone
        return read_weights(checkpoint(folder), DTYPE, adapters=dict(adapters))


def keys(*found):
    return ApiKeys({key: owner_of(key) for key in found})


class Running:
    """A server that runs: its address, its engine, and a client."""

    def __init__(self, port, engine, queue, served=None, limits=None):
        self.port, self.engine, self.queue, self.served, self.limits = port, engine, queue, served, limits
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=WAIT_S, headers=JSON)

    def post(self, path, body=None, **options):
        return self.client.post(path, json=body, **options)

    def chat(self, **body):
        return self.post("/v1/chat/completions", {"messages": HELLO, "max_tokens": 4, "temperature": 0, **body})

    def complete(self, **body):
        return self.post("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0, **body})

    def refused(self, answer, status=400):
        """The error of an answer, which has the shape of OpenAI's."""
        assert answer.status_code == status, answer.text
        (error,) = answer.json().values()
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        return error

    def idle(self):
        """Wait until every row is back."""
        end = time.monotonic() + WAIT_S
        while self.engine.busy or self.queue.active:
            assert time.monotonic() < end, (self.engine.n_running, self.queue.active)
            time.sleep(0.01)
        return True

    def raw(self):
        """A socket."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)


@contextmanager
def serve(*, budget=128, rows=4, engine=None, origins=(), folder=None, adapters=(), tool_form="auto", **settings):
    """Run a server until the block ends."""
    settings.setdefault("max_new_tokens", ANSWER)
    options = {"budget": budget, "rows": rows, **(engine or {})}
    made = kvkeep.Engine(model(folder, adapters), checkpoint(folder).tokenizer, **options)
    served = ServedModel(made, checkpoint(folder), tool_use=tool_use_of(checkpoint(folder), tool_form))
    place = ServerAddress(port=0, read_timeout_s=settings.get("read_timeout_s", 30.0), grace_s=5.0)
    app = make_app(served, ServerSettings(name=NAME, **settings), origins)
    with made, listening(app, place) as port:
        running = Running(port, made, app.state.queue, served, app.state.limits)
        running.responses = app.state.responses
        try:
            yield running
        finally:
            running.client.close()


@contextmanager
def listening(app, place):
    """The port of a server that runs an application in a thread until the block ends."""
    ready = threading.Event()
    server = HttpServer(app, place, ready.set)
    with listen(place) as sock:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        assert ready.wait(WAIT_S)
        try:
            yield sock.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


def alone(prompt, *, raw=False, messages=None, budget=128, **options):
    """The text that a prompt gets from an engine of its own."""
    wishes = {name: options.pop(name) for name in ("policy", "stop", "sequence", "budget_", "pins") if name in options}
    sampling = kvkeep.SamplingParams(**{"max_new_tokens": 4, **options})
    request = kvkeep.Request(prompt=prompt, messages=messages, raw=raw, sampling=sampling, **wishes)
    with kvkeep.Engine(model(), checkpoint().tokenizer, budget=budget, rows=1) as engine:
        return engine.generate(request)[0]


def events(answer):
    """The objects of a stream, and whether it ended as it should."""
    lines = [line for line in answer.text.split("\n\n") if line and not line.startswith(":")]
    assert all(line.startswith("data: ") for line in lines), lines
    found = [line.removeprefix("data: ") for line in lines]
    assert found[-1] == "[DONE]"
    return [json.loads(one) for one in found[:-1]]
