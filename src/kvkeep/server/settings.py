"""The settings of a server."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvkeep.parameters import (
    CHAT_MAX_NEW_TOKENS,
    KEY_REQUESTS,
    KEY_TOKENS,
    MAX_BODY,
    MAX_MODEL_LEN,
    MAX_QUEUE,
    PAGE,
    QUEUE_TIMEOUT,
    READ_TIMEOUT,
    REQUEST_TIMEOUT,
)
from kvkeep.server.errors import RefusalError, unknown

# API keys: who may use the server, and to whom things belong.

EVERYBODY = "everybody"
"""The owner of everything on a server without keys."""

_SCRIPTS = (
    "page",
    "api",
    "conversations",
    "elements",
    "log",
    "markdown",
    "memory",
    "vendor/marked.umd",
    "vendor/purify.min",
)
PAGE_FILES = {
    "/": ("page.html", "text/html"),
    "/page.css": ("page.css", "text/css"),
    **{f"/{name}.js": (f"{name}.js", "text/javascript") for name in _SCRIPTS},
}
"""The files of the page at ``/``, which need no key: path → file and media type."""


LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "[::1]")
"""The names of a server for clients on its own machine. A foreign web page has no address that begins with them."""


def host_name(host: str) -> str:
    """Return the host name in a ``Host`` header, in lower case, without the port and without the dot at the end of a
    full name. An address of IPv6 keeps its brackets.
    """
    name, colon, port = host.strip().lower().rpartition(":")
    # an address in brackets has colons of its own, and a full name may end with the dot of the root
    whole = not colon or host.rstrip().endswith("]") or not port.isdecimal()
    return (host.strip().lower() if whole else name).rstrip(".")


def owner_of(key: str) -> str:
    """Return the name of the owner of an API key: 16 hexadecimal digits of its hash, from which it cannot be read."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()[:16]


CONVERSATION = "conv_"
"""Names of sessions that keep a chat begin so."""


def full_name(owner: str, name: str) -> str:
    """Return ``OWNER--NAME``, by which the engine, its file and its lease know the session of an owner."""
    return f"{owner}--{name}"


@dataclass(frozen=True)
class ApiKeys:
    """The keys that a server accepts.

    Attributes:
        owners: key → the name of its owner.
    """

    owners: Mapping[str, str] = field(default_factory=dict, repr=False)

    def owner(self, header: str | None) -> str:
        """Return the owner's name of the key in an ``Authorization`` header; ``everybody`` if the server has no keys.

        All keys are compared, each in constant time, so that the time does not tell which one is alike.

        Raises:
            RefusalError: the header has no key, or an unknown one.
        """
        if not self.owners:
            return EVERYBODY
        kind, _, given = (header or "").partition(" ")
        if kind.lower() != "bearer" or not given.strip():
            raise _refused("No API key was given. Send the header Authorization: Bearer KEY.")
        # hashes are compared: they have one length, and `compare_digest` takes no texts beyond ASCII
        shown = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
        found = None  # no break below: the time must not tell which key is alike
        for key, owner in self.owners.items():
            if hmac.compare_digest(shown, hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()):
                found = owner
        if found is None:
            raise _refused("The API key is not one that this server knows.")
        return found


def _refused(message: str) -> RefusalError:
    """Return the refusal with status 401 for a missing or wrong API key."""
    return RefusalError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server treats its clients.

    Attributes:
        name: the model's name in answers.
        keys: the keys that clients must show; without any, everybody is served.
        max_new_tokens: of a chat that does not say how many.
        max_model_len: the most tokens of a prompt and its answer together; ``None``: no limit.
        max_queue: requests that may wait for a row; more are refused.
        queue_timeout_s: seconds that a request may wait for a row.
        request_timeout_s: seconds that a request may take in all.
        read_timeout_s: seconds in which a client must send a request, and read a piece of an answer.
        max_body_bytes: size of the largest body.
        ping_s: seconds after which a stream without news gets a comment.
        max_responses: answers of ``/v1/responses`` that are kept to be continued.
        max_sessions: sessions that may be open.
        session_dir: the engine's folder of saved sessions.
        key_requests: requests of a key that may wait or run at once.
        key_tokens: tokens that a key may use per minute.
        page: whether there is a page at ``/``.
        pin_system: whether system messages that are short are never evicted, unless a chat says otherwise.
        allowed_hosts: names of the server in ``Host`` headers, beside `LOOPBACK_HOSTS`; ``*``: any. With a name of its
            own that leads to this machine, a web page could otherwise drive the server (DNS rebinding).
        adapters: the names of the model's adapters, as the engine has them.
    """

    name: str
    keys: ApiKeys = field(default_factory=ApiKeys)
    max_new_tokens: int = CHAT_MAX_NEW_TOKENS.default
    max_model_len: int | None = MAX_MODEL_LEN.default
    max_queue: int = MAX_QUEUE.default
    queue_timeout_s: float = QUEUE_TIMEOUT.default
    request_timeout_s: float = REQUEST_TIMEOUT.default
    read_timeout_s: float = READ_TIMEOUT.default
    max_body_bytes: int = MAX_BODY.default
    ping_s: float = 15.0
    max_responses: int = 256
    max_sessions: int = 1024
    session_dir: str | None = None
    key_requests: int | None = KEY_REQUESTS.default
    key_tokens: int | None = KEY_TOKENS.default
    page: bool = PAGE.default
    pin_system: bool = True
    allowed_hosts: tuple[str, ...] = ()
    adapters: tuple[str, ...] = ()

    def check_host(self, host: str | None, address: tuple[str, int | None] | None) -> None:
        """Refuse a request whose ``Host`` header has none of this server's names: those for its own machine, the
        allowed hosts, and the address at which the connection has arrived. Otherwise a page could have a name of its
        own that leads here (DNS rebinding).

        Args:
            host: its ``Host`` header; ``None``, as programs of HTTP/1.0 send none, is not refused.
            address: host and port at which the connection has arrived; ``None``: unknown.

        Raises:
            RefusalError: the server does not have this name.
        """
        if host is None or "*" in self.allowed_hosts:
            return
        name = host_name(host)
        if name in LOOPBACK_HOSTS or name in self.allowed_hosts:
            return
        # in headers an address of IPv6 stands in brackets
        if address is not None and name in (address[0], f"[{address[0]}]"):
            return
        raise RefusalError(
            403,
            f"The host {host[:80]!r} is none of this server's names. Use one of them, or name it in "
            "`allowed_host` when the server is started.",
            code="host_not_allowed",
        )

    @property
    def short_name(self) -> str:
        """Return the last part of the model's name if that is a path: ``smollm2`` for ``/models/smollm2/``; else the
        whole name.
        """
        return self.name.replace("\\", "/").rstrip("/").rpartition("/")[2] or self.name

    def model_name(self, adapter: str | None) -> str:
        """Return the name by which clients ask for the model with an adapter, ``MODEL:ADAPTER``; for ``None`` the
        model's.
        """
        return self.name if adapter is None else f"{self.name}:{adapter}"

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a client asks for with the name of a model; ``None`` for the model without one.

        A model of a folder or a hub's organisation answers to the last part of its name, too, and that of a GGUF file
        to the last part without ``.gguf``.

        Args:
            model: the name in a body; ``None``: it names none.

        Raises:
            RefusalError: no model that runs has this name.
        """
        if model is None:
            return None
        for name in (self.name, self.short_name, self.short_name.removesuffix(".gguf")):
            if model == name:
                return None
            for adapter in self.adapters:
                if model == f"{name}:{adapter}":
                    return adapter
        known = ", ".join(map(self.model_name, (None, *self.adapters)))
        raise unknown("model", model, f"This server runs {known}; see /v1/models.")

    def check_adapter(self, model: str | None, adapter: str | None) -> None:
        """Refuse a request that continues a conversation under the name of another model, or with another adapter.

        Args:
            model: the name in a body; ``None``, which is not refused: it names none.
            adapter: the conversation's adapter; ``None``: the base model.

        Raises:
            RefusalError: the name is not that of the model with the conversation's adapter.
        """
        if model is not None and self.adapter_of(model) != adapter:
            raise RefusalError(
                400,
                f"The conversation was begun with {self.model_name(adapter)}, and goes on with it. Name it, or begin "
                f"another conversation with {model[:80]}.",
                param="model",
            )
