"""A crew on a cluster that dies as a die decides, without Ray: each line has one answer, whatever is killed."""

import functools
import itertools
import random
import socket
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import pytest

from kvkeep.errors import InputError
from kvkeep.scale import crew, pieces, place
from kvkeep.scale.cluster import Need
from kvkeep.scale.lost import LostClusterError, check_alive, left
from kvkeep.scale.pieces import Answer
from kvkeep.scale.worker import LINES, EngineFacts


class GoneError(Exception):
    """The worker has died."""


class Call:
    """A call of an actor: an answer to come."""

    def __init__(self, actor, name, arguments):
        self.actor, self.name, self.arguments = actor, name, arguments
        self.answer = None


class Actor:
    """A worker in a process that dies sometimes."""

    def __init__(self, cluster):
        self.cluster, self.alive, self.calls, self.answers = cluster, True, [], 0

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

    def remote(self, kind):
        return self

    def options(self, **options):
        class Remote:
            @staticmethod
            def remote(make):
                self.actors.append(Actor(self))
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
                weights = self.weights.pop(0) if len(self.weights) > 1 else self.weights[0]
                call.answer = EngineFacts(weights, (False, False), "host", 1, 2, 100)
            elif call.arguments[0] in self.deadly or call.actor.answers >= self.life:
                call.actor.alive = False
            elif call.actor.alive:
                self.ran[call.arguments[0]] += 1
                call.actor.answers += 1
                call.answer = Answer(call.arguments[0], "d", call.arguments[1], new=1)
        if dies and (alive := [actor for actor in self.actors if actor.alive]):
            self.deaths -= 1
            self.draw.choice(alive).alive = False


def run(monkeypatch, cluster, lines, *, size=3, deaths=0, **options):
    """The answers of a crew, and what it said; so many workers die once all have begun."""
    monkeypatch.setattr(crew, "need_ray", lambda: cluster)
    answers, notes = [], []
    made = crew.Crew(LINES, lambda like: None, size, Need(), tell=notes.append)
    made.begin()
    cluster.deaths = deaths
    todo = iter([(n, b"%d" % n) for n in range(1, lines + 1)])
    made.run(lambda place: next(todo, None), [{}], answers.append, **options)
    made.close()
    return answers, notes


@pytest.mark.parametrize("seed", range(20))
def test_each_line_has_one_answer_whoever_dies(seed, monkeypatch):
    monkeypatch.setattr(crew, "DEATHS", 10**6)
    deaths = 3 + seed % 9
    cluster = Cluster(seed)
    answers, notes = run(monkeypatch, cluster, 120, deaths=deaths)
    assert sorted(answer.number for answer in answers) == list(range(1, 121))
    assert all(answer.whole == b"%d" % answer.number for answer in answers if answer.whole is not None)
    failed = [answer for answer in answers if answer.whole is None]
    assert len(failed) * pieces.GUILTY <= deaths
    assert cluster.most <= 2 + 2  # rows, and two more
    assert all(not actor.alive for actor in cluster.actors)
    assert 0 < sum("died and is replaced" in note for note in notes) <= deaths


@pytest.mark.parametrize("seed", range(20))
def test_lines_that_kill_their_workers_fail_and_no_others(seed, monkeypatch):
    deadly = {3, 17, 18}
    answers, _ = run(monkeypatch, Cluster(seed, deadly=deadly), 30)
    assert sorted(answer.number for answer in answers) == list(range(1, 31))
    assert {answer.number for answer in answers if answer.whole is None} == deadly
    assert all("its worker died" in answer.reason for answer in answers if answer.whole is None)


def test_a_crew_without_deaths_runs_each_line_once(monkeypatch):
    for seed in range(10):
        cluster = Cluster(seed)
        answers, notes = run(monkeypatch, cluster, 25)
        assert set(cluster.ran.values()) == {1}
        assert (len(answers), notes, cluster.most) == (25, [], 4)


def test_lines_go_to_the_worker_with_the_fewest(monkeypatch):
    cluster = Cluster(0)
    run(monkeypatch, cluster, 6)
    assert cluster.most == 2


@pytest.mark.parametrize("seed", range(5))
def test_workers_that_die_after_answers_are_not_given_up(seed, monkeypatch):
    monkeypatch.setattr(pieces, "SUSPECT", 10**6)
    answers, notes = run(monkeypatch, Cluster(seed, life=5), 60, size=2)
    assert sorted(answer.number for answer in answers if answer.whole is not None) == list(range(1, 61))
    assert len(notes) >= 60 // 5 - 2
    assert not any("given up" in note for note in notes)


def test_deaths_of_a_suspect_are_not_those_of_its_place(monkeypatch):
    for seed in range(5):
        answers, _ = run(monkeypatch, Cluster(seed, deadly={1, 2, 3, 4}), 12, size=1)
        assert {answer.number for answer in answers if answer.whole is None} == {1, 2, 3, 4}


def test_a_worker_that_hangs_is_named(monkeypatch):
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr(place.time, "monotonic", lambda: next(clock))
    cluster, waits = Cluster(0), itertools.count()
    begins = functools.partial(filter, lambda call: call.name == "begin")
    monkeypatch.setattr(cluster, "_go_on", lambda calls, honest=cluster._go_on: honest(list(begins(calls))))
    _, notes = run(monkeypatch, cluster, 9, stopped=lambda: next(waits) > 40)
    silent = [note for note in notes if "has answered nothing for" in note]
    assert {note.split(" (")[0] for note in silent} == {"worker 1", "worker 2", "worker 3"}
    assert "(process 1 on host)" in silent[0]
    assert "end that process: it is replaced" in silent[0]
    assert len(silent) < 25  # of about 120 waits: each note comes after twice the time


def test_a_cluster_that_has_gone_away_is_not_waited_for():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        shut = []
        context = SimpleNamespace(gcs_address=address)
        ray = SimpleNamespace(get_runtime_context=lambda: context, shutdown=lambda: shut.append(1))
        with pytest.raises(LostClusterError, match=f"The cluster of Ray at {address} has gone away"), left(ray):
            check_alive(ray)
        assert not shut  # that would wait for an answer
        taken.listen()
        with left(ray):
            check_alive(ray)
        with pytest.raises(ZeroDivisionError), left(ray):
            raise ZeroDivisionError
        assert shut == [1, 1]


def test_a_crew_without_workers_asks_for_the_cluster(monkeypatch):
    def gone(ray):
        raise LostClusterError("It has gone away.")

    cluster, kills = Cluster(0, deadly={5}), []
    monkeypatch.setattr(crew, "check_alive", gone)

    def go_on(calls, honest=cluster._go_on):
        honest([call for call in calls if call.actor is cluster.actors[0]])

    monkeypatch.setattr(cluster, "_go_on", go_on)
    monkeypatch.setattr(cluster, "kill", lambda actor, no_restart: kills.append(actor))
    monkeypatch.setattr(crew, "need_ray", lambda: cluster)
    made = crew.Crew(LINES, lambda like: None, 1, Need())
    made.begin()
    with pytest.raises(LostClusterError, match="gone away"):
        made.run(functools.partial(next, iter([(n, b"a") for n in range(12)])), [{}], lambda answer: None)
    before = len(kills)
    made.close()
    assert len(kills) == before  # nobody would answer


def test_a_crew_whose_workers_all_die_says_so(monkeypatch):
    with pytest.raises(InputError, match="No worker is left: each died 3 times"):
        run(monkeypatch, Cluster(0, deadly=range(1, 100)), 40)


def test_a_worker_with_other_weights_is_given_up(monkeypatch):
    with pytest.raises(InputError, match="different weights under one name"):
        run(monkeypatch, Cluster(0, weights=("w", "other")), 4)
    cluster = Cluster(1, deadly=(2,), weights=("w", "w", "w", "other", "w"))
    answers, notes = run(monkeypatch, cluster, 12)
    assert sorted(answer.number for answer in answers) == list(range(1, 13))
    assert any("is given up: Workers have different weights" in note for note in notes)


def test_a_crew_that_is_stopped_reads_no_more_lines(monkeypatch):
    calls = itertools.count()
    answers, _ = run(monkeypatch, Cluster(0), 1000, stopped=lambda: next(calls) > 5)
    assert len(answers) < 100


@pytest.mark.slow
def test_a_command_whose_cluster_has_gone_away_ends_at_once():
    code = (
        "from kvkeep.cli.workers import ended_with_its_cluster\n"
        "from kvkeep.scale.lost import LostClusterError\n"
        "import atexit\n"
        "atexit.register(print, 'an ordinary end')\n"
        "with ended_with_its_cluster():\n"
        "    raise LostClusterError('It has gone away.')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: It has gone away.\n"
