"""Events of an engine for coroutines, which never wait for a step in the thread of their loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from kvkeep.engine.request import Event
from kvkeep.engine.service import Box
from kvkeep.errors import InputError


class LoopBox(Box):
    """A box whose listener is a coroutine.

    Args:
        loop: the loop that runs it.
    """

    blocks = False

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._loop = loop
        self._ready: asyncio.Queue[Event | BaseException] = asyncio.Queue()

    def put(self, event: Event | BaseException) -> None:
        """Append an event from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._ready.put_nowait, event)
        except RuntimeError:  # the loop has been closed, and its coroutines with it
            self.left = True

    async def next(self) -> Event:
        """Wait for the next event and return it.

        Raises:
            InputError: another loop runs, to which no event comes.
            BaseException: the failure of a step.
        """
        if asyncio.get_running_loop() is not self._loop:
            raise InputError(
                "The stream was begun in another event loop, and its events go there. Read a stream to its end in one "
                "asyncio.run, or begin a new one."
            )
        return self.opened(await self._ready.get())


class AsyncEvents(AsyncIterator[Event]):
    """The events of one request, for ``async for``. A coroutine that stops listening cancels its request.

    Args:
        enter: queues the request with a box, and returns its number; may wait for the end of a step.
        leave: notes that nobody listens to a box any more; never waits.

    Attributes:
        number: the number of the request; ``None`` before it is queued.
    """

    def __init__(self, enter: Callable[[Box], int], leave: Callable[[Box], None]) -> None:
        self._enter, self._leave = enter, leave
        self.number: int | None = None
        self._box: LoopBox | None = None
        self._ended = False

    def __aiter__(self) -> AsyncEvents:
        return self

    async def __anext__(self) -> Event:
        if self._ended:
            raise StopAsyncIteration
        try:
            box = self._box or await self._queued()
            event = await box.next()
        except BaseException:
            self._stop()
            raise
        self._ended = event.result is not None
        return event

    async def begin(self) -> None:
        """Queue the request now, and not only when its first event is asked for.

        Raises:
            KVKeepError: the engine refuses the request.
        """
        try:
            if self._box is None and not self._ended:
                await self._queued()
        except BaseException:
            self._stop()
            raise

    async def _queued(self) -> LoopBox:
        self._box = box = LoopBox(asyncio.get_running_loop())
        self.number = await asyncio.to_thread(self._enter, box)
        return box

    async def aclose(self) -> None:
        """Stop listening; the request is cancelled."""
        self._stop()

    async def __aenter__(self) -> AsyncEvents:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stop()

    def __del__(self) -> None:
        self._stop()

    def _stop(self) -> None:
        if not self._ended:
            self._ended = True
            if self._box is not None:
                self._leave(self._box)
