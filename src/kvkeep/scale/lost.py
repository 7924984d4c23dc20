"""A cluster of Ray that goes away: found out before Ray, which ends this process after a minute, without an error."""

from __future__ import annotations

import atexit
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvkeep.errors import InputError

_ANSWER_S = 5.0


class LostClusterError(InputError):
    """The cluster has gone away, and whoever asks it for anything waits in vain."""


def check_alive(ray: Any) -> None:
    """Refuse to wait for a cluster that has gone away.

    Raises:
        LostClusterError: nothing answers at its address.
    """
    address = str(ray.get_runtime_context().gcs_address)
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise LostClusterError(
            f"The cluster of Ray at {address} has gone away. What is written stays: start a cluster, or leave "
            "`ray_address` out, and the same command goes on from there."
        ) from error


@contextmanager
def left(ray: Any) -> Iterator[None]:
    """A context after which this process has left its cluster, unless that has gone away."""
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
