"""The messages of a replica's answer on their way to the client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from starlette.datastructures import Headers
from starlette.types import Message, Send

from kvkeep.server.errors import GoneError, RefusalError
from kvkeep.server.limits import Meter
from kvkeep.server.replaying import USED, Used
from kvkeep.server.replies import ends
from kvkeep.server.streaming import DONE, failed


class Relay:
    """Sends an answer on. Nothing is sent before the first piece of its body is there.

    Args:
        send: sends messages to the client.
        write_s: seconds in which the client must take a piece.
        named: whether events of a stream have names.
        begins: called with the status of an answer before anything of it is sent.
        meter: is told of what the request uses.

    Attributes:
        begun: whether something was sent.
        ended: whether the last piece was sent.
    """

    def __init__(
        self, send: Send, *, write_s: float, named: bool, begins: Callable[[int], object], meter: Meter | None = None
    ) -> None:
        self._send, self._write_s, self._named, self._begins, self._meter = send, write_s, named, begins, meter
        self._start: Message | None = None
        self.begun = self.ended = False

    async def run(self, messages: AsyncGenerator[Message, None], *, unless: str | None) -> bool:
        """Send an answer on; ``False`` if nothing was sent because it has a header.

        Args:
            messages: of the answer.
            unless: the header.

        Raises:
            GoneError: the client does not take what is sent.
        """
        async for message in messages:
            self._count(message.pop(USED, None))
            if message["type"] == USED:
                continue
            if message["type"] == "http.response.start":
                self._begins(message["status"])
                if unless is not None and unless in Headers(raw=message["headers"]):
                    return False
                self._start = message
                continue
            if self._start is not None and not self.begun:
                self.begun = True
                await self._pass(self._start)
            await self._pass(message)
            self.ended = ends(message)
        return True

    async def broken(self, refusal: RefusalError) -> bool:
        """End an answer that breaks off, with an error as the last event; ``False`` if nothing of it was sent."""
        if not self.begun:
            return False
        assert self._start is not None
        if not Headers(raw=self._start["headers"]).get("content-type", "").startswith("text/event-stream"):
            raise GoneError  # a part of an answer; the connection ends without the rest
        last = failed(refusal, named=self._named) + (b"" if self._named else DONE)
        await self._pass({"type": "http.response.body", "body": last, "more_body": False})
        return True

    def _count(self, used: Used | None) -> None:
        """Tell the meter of what a message says of the use."""
        if self._meter is None or used is None:
            return
        self._meter.spend(used.tokens)
        if used.ended:
            self._meter.end()

    async def _pass(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._write_s):
                await self._send(message)
        except (OSError, TimeoutError) as error:
            raise GoneError from error
