"""What commands on a cluster of Ray have in common: room for their workers, paths of files there, and their end.

Importing this module imports torch.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvkeep.cli import console
from kvkeep.errors import InputError
from kvkeep.scale.cluster import LostClusterError, Need, check_room, check_versions, nodes, own_cpus, share

PROCESS_BYTES = 400 * 10**6
"""Main memory of a worker beside weights and caches: Python, torch, buffers."""


def room_for(
    count: int,
    main_bytes: int,
    *,
    device: str,
    threads: int | None,
    address: str | None,
    what: str = "worker",
    option: str = "ray_workers",
    less: str = "`max_rows`, `budget` or `threads`",
) -> tuple[Need, str]:
    """What each of some workers takes, and the device that it uses, after a check that all fit. The cluster was joined.

    Args:
        count: the number of workers.
        main_bytes: main memory of each, if it has no GPU; 0 if it is not known.
        device: the value of ``--device``.
        threads: the value of ``--threads``.
        address: the value of ``--ray-address``.
        what: a word for a worker.
        option: the argument with their number.
        less: what makes a worker smaller.

    Raises:
        InputError: nodes have other versions than this process, or the workers do not fit.
    """
    found = nodes()
    check_versions(found)
    gpus = int(device.startswith("cuda") or (device == "auto" and any(node.gpus for node in found)))
    cpus = threads or (own_cpus(count, None) if address is None else share(found, count))
    need = Need(cpus=cpus, gpus=gpus, memory=0 if gpus else main_bytes)
    check_room(found, need, count, what=what, option=option, less=less)
    return need, "cuda" if gpus else "cpu" if device == "auto" else device  # a worker sees its own GPU alone


def whole(name: str | None) -> str | None:
    """The whole path of a file or a folder, which a worker looks up from another folder; a hub name as it is."""
    if name is None:
        return None
    with suppress(OSError):
        path = Path(name).expanduser()
        if path.exists():
            return str(path.resolve())
    return name


@contextmanager
def ended_with_its_cluster() -> Iterator[None]:
    """End this process with an error if its cluster has gone away.

    Ray's threads, which still look for the cluster, would crash an ordinary end of the process.
    """
    try:
        yield
    except LostClusterError as error:
        console.error(str(error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(console.BAD_INPUT)


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Delay the first Ctrl-C: the function that this yields returns True after it. The second one ends the process."""
    pressed = False

    def press(*args: object) -> None:
        nonlocal pressed
        pressed = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, press)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


# Commands in processes that torchrun has started: all of them work, and the first one speaks and writes.
#
# Importing this module imports neither torch nor transformers.

SPLIT = ("generate",)
"""Commands that split a model over processes."""

WAIT_S = 5.0
"""Seconds that a process other than the first one waits before it fails: torchrun ends all when one has failed."""


def processes() -> int:
    """The number of processes that torchrun has started; 1 without torchrun."""
    return _number("WORLD_SIZE") if os.environ.get("TORCHELASTIC_RUN_ID") else 1


def leads() -> bool:
    """Whether this process speaks and writes."""
    return processes() == 1 or _number("RANK") == 0


def _number(name: str) -> int:
    found = os.environ.get(name, "")
    return int(found) if found.isdecimal() else 1


@contextmanager
def quiet_followers(words: Sequence[str]) -> Iterator[None]:
    """Refuse a command that runs in one process alone, and silence all processes but the first one.

    The others say why they fail only if the first one does not fail as well, and says it.

    Args:
        words: the command line without the program.

    Raises:
        SystemExit: torchrun has started several processes for another command.
    """
    if processes() == 1:
        yield
        return
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in SPLIT:
        if leads():
            console.error(f"torchrun has started {processes()} processes, and kvkeep {name} runs in one: leave it out.")
        else:
            time.sleep(WAIT_S)
        sys.exit(console.BAD_INPUT)
    if leads():
        yield
        return
    with tempfile.TemporaryFile() as said:
        spoken, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):
                traceback.print_exc()
            if not isinstance(error, SystemExit) or error.code:
                sys.stderr.flush()
                time.sleep(WAIT_S)
                said.seek(0)
                os.write(spoken, said.read())
            raise


def refuse_standard_input() -> None:
    """Refuse to read standard input, of which each process would get a part.

    Raises:
        InputError: torchrun has started several processes.
    """
    if processes() > 1:
        raise InputError("Processes of torchrun cannot share standard input. Give the text as an option, or a file.")


def told(value: Any) -> Any:
    """A value of the first process, which JSON can hold, in all processes. They must have joined."""
    if processes() == 1:
        return value
    import torch
    from torch import distributed as dist

    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    raw = json.dumps(value).encode() if leads() else b""
    size = torch.tensor([len(raw)], device=device)
    dist.broadcast(size, 0)
    sent = torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8).to(device)
    sent = sent if leads() else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(sent, 0)
    return json.loads(bytes(sent.cpu().tolist()))
