"""What every request passes before its route: where it comes from, the key and its limits; and a line in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.server.errors import RefusalError
from kvkeep.server.rate_limits import COUNTED, Meter, RateLimits
from kvkeep.server.settings import EVERYBODY, PAGE_FILES, ServerSettings
from kvkeep.server.sse import ends, refused

log = logging.getLogger("kvkeep.access")
OPEN = ("/health",)
"""Routes that need no key."""
IGNORED = "X-Kvkeep-Ignored"
"""The header of an answer that names the fields of the request which nobody knows."""
_MOST_NAMED, _MOST_TOLD, _LONGEST = 16, 1024, 80
"""Fields that one header names, fields that the log names in all, and characters of a name."""


class AuthMiddleware:
    """Lets requests with a key in that has not used all that it may, and logs each one without its text.

    Requests of foreign web pages are refused: a browser sends them from a machine that may reach the server.

    Args:
        app: the application behind it.
        settings: of the server.
        limits: of keys.
        origins: origins of web pages that may call the server.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, limits: RateLimits, origins: Sequence[str] = ()) -> None:
        self._app, self._settings, self._limits, self._origins = app, settings, limits, origins
        self._told: set[str] = set()
        self._open = (*OPEN, *PAGE_FILES) if settings.page else OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check where a request comes from, its key and the key's limits, its path and the type of its body; pass it on
        to the application, or answer with a refusal; and log it at its end.

        Later steps find the owner, an event that is set when the request ends, and the meter in ``scope["state"]``.
        Whatever is not HTTP is passed on at once.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), 0
        meter: Meter | None = None

        async def watched(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            self._name_ignored(message, scope)
            # a refusal is over with its first message, as nothing runs for it
            if meter is not None and (status >= 400 or ends(message)):
                meter.end()  # first, so that a client who has the answer may begin the next request
            await send(message)

        owner, ended = EVERYBODY, threading.Event()
        headers, state = Headers(scope=scope), scope.setdefault("state", {})
        try:
            self._check_source(scope, headers)
            if scope["path"] not in self._open:
                owner = self._settings.keys.owner(headers.get("authorization"))
            state.update(owner=owner, ended=ended)
            _check_path(scope)
            _check_body(scope, headers)
            meter = self._begun(scope, owner)
            await self._app(scope, receive, watched)
        except RefusalError as refusal:
            await refused(refusal)(scope, receive, watched)
        except Exception as error:  # a defect; the client learns no more than its name
            log.exception("%s %s failed.", scope["method"], _shown(scope))
            if not status:  # an answer that has begun cannot become another one
                failure = RefusalError(500, f"The server failed: {type(error).__name__}. Its log says more.")
                await refused(failure)(scope, receive, watched)
        finally:
            ended.set()
            if meter is not None:
                meter.end()
            _note(scope, owner, status, time.perf_counter() - start)

    def _check_source(self, scope: Scope, headers: Headers) -> None:
        """Refuse a request that a foreign web page may have sent: by its ``Host`` header, or by what browsers say of
        the page. One that a router sends on was checked there, and is not checked again.

        Raises:
            RefusalError: it may have.
        """
        if "meter" not in scope["state"]:  # `replay` puts one there for each request of a router
            self._settings.check_host(headers.get("host"), scope.get("server"))
            _check_page(scope, headers, self._origins)

    def _name_ignored(self, message: Message, scope: Scope) -> None:
        """Add to a message, if it is the head of an answer, a header that names up to 16 of the request's fields that
        nobody knows, and log those that no request had before. Leave other messages, and answers without such fields,
        alone.
        """
        ignored: Sequence[str] = scope["state"].get("ignored", ())
        if not ignored or message["type"] != "http.response.start":
            return
        # a header may not end with white space, so that an empty name needs a sign
        names = [quote(name[:_LONGEST], errors="replace") or '""' for name in ignored[:_MOST_NAMED]]
        if len(self._told) < _MOST_TOLD and (new := [name for name in names if name not in self._told]):
            self._told.update(new)
            log.warning("Requests have fields that are unknown and ignored: %s.", ", ".join(new))
        message["headers"] = [*message["headers"], (IGNORED.lower().encode(), ", ".join(names).encode())]

    def _begun(self, scope: Scope, owner: str) -> Meter | None:
        """Begin to count a request that runs the model against the limits of its key, and return its meter, which is
        also stored in ``scope["state"]``.

        Return ``None`` for one that runs no model, and for one that a router has sent on and counts itself.

        Raises:
            RefusalError: the key has used all that it may.
        """
        if scope["method"] != "POST" or scope["path"] not in COUNTED or "meter" in scope["state"]:
            return None
        scope["state"]["meter"] = meter = self._limits.begin(owner)
        return meter


def _check_page(scope: Scope, headers: Headers, origins: Sequence[str]) -> None:
    """Refuse a request that a browser sends for a page of another origin that is not one of ``origins``. Programs that
    are no browsers send none of the headers that tell, and pass.

    Raises:
        RefusalError: the page may not call the server.
    """
    origin, allowed = headers.get("origin"), "*" in origins
    if allowed or (origin is not None and origin in origins):
        return
    # a link on another site may open the chat page itself
    opens = scope["method"] == "GET" and scope["path"] == "/" and headers.get("sec-fetch-mode") == "navigate"
    foreign = origin is not None and not _same_origin(origin, headers.get("host"))
    if foreign or (headers.get("sec-fetch-site") == "cross-site" and not opens):
        shown = f"The web page {origin[:_LONGEST]}" if origin is not None else "A web page of another site"
        raise RefusalError(
            403, f"{shown} may not call this server. Name its origin in `allow_origin`.", code="origin_not_allowed"
        )


def _same_origin(origin: str, host: str | None) -> bool:
    """Return whether an ``Origin`` header, such as ``http://localhost:8000``, names the host and port of a ``Host``
    header. The schemes' own ports may be left out on either side; the scheme itself is not compared.
    """
    scheme, _, place = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")  # browsers leave it out, and others need not
    return place != "" and place.removesuffix(port) == (host or "").lower().removesuffix(port)


def _check_body(scope: Scope, headers: Headers) -> None:
    """Refuse a request whose body has no content type, or one other than JSON, which browsers send for any page without
    asking the server first. One without a body passes, and so does any GET, HEAD, OPTIONS or DELETE.

    Raises:
        RefusalError: the body has another content type, or none.
    """
    if scope["method"] in ("GET", "HEAD", "OPTIONS", "DELETE"):
        return
    # a length of 0 may have several digits
    has_body = headers.get("content-length", "0").strip("0") != "" or "transfer-encoding" in headers
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if has_body and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        shown = f"is {kind[:_LONGEST]}" if kind else "has no content type"
        raise RefusalError(
            415, f"The body {shown}. Send JSON with the header Content-Type: application/json.", code="content_type"
        )


def _check_path(scope: Scope) -> None:
    """Refuse a path that ends with a line break: patterns of routes would match it, and the exact paths that count
    would not.

    Raises:
        RefusalError: the path ends with a line break.
    """
    if scope["path"].endswith("\n"):
        raise RefusalError(
            404, f"{scope['method']} {_shown(scope)}: a path ends with a line break; see /openapi.json for all routes."
        )


def _note(scope: Scope, owner: str, status: int, seconds: float) -> None:
    """Log a request that has ended: client, owner of the key, method, path, status (0: nothing was sent) and
    seconds.
    """
    client: Any = scope.get("client") or ("-",)  # none on a unix socket
    log.info("%s %s %s %s %d %.3fs", client[0], owner, scope["method"], _shown(scope), status, seconds)


def _shown(scope: Scope) -> str:
    """Return the first 200 characters of a request's path, with "?" for each that is not printable, so that it cannot
    fake a line of the log.
    """
    return "".join(character if character.isprintable() else "?" for character in str(scope["path"])[:200])
