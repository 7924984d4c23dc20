"""Several threads and coroutines on one engine: who may touch it, who steps it, and where its events go.

A single listener steps the engine itself, in its own thread. As soon as there are several, or one that must not block,
a thread of its own steps the engine until all of them have ended, and the listeners wait for their events.
"""

from __future__ import annotations

import abc
import asyncio
import atexit
import os
import queue
import signal
import threading
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as GenericSequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from kvkeep.engine.request import Event
from kvkeep.engine.sequence import Sequence
from kvkeep.errors import InputError

# A lock that threads get in the order in which they ask.


class FairLock:
    """A lock that threads get in the order in which they ask. Its owner may take it again.

    A plain lock would let a thread that steps in a loop keep out everybody else.

    Attributes:
        lost: whether the thread that would pass it on was left behind in another process.
    """

    lost = False

    def __init__(self) -> None:
        self._inner = threading.Lock()
        self._waiting: deque[threading.Lock] = deque()
        self._taken = False
        self._owner: int | None = None
        self._depth = 0

    @property
    def mine(self) -> bool:
        """Return whether this thread holds the lock."""
        return self._owner == threading.get_ident()

    @property
    def taken(self) -> bool:
        """Return whether any thread holds the lock."""
        return self._taken

    def __enter__(self) -> None:
        """Wait for this thread's turn, and take the lock. Return at once if the thread holds the lock already.

        Raises:
            InputError: the process was forked while another thread held the lock.
        """
        if self.lost:
            raise InputError(
                "This process was forked while the engine was at work, and the engine's threads stayed behind. Make an "
                "engine in the new process, or start it with multiprocessing's method 'spawn'."
            )
        if not self.mine:
            self._take()
            self._owner = threading.get_ident()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        """Give the lock up if this is the outermost context, and let the next thread in line have it."""
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._pass_on()

    def _take(self) -> None:
        """Take the lock, or wait in line until the thread before hands it over."""
        with self._inner:
            if not self._taken:
                self._taken = True
                return
            # each waiting thread gets a lock of its own that is already taken; releasing it wakes that thread and no
            # other
            gate = threading.Lock()
            gate.acquire()
            self._waiting.append(gate)
        try:
            gate.acquire()  # until it is opened by the thread that had the turn before
        except BaseException:  # Ctrl-C, for example
            with self._inner:
                # the turn may have been handed to this thread in the moment of its interruption
                given = gate not in self._waiting
                if not given:
                    self._waiting.remove(gate)
            if given:
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """Hand the lock to the thread that has waited longest, or free it if none waits."""
        with self._inner:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._taken = False


# Ctrl-C and failures in a step: an interrupt waits for the step's end, and a failure ends the requests it touched.


class Uninterrupted:
    """A context that holds back Ctrl-C until its end; a second Ctrl-C interrupts at once.

    An interrupt in the middle of a step would leave no way to tell which parts of the step were done. So the step is
    brought to its end first, unless it comes by a place where it may be given up, see `interrupt_here`. Signals reach
    the main thread only; in other threads this context does nothing.
    """

    _waiting: ClassVar[int] = 0
    """Contexts that hold back a Ctrl-C now."""

    def __init__(self) -> None:
        self._before: Any = None
        self._held = False

    def __enter__(self) -> None:
        """Hold Ctrl-C back from now on; do nothing in other threads than the main one, or if nothing handles Ctrl-C."""
        if threading.current_thread() is threading.main_thread():
            before = signal.getsignal(signal.SIGINT)
            if callable(before):  # neither ignored nor left to the system
                self._before = before
                signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, *error: object) -> None:
        """Restore the handler of Ctrl-C, and call it if a Ctrl-C was held back."""
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._held:
            Uninterrupted._waiting -= 1
            self._before(signal.SIGINT, None)

    def _hold(self, number: int, frame: object) -> None:
        """Note a first Ctrl-C, and let the next one interrupt at once."""
        self._held = True
        Uninterrupted._waiting += 1
        signal.signal(signal.SIGINT, self._before)

    @classmethod
    def interrupt_here(cls) -> None:
        """Raise `KeyboardInterrupt` if a Ctrl-C is held back: a long step may be given up here, but loses its requests.

        In other threads than the main one do nothing.
        """
        if cls._waiting and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt


class Guard:
    """A context that recovers from failures. An interrupt is passed on to the caller after the recovery.

    Args:
        recover: called with the exception and the requests that it touched.
        touched: returns these requests; called when something fails.
    """

    def __init__(
        self,
        recover: Callable[[BaseException, GenericSequence[Sequence]], None],
        touched: Callable[[], GenericSequence[Sequence]],
    ) -> None:
        self._recover, self._touched = recover, touched

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Recover from the error, if there is one. Return whether it ends here: an interrupt goes on."""
        if error is None or isinstance(error, GeneratorExit):  # a generator that is closed has not failed
            return False
        self._recover(error, self._touched())
        return isinstance(error, Exception)


_T = TypeVar("_T")
_END: Any = object()  # no request of a caller can be this object


class Box(abc.ABC):
    """Events on their way to one listener.

    Attributes:
        open: numbers of the requests of which more events come.
        left: whether the listener has gone.
        blocks: whether the listener may wait for a step in its own thread.
    """

    blocks: ClassVar[bool]

    def __init__(self) -> None:
        self.open: set[int] = set()
        self.left = False

    @abc.abstractmethod
    def put(self, event: Event | BaseException) -> None:
        """Append an event, or the failure that ends all requests of this listener."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Wake the listener for the events put so far, if `put` has not done so."""

    def opened(self, event: Event | BaseException) -> Event:
        """Return an event that was taken out of the box; raise it instead if it is a failure.

        After the last event of a request this is no longer among the requests in ``open``; after a failure none is.
        """
        if isinstance(event, BaseException):
            self.open.clear()
            raise event
        if event.result:
            self.open.discard(event.id)
        return event


class ThreadBox(Box):
    """A box whose listener is a thread."""

    blocks = True

    def __init__(self) -> None:
        super().__init__()
        self._events: queue.SimpleQueue[Event | BaseException] = queue.SimpleQueue()

    @property
    def empty(self) -> bool:
        """Return whether no event lies in the box."""
        return self._events.empty()

    def put(self, event: Event | BaseException) -> None:
        """Append an event, or the failure that ends all requests of this listener."""
        self._events.put(event)

    def wake(self) -> None:
        """Do nothing, since `put` wakes a waiting thread."""

    def take(self) -> Event:
        """Wait for the next event and return it.

        Raises:
            BaseException: the failure of a step.
        """
        return self.opened(self._events.get())


class Dispatcher:
    """Hands the events of an engine to those who listen.

    Attributes:
        turn: whoever touches the engine has it.
    """

    def __init__(self) -> None:
        self.turn = FairLock()
        # for what must be done to all engines when the process forks or ends
        _services.add(self)
        self._boxes: dict[int, Box] = {}
        self._left: deque[Box] = deque()
        self._fresh: list[Box] = []
        self._serves = False  # a step runs in the thread that steps
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """Return whether a thread runs steps, or any thread holds the lock."""
        return self._thread is not None or self.turn.taken

    def listen(self, number: int, box: Box, step: Callable[[], object]) -> None:
        """Send the events of a request to a box from now on. The caller holds the lock.

        Start a thread that steps the engine unless one runs, or this box alone listens and may block.

        Args:
            number: the request's number.
            box: the listener's.
            step: brings the engine one step further.
        """
        box.open.add(number)
        self._boxes[number] = box
        # a single listener that blocks steps by itself while it waits
        if self._thread is None and (not box.blocks or any(listener is not box for listener in self._boxes.values())):
            thread = threading.Thread(target=self._serve, args=(step,), name="kvkeep-engine", daemon=True)
            thread.start()
            self._thread = thread  # after `start`, which may fail; the new thread waits for the caller's lock

    def deliver(self, event: Event) -> bool:
        """Put an event into the box of its request, and return whether somebody listens to it: else it is not put
        anywhere. After its last event the request has no box.

        The caller holds the lock.
        """
        box = self._boxes.pop(event.id, None) if event.result else self._boxes.get(event.id)
        if box is not None:
            self._put(box, event)
        return box is not None

    def refuse(self, number: int, error: Exception) -> None:
        """Send an error to the listener of a request, which will raise it, and nothing after it. Do nothing if nobody
        listens. The caller holds the lock.
        """
        box = self._boxes.pop(number, None)
        if box is not None:
            self._put(box, error)

    def wake(self) -> None:
        """Wake the listeners of all events since the last call. Those that turn out to have left, since their loops
        were closed, are noted for `sweep`.

        The caller holds the lock.
        """
        for box in self._fresh:
            box.wake()
            if box.left:
                self._left.append(box)
        self._fresh.clear()

    def _put(self, box: Box, event: Event | BaseException) -> None:
        """Put an event into a box, and wake its listener; inside the stepping thread the listener is woken later."""
        box.put(event)
        self._fresh.append(box)
        if not self._serves:
            self.wake()

    def events(self, box: ThreadBox, step: Callable[[], object]) -> Iterator[Event]:
        """Yield the events that lie in a box, and return once it is empty. If it is empty at first, wait for an event.

        While waiting, step the engine in this thread, unless another thread steps it. Return at once if the box has no
        open request.

        Raises:
            BaseException: the failure of a step.
        """
        while box.empty and box.open and self._thread is None:
            step()
        while box.open:
            yield box.take()
            if box.empty:
                return

    def drain(
        self,
        source: Iterator[_T],
        add: Callable[[_T, ThreadBox], object],
        has_room: Callable[[], bool],
        *,
        step: Callable[[], object],
        end: Callable[[int], object],
    ) -> Iterator[Event]:
        """Add requests while there is room, and yield their events until all of them have ended. Closing the iterator
        cancels those that have not.

        Args:
            source: the requests.
            add: queues a request, with the box of its events.
            has_room: returns whether it is time to add more.
            step: brings the engine one step further.
            end: cancels the request of a number.
        """
        box, more = ThreadBox(), True
        try:
            while more or box.open:
                # one of them at least runs, also where others leave no room
                while more and (not box.open or has_room()):
                    if more := (request := next(source, _END)) is not _END:
                        add(request, box)
                yield from self.events(box, step)
        finally:  # a caller that stops listening wants no more tokens
            self.leave(box)
            # with the turn, it was collected in the middle of a step, which sweeps at its end; and nobody in a forked
            # process can take a lost turn
            if not (self.turn.mine or self.turn.lost):
                with Uninterrupted(), self.turn:
                    self.sweep(end)

    def leave(self, box: Box) -> None:
        """Mark a box as abandoned by its listener. Its requests are cancelled at the next `sweep`. Never waits."""
        box.left = True
        self._left.append(box)

    def sweep(self, end: Callable[[int], object]) -> None:
        """Cancel the requests to which nobody listens any more. The caller holds the lock."""
        while self._left:
            box = self._left.popleft()
            for number in [number for number, listener in self._boxes.items() if listener is box]:
                del self._boxes[number]
                end(number)

    def wait(self) -> None:
        """Wait until the stepping thread has ended. Return at once from that thread, or while holding the lock."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and not self.turn.mine:
            thread.join()

    def _serve(self, step: Callable[[], object]) -> None:
        """Step the engine in this thread until nobody listens.

        An error of a step is put into every box, whose requests then end, and the thread goes on.
        """
        while True:
            with self.turn:
                if not self._boxes:
                    self._thread = None
                    return
                self._serves = True
                try:
                    step()
                except BaseException as error:
                    for box in set(self._boxes.values()):
                        self.leave(box)  # its requests are cancelled at the next `sweep`, or the loop would not end
                        self._put(box, error)
                finally:
                    self._serves = False
                    self.wake()


_services: weakref.WeakSet[Dispatcher] = weakref.WeakSet()


def _leave_behind() -> None:
    """Mark the locks of busy engines as lost in a forked process: their threads were not copied, so nobody would
    release them.
    """
    for service in list(_services):
        service.turn.lost = service.busy
    _services.clear()  # at this process' exit `_stop` must not wait for threads of the other one


os.register_at_fork(after_in_child=_leave_behind)


@atexit.register
def _stop() -> None:
    """Take the lock of every engine and keep it, at Python's exit: torch ends the process with an error if Python ends
    during a step.
    """
    for service in list(_services):
        service.turn.__enter__()


# Events of an engine for coroutines, which never wait for a step in the thread of their loop.

Sink: TypeAlias = "Callable[[Event | BaseException], object]"
"""Takes an event, or the failure after which no more come, in the thread of the loop."""


class _Post:
    """Events on their way into one loop, which is woken once for all of them.

    Args:
        loop: the loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)  # `_posts` holds this post for as long as there is the loop
        self._bag: deque[tuple[LoopBox, Event | BaseException]] = deque()
        self._called = False

    def put(self, box: LoopBox, event: Event | BaseException) -> None:
        """Append an event from any thread."""
        self._bag.append((box, event))

    def send(self) -> None:
        """Schedule `_hand_out` in the loop; do nothing without events, or if it is scheduled already.

        If the loop has been closed, drop all events, and mark their boxes as left.
        """
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
        """Pass all events to their sinks, in the thread of the loop."""
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
        """Wake the loop, unless it has been woken for another box already."""
        self._post.send()

    async def next(self) -> Event:
        """Wait for the next event and return it.

        Raises:
            InputError: it is called in another event loop than the box's.
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
        """Queue the request now instead of at the first ``async for``; do nothing if it is queued or has ended.

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
        """Return an event that a sink has taken, and note whether it is the last one.

        Raises:
            BaseException: the event is the failure of a step; the request is cancelled.
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
        """Queue the request in another thread, since that may wait for a step, set ``number``, and return the box of
        the request's events.
        """
        self._box = box = LoopBox(asyncio.get_running_loop(), sink)
        self.number = await asyncio.to_thread(self._enter, box)
        return box

    async def aclose(self) -> None:
        """Stop listening, which cancels the request."""
        self._stop()

    async def __aenter__(self) -> AsyncEvents:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._stop()

    def __del__(self) -> None:
        self._stop()

    def _stop(self) -> None:
        """Leave the box, which cancels the request; do nothing after the last event."""
        if not self._ended:
            self._ended = True
            if self._box is not None:
                self._leave(self._box)
