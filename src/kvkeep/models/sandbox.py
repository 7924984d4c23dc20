"""A process of its own for work that may never end: it answers JSON lines, and is killed when it takes too long."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

_START_S = 300.0
"""Seconds until the script is ready. It was asked nothing yet, so only a machine without a free core takes long."""

_READ_BYTES = 2**16


class SandboxProcess:
    """A process that runs a script of kvkeep. It is started when it is first asked, and again after it was killed.

    The script prints ``{}`` when it is ready, and then one JSON line for each line that it reads.

    Args:
        script: the script.
        memory_bytes: the script's argument: memory that the process may still allocate when it is ready.
    """

    def __init__(self, script: Path, memory_bytes: int) -> None:
        self._script, self._memory_bytes = script, memory_bytes
        self._process: subprocess.Popen[str] | None = None
        self._starter = 0  # the process that has started it; a forked child would take its parent's answers

    @property
    def command(self) -> str:
        """Return the command that starts the process, for messages."""
        return f"{sys.executable} {self._script}"

    @property
    def runs(self) -> bool:
        """Return whether the process runs. If it does not, the next question starts another one."""
        return self._process is not None and self._starter == os.getpid() and self._process.poll() is None

    def ask(self, line: str, timeout_s: float) -> dict[str, Any] | None:
        """Return the answer to a line; ``None`` if the process ends first, or is killed because the time is over.

        Raises:
            OSError: the process does not start.
        """
        if not self.runs:
            self.end()
            self._process = self._start()
        process = cast("subprocess.Popen[str]", self._process)
        with suppress(OSError):  # a process that has just ended does not answer either
            cast(IO[str], process.stdin).write(line + "\n")
            cast(IO[str], process.stdin).flush()
        answer = self._read(process, timeout_s)
        if answer is None:
            self.end()
        return answer

    def end(self) -> None:
        """Kill the process, if there is one. A forked child leaves its parent's alone."""
        if self._process is not None and self._starter != os.getpid():
            self._process.returncode = 0
        elif self._process is not None:
            self._process.kill()
            with suppress(OSError):  # it did not read its last input
                self._process.communicate()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        self._starter = os.getpid()
        places = os.pathsep.join(place for place in sys.path if place)
        process = subprocess.Popen(
            [sys.executable, "-P", str(self._script), str(self._memory_bytes)],  # -P: import nothing from its folder
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            env={**os.environ, "PYTHONPATH": places, "USE_TORCH": "0", "PYTHONIOENCODING": "utf-8"},
        )
        if self._read(process, _START_S) is None:
            with suppress(subprocess.TimeoutExpired):  # its output ends a moment before it does
                process.wait(1.0)
            process.kill()
            process.communicate()
            late = process.returncode == -signal.SIGKILL
            why = f"it is not ready after {_START_S:.0f} s" if late else f"it ends with code {process.returncode}"
            raise OSError(f"{self.command}: {why}")
        return process

    @staticmethod
    def _read(process: subprocess.Popen[str], timeout_s: float) -> dict[str, Any] | None:
        """Return one line of the process; ``None`` if it ends first, or the time is over."""
        latest = time.monotonic() + timeout_s
        source = cast(IO[str], process.stdout).fileno()
        poll = select.poll()  # select.select takes no file numbers above 1023, which a server has
        poll.register(source, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            left_s = latest - time.monotonic()
            if left_s <= 0 or not poll.poll(1000 * left_s):
                return None
            part = os.read(source, _READ_BYTES)
            if not part:  # the process has ended
                return None
            line += part
        return cast("dict[str, Any]", json.loads(line))
