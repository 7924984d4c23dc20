"""What commands on a cluster of Ray have in common: room for their workers, paths of files there, and their end.

Importing this module imports torch.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvkeep.cli import console
from kvkeep.cli.options import ModelOptions
from kvkeep.policies._head_budgets import PROFILE
from kvkeep.policies.base import Policy, own_options
from kvkeep.scale.cluster import LostClusterError, Need, check_room, check_versions, nodes, own_cpus, share
from kvkeep.scale.driver import ModelRecipe

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
    """Return the resources that each worker needs and its device (``cuda``, ``cpu`` …), after a check that all fit.

    The cluster must have been joined.

    Args:
        count: the number of workers.
        main_bytes: main memory of each worker, if it has no GPU; 0 if it is not known.
        device: the value of ``--device``.
        threads: the value of ``--threads``.
        address: the value of ``--ray-address``.
        what: a word for a worker.
        option: the argument with the number of workers.
        less: what makes a worker smaller.

    Raises:
        InputError: nodes have other versions than this process, or the workers do not fit.
    """
    found = nodes()
    check_versions(found)
    # a worker runs on one device: a GPU, or none
    gpus = int(device.startswith("cuda") or (device == "auto" and any(node.gpus for node in found)))
    cpus = threads or (own_cpus(count, None) if address is None else share(found, count))
    need = Need(cpus=cpus, gpus=gpus, memory=0 if gpus else main_bytes)
    check_room(found, need, count, what=what, option=option, less=less)
    return need, "cuda" if gpus else "cpu" if device == "auto" else device  # a worker sees its own GPU alone


def whole(name: str | None) -> str | None:
    """Return the full path of a file or folder that exists here, since workers run in other folders.

    Other names and ``None`` are returned unchanged.
    """
    if name is None:
        return None
    with suppress(OSError):  # no file has such a name: it is too long, for example
        path = Path(name).expanduser()
        if path.exists():
            return str(path.resolve())
    return name


def whole_rule(head_budget: str | None) -> str | None:
    """Return a rule for heads with the full path of the profile that it names, see `whole`; other rules unchanged."""
    rule, colon, file = (head_budget or "").partition(":")
    return f"{rule}:{whole(file)}" if rule == PROFILE and colon else head_budget


def whole_policy(policy: Policy) -> Policy:
    """Return a policy whose options name files by their full paths, see `whole`; the policy itself if none does."""
    names = [field.name for field in own_options(type(policy)) if field.metadata.get("file")]
    files: dict[str, Any] = {name: whole(getattr(policy, name)) for name in names}
    return replace(policy, **files) if files else policy


def model_recipe(request: ModelOptions, device: str, adapters: Mapping[str, str] | None = None) -> ModelRecipe:
    """Return the recipe by which a worker loads the model of ``request`` on ``device``, with full paths.

    Args:
        request: the options of the command.
        device: of the worker.
        adapters: folders of adapters by their names.
    """
    return ModelRecipe(
        model=whole(request.model),
        dtype=request.dtype,
        device=device,
        load_in=request.load_in,
        threads=request.threads,
        allow_pickle=request.allow_pickle,
        adapters={name: str(whole(folder)) for name, folder in (adapters or {}).items()},
    )


@contextmanager
def ended_with_its_cluster() -> Iterator[None]:
    """End this process at once, with an error, if its cluster goes away while the context lasts.

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
    """Hold back the first Ctrl-C while the context lasts: the yielded function returns whether Ctrl-C was pressed.

    A second Ctrl-C interrupts as usual.
    """
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
