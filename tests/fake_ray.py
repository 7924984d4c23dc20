"""A cluster that dies as a die decides, in place of the package of Ray."""

import random
from collections import Counter

from kvkeep.scale.worker import EngineFacts
from kvkeep.scale.worker_pool import WorkResult


class GoneError(Exception):
    """The worker has died."""


class Call:
    """A call of an actor: an answer to come."""

    def __init__(self, actor, name, arguments):
        self.actor, self.name, self.arguments = actor, name, arguments
        self.answer = None


class Actor:
    """A worker in a process that dies sometimes."""

    def __init__(self, cluster, worker):
        self.cluster, self.worker, self.alive, self.calls, self.answers = cluster, worker, True, [], 0

    def __getattr__(self, name):
        return Method(self, name)


class Method:
    def __init__(self, actor, name):
        self.actor, self.name = actor, name

    def remote(self, *arguments):
        call = Call(self.actor, self.name, arguments)
        self.actor.calls.append(call)
        return call


class Cluster:
    """Stands in for the package of Ray.

    Args:
        seed: decides which calls end when, and who dies.
        deadly: numbers of lines that kill their worker.
        weights: of the workers, in the order of their beginning; the last one's go on.
        life: answers after which a worker dies.
    """

    def __init__(self, seed, *, deadly=(), weights=("w",), life=10**6):
        self.draw, self.deadly, self.deaths, self.life = random.Random(seed), set(deadly), 0, life
        self.weights, self.actors, self.ran, self.most = list(weights), [], Counter(), 0

    def begun(self, call):
        """What a worker says of itself."""
        weights = self.weights.pop(0) if len(self.weights) > 1 else self.weights[0]
        return EngineFacts(weights, (False, False), "host", 1, 2, 100)

    def answered(self, call):
        """What a worker answers."""
        return WorkResult(call.arguments[0], "d", call.arguments[1], new=1)

    def remote(self, kind):
        self.kind = kind
        return self

    def options(self, **options):
        class Remote:
            @staticmethod
            def remote(make):
                self.actors.append(Actor(self, self.kind(make)))
                return self.actors[-1]

        return Remote

    def kill(self, actor, no_restart):
        actor.alive = False

    def wait(self, calls, num_returns=1, timeout=None):
        assert len(set(calls)) == len(calls)
        if timeout != 0:
            assert calls, "waits for nothing"
            self._go_on(calls)
        ready = [call for call in calls if call.answer is not None or not call.actor.alive]
        return ready, [call for call in calls if call not in ready]

    def get(self, call, timeout=None):
        if call.answer is None:
            raise GoneError("Worker exit detail: killed. ")
        return call.answer

    def _go_on(self, calls):
        """Let some calls end, and perhaps a worker die, before or after its answers."""
        for actor in self.actors:
            held = sum(call.name == "run" and call.answer is None for call in actor.calls)
            self.most = max(self.most, held if actor.alive else 0)
        open_ones = [call for call in calls if call.answer is None and call.actor.alive]
        some = self.draw.sample(open_ones, self.draw.randint(0, len(open_ones)))
        dies = self.deaths and self.draw.random() < 0.5
        for call in some:
            if call.name == "begin":
                call.answer = self.begun(call)
            elif call.arguments[0] in self.deadly or call.actor.answers >= self.life:
                call.actor.alive = False
            elif call.actor.alive:
                self.ran[call.arguments[0]] += 1
                call.actor.answers += 1
                call.answer = self.answered(call)
        if dies and (alive := [actor for actor in self.actors if actor.alive]):
            self.deaths -= 1
            self.draw.choice(alive).alive = False
