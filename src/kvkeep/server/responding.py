"""The routes of ``/v1/responses``: answers that can be continued by their id."""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request, Response

from kvkeep.engine import Engine, Session
from kvkeep.engine import Request as Turn
from kvkeep.openai.requests import Asked
from kvkeep.openai.responses import calls_of
from kvkeep.server.asking_responses import turn_of
from kvkeep.server.bodies import body_of
from kvkeep.server.desk import Desk, in_thread
from kvkeep.server.errors import in_words_of, unknown
from kvkeep.server.generating import Generator
from kvkeep.server.replies import meter_of, owner_of, reply, unless_gone
from kvkeep.server.response_events import Answer
from kvkeep.server.schema import ResponseBody
from kvkeep.server.settings import Settings
from kvkeep.server.streaming import begun


@dataclass(eq=False)
class Kept:
    """An answer that can be continued.

    Attributes:
        owner: whose it is.
        session: ends with this answer.
        body: the answer as it was sent.
    """

    owner: str
    session: Session
    body: dict[str, Any]
    created: float = field(default_factory=time.time)


class Shelf:
    """The answers that can be continued, least recently used first.

    Args:
        most: how many are kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: OrderedDict[str, Kept] = OrderedDict()

    def find(self, who: str, name: str) -> Kept:
        """An owner's answer.

        Raises:
            RefusalError: there is none.
        """
        found = self._kept.get(name)
        if found is None or found.owner != who:
            raise unknown("response", name, "It was never stored, or has been dropped since. Send the conversation.")
        self._kept.move_to_end(name)
        return found

    def has(self, who: str, name: str) -> bool:
        """Whether an owner's answer is there."""
        return name in self._kept and self._kept[name].owner == who

    def put(self, name: str, kept: Kept) -> list[Session]:
        """Keep an answer, and return the sessions of those that are dropped for it."""
        self._kept[name] = kept
        dropped = []
        while len(self._kept) > self._most:
            dropped.append(self._kept.popitem(last=False)[1].session)
        return dropped

    def drop(self, name: str) -> Session:
        """Forget an answer."""
        return self._kept.pop(name).session


class Responder:
    """Answers ``/v1/responses``.

    Args:
        engine: the engine.
        generator: checks models and streams.
        desk: runs requests.
        settings: of the server.
    """

    def __init__(self, engine: Engine, generator: Generator, desk: Desk, settings: Settings) -> None:
        self._engine, self._generator, self._desk, self._settings = engine, generator, desk, settings
        self._shelf = Shelf(settings.max_responses)

    def holds(self, who: str, name: str) -> bool:
        """Whether an owner's answer is kept here."""
        return self._shelf.has(who, name)

    async def respond(self, request: Request) -> Response:
        """Answer, and keep the answer so that it can be continued."""
        body = await body_of(request, ResponseBody, self._settings)
        self._generator.check_model(body.model)
        who = owner_of(request)
        previous = None if body.previous_response_id is None else self._shelf.find(who, body.previous_response_id)
        asked, turn = await in_thread(lambda: self._turn(body, previous))
        session = await in_thread(lambda: self._begin(body, previous))
        name = secrets.token_hex(16)
        answer = Answer(f"resp_{name}", body, self._settings.name, calls_of(asked, name, 0))
        chunks = self._chunks(request, session, turn, answer)
        with in_words_of({"response_format": "text.format"}.get(asked.form or "", asked.form)):
            ready = await unless_gone(request, begun(chunks))
        if body.stream:
            return self._generator.stream(request, ready, done=False, named=True)
        return reply(await unless_gone(request, _last(ready)))

    def _turn(self, body: ResponseBody, previous: Kept | None) -> tuple[Asked, Turn]:
        """A body as a chat's, and its request."""
        before = None if previous is None else len(previous.session.token_ids)
        return turn_of(body, self._generator.served, self._settings, before=before)

    async def look(self, request: Request) -> Response:
        """Show an answer again."""
        return reply(self._shelf.find(owner_of(request), request.path_params["name"]).body)

    async def remove(self, request: Request) -> Response:
        """Forget an answer."""
        name = request.path_params["name"]
        self._shelf.find(owner_of(request), name)
        session = self._shelf.drop(name)
        await in_thread(session.close)
        return reply({"id": name, "object": "response", "deleted": True})

    def _begin(self, body: ResponseBody, previous: Kept | None) -> Session:
        """A session for an answer: a copy of the previous answer's, or a new one."""
        if previous is None:
            return self._engine.session(policy=body.policy, budget=body.budget)
        before = previous.session  # the numbers of a fork depend on how many there were, a copy's on the seed alone
        return self._engine.session(policy=before.policy, budget=before.budget, memory=before.snapshot())

    async def _chunks(
        self, request: Request, session: Session, asked: Turn, answer: Answer
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """The events of an answer, after an empty one."""
        kept = False
        run = self._desk.run([session.asend(asked)], meter_of(request))
        try:
            async for found in run:
                if found is None:
                    yield {}
                    for event in answer.beginning():
                        yield event
                    continue
                for piece in answer.more(found[1]):
                    yield piece
                if (result := found[1].result) is not None:
                    if kept := answer.stored:
                        await self._keep(answer.name, Kept(owner_of(request), session, answer.body(result)))
                    for piece in answer.end(result):
                        yield piece
        finally:
            await run.aclose()
            if not kept:
                await in_thread(session.close)

    async def _keep(self, name: str, kept: Kept) -> None:
        for session in self._shelf.put(name, kept):
            await in_thread(session.close)


async def _last(chunks: AsyncGenerator[Mapping[str, Any], None]) -> Mapping[str, Any]:
    """The whole answer, which is part of the last event."""
    last: Mapping[str, Any] = {}
    try:
        async for chunk in chunks:
            last = chunk
    finally:
        await chunks.aclose()
    found: Mapping[str, Any] = last["response"]
    return found
