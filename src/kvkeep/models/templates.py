"""Chat templates, filled in by a process of their own, since a template is a program that may never end.

Jinja's sandbox keeps a template from files and from Python. It does not bound time and memory: two nested loops, a
macro that calls itself twice or ``10**10**10`` never end, and nothing inside a process can stop all of these. So a
second process fills in templates. It is started when it is first needed, answers in well under a millisecond, and is
killed when it does not.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from transformers import PreTrainedTokenizerBase

from kvkeep.errors import InputError

TIMEOUT_S = 10.0
MEMORY_BYTES = 2**30
_START_S = 60.0
_REMEDY = "Use `raw=True` to leave it out and write the whole prompt."


def fill(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Mapping[str, str]]) -> str:
    """The text of a conversation in the tokenizer's chat template, up to the beginning of the model's answer.

    Raises:
        InputError: the template fails, or takes too long or too much memory.
    """
    try:
        asked = {
            **tokenizer.special_tokens_map,
            "chat_template": tokenizer.get_chat_template(),
            "messages": list(map(dict, messages)),
            "add_generation_prompt": True,
        }
        line = json.dumps(asked)
    except Exception as error:  # templates without a default, tokens that are not text
        raise InputError(f"The tokenizer's chat template cannot be used ({error!s:.200}). {_REMEDY}") from error
    with _LOCK:
        answer = _WORKER.ask(line)
    if "text" not in answer:
        raise InputError(f"The tokenizer's chat template fails ({answer['error']}). {_REMEDY}")
    return answer["text"]


class _Worker:
    """The process that fills in templates; it is started again after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def ask(self, line: str) -> dict[str, str]:
        """The process's answer to a line: ``text`` or ``error``.

        Raises:
            InputError: the process does not start.
        """
        if self._process is None or self._process.poll() is not None:
            self.end()
            self._process = self._start()
        with suppress(OSError):  # a process that has just ended does not answer either
            cast(IO[str], self._process.stdin).write(line + "\n")
            cast(IO[str], self._process.stdin).flush()
        answer = self._read(self._process, TIMEOUT_S)
        if answer is None:
            self.end()
            return {"error": f"it takes more than {TIMEOUT_S:.0f} s or {MEMORY_BYTES >> 20} MiB"}
        return answer

    def end(self) -> None:
        """Kill the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            with suppress(OSError):  # it did not read its last input
                self._process.communicate()
            self._process = None

    def _start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("render.py")
        places = os.pathsep.join(place for place in sys.path if place)
        process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(MEMORY_BYTES)],  # -P: import no module from the script's folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": places, "USE_TORCH": "0", "PYTHONIOENCODING": "utf-8"},
        )
        if self._read(process, _START_S) is None:
            process.kill()
            process.communicate()
            raise InputError(
                f"The process that fills in chat templates ({sys.executable} {script}) does not start. {_REMEDY}"
            )
        return process

    @staticmethod
    def _read(process: subprocess.Popen[str], timeout_s: float) -> dict[str, str] | None:
        """One line of the process; ``None`` if it ends first. It is killed when the time is over."""
        clock = threading.Timer(timeout_s, process.kill)
        clock.start()
        try:
            line = cast(IO[str], process.stdout).readline()
        finally:
            clock.cancel()
        found: Any = json.loads(line) if line.endswith("\n") else None
        return cast(dict[str, str] | None, found)


_WORKER = _Worker()
_LOCK = threading.Lock()


def _begin_anew() -> None:
    """Use another process in a forked child: two that share one would take each other's answers."""
    global _WORKER, _LOCK
    _WORKER, _LOCK = _Worker(), threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)
atexit.register(lambda: _WORKER.end())
