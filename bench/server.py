"""What does HTTP cost: tokens per second, the first token, and stalls beside a long prompt, against the engine alone?

    python bench/server.py [--streams 8 32] [--new 128] [--repeats 3] [--embedded]

One process has the model, the engine and the server; the client is another process, which does little beside reading.
The engine alone and the engine behind HTTP take turns with the same requests. Targets: at least 0.95 of the engine's
tokens per second, at most 5 ms more until the first token of a single stream, and no stall longer than a chunk.
The threads of torch, the web's thread and the client share the cores: ``--threads 1`` shows how much of the difference
is that, and ``OMP_WAIT_POLICY=active`` what it costs if torch's threads spin while they wait.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as kvkeep serve does, before torch is imported

import torch
from lib import arguments, finish, interleaved, kernel, positive, show, speed_model

import kvkeep
from kvkeep.models.load import find, quiet, read_weights
from kvkeep.models.tiny import embedded
from kvkeep.server.app import make_app
from kvkeep.server.model import ServedModel
from kvkeep.server.run import HttpServer, ServerAddress, listen, settle
from kvkeep.server.settings import ServerSettings

_CLIENT = Path(__file__).parent / "lib" / "streams.py"
_STALLED = 7
"""Streams that run while a long prompt arrives."""


@dataclass(frozen=True)
class Asked:
    """A request of both ways.

    Attributes:
        prompt: token ids.
        new: tokens that are generated.
        after: tokens that the first request has when this one is sent.
    """

    prompt: list[int]
    new: int
    after: int = 0

    @property
    def request(self) -> kvkeep.Request:
        """The request to the engine."""
        wish = kvkeep.SamplingParams(max_new_tokens=self.new)
        return kvkeep.Request(prompt=self.prompt, sampling=wish, ignore_end=True)

    @property
    def http(self) -> dict[str, Any]:
        """The request over HTTP."""
        fields = {"max_tokens": self.new, "temperature": 0, "ignore_eos": True, "stream": True}
        return {"body": {"prompt": self.prompt, **fields}, "after": self.after}


class Both:
    """An engine and a server with it.

    Args:
        engine: the engine.
        port: of the server.
    """

    def __init__(self, engine: kvkeep.Engine, port: int) -> None:
        self.engine, self._port = engine, port

    def http(self, asked: list[Asked]) -> list[list[float]]:
        """Run requests over HTTP: for each the time at which it was sent, and the times of its events."""
        job = json.dumps({"port": self._port, "requests": [one.http for one in asked]})
        done = subprocess.run([sys.executable, _CLIENT], input=job, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"The client failed: {done.stderr}")
        times: list[list[float]] = json.loads(done.stdout)
        while self.engine.busy:
            time.sleep(0.001)
        return times

    def alone(self, asked: list[Asked]) -> list[list[float]]:
        """Run the same requests in the engine alone; the same times."""
        times: list[list[float]] = [[] for _ in asked]
        places: dict[int, int] = {}
        left = sorted(range(len(asked)), key=lambda place: asked[place].after)
        while left or self.engine.busy:
            while left and (not asked[left[0]].after or len(times[0]) > asked[left[0]].after):
                place = left.pop(0)
                times[place].append(time.perf_counter())
                places[self.engine.add(asked[place].request)] = place
            for event in self.engine.step():
                if event.text or event.result:  # a token without text of its own makes no event over HTTP
                    times[places[event.id]].append(time.perf_counter())
        return times


def with_text(model: Any, tokenizer: Any) -> None:
    """Keep random weights from choosing tokens that are no text by themselves.

    Over HTTP a token is seen by its text, so a row of halves of characters would look like a stall.
    """
    weights = model.get_output_embeddings().weight
    texts = [tokenizer.decode([token]) for token in range(weights.shape[0])]
    silent = [not text.isascii() or not text.strip() for text in texts]
    with torch.no_grad():
        weights[torch.tensor(silent)] = 0.0


@contextmanager
def both(options: argparse.Namespace) -> Iterator[Both]:
    """The engine and its server."""
    checkpoint = find(embedded())
    with quiet():
        if options.embedded:
            model = read_weights(checkpoint, options.dtype, "cpu")
        else:
            model = speed_model(getattr(torch, options.dtype), options.layers)
            with_text(model, checkpoint.tokenizer)
    settings = {"policy": options.policy, "budget": options.budget, "prefill_chunk": options.chunk}
    place = ServerAddress(port=0)
    with kvkeep.Engine(model, checkpoint.tokenizer, rows=max(options.streams), **settings) as engine:
        ready = threading.Event()
        server = HttpServer(make_app(ServedModel(engine, checkpoint), ServerSettings(name="bench")), place, ready.set)
        with listen(place) as sock:
            thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
            thread.start()
            try:
                ready.wait()
                settle()
                yield Both(engine, sock.getsockname()[1])
            finally:  # the thread would keep the process alive
                server.should_exit = True
                thread.join()


def prompts(pair: Both, count: int, tokens: int, new: int) -> list[Asked]:
    """Requests with random prompts."""
    draw = random.Random(count)
    known = range(3, pair.engine.model.config.vocab_size)  # without the special ones
    return [Asked(draw.choices(known, k=tokens), new) for _ in range(count)]


def speeds(pair: Both, options: argparse.Namespace) -> tuple[list[list[str]], list[dict[str, Any]]]:
    """Tokens per second both ways, at each number of streams."""
    rows, data = [], []
    for streams in options.streams:
        asked = prompts(pair, streams, options.prompt, options.new)
        seconds: dict[str, list[float]] = {"alone": [], "http": []}

        def note(name: str, asked: list[Asked] = asked, seconds: dict[str, list[float]] = seconds) -> None:
            times = getattr(pair, name)(asked)
            seconds[name].append(max(map(max, times)) - min(map(min, times)))

        interleaved({name: lambda name=name: note(name) for name in seconds}, options.repeats, warmup=0)
        alone, http = (streams * options.new / statistics.median(seconds[name]) for name in seconds)
        rows.append([f"{streams} streams", f"{alone:.0f}", f"{http:.0f} tokens/s", f"{http / alone:.3f}", "0.95"])
        data.append({"streams": streams, "ratio": http / alone, "seconds": seconds})
    return rows, data


def first_token(pair: Both, options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The time until the first token of a single stream, both ways."""
    ms: dict[str, list[float]] = {"alone": [], "http": []}

    def note(name: str) -> None:
        (times,) = getattr(pair, name)(prompts(pair, 1, options.prompt, 3))
        ms[name].append(1e3 * (times[1] - times[0]))

    interleaved({name: lambda name=name: note(name) for name in ms}, options.singles, warmup=0)
    alone, http = statistics.median(ms["alone"]), statistics.median(ms["http"])
    row = ["first token, 1 stream", f"{alone:.1f}", f"{http:.1f} ms", f"{http - alone:+.1f} ms", "+5 ms"]
    return row, {"overhead_ms": http - alone, "ms": ms}


def chunk_ms(pair: Both, options: argparse.Namespace) -> float:
    """The median time of a chunk of the long prompt, with no other request."""
    (one,) = prompts(pair, 1, options.long, 1)
    found: list[float] = []
    pair.engine.add(one.request)
    while pair.engine.busy:
        start = time.perf_counter()
        pair.engine.step()
        found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def stall(pair: Both, options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    """The longest time between two tokens of seven streams while a long prompt is read, both ways."""
    new = 32 + 8 * options.long // options.chunk
    running = prompts(pair, _STALLED, options.prompt, new)
    (late,) = prompts(pair, 1, options.long, 2)
    asked = [*running, Asked(late.prompt, late.new, after=16)]
    ms: dict[str, list[float]] = {"alone": [], "http": []}

    def note(name: str) -> None:
        times = getattr(pair, name)(asked)
        gaps = [b - a for one in times[:_STALLED] for a, b in itertools.pairwise(one[1:])]
        ms[name].append(1e3 * max(gaps))

    interleaved({name: lambda name=name: note(name) for name in ms}, options.repeats, warmup=0)
    alone, http = statistics.median(ms["alone"]), statistics.median(ms["http"])
    step = chunk_ms(pair, options)
    row = [
        "longest stall, 7 streams",
        f"{alone:.0f}",
        f"{http:.0f} ms",
        f"{http / alone:.2f}",
        f"1 chunk: {step:.0f} ms",
    ]
    return row, {"ratio": http / alone, "ms": ms, "chunk_ms": step}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--streams", type=positive, nargs="+", default=[8, 32])
    parser.add_argument("--prompt", type=positive, default=16)
    parser.add_argument("--new", type=positive, default=128)
    parser.add_argument("--long", type=positive, default=4096, help="tokens of the prompt that arrives beside streams")
    parser.add_argument("--chunk", type=positive, default=512, help="prompt tokens per step")
    parser.add_argument("--policy", default="h2o")
    parser.add_argument("--budget", type=positive, default=256)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--singles", type=positive, default=30, help="single requests, for the first token")
    parser.add_argument("--embedded", action="store_true", help="the embedded model, whose steps are short")
    options = parser.parse_args()
    options.streams = sorted({*options.streams})
    torch.set_num_threads(options.threads)
    with both(options) as pair:
        pair.http(prompts(pair, 2, options.prompt, 4))
        first, first_data = first_token(pair, options)
        rows, data = speeds(pair, options)
        stalled, stalled_data = stall(pair, options) if max(options.streams) > _STALLED else ([], {})
    name = "the embedded model" if options.embedded else "the model for speed"
    show(
        f"kvkeep serve with {name}, {options.policy} {options.budget}, {options.dtype}, kernel: {kernel()}",
        ["", "engine alone", "through HTTP", "HTTP / alone", "aim"],
        [row for row in (*rows, first, stalled) if row],
        [f"{options.prompt} + {options.new} tokens; the long prompt has {options.long}, in chunks of {options.chunk}."],
    )
    finish({"bench": "server", **vars(options), "speeds": data, "first": first_data, "stall": stalled_data})


if __name__ == "__main__":
    main()
