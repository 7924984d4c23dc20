"""A router on loopback before replicas that run in this process and can be killed, each with an engine of its own."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import ExitStack, contextmanager
from functools import partial

from .running import ANSWER, NAME, Running, checkpoint, listening, model  # isort: skip  it skips tests without fastapi

if sys.platform != "win32":
    import fcntl

import kvkeep
from kvkeep.server.app import make_app
from kvkeep.server.model import ServedModel
from kvkeep.server.replicas import SESSION, LostError, replay
from kvkeep.server.router import make_router
from kvkeep.server.run import ServerAddress
from kvkeep.server.session_leases import SharedFolder
from kvkeep.server.session_registry import Handover
from kvkeep.server.settings import ServerSettings


class Locks(SharedFolder):
    """Leases of replicas in one process. Its own locks would not keep them apart, so a table does."""

    def __init__(self, root, own, table):
        self._table = table
        super().__init__(root, own)

    def _lock(self, kind, name):
        with self._table.lock:
            if kind == fcntl.LOCK_UN:
                self._table.pop(name, None)
            elif (holder := self._table.get(name, self)) is not self and holder.own.name not in self._table.dead:
                raise BlockingIOError
            else:
                self._table[name] = self

    def close(self):
        with self._table.lock:
            for name in [name for name, holder in self._table.items() if holder is self]:
                del self._table[name]
        super().close()


class Table(dict):
    """The locks that replicas hold: name → holder. Those of dead ones count no more."""

    lock = threading.Lock()

    def __init__(self, dead):
        super().__init__()
        self.dead = dead


class Local:
    """Replicas in this process.

    Attributes:
        asked: replica and path of every request.
        dead: replicas that have ended.
        gone: replicas that have ended, of which the router has not heard yet.
        leaving: replicas that take no more requests, and end with their last answer.
        late: replicas that are leaving, of which the router has not heard yet.
        held: replicas whose answers wait, so that an answer cannot end before a test has looked.
    """

    def __init__(self, apps, rows):
        self.apps, self.rows = apps, rows
        self.asked, self.dead, self.gone, self.leaving, self.late, self.held = [], set(), set(), set(), set(), set()

    def here(self):
        return {name: self.rows for name in self.apps if name not in self.dead | self.leaving}

    async def ask(self, replica, request):
        self.asked.append((replica, request.path))
        if replica in self.gone:
            self.gone.discard(replica)
            self.dead.add(replica)
            raise LostError(replica, reached=False)
        messages = replay(self.apps[replica], request)
        try:
            while True:
                coming = asyncio.ensure_future(anext(messages))
                try:
                    while not (await asyncio.wait({coming}, timeout=0.01))[0] or replica in self.held:
                        self._check(replica)
                        await asyncio.sleep(0.001)  # a wait for what has come already returns without a pause
                    self._check(replica)
                    message = coming.result()
                except StopAsyncIteration:
                    return
                finally:
                    coming.cancel()
                    await asyncio.wait({coming})
                yield message
        finally:
            await messages.aclose()

    async def holds(self, replica, kind, owner, name):
        self._check(replica)
        state = self.apps[replica].state
        return (state.sessions if kind == SESSION else state.responses).holds(owner, name)

    def stays(self, replica):
        return replica not in self.leaving | self.late

    def _check(self, replica):
        if replica in self.dead:
            raise LostError(replica)

    def of(self, path):
        """The replicas that were asked for a path, in order."""
        return [replica for replica, asked in self.asked if asked == path]


@contextmanager
def fronted(*, folder=None, names=("one", "two"), rows=2, budget=96, engine=None, prefixes=False, **settings):
    """Run a router and its replicas until the block ends."""
    settings.setdefault("max_new_tokens", ANSWER)
    with ExitStack() as stack:
        apps, engines = {}, {}
        replicas = Local(apps, rows)
        table = Table(replicas.dead)
        for name in names:
            leases = None if folder is None else Locks(folder, name, table)
            own = None if leases is None else str(leases.own)
            options = {"budget": budget, "rows": rows, "session_dir": own, **(engine or {})}
            made = stack.enter_context(kvkeep.Engine(model(), checkpoint().tokenizer, **options))
            if leases is not None:  # a dead one's folder may be gone; its engine is closed here all the same
                stack.callback(leases.own.mkdir, exist_ok=True)
            told = ServerSettings(name=NAME, session_dir=own, **settings)
            apps[name], engines[name] = make_app(ServedModel(made, checkpoint()), told, leases=leases), made
            if leases is not None:
                stack.callback(leases.close)
            stack.callback(Handover(apps[name].state.sessions, partial(replicas.stays, name)).end)
        front = make_router(replicas, ServerSettings(name=NAME, **settings), prefixes=prefixes)
        with listening(front, ServerAddress(port=0, grace_s=5.0)) as port:
            running = Running(port, None, front.state.queue, limits=front.state.limits)
            running.replicas, running.engines = replicas, engines
            try:
                yield running
            finally:
                running.client.close()
