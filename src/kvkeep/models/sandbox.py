"""A process of its own for work that may never end: it answers JSON lines, and is killed when it takes too long."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

_START_S = 300.0
"""Seconds until the script is ready. It was asked nothing yet, so only a machine without a free core takes long."""

_PIPE_BYTES = 2**16
"""Bytes that are read at once: what a pipe of Linux holds."""


class SandboxProcess:
    """A process that runs a script of kvkeep. It is started when it is first asked, and again after it was killed.

    The script prints ``{}`` when it is ready, and then one JSON line for each line that it reads.

    Args:
        script: the script.
        memory_bytes: the script's argument: memory that the process may still allocate when it is ready.
    """

    def __init__(self, script: Path, memory_bytes: int) -> None:
        self._script, self._memory_bytes = script, memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._starter = 0  # the process that has started it; a forked child would take its parent's answers

    @property
    def command(self) -> str:
        """Return the command that starts the process, for messages."""
        return f"{sys.executable} {self._script}"

    @property
    def runs(self) -> bool:
        """Return whether this process has started the sandbox and it still runs. `ask` starts it otherwise."""
        return self._process is not None and self._starter == os.getpid() and self._process.poll() is None

    def ask(self, line: str, timeout_s: float) -> dict[str, Any] | None:
        """Send a line to the process and return its answer; ``None`` if it ended or took too long and was killed.

        Raises:
            OSError: the process does not start.
        """
        if not self.runs:
            self.end()  # one that has ended is waited for; a forked child leaves its parent's alone
            self._process = self._start()
        process = cast("subprocess.Popen[bytes]", self._process)
        # the process waits for a line, since one that has not answered was killed: it takes this one at once
        with suppress(OSError):  # a process that has just ended does not answer either
            cast(IO[bytes], process.stdin).write(line.encode() + b"\n")
            cast(IO[bytes], process.stdin).flush()
        answer = None
        try:
            with suppress(TimeoutError):
                answer = self._read(process, timeout_s)
        finally:
            if answer is None:  # also after Ctrl-C: a late answer would be taken for the next line's
                self.end()
        return answer

    def end(self) -> None:
        """Kill the process, if there is one. A forked child leaves its parent's alone."""
        if self._process is not None and self._starter != os.getpid():
            # else Python would warn at its end that the process still runs, or wait for it
            self._process.returncode = 0
        elif self._process is not None:
            self._process.kill()
            with suppress(OSError):  # it did not read its last input
                self._process.communicate()
        self._process = None

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the process, wait until it is ready, and return it.

        Raises:
            OSError: it does not start, ends at once, or is not ready in time and was killed.
        """
        self._starter = os.getpid()
        # the script finds the packages that this process finds, but nothing in the working folder, which "" stands for
        places = os.pathsep.join(place for place in sys.path if place)
        process = subprocess.Popen(
            [sys.executable, "-P", str(self._script), str(self._memory_bytes)],  # -P: import nothing from its folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,  # Ctrl-C on a terminal is for kvkeep, which goes on with this process afterwards
            # USE_TORCH: transformers does not import torch, which takes seconds and much of the memory
            env={**os.environ, "PYTHONPATH": places, "USE_TORCH": "0", "PYTHONIOENCODING": "utf-8"},
        )
        try:
            if self._read(process, _START_S) is not None:
                return process
            with suppress(subprocess.TimeoutExpired):  # its output ends a moment before it does
                process.wait(1.0)
            process.kill()
            process.communicate()
            why = f"it ends with code {process.returncode}"
        except TimeoutError:
            process.communicate()
            why = f"it is not ready after {_START_S:.0f} s"
        raise OSError(f"{self.command}: {why}")

    @staticmethod
    def _read(process: subprocess.Popen[bytes], timeout_s: float) -> dict[str, Any] | None:
        """Read one line of the process as JSON; return ``None`` if the process ends first.

        Raises:
            TimeoutError: the time was over, and the process is killed.
        """
        end, line = time.monotonic() + timeout_s, b""
        output = cast(IO[bytes], process.stdout).fileno()
        with selectors.DefaultSelector() as selector:  # a timer would start a thread, which takes longer than an answer
            selector.register(output, selectors.EVENT_READ)
            while not line.endswith(b"\n"):
                if not selector.select(max(0.0, end - time.monotonic())):
                    process.kill()
                    raise TimeoutError
                piece = os.read(output, _PIPE_BYTES)
                if not piece:
                    return None
                line += piece
        return cast("dict[str, Any]", json.loads(line))
