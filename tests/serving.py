"""A server with replicas as a command of its own, and clients that talk to it while replicas are killed."""

import asyncio
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import rayjobs

UP_S = 300
TALK = "/v1/chat/completions"


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def replicas(pid, sessions):
    """Process → name of each replica that a process has started: the folder of its sessions, which only it has open."""
    found = {}
    for one, name in rayjobs.family(pid).items():
        if name.startswith("ray::ServeReplica"):
            opened = {Path(os.path.realpath(file)) for file in Path(f"/proc/{one}/fd").glob("*")}
            folders = [file.name for file in opened if file.parent == sessions.resolve()]
            found[one] = next((folder for folder in folders if folder.startswith("replica-")), "")
    return {one: name.removeprefix("replica-") for one, name in found.items() if name}


class Served:
    """``kvkeep serve --ray-replicas`` with the embedded model.

    Attributes:
        url: its address.
        process: the command.
    """

    def __init__(self, folder, *words, replicas="2"):
        self.sessions, self._said = folder / "sessions", folder / "said"
        command = [sys.executable, "-m", "kvkeep", "serve", "--ray-replicas", replicas, "--port", "0"]
        command += ["--threads", "1", "--session-dir", str(self.sessions), *map(str, words)]
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        with self._said.open("w") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
        end = time.monotonic() + UP_S
        while not (found := re.search(r"(http://\S+)/v1", self.said)):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.1)
        self.url = found[1]

    @property
    def said(self):
        return self._said.read_text()

    def replicas(self):
        """Process → name of each replica."""
        return replicas(self.process.pid, self.sessions)

    def health(self):
        return httpx.get(f"{self.url}/health", timeout=30).json()

    def wait_for(self, count):
        """Wait until a number of replicas take requests."""
        rayjobs.wait_for(lambda: len(self.health().get("replicas", ())) == count)

    def end(self):
        """End the command, and wait for it and for all that it has started."""
        others = rayjobs.family(self.process.pid)
        self.process.terminate()
        code = self.process.wait(120)
        rayjobs.wait_for(lambda: not rayjobs.alive(others))
        return code


class Talk:
    """A client with a session of its own.

    Attributes:
        turns: number of those that were answered.
        seen: tokens of the session after them.
        errors: status and error object of each turn that failed.
    """

    def __init__(self, url, number):
        self.name, self.number = f"talk-{number}", number
        self.http = httpx.AsyncClient(base_url=url, timeout=180)
        self.turns, self.errors, self.seen = 0, [], 0

    async def begin(self):
        assert (await self.http.post("/v1/sessions", json={"id": self.name})).status_code == 201

    async def turn(self, text="And then?"):
        """Send a turn; note its answer or its error.

        A turn whose answer was lost is part of the session, or not. No turn that was answered may be missing.
        """
        body = {"messages": [{"role": "user", "content": text}], "session_id": self.name, "max_tokens": 4}
        body |= {"temperature": 0, "ignore_eos": True}
        answer = await self.http.post(TALK, json=body)
        if answer.status_code != 200:
            self.errors.append((answer.status_code, answer.json()["error"]))
            now = (await self.http.get(f"/v1/sessions/{self.name}")).json()["seen_tokens"]
            assert now == self.seen or self.seen < now <= self.seen + 20
            self.seen = now
            return
        usage = answer.json()["usage"]
        before, own = usage["prompt_tokens_details"]["cached_tokens"], usage["total_tokens"]
        assert own > self.seen
        assert before in (self.seen, max(0, self.seen - 1)), (before, self.seen)  # the last token may be read again
        self.turns, self.seen = self.turns + 1, own


async def talk(url, count, turns, while_it_runs=None):
    """Let clients talk side by side; do something in between."""
    clients = [Talk(url, number) for number in range(count)]
    await asyncio.gather(*(one.begin() for one in clients))

    async def whole(one):
        for _ in range(turns):
            await one.turn()

    work = asyncio.gather(*(whole(one) for one in clients))
    if while_it_runs is not None:
        await while_it_runs(clients)
    await work
    for one in clients:
        await one.http.aclose()
    return clients
