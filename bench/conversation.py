"""How long does a chat client wait for the first token of its next turn, if it sends the whole conversation each time?

    python bench/conversation.py MODEL [--context 2400] [--budget 100%] [--turns 6] [--new 40] [--repeats 1]
    python bench/conversation.py MODEL.gguf --peer    # beside llama.cpp, whose sequence keeps its tokens

`kvkeep serve MODEL` is started as a user starts it, once with its default (`--conversations auto`) and once with
`fresh`, which reads everything anew; by default the budget holds the whole conversation. Each client pastes a piece
of kvkeep's documentation and then asks about it, turn by turn; answers are streamed. Ratios are those of a later turn
to the first one. llama.cpp is not asked over HTTP, which saves it a few milliseconds. With `--dtype float32` the
texts of both ways must be equal, which is checked and shown.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from lib import finish, positive, show
from peers import llama_cpp

from kvkeep.models.load import find
from kvkeep.models.tokenization import encode_chat

DOCS = Path(__file__).parents[1] / "docs"
QUESTIONS = ("What is this text about?", "Which of its words matter most?", "Say that again in one sentence.")
WAYS = ("auto", "fresh")
CHARACTERS = 3
"""Characters of the documentation for a token, rather too few."""


@dataclass
class Talk:
    """A conversation as its client knows it.

    Attributes:
        messages: all messages.
        first_s: seconds until the first token of each turn.
        cached: tokens of each turn's prompt that were not read again.
        prompt: tokens of each turn's prompt.
    """

    messages: list[dict[str, str]]
    first_s: list[float] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)

    @property
    def answers(self) -> list[str]:
        """What the model said."""
        return [message["content"] for message in self.messages if message["role"] == "assistant"]


@contextmanager
def server(model: str, way: str, options: argparse.Namespace) -> Iterator[str]:
    """Run `kvkeep serve`, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    budget = max(64, int(room(options) * options.budget))
    words = [sys.executable, "-m", "kvkeep", "serve", model, "--port", str(port), "--budget", str(budget)]
    words += ["--conversations", way, "--dtype", options.dtype]
    running = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while not answers(f"{address}/health"):
            if running.poll() is not None:
                raise SystemExit(f"{' '.join(words)} ended with {running.returncode}.")
            time.sleep(0.2)
        yield address
    finally:
        running.terminate()
        running.wait()


def room(options: argparse.Namespace) -> int:
    """Tokens of a whole conversation, and some more."""
    return options.context + options.turns * (options.new + 60) + 200


def answers(url: str) -> bool:
    """Whether a server is there."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def turn(address: str, talk: Talk, question: str, new: int) -> None:
    """Send the conversation with one more message, and read the answer."""
    talk.messages.append({"role": "user", "content": question})
    wish = {"messages": talk.messages, "max_tokens": new, "temperature": 0, "stream": True}
    body = json.dumps({**wish, "stream_options": {"include_usage": True}}).encode()
    asked = urllib.request.Request(f"{address}/v1/chat/completions", body, {"Content-Type": "application/json"})
    start, first, said = time.perf_counter(), None, ""
    with urllib.request.urlopen(asked, timeout=3600) as events:
        for line in events:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", []):
                piece = choice["delta"].get("content") or ""
                first = first or (time.perf_counter() if piece else None)
                said += piece
            if usage := event.get("usage"):
                talk.prompt.append(usage["prompt_tokens"])
                talk.cached.append((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))
    talk.first_s.append((first or time.perf_counter()) - start)
    talk.messages.append({"role": "assistant", "content": said})


def talked(address: str, text: str, options: argparse.Namespace) -> Talk:
    """Hold a whole conversation."""
    talk = Talk([])
    for number in range(options.turns):
        question = QUESTIONS[number % len(QUESTIONS)]
        turn(address, talk, f"{text}\n\n{question}" if number == 0 else question, options.new)
    return talk


def texts(options: argparse.Namespace) -> list[str]:
    """A text of its own for each client."""
    whole = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    size = options.context * CHARACTERS
    starts = range(0, max(1, len(whole) - size), max(1, (len(whole) - size) // options.clients))
    return [whole[start : start + size] for start, _ in zip(starts, range(options.clients), strict=False)]


def measured(model: str, way: str, options: argparse.Namespace) -> list[Talk]:
    """Hold all conversations under one way to read them, all clients at once."""
    with server(model, way, options) as address:
        turn(address, Talk([]), "Hello", 2)  # what is built with the first request is not measured
        with ThreadPoolExecutor(options.clients) as clients:
            return list(clients.map(lambda text: talked(address, text, options), texts(options)))


def beside(options: argparse.Namespace) -> list[Talk]:
    """Hold the conversations with llama.cpp, one after the other."""
    checkpoint = find(options.model)
    talks = []
    process, ask = llama_cpp.start(options.model, len(os.sched_getaffinity(0)))
    for text in [None, *texts(options)]:
        talk, new = Talk([]), {"room": room(options)}
        for number in range(1 if text is None else options.turns):  # the first one is not measured
            question = "Hello" if text is None else QUESTIONS[number % len(QUESTIONS)]
            talk.messages.append(
                {"role": "user", "content": f"{text}\n\n{question}" if text and not number else question}
            )
            ids = encode_chat(checkpoint, talk.messages)[0].tolist()
            found = ask({**new, "prompt": ids, "count": options.new})
            (answer,), new = found["answers"], {}
            talk.first_s.append(answer["times"][0])
            talk.prompt.append(len(ids))
            talk.cached.append(found["cached"])
            said = checkpoint.tokenizer.decode(answer["tokens"], skip_special_tokens=True)
            talk.messages.append({"role": "assistant", "content": said})
        talks.append(talk)
    process.terminate()
    return talks[1:]


def line(way: str, talks: Sequence[Talk]) -> list[str]:
    """A line of the table: the first turn, the others, and their ratio."""
    first = median(talk.first_s[0] for talk in talks)
    later = median(seconds for talk in talks for seconds in talk.first_s[1:])
    worst = max(seconds for talk in talks for seconds in talk.first_s[1:])
    cached = sum(sum(talk.cached[1:]) for talk in talks) / sum(sum(talk.prompt[1:]) for talk in talks)
    return [way, f"{first:.2f}", f"{later:.2f}", f"{worst:.2f}", f"{later / first:.2f}", f"{cached:.0%}"]


def share(text: str) -> float:
    """A share such as 50%."""
    return float(text.removesuffix("%")) / 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", metavar="MODEL", help="a chat model: hub name, folder or GGUF file")
    parser.add_argument("--context", type=positive, default=2400, help="about so many tokens in the first message")
    parser.add_argument("--turns", type=positive, default=6)
    parser.add_argument("--new", type=positive, default=40, help="tokens of an answer, at most")
    parser.add_argument("--clients", type=positive, default=1, help="conversations at once, each with its own text")
    parser.add_argument("--repeats", type=positive, default=1, help="servers of each kind, in turn")
    parser.add_argument("--budget", type=share, default=1.0, help="share of the conversation, e.g. 50%%")
    parser.add_argument("--peer", action="store_true", help="llama.cpp as well, after `make peers`")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto")
    options = parser.parse_args()
    if options.turns < 2:
        parser.error("a later turn is compared with the first one: --turns is 2 or more")
    found: dict[str, list[Talk]] = {way: [] for way in WAYS}
    for _ in range(options.repeats):
        for way in WAYS:
            found[way] += measured(options.model, way, options)
        if options.peer:
            found.setdefault("llama.cpp", []).extend(beside(options))
    equal = sum(a.answers == b.answers for a, b in zip(*(found[way] for way in WAYS), strict=True))
    notes = [f"{equal} of {len(found['auto'])} conversations have equal texts in both ways ({options.dtype})"]
    longest = max(max(talk.prompt) for talk in found["auto"])
    title = f"{Path(options.model).name}: {options.clients} clients, {options.turns} turns, up to {longest} tokens"
    columns = ["conversations", "first turn s", "later turns s", "longest s", "later / first", "not read again"]
    show(title, columns, [line(way, talks) for way, talks in found.items()], notes)
    runs = {way: [vars(talk) for talk in talks] for way, talks in found.items()}
    finish({"bench": "conversation", **vars(options), "equal": equal, "runs": runs})


if __name__ == "__main__":
    main()
