"""Another server's leases in a process of its own, as replicas have them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import processes


class Other:
    """Holds leases until it is killed."""

    def __init__(self, root, own="other"):
        self.own = root / own
        self._pipe, end = multiprocessing.Pipe()
        self._process = processes.start(hold, str(root), own, end)
        end.close()
        assert self._pipe.recv() == "ready"

    def take(self, name):
        return self._ask("take", name)

    def give(self, name):
        self._ask("give", name)

    def _ask(self, *words):
        self._pipe.send(words)
        return self._pipe.recv()

    def kill(self):
        self._process.kill()
        self._process.join()
        self._pipe.close()


def hold(root, own, pipe):
    from kvkeep.server.session_leases import SharedFolder

    folder = SharedFolder(Path(root), own)
    pipe.send("ready")
    while True:
        word, name = pipe.recv()
        pipe.send(getattr(folder, word)(name))
