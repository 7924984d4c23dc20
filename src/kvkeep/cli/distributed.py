"""Commands in processes that torchrun has started: all of them work, and the first one speaks and writes.

Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kvkeep.cli import console
from kvkeep.errors import InputError

SPLIT = ("generate",)
"""Commands that split a model over processes."""

WAIT_S = 5.0
"""Seconds that a process other than the first one waits before it fails: torchrun ends all when one has failed."""


def processes() -> int:
    """Return how many processes torchrun has started; 1 without torchrun."""
    # containers of a cluster may set WORLD_SIZE as well; the id comes from torchrun alone
    return _number("WORLD_SIZE") if os.environ.get("TORCHELASTIC_RUN_ID") else 1


def leads() -> bool:
    """Return whether this process prints and writes files: it is the only one, or the first that torchrun started."""
    return processes() == 1 or _number("RANK") == 0


def _number(name: str) -> int:
    """Return the number that torchrun has put into an environment variable; 1 without it."""
    found = os.environ.get(name, "")
    return int(found) if found.isdecimal() else 1


@contextmanager
def quiet_followers(words: Sequence[str]) -> Iterator[None]:
    """Silence all processes but the first one while the context lasts, and refuse a command that runs in one process.

    Without torchrun do nothing. Other processes report a failure only if the first one does not.

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
        os.dup2(nothing, 1)  # for the rest of the process, which ends with the context
        os.dup2(said.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if isinstance(error, Exception):  # else it has been told, or is Ctrl-C
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
    """Return in all processes the first one's ``value``, as JSON hands it on; a single process gets its own back.

    All must have joined, and all must call this.
    """
    if processes() == 1:
        return value
    import torch
    from torch import distributed as dist

    # NCCL, which torchrun's processes use on GPUs, sends tensors on a GPU only
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    raw = json.dumps(value).encode() if leads() else b""
    size = torch.tensor([len(raw)], device=device)
    dist.broadcast(size, 0)
    sent = torch.frombuffer(bytearray(raw or b" "), dtype=torch.uint8).to(device)  # torch takes no empty buffer
    sent = sent if leads() else torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.broadcast(sent, 0)
    return json.loads(bytes(sent.cpu().tolist()))
