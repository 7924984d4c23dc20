"""The routes of sessions: make, look at, fork, rewind, pin, drop, save, restore, delete. Their turns are chats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import Request, Response

from kvkeep.engine.request import HeldTokens
from kvkeep.pins import spans
from kvkeep.policies.registry import label
from kvkeep.server.errors import parameter
from kvkeep.server.model import ServedModel
from kvkeep.server.request_queue import in_thread
from kvkeep.server.schemas import DropBody, ForkBody, PinBody, RewindBody, SessionBody, body_of
from kvkeep.server.session_registry import ServerSession, SessionRegistry
from kvkeep.server.settings import ServerSettings
from kvkeep.server.sse import owner_of, reply


def held(entry: ServerSession, served: ServedModel) -> dict[str, Any]:
    """Return what a session's memory holds after its last finished turn, in the form of the API, see
    `ServedModel.shown`; before the first turn nothing.
    """
    session = entry.session
    ids = session.token_ids
    memory = HeldTokens.of(ids, session.snapshot().contents) if ids else HeldTokens()
    return {"id": entry.id, "object": "session.positions", **served.shown(memory, session.budget)}


class SessionRoutes:
    """Answers what is asked about sessions.

    Args:
        served: the model.
        sessions: the sessions.
        settings: of the server.
    """

    def __init__(self, served: ServedModel, sessions: SessionRegistry, settings: ServerSettings) -> None:
        self._served, self._sessions, self._settings = served, sessions, settings

    async def make(self, request: Request) -> Response:
        """Open a session, and answer with its description."""
        body = await body_of(request, SessionBody, self._settings, empty=True)
        adapter = self._settings.adapter_of(body.model)
        return reply(await in_thread(lambda: self._card(self._sessions.make(owner_of(request), body, adapter))), 201)

    async def all(self, request: Request) -> Response:
        """Answer with the names of all sessions of the key, open or saved."""
        names = await in_thread(lambda: self._sessions.names(owner_of(request)))
        return reply({"object": "list", "data": [{"id": name, "object": "session"} for name in names]})

    async def one(self, request: Request) -> Response:
        """Answer with the description of a session."""
        return reply(await in_thread(lambda: self._card(self._find(request))))

    async def positions(self, request: Request) -> Response:
        """Answer with the positions that the memory of a session holds."""
        return reply(await in_thread(lambda: held(self._find(request), self._served)))

    async def fork(self, request: Request) -> Response:
        """Copy a session after its last finished turn, and answer with the description of the copy."""
        body = await body_of(request, ForkBody, self._settings, empty=True)
        return reply(await self._changed(lambda: self._sessions.fork(owner_of(request), name(request), body.id)), 201)

    async def rewind(self, request: Request) -> Response:
        """Take back the last turns of a session, and answer with its description."""
        body = await body_of(request, RewindBody, self._settings, empty=True)
        return reply(await self._changed(lambda: self._sessions.rewind(owner_of(request), name(request), body.turns)))

    async def pin(self, request: Request) -> Response:
        """Set which tokens of a session may not be evicted, in place of its pins, and answer with its description.

        Raises:
            RefusalError: the pins are missing, or the session refuses.
        """
        body = await body_of(request, PinBody, self._settings)
        if body.pins is None:
            raise parameter("pins", "is missing: spans of positions such as [[0, 12]], or [] for none")
        pins = spans([(start, stop) for start, stop in body.pins])
        return reply(await self._changed(lambda: self._sessions.pin(owner_of(request), name(request), pins)))

    async def drop(self, request: Request) -> Response:
        """Let messages or spans of tokens of a session leave its memory, and answer with its description.

        Raises:
            RefusalError: neither messages nor spans are given, or the session refuses.
        """
        body = await body_of(request, DropBody, self._settings)
        if not body.messages and not body.spans:
            raise parameter("messages", "is missing: indexes of messages such as [3], or spans of positions in spans")
        return reply(await self._changed(lambda: self._sessions.drop(owner_of(request), name(request), body)))

    async def save(self, request: Request) -> Response:
        """Write a session to the disk, and answer with its description."""
        return reply(await self._changed(lambda: self._sessions.save(owner_of(request), name(request))))

    async def restore(self, request: Request) -> Response:
        """Go back to the memory with which a session was saved last, and answer with its description."""
        return reply(await self._changed(lambda: self._sessions.restore(owner_of(request), name(request))))

    async def remove(self, request: Request) -> Response:
        """Close a session, delete its file, and answer that it is deleted."""
        await in_thread(lambda: self._sessions.remove(owner_of(request), name(request)))
        return reply({"id": name(request), "object": "session.deleted", "deleted": True})

    def _find(self, request: Request) -> ServerSession:
        """Return the session that a request's path names, opened if it is only saved. It counts as in use until the
        request ends. It may wait, so call this in a thread.

        Raises:
            RefusalError: see `SessionRegistry.find`.
        """
        return self._sessions.find(owner_of(request), name(request), request.state.ended)

    async def _changed(self, work: Callable[[], ServerSession]) -> dict[str, Any]:
        """Call ``work``, which changes a session and returns it, in a thread, and return the session's description
        after that. If servers share the folder, the session is written to its file as well.

        The registry is locked meanwhile, so that the description is that of this change.

        Raises:
            RefusalError: ``work`` refuses, or raises an error of kvkeep.
        """

        def changed() -> dict[str, Any]:
            with self._sessions.lock:
                entry = work()
                self._sessions.keep(entry)
                return self._card(entry)

        return await in_thread(changed)

    def _card(self, entry: ServerSession) -> dict[str, Any]:
        """Return a session's description in the form of the API, see `card`."""
        return card(entry, self._settings.model_name(entry.session.adapter))


def card(entry: ServerSession, model: str) -> dict[str, Any]:
    """Return a session's description in the form of the API: name, model, settings, messages, numbers of its memory,
    and how many turns can be taken back.

    Args:
        entry: the session.
        model: the name of its model, with the adapter.
    """
    session = entry.session
    return {
        "id": entry.id,
        "object": "session",
        "created": entry.created,
        "model": model,
        "policy": label(session.policy),
        "budget": session.budget,
        "messages": [dict(message) for message in session.messages],
        "seen_tokens": len(session.token_ids),
        "dropped": [list(span) for span in session.history.dropped],
        "kv_bytes": session.nbytes,
        "turns_to_rewind": entry.turns_to_rewind,
    }


def name(request: Request) -> str:
    """Return the session's name in a request's path, without the owner's."""
    return str(request.path_params["name"])
