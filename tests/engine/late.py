"""A queue of copies for tests on a CPU: copies come as late as they may, or at random moments before."""

import functools
import weakref
from collections import deque
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xA5


class Ended:
    """The end of the copies up to a number."""

    def __init__(self, queue, number):
        self._queue, self.number = queue, number

    def query(self):
        self._queue.may_fail("query")
        self._queue.go_on()
        return self._queue.done >= self.number

    def synchronize(self):
        self._queue.may_fail("wait")
        self._queue.until(self.number)


class LateQueue:
    """Copies that take place in order, when somebody waits for them.

    Memory is poisoned until a copy has written it. While `watched`, every operation of torch is looked at: one that
    reads or writes what a copy has yet to write, or that writes what a copy has yet to read, is noted in ``wrong``.

    Args:
        rng: lets copies take place at random moments as well.
        fails: is given the name of each operation before it is done, and may raise.

    Attributes:
        wrong: what has been read or overwritten too early.
        most_bytes: the most bytes of copies that lay on the device at once.
        counts: calls of each operation.
    """

    device = torch.device("cpu")

    def __init__(self, rng=None, fails=lambda name: None):
        self._rng, self._fails = rng, fails
        self._pending, self._running = deque(), False
        self.asked = self.done = self.most_bytes = 0
        self.wrong, self.counts = [], {}
        self._on_device, self._pinned = [], []
        self._known = None, set(), set()

    def may_fail(self, name):
        self.counts[name] = self.counts.get(name, 0) + 1
        self._fails(name)

    def empty(self, nbytes):
        self.may_fail("empty")
        found = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self._on_device.append(weakref.ref(found))
        self._note()
        return found

    def pinned(self, nbytes):
        self.may_fail("pinned")
        found = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self._pinned = [ref for ref in self._pinned if ref() is not None] + [weakref.ref(found)]
        return found

    def copy(self, pairs):
        self.may_fail("copy")
        for n, (source, target) in enumerate(pairs):
            assert len(source) == len(target)
            if n == len(pairs) // 2:
                self.may_fail("half a copy")
            self.asked += 1
            self._pending.append((self.asked, source, target))
            for root in (source._base, target._base):
                if not any(ref() is root for ref in (*self._pinned, *self._on_device)):
                    self._on_device.append(weakref.ref(root))
        self._note()
        return Ended(self, self.asked)

    def hold(self, event):
        self.may_fail("hold")
        self.until(event.number)

    def synchronize(self):
        self.may_fail("synchronize")

    def until(self, number):
        """Let the copies up to a number take place."""
        self._running = True
        while self.done < number:
            self.done, source, target = self._pending.popleft()
            target.copy_(source)
        self._running = False

    def go_on(self):
        """Perhaps let some copies take place."""
        if self._rng is not None and self._pending and not self._running and self._rng.random() < 0.02:
            self.until(self._rng.randint(self.done, self.asked))

    def device_bytes(self):
        """The bytes of all copies on the device, with those that only the queue holds."""
        found = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in self._alive()}
        return sum(found.values())

    def _alive(self):
        self._on_device = [ref for ref in self._on_device if ref() is not None]
        return [ref() for ref in self._on_device]

    def _note(self):
        self.most_bytes = max(self.most_bytes, self.device_bytes())

    @contextmanager
    def watched(self):
        """Look at every operation, and let copies take place between two of them."""
        with _Watch(self):
            yield
        assert self.wrong == []

    def look(self, func, args, options):
        """Note an operation that comes too early."""
        self.go_on()
        if self._running or not self._pending:
            return
        if self._known[0] != (self.asked, self.done):
            pairs = zip(*(pair for _, *pair in self._pending), strict=True)
            self._known = (self.asked, self.done), *({x.untyped_storage().data_ptr() for x in one} for one in pairs)
        _, sources, targets = self._known
        for place, name, writes in _touched(func):
            value = args[place] if place < len(args) else options.get(name)
            for one in value if isinstance(value, list | tuple) else (value,):
                if isinstance(one, torch.Tensor) and one.device.type != "meta" and one.numel():
                    start = one.untyped_storage().data_ptr()
                    if start in targets or (writes and start in sources):
                        self.wrong.append(f"{func} {'writes' if writes else 'reads'} too early")


@functools.cache
def _touched(func):
    """Where an operation takes tensors that it reads or writes, their names, and whether it writes them. Of a view it
    does neither."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if "Tensor" in str(argument.type) and (writes or argument.alias_info is None):
            found.append((place, argument.name, writes))
    return found


class _Watch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls):
        return False  # nothing here is compiled, and to say so before each operation takes longer than to look at it

    def __init__(self, queue):
        super().__init__()
        self._queue = queue

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._queue.look(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
