"""The way of requests to the engine and of their tokens back: a bounded queue, time-outs, and clients that leave."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias, TypeVar

from kvkeep.engine.dispatcher import AsyncEvents
from kvkeep.engine.engine import Engine
from kvkeep.engine.grammar import TOO_COMPLEX, FormError
from kvkeep.engine.request import Event, Result
from kvkeep.errors import KVKeepError
from kvkeep.server.errors import RefusalError, refusal_of
from kvkeep.server.rate_limits import Meter, Spending
from kvkeep.server.settings import ServerSettings

Arrival: TypeAlias = "tuple[int, Event | BaseException]"
"""The index of a request, and its event or the reason why there are no more."""
Run: TypeAlias = "AsyncGenerator[tuple[int, Event] | None, None]"
"""Yields ``None`` as soon as a request has a row, then the index of each event's request and the event."""

_T = TypeVar("_T")
_LOOK_S = 0.02
"""Seconds between two looks at whether a request has got a row."""
_LONGEST_RETRY_S = 60  # that a refusal names


class RequestQueue:
    """Hands requests to the engine, no more than may wait, and hands back their events.

    Args:
        engine: the engine.
        settings: limits of the queue, and times.

    Attributes:
        active: the number of requests that wait or run.
        draining: whether new requests are refused, because the server is about to end.
        ended: called with every result.
        refused: called with every refusal.
    """

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self._engine, self._settings = engine, settings
        self.active = 0
        self.draining = False
        self.ended: list[Callable[[Result], object]] = []
        self.refused: list[Callable[[RefusalError], object]] = []
        self._seconds = 1.0  # that a request took, as a moving mean

    async def run(self, streams: Sequence[AsyncEvents], meter: Meter) -> Run:
        """Queue the requests of one body in the engine, and run them to their ends. Yield ``None`` once the first has a
        row, then each event, in the order of arrival, with the index of its request.

        Closing the generator, and any failure, cancels the requests that still run.

        Args:
            streams: the requests, not yet queued.
            meter: is told of what they use, and of their end.

        Raises:
            RefusalError: the queue is full, a request waits too long for a row or takes too long, cannot run, or fails.
        """
        spending = Spending(meter)
        with self._telling(), self._admitted(len(streams)):
            events: asyncio.Queue[Arrival] = asyncio.Queue()
            early: list[tuple[int, Event]] = []
            starts = [asyncio.ensure_future(_begin(index, stream, events)) for index, stream in enumerate(streams)]
            limit = self._settings.request_timeout_s
            # as if it were a failure of the first request, which `_opened` raises
            timer = asyncio.get_running_loop().call_later(limit, events.put_nowait, (0, _late(limit)))
            try:
                early = await self._started(streams, events)
                yield None
                left = len(streams)
                while left:
                    index, event = early.pop() if early else _opened(streams, await events.get())
                    spending.note(index, event)
                    if event.result is not None:
                        left -= 1
                        self._end(event.result)
                    if not left:
                        meter.end()  # before the client can know, who may then begin the next request
                    yield index, event
            finally:
                timer.cancel()
                await _stop(starts, streams)
                for index, event in [*early, *_left(events)]:  # nobody waits for them, and they count
                    spending.note(index, event)
                meter.end()

    async def results(self, streams: Sequence[AsyncEvents], meter: Meter) -> list[Result]:
        """Run the requests of one body together to their ends, and return their results in the order of the requests.

        Args:
            streams: the requests, not yet queued.
            meter: is told of what they use, and of their end.

        Raises:
            RefusalError: see `run`.
        """
        results: dict[int, Result] = {}
        run = self.run(streams, meter)
        try:
            async for item in run:
                # ``None`` only says that a request has got a row
                if item is not None and item[1].result is not None:
                    results[item[0]] = item[1].result
        finally:
            await run.aclose()
        return [results[index] for index in range(len(streams))]

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Tell the listeners in ``refused`` of a refusal that the code in the context raises, which goes on."""
        try:
            yield
        except RefusalError as refusal:
            for listener in self.refused:
                listener(refusal)
            raise

    @contextmanager
    def _admitted(self, count: int) -> Iterator[None]:
        """Count this many requests as active until the context ends, and measure the time for the estimate in `_busy`;
        refuse all of them if there is no room for each.

        There is room for as many as the engine has rows, and as may wait.

        Raises:
            RefusalError: the queue is full, the requests are too many for an empty one, or the server drains.
        """
        room = self._engine.rows + self._settings.max_queue
        if self.draining:
            raise RefusalError(503, "The server is about to end: it takes no requests.", headers={"Retry-After": "5"})
        if count > room:
            raise RefusalError(
                400, f"The request asks for {count} texts at once, and this server takes {room}. Ask for less."
            )
        if self.active + count > room:
            raise self._busy(f"{self.active} requests run or wait, the most that this server takes.")
        self.active += count
        start = time.monotonic()
        try:
            yield
        finally:
            self.active -= count
            self._seconds += (time.monotonic() - start - self._seconds) / 8  # a mean in which the last ones count most

    def _busy(self, why: str) -> RefusalError:
        """Return the refusal with status 429 for a full queue: the sentence ``why``, and an estimate, from 1 to 60 s,
        of when to try again.
        """
        # requests in front of a new one leave in groups of as many as there are rows
        turns = max(1, self.active - self._engine.rows) / max(1, self._engine.rows)  # a closed engine has no rows
        wait = min(_LONGEST_RETRY_S, max(1, math.ceil(turns * self._seconds)))
        message = f"{why} Try again in {wait} s."
        return RefusalError(429, message, code="queue_full", headers={"Retry-After": str(wait)})

    async def _started(self, streams: Sequence[AsyncEvents], events: asyncio.Queue[Arrival]) -> list[tuple[int, Event]]:
        """Wait until the first request has a row, or an event of any request has arrived. Return that event, with the
        index of its request, in a list, which is empty if none has come yet.

        Args:
            streams: the requests.
            events: the queue into which their events go.

        Raises:
            RefusalError: no row was free within the server's time for that, or a failure has arrived.
        """
        limit = time.monotonic() + self._settings.queue_timeout_s
        pause, first = _LOOK_S / 16, streams[0]  # doubled below, since most requests get a row at once
        # a request without a number is not in the engine's queue yet
        while events.empty() and (first.number is None or self._engine.waits(first.number)):
            if time.monotonic() > limit:
                raise self._busy(f"No row was free within {self._settings.queue_timeout_s:g} s.")
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    return [_opened(streams, await events.get())]
            pause = min(2 * pause, _LOOK_S)
        return [] if events.empty() else [_opened(streams, events.get_nowait())]

    def _end(self, result: Result) -> None:
        """Tell the listeners in ``ended`` of a request's result, and then refuse if it failed or was cancelled.

        Raises:
            RefusalError: the request has failed or was cancelled.
        """
        for listener in self.ended:
            listener(result)
        if result.finish_reason == "error":
            status = 400 if str(result.error).startswith(TOO_COMPLEX) else 500  # the grammar is the client's
            param = FormError.param if status == 400 else None
            raise RefusalError(status, f"The request failed: {result.error}", param=param)
        if result.finish_reason == "cancelled":
            raise RefusalError(
                503, "The request was cancelled: its session was deleted, or the server is about to end."
            )


def _left(events: asyncio.Queue[Arrival]) -> Iterator[tuple[int, Event]]:
    """Empty a queue without waiting, and yield its events with the indexes of their requests. Failures are dropped:
    nobody is left to be told.
    """
    while not events.empty():
        index, event = events.get_nowait()
        if isinstance(event, Event):
            yield index, event


async def _begin(index: int, stream: AsyncEvents, events: asyncio.Queue[Arrival]) -> None:
    """Queue a request in the engine, and return once it is there. Its events go to ``events`` from then on, with its
    index; so does the failure to queue it, which is not raised.
    """

    def sink(event: Event | BaseException) -> None:
        events.put_nowait((index, event))

    try:
        await stream.begin(sink)
    except asyncio.CancelledError:  # by `_stop`: nobody takes anything out of the queue any more
        raise
    except BaseException as error:  # raised by whoever takes it out of the queue
        sink(error)


def _opened(streams: Sequence[AsyncEvents], arrival: Arrival) -> tuple[int, Event]:
    """Return a queue's entry if it is an event, with the index of its request; raise it if it is a failure.

    Raises:
        BaseException: the entry is a failure; a `KVKeepError` becomes a `RefusalError`.
    """
    index, event = arrival
    if isinstance(event, RefusalError):
        raise event
    try:
        return index, streams[index].taken(event)
    except KVKeepError as error:
        raise refusal_of(error) from error


def _late(limit: float) -> RefusalError:
    """Return the refusal with status 503 for a request that took longer than ``limit`` seconds, and was cancelled."""
    message = f"The request took longer than {limit:g} s and was cancelled. Ask for fewer tokens."
    return RefusalError(503, message, code="timeout")


async def _stop(tasks: Sequence[asyncio.Future[Any]], streams: Sequence[AsyncEvents]) -> None:
    """Cancel the tasks that queue requests, and the requests that still run. Return when the tasks have ended; rows are
    free only at the engine's next step.
    """
    for task in tasks:
        task.cancel()
    for stream in streams:
        await stream.aclose()
    with suppress(asyncio.CancelledError):  # of the caller, who is ending as well
        await asyncio.gather(*tasks, return_exceptions=True)


async def in_thread(work: Callable[[], _T]) -> _T:
    """Run a slow function in a thread, so that other clients do not wait, and return its result. Errors of kvkeep
    become refusals; others are raised as they are.

    Raises:
        RefusalError: the function raised a `KVKeepError`.
    """
    try:
        return await asyncio.to_thread(work)
    except KVKeepError as error:
        raise refusal_of(error) from error
