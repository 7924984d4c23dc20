"""llama.cpp, in the binaries of the npm package node-llama-cpp; the model is a GGUF file.

All prompts are sequences of one context and are worked on at the same time. Keys and values are float16, llama.cpp's
default.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peers import Outcome, Prompt, Run, Unavailable, Work

SCRIPT = Path(__file__).with_suffix(".mjs")
PACKAGE = SCRIPT.parents[2] / ".venv-peer-llama_cpp/node_modules/node-llama-cpp/dist/index.js"


def start(model: str, threads: int) -> tuple[subprocess.Popen[str], Callable[[dict[str, Any]], dict[str, Any]]]:
    """Load a model in a process of its own. Return the process, and what asks it one question as JSON."""
    node = shutil.which("node")
    if node is None or not PACKAGE.exists():
        raise Unavailable("node or its package node-llama-cpp is not there; `make peers` installs the package")
    if not model.endswith(".gguf"):
        raise Unavailable("it reads GGUF files only")
    process = subprocess.Popen([node, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None

    def ask(question: dict[str, Any]) -> dict[str, Any]:
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"llama.cpp has ended with status {process.wait()}")
        return json.loads(answer)

    ask({"package": str(PACKAGE), "model": model, "threads": threads})
    return process, ask


def load(work: Work) -> Run:
    process, ask = start(work.model, work.threads)

    def run(prompts: list[Prompt], new_tokens: int) -> Outcome:
        done = ask({"prompts": prompts, "count": new_tokens})
        times = [answer["times"] for answer in done["answers"]]
        tokens = [answer["tokens"] for answer in done["answers"]]
        return Outcome.at_once(tokens, times, done["seconds"], process.pid)

    return run
