"""A cluster of Ray: started on this machine or joined by its address, and checked before workers are started there."""

from __future__ import annotations

import atexit
import os
import platform
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch

from kvkeep.engine.admission import free_bytes
from kvkeep.errors import InputError, pip_install, show_bytes
from kvkeep.models.threads import cores
from kvkeep.scale import EXTRA
from kvkeep.version import __version__

# A cluster of Ray that goes away: found out before Ray, which ends this process after a minute, without an error.


class LostClusterError(InputError):
    """The cluster has gone away, and whoever asks it for anything waits in vain."""


def check_alive(ray: Any) -> None:
    """Raise an error if the cluster that this process has joined has gone away, so that nobody waits for it in vain.

    Args:
        ray: the package.

    Raises:
        LostClusterError: nothing answers at the cluster's address.
    """
    address = str(ray.get_runtime_context().gcs_address)
    host, _, port = address.rpartition(":")
    try:
        # brackets stand around an IPv6 address
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise LostClusterError(
            f"The cluster of Ray at {address} has gone away. What is written stays: start a cluster, or leave "
            "`ray_address` out, and the same command goes on from there."
        ) from error


@contextmanager
def left(ray: Any) -> Iterator[None]:
    """Leave the Ray cluster when the context ends. If the cluster has gone away, only keep Ray from trying to leave."""
    try:
        yield
    except LostClusterError:
        atexit.unregister(ray.shutdown)  # it would wait for an answer
        raise
    except BaseException:
        ray.shutdown()
        raise
    else:
        ray.shutdown()


OBJECT_STORE = 128 * 2**20
"""Bytes of the object store of a cluster on this machine alone. Lines and answers are small, so little lies there."""
PACKAGES = ("torch", "transformers")
"""Packages whose version may change the last digits of what a model computes, and with them tokens."""
# how Ray says why a worker has died
_DETAIL = re.compile(r"Worker exit detail: (.+?)\.(?: |$)", re.DOTALL)
_SETTINGS = 4  # the type of the frame with which both sides begin
_ANSWER_S = 5.0
"""Seconds in which the head node must answer."""
_SCOUT_S = 120.0
"""Seconds in which a node must describe itself: it may have to start a process that imports torch."""


def need_ray() -> Any:
    """Import Ray, and return its package.

    Raises:
        InputError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError(f"Ray is not installed: {pip_install(EXTRA)}.") from error
    return ray


@dataclass(frozen=True)
class Need:
    """What one worker takes.

    Attributes:
        cpus: CPU cores, one for each thread.
        gpus: GPUs.
        memory: bytes of main memory for weights and rows; 0 if it is not known.
    """

    cpus: int = 1
    gpus: int = 0
    memory: int = 0

    def __str__(self) -> str:
        """Return the need in words, such as ``2 CPUs, 1 GPU and 3.00 GB``."""
        parts = [f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"]
        parts += [f"{self.gpus} GPU"] if self.gpus else []
        parts += [show_bytes(self.memory)] if self.memory else []
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


@dataclass(frozen=True)
class Node:
    """A machine of a cluster.

    Attributes:
        name: its address.
        cpus: CPU cores that Ray gives away.
        gpus: GPUs that Ray gives away.
        memory: bytes of main memory that are free, and that Ray gives away.
        versions: package → version.
    """

    name: str
    cpus: int
    gpus: int
    memory: int
    versions: dict[str, str]

    def fits(self, need: Need) -> int:
        """Return the number of workers with this need for which the node has CPUs, GPUs and memory; 0 if for none."""
        shares = [self.cpus // need.cpus]
        shares += [self.gpus // need.gpus] if need.gpus else []
        shares += [self.memory // need.memory] if need.memory else []
        return min(shares)


@contextmanager
def joined(address: str | None, *, cpus: int) -> Iterator[None]:
    """Join a cluster while the context lasts: the one at an address, or one on this machine alone.

    If this process has joined a cluster already, use that one, and leave it joined.

    Args:
        address: ``host:port`` of a running cluster, or ``auto`` for the one of this machine. Without one, that of the
            variable RAY_ADDRESS; without that, a cluster is started here, and ended with the block.
        cpus: CPU cores that a cluster of this machine alone gives away.

    Raises:
        InputError: Ray is not installed, or no cluster answers at the address.
    """
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "2")  # 20 attempts of Ray take a quarter of an hour
    ray = need_ray()
    if ray.is_initialized():  # the caller's own session
        yield
        return
    address = _meant(address)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": True}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is sent away
        os.environ.setdefault("RAY_worker_niceness", "0")  # workers are the work, as an engine in this process is
        options |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": OBJECT_STORE}
    try:
        ray.init(address=address, **options)
    except Exception as error:  # whatever Ray raises: another version of it, no cluster, a port of something else
        ray.shutdown()  # an attempt that has failed may have started processes
        where = "on this machine" if address in ("local", "auto") else f"at {address}"
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"There is no cluster of Ray {where}: {reason:.300}") from error
    with left(ray):
        yield


def _meant(address: str | None) -> str:
    """Return the address of the cluster to join: the given one, or that of the variable RAY_ADDRESS, or ``local``, for
    one that Ray starts itself.
    """
    return address or os.environ.get("RAY_ADDRESS") or "local"


def check_ray(address: str | None) -> None:
    """Refuse if Ray is not installed, or at an address no cluster of it answers, before a command does any work.

    ``auto``, and a cluster that Ray starts itself, are not tried.

    Args:
        address: as for `joined`.

    Raises:
        InputError: Ray is not installed, the address is no ``host:port``, or nothing or something else answers at it.
    """
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")  # Ray reports deaths on standard output, beside results
    need_ray()
    address = _meant(address)
    if address in ("local", "auto"):
        return
    host, _, port = address.rpartition(":")
    # six digits are too many already, and int() refuses thousands of them
    if "://" in address or not host or not port.isdecimal() or not 0 < int(port[:6]) < 2**16:
        raise InputError(
            f"`ray_address={address}` is no address of a cluster. Give host:port of its head node, as ray start "
            "prints it, or auto for the cluster of this machine. Addresses of Ray's client (ray://) are not supported: "
            "run the job on a node of the cluster."
        )
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as connection:
            # under TLS the answer cannot be read here
            speaks = bool(os.environ.get("RAY_USE_TLS")) or _speaks_http2(connection)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError(
            f"Nothing answers at `ray_address={address}`: {reason}. Start a cluster with ray start, or leave "
            "the address out: the workers then run on this machine."
        ) from error
    if not speaks:
        raise InputError(
            f"What answers at `ray_address={address}` is no cluster of Ray. Give host:port of its head node, as ray "
            "start prints it; the port is 6379 if you have not chosen another."
        )


def _speaks_http2(connection: socket.socket) -> bool:
    """Return whether a server speaks HTTP/2 (RFC 9113, 3.4), as Ray's does. Ray itself would try for minutes."""
    # the client's preface, and an empty SETTINGS frame
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0)))
    try:
        answer = connection.recv(9)
    except OSError:  # it says nothing, or ends the connection
        return False
    return len(answer) >= 4 and answer[3] == _SETTINGS  # a frame's header: three bytes of length, then the type


def own_cpus(workers: int, threads: int | None) -> int:
    """Return the CPU cores of each worker of a cluster on this machine alone: ``threads`` if they are given, else an
    equal share of the cores, at least 1.
    """
    return threads or max(1, cores() // workers)


def share(nodes: Sequence[Node], workers: int) -> int:
    """Return the most CPU cores that each of ``workers`` workers on these nodes can have; 1 if there are too few."""
    most = max((node.cpus for node in nodes), default=1)
    fits = (cpus for cpus in range(most, 1, -1) if sum(node.cpus // cpus for node in nodes) >= workers)
    return next(fits, 1)


def scout() -> dict[str, Any]:
    """Return the free main memory in bytes (``None`` if unknown) of the machine that calls this, and the versions of
    kvkeep, Python and `PACKAGES` there.
    """
    return {
        "free": free_bytes(torch.device("cpu")),
        "versions": {
            "kvkeep": __version__,
            "python": ".".join(platform.python_version_tuple()[:2]),
            # without the build, such as +cpu
            **{name: version(name).partition("+")[0] for name in PACKAGES},
        },
    }


def nodes() -> list[Node]:
    """Return every machine of the joined cluster that is alive, with what it has, after a call to each.

    Raises:
        InputError: a machine has no kvkeep that can be imported, or does not answer.
    """
    ray = need_ray()
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    alive = [node for node in ray.nodes() if node["Alive"]]
    asked = [
        # no CPU, so that a busy node answers, too; on that node alone
        ray.remote(num_cpus=0, max_retries=3)(scout)
        .options(scheduling_strategy=On(node["NodeID"], soft=False))
        .remote()
        for node in alive
    ]
    machines = []
    for node, reference in zip(alive, asked, strict=True):
        name, resources = node["NodeManagerAddress"], node["Resources"]
        try:
            said = ray.get(reference, timeout=_SCOUT_S)
        except Exception as error:  # no kvkeep there, a node that goes away, a process that cannot be started
            raise InputError(
                f"The node {name} cannot run kvkeep: {last_words(error)}. Install kvkeep {__version__} with "
                f"the extra '{EXTRA}' on every node: {pip_install(EXTRA)}."
            ) from error
        # 2**62: the system does not tell what is free
        memory = min(int(resources.get("memory", 0)), said["free"] if said["free"] is not None else 2**62)
        cpus, gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        machines.append(Node(name, cpus, gpus, memory, said["versions"]))
    return machines


def check_versions(machines: Sequence[Node], own: dict[str, str] | None = None) -> None:
    """Refuse nodes whose packages are not those of this process: the tokens would depend on who made them.

    Args:
        machines: the nodes.
        own: package → the version that is right; by default those of this process, see `scout`.

    Raises:
        InputError: a version differs.
    """
    own = own or scout()["versions"]
    for node in machines:
        for name, mine in own.items():
            if node.versions.get(name) != mine:
                raise InputError(
                    f"The node {node.name} has {name} {node.versions.get(name)}, and this process has {mine}. Answers "
                    "would depend on the node that makes them: install the same version everywhere."
                )


def check_room(
    machines: Sequence[Node],
    need: Need,
    workers: int,
    *,
    what: str = "worker",
    option: str = "ray_workers",
    less: str = "`max_rows`, `budget` or `threads`",
) -> None:
    """Refuse more workers than fit into the cluster; the error says how many would.

    Args:
        machines: the machines of the cluster.
        need: what each worker takes.
        workers: their number.
        what: a word for a worker.
        option: the argument with their number.
        less: words for the arguments that make a worker smaller.

    Raises:
        InputError: the workers do not fit.
    """
    fits = sum(node.fits(need) for node in machines)
    if fits >= workers:
        return
    have = "; ".join(
        f"{node.name} has {node.cpus} CPUs" + (f", {node.gpus} GPUs" if need.gpus else "") + _memory(node, need)
        for node in machines[:5]
    )
    more = f"; and {len(machines) - 5} more nodes" if len(machines) > 5 else ""
    remedy = f"Give `{option}={fits}`, or less to each: lower {less}." if fits else f"Lower {less}, or add nodes."
    each = "each" if workers > 1 else ""
    raise InputError(
        f"{workers} {what}{'s' if workers > 1 else ''} of {need} {each}".rstrip()
        + f" do{'' if workers > 1 else 'es'} not fit into the cluster, {fits or 'none'} would: {have}{more}. {remedy}"
    )


def _memory(node: Node, need: Need) -> str:
    """Return the part of an error about a node's free memory; empty if no memory is asked for."""
    return f" and {show_bytes(node.memory)} of free memory" if need.memory else ""


def last_words(error: BaseException) -> str:
    """Return the reason of a Ray error in one line. Such errors are long and begin with a traceback."""
    text = str(getattr(error, "cause", None) or error)  # the worker's own error, where Ray has wrapped one
    if detail := _DETAIL.search(text):
        return f"its process ended ({' '.join(detail[1].split()):.120})"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[-1].rstrip(".") if lines else type(error).__name__)[:300]
