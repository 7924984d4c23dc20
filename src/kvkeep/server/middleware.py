"""What every request passes before its route: the key and its limits, and a line in the log after it."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvkeep.server.errors import RefusalError
from kvkeep.server.rate_limits import COUNTED, Meter, RateLimits
from kvkeep.server.settings import EVERYBODY, PAGE_FILES, ServerSettings
from kvkeep.server.sse import ends, refused

log = logging.getLogger("kvkeep.access")
OPEN = ("/health",)
"""Routes that need no key."""


class AuthMiddleware:
    """Lets requests with a key in that has not used all that it may, and logs each one without its text.

    Args:
        app: the application behind it.
        settings: of the server.
        limits: of keys.
    """

    def __init__(self, app: ASGIApp, settings: ServerSettings, limits: RateLimits) -> None:
        self._app, self._settings, self._limits = app, settings, limits
        self._open = (*OPEN, *PAGE_FILES) if settings.page else OPEN

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the key and its limits, pass the request on or answer with a refusal, and log the request.

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
            if meter is not None and (status >= 400 or ends(message)):
                meter.end()  # first, so that a client who has the answer may begin the next request
            await send(message)

        owner, ended = EVERYBODY, threading.Event()
        try:
            if scope["path"] not in self._open:
                owner = self._settings.keys.owner(Headers(scope=scope).get("authorization"))
            scope.setdefault("state", {}).update(owner=owner, ended=ended)
            _check_path(scope)
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

    def _begun(self, scope: Scope, owner: str) -> Meter | None:
        """Return the meter of a request whose tokens count for its key.

        Return ``None`` for other requests, and for one from a router, which has its own meter.

        Raises:
            RefusalError: the key has used all that it may.
        """
        if scope["method"] != "POST" or scope["path"] not in COUNTED or "meter" in scope["state"]:
            return None
        scope["state"]["meter"] = meter = self._limits.begin(owner)
        return meter


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
    """Log a request: client, owner, path, status and seconds.

    Characters that could fake a log line are taken out of the path.
    """
    client: Any = scope.get("client") or ("-",)
    log.info("%s %s %s %s %d %.3fs", client[0], owner, scope["method"], _shown(scope), status, seconds)


def _shown(scope: Scope) -> str:
    return "".join(character if character.isprintable() else "?" for character in str(scope["path"])[:200])
