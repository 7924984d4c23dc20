"""Jobs on Ray as commands of their own: they are started, watched, killed and read again."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

STUCK_S = 600


def inputs(path, lines, new=lambda number: 4 + number % 13):
    """A file of prompts."""
    names = ("Tom", "Anna", "the dog", "a bird", "the old man")
    path.write_text(
        "".join(
            json.dumps(
                {
                    "prompt": f"Once upon a time {names[n % 5]} found {n} stones and",
                    "id": n,
                    "options": {"max_new_tokens": new(n), "ignore_end": True},
                }
            )
            + "\n"
            for n in range(lines)
        )
    )
    return path


def start(source, target, *options):
    """A job in a process of its own."""
    return command("generate", "--input", source, "--output", target, *options)


def command(*words):
    """A command of kvkeep in a process of its own."""
    asked = [sys.executable, "-m", "kvkeep", *map(str, words)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(job):
    """The exit code of a job and what it said."""
    out, err = job.communicate(timeout=STUCK_S)
    return job.returncode, out + err


def run(source, target, *options):
    return finish(start(source, target, *options))


def texts(path):
    """Line number → text, after a check that no line is there twice."""
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    numbers = Counter(one["completion"]["line"] for one in found)
    assert not [number for number, times in numbers.items() if times > 1]
    return {one["completion"]["line"]: (one["id"], one["completion"]["text"]) for one in found}


def count(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _stat(pid):
    """The name and the parent of a process."""
    try:
        name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return "", 0
    return name, parent


def family(pid):
    """Process → name, of all descendants of a process."""
    known = {int(path.name): _stat(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()}
    found = {pid}
    while more := {one for one, (_, parent) in known.items() if parent in found} - found:
        found |= more
    return {one: known[one][0] for one in found - {pid} if known[one][0]}


def workers(job):
    """The processes of a command's workers."""
    return [pid for pid, name in family(job.pid).items() if name.startswith(("ray::Worker", "ray::ModelWorker"))]


def wait_for(condition, job=None):
    """Wait until something holds; the test's own limit ends a wait for what never comes."""
    end = time.monotonic() + STUCK_S
    while not (found := condition()):
        assert time.monotonic() < end
        if job is not None and job.poll() is not None:
            raise AssertionError(f"the job ended: {finish(job)}")
        time.sleep(0.02)
    return found


def kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def alive(pids):
    """Those of some processes that have not ended."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        found += [pid] if state != "Z" else []
    return found
