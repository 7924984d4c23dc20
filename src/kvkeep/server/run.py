"""Running the application: sockets, signals, slow clients, and the end."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvkeep.errors import InputError
from kvkeep.parameters import GRACE, HOST, PORT, READ_TIMEOUT

_MOST_HEADER_BYTES = 2**16
"""Bytes of the head of a request; a larger one is refused."""
_SWITCH_S = 0.001
"""Seconds after which a thread that computes lets another one run: clients wait while the engine's thread steps."""


@dataclass(frozen=True, kw_only=True)
class ServerAddress:
    """Where a server listens, and how it ends.

    Attributes:
        host, port: of a TCP socket; port 0: any free one.
        unix_socket: path of a unix socket in place of it.
        tls_cert, tls_key: files for HTTPS.
        grace_s: seconds that running requests have after the first signal to end.
        read_timeout_s: seconds in which the head of a request must come.
    """

    host: str = HOST.default
    port: int = PORT.default
    unix_socket: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    grace_s: float = GRACE.default
    read_timeout_s: float = READ_TIMEOUT.default

    def url(self, port: int) -> str:
        """Return the URL of the server, with this port in place of its own, which may be 0; or ``unix:PATH`` for a unix
        socket.
        """
        if self.unix_socket is not None:
            return f"unix:{self.unix_socket}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_cert is None else 'https'}://{host}:{port}"


def listen(place: ServerAddress) -> socket.socket:
    """Return a new non-blocking socket that is bound to the address. A TCP socket listens already, a unix socket not
    yet.

    Raises:
        InputError: the address cannot be used.
    """
    try:
        if place.unix_socket is not None:
            return _unix(place.unix_socket)
        family = socket.AF_INET6 if ":" in place.host else socket.AF_INET
        made = socket.create_server((place.host, place.port), family=family, backlog=2048)  # as uvicorn's own
    except (OSError, OverflowError) as error:  # an OverflowError: no port has such a number
        why = (getattr(error, "strerror", None) or str(error)).partition(" (")[0]  # Python adds the address there
        if place.unix_socket is not None:
            raise InputError(f"`unix_socket={place.unix_socket}` cannot be used: {why}. Give another.") from error
        raise InputError(
            f"{place.host} port {place.port} cannot be used: {why}. Give another `host` or `port`; port 0 takes any."
        ) from error
    made.setblocking(False)
    return made


def _unix(path: str) -> socket.socket:
    """Return a new unix socket that is bound to a path, and that only this user may connect to. A socket there that
    nobody listens on, as a killed server leaves it, is removed.

    Raises:
        OSError: a server listens there, the path is something else, or it cannot be bound.
    """
    with suppress(FileNotFoundError):
        if stat.S_ISSOCK(os.stat(path).st_mode) and not _answers(path):
            os.unlink(path)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)  # a chmod after bind would leave a moment in which others can connect
    try:
        made.bind(path)
    except BaseException:
        made.close()
        raise
    finally:
        os.umask(before)
    made.setblocking(False)
    return made


def _answers(path: str) -> bool:
    """Return whether a server listens on the unix socket at a path, by connecting to it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except OSError:  # nobody listens
            return False
    return True


def check_tls(place: ServerAddress) -> None:
    """Refuse an address whose ``tls_cert`` and ``tls_key`` are no certificate in PEM and its key without a password. An
    address without both passes.

    Raises:
        InputError: only one of them is given, or a file is missing, cannot be read, or does not belong to the other.
    """
    import ssl

    if (place.tls_cert is None) != (place.tls_key is None):
        raise InputError("HTTPS needs a certificate and its key: give both `tls_cert` and `tls_key`.")
    if place.tls_cert is None or place.tls_key is None:
        return
    try:
        # without a password OpenSSL would ask for that of an encrypted key on the terminal
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(place.tls_cert, place.tls_key, password="")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{place.tls_cert} and {place.tls_key} are no certificate and key in PEM: {why}.") from error


def settle() -> None:
    """Tune a process that only serves: leave the objects that are there now out of later garbage collections, and let
    the engine's thread have the interpreter back from the web's thread after a millisecond.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(_SWITCH_S)


class HttpServer(uvicorn.Server):
    """A server that ends after SIGTERM or Ctrl-C when running requests have ended, and at once after a second Ctrl-C.

    Args:
        app: the application.
        place: where it listens.
        started: called when requests are taken.

    Attributes:
        interrupted: whether Ctrl-C ended it.
    """

    def __init__(self, app: FastAPI, place: ServerAddress, started: Callable[[], object] = lambda: None) -> None:
        """Configure uvicorn for an application and an address; it does not listen yet."""
        # uvicorn takes a class and makes a protocol for each connection, so the time-out is a class's attribute
        protocol = type("Http", (_Http,), {"timeout_s": place.read_timeout_s})
        config = uvicorn.Config(
            app,
            log_config=None,  # the command that starts the server sets up logging
            http=protocol,
            ws="none",
            lifespan="on",
            proxy_headers=False,
            server_header=False,
            access_log=False,  # `AuthMiddleware` writes one
            timeout_graceful_shutdown=max(1, round(place.grace_s)),  # uvicorn takes whole seconds
            h11_max_incomplete_event_size=_MOST_HEADER_BYTES,
            ssl_certfile=place.tls_cert,
            ssl_keyfile=place.tls_key,
        )
        super().__init__(config)
        self._app, self._begun, self.interrupted = app, started, False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to take requests, on the given sockets or on the address, and then call ``started``."""
        await super().startup(sockets)
        self._begun()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:  # uvicorn would raise them again at the end
        """Handle SIGINT and SIGTERM with `handle_exit` while the context lasts; in other threads than the main one do
        nothing.
        """
        taken = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, self.handle_exit) for number in taken}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain: refuse new requests, and end when running ones have ended. Ctrl-C after an earlier signal
        ends the server at once.
        """
        self._app.state.queue.draining = True
        self.force_exit = self.force_exit or (self.should_exit and sig == signal.SIGINT)
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.should_exit = True


class _Http(H11Protocol):
    """A connection whose client must send the head of a request in time. uvicorn limits only the time between two."""

    timeout_s = 30.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()

    def _watch(self) -> None:
        """Start the timer, unless it runs, while the connection awaits the head of a request, and stop it while a
        request is answered.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget()
        elif self._timer is None:
            self._timer = self.loop.call_later(self.timeout_s, self._slow)

    def _forget(self) -> None:
        """Stop the timer for the head of a request, if it runs."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _slow(self) -> None:
        """Close the connection, called when the timer ends, unless a request is being answered."""
        self._timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()
