"""A router on loopback before replicas that run in this process and can be killed, each with an engine of its own."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, contextmanager

from .running import NAME, Running, checkpoint, listening, model  # isort: skip  it skips tests without fastapi

import kvkeep
from kvkeep.server.app import make_app
from kvkeep.server.front import make_front
from kvkeep.server.holders import SESSION
from kvkeep.server.leases import SharedFolder
from kvkeep.server.replaying import replay
from kvkeep.server.replicas import LostError, MissedError
from kvkeep.server.running import Place
from kvkeep.server.served import Served
from kvkeep.server.settings import Settings


class Local:
    """Replicas in this process.

    Attributes:
        asked: replica and path of every request.
        dead: replicas that have ended.
        gone: replicas that have ended, of which the router has not heard yet.
    """

    def __init__(self, apps, rows):
        self.apps, self.rows = apps, rows
        self.asked, self.dead, self.gone = [], set(), set()

    def here(self):
        return {name: self.rows for name in self.apps if name not in self.dead}

    async def ask(self, replica, request):
        self.asked.append((replica, request.path))
        if replica in self.gone:
            self.gone.discard(replica)
            self.dead.add(replica)
            raise MissedError(replica)
        messages = replay(self.apps[replica], request)
        try:
            while True:
                coming = asyncio.ensure_future(anext(messages))
                try:
                    while not (await asyncio.wait({coming}, timeout=0.01))[0]:
                        self._check(replica)
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
        return (state.book if kind == SESSION else state.responder).holds(owner, name)

    def _check(self, replica):
        if replica in self.dead:
            raise LostError(replica)

    def of(self, path):
        """The replicas that were asked for a path, in order."""
        return [replica for replica, asked in self.asked if asked == path]


@contextmanager
def fronted(*, folder=None, names=("one", "two"), rows=2, budget=96, engine=None, prefixes=False, **settings):
    """Run a router and its replicas until the block ends."""
    with ExitStack() as stack:
        apps, engines = {}, {}
        for name in names:
            leases = None if folder is None else SharedFolder(folder, name)
            own = None if leases is None else str(leases.own)
            options = {"budget": budget, "rows": rows, "session_dir": own, **(engine or {})}
            made = stack.enter_context(kvkeep.Engine(model(), checkpoint().tokenizer, **options))
            told = Settings(name=NAME, session_dir=own, **settings)
            apps[name], engines[name] = make_app(Served(made, checkpoint()), told, leases=leases), made
            if leases is not None:
                stack.callback(leases.close)
        replicas = Local(apps, rows)
        front = make_front(replicas, Settings(name=NAME, **settings), prefixes=prefixes)
        with listening(front, Place(port=0, grace_s=5.0)) as port:
            running = Running(port, None, front.state.desk, limits=front.state.limits)
            running.replicas, running.engines = replicas, engines
            try:
                yield running
            finally:
                running.client.close()
