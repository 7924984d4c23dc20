"""Events of an engine for coroutines, which never wait for a step in the thread of their loop."""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TypeAlias

from kvkeep.engine.dispatcher import Box
from kvkeep.engine.request import Event
from kvkeep.errors import InputError

Sink: TypeAlias = "Callable[[Event | BaseException], object]"
"""Takes an event, or the failure after which no more come, in the thread of the loop."""


class _Post:
    """Events on their way into one loop, which is woken once for all of them.

    Args:
        loop: the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._bag: deque[tuple[LoopBox, Event | BaseException]] = deque()
        self._called = False

    def put(self, box: LoopBox, event: Event | BaseException) -> None:
        """Append an event from any thread."""
        self._bag.append((box, event))

    def send(self) -> None:
        """Wake the loop, unless it has been woken and has not come yet."""
        if self._called or not self._bag:
            return
        self._called = True
        try:
            loop = self._loop()
            assert loop is not None  # its boxes hold it
            loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:  # the loop has been closed, and its coroutines with it
            self._called = False
            while self._bag:
                self._bag.popleft()[0].left = True

    def _hand_out(self) -> None:
        self._called = False  # before the bag is looked at: what comes later wakes the loop again
        while self._bag:
            box, event = self._bag.popleft()
            box.sink(event)


_posts: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Post] = weakref.WeakKeyDictionary()


class LoopBox(Box):
    """A box whose listener is a coroutine.

    Args:
        loop: the loop that runs it.
        sink: takes the events; by default they are kept until `next` takes them.
    """

    blocks = False

    def __init__(self, loop: asyncio.AbstractEventLoop, sink: Sink | None = None) -> None:
        super().__init__()
        self._loop = loop
        self._post = _posts.setdefault(loop, _Post(loop))
        self._ready: asyncio.Queue[Event | BaseException] = asyncio.Queue()
        self.sink: Sink = sink or self._ready.put_nowait

    def put(self, event: Event | BaseException) -> None:
        """Append an event from any thread."""
        self._post.put(self, event)

    def wake(self) -> None:
        """Wake the loop, if no other box has done so."""
        self._post.send()

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

    async def begin(self, sink: Sink | None = None) -> None:
        """Queue the request now, and not only when its first event is asked for.

        Args:
            sink: takes the events, which nobody can then wait for with ``async for``; see `taken`.

        Raises:
            KVKeepError: the engine refuses the request.
        """
        try:
            if self._box is None and not self._ended:
                await self._queued(sink)
        except BaseException:
            self._stop()
            raise

    def taken(self, event: Event | BaseException) -> Event:
        """Return an event that a sink has taken.

        Raises:
            BaseException: it is the failure of a step.
        """
        assert self._box is not None
        try:
            found = self._box.opened(event)
        except BaseException:
            self._stop()
            raise
        self._ended = self._ended or found.result is not None
        return found

    async def _queued(self, sink: Sink | None = None) -> LoopBox:
        self._box = box = LoopBox(asyncio.get_running_loop(), sink)
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
