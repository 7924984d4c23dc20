"""A crew on a cluster that dies as a die decides, without Ray: each line has one answer, whatever is killed."""

import functools
import itertools
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
from fake_ray import Cluster

from kvkeep.errors import InputError
from kvkeep.scale import worker_pool
from kvkeep.scale.cluster import LostClusterError, Need, check_alive, left
from kvkeep.scale.worker import LINES


def run(monkeypatch, cluster, lines, *, size=3, deaths=0, **options):
    """The answers of a crew, and what it said; so many workers die once all have begun."""
    monkeypatch.setattr(worker_pool, "need_ray", lambda: cluster)
    answers, notes = [], []
    made = worker_pool.WorkerPool(LINES, lambda like: None, size, Need(), tell=notes.append)
    made.begin()
    cluster.deaths = deaths
    todo = iter([(n, b"%d" % n) for n in range(1, lines + 1)])
    made.run(lambda place: next(todo, None), [{}], answers.append, **options)
    made.close()
    return answers, notes


@pytest.mark.parametrize("seed", range(20))
def test_each_line_has_one_answer_whoever_dies(seed, monkeypatch):
    monkeypatch.setattr(worker_pool, "DEATHS", 10**6)
    deaths = 3 + seed % 9
    cluster = Cluster(seed)
    answers, notes = run(monkeypatch, cluster, 120, deaths=deaths)
    assert sorted(answer.number for answer in answers) == list(range(1, 121))
    assert all(answer.whole == b"%d" % answer.number for answer in answers if answer.whole is not None)
    failed = [answer for answer in answers if answer.whole is None]
    assert len(failed) * worker_pool.GUILTY <= deaths
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
    monkeypatch.setattr(worker_pool, "SUSPECT", 10**6)
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
    monkeypatch.setattr(worker_pool.time, "monotonic", lambda: next(clock))
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
    monkeypatch.setattr(worker_pool, "check_alive", gone)

    def go_on(calls, honest=cluster._go_on):
        honest([call for call in calls if call.actor is cluster.actors[0]])

    monkeypatch.setattr(cluster, "_go_on", go_on)
    monkeypatch.setattr(cluster, "kill", lambda actor, no_restart: kills.append(actor))
    monkeypatch.setattr(worker_pool, "need_ray", lambda: cluster)
    made = worker_pool.WorkerPool(LINES, lambda like: None, 1, Need())
    made.begin()
    with pytest.raises(LostClusterError, match="gone away"):
        made.run(functools.partial(next, iter([(n, b"a") for n in range(12)])), [{}], lambda answer: None)
    before = len(kills)
    made.close()
    assert len(kills) == before  # nobody would answer


def test_a_crew_whose_workers_all_die_says_so(monkeypatch):
    with pytest.raises(InputError, match="No worker is left: each died 3 times"):
        run(monkeypatch, Cluster(0, deadly=range(1, 100)), 40)


def test_the_last_reason_is_that_of_a_worker_that_cannot_be_replaced(monkeypatch):
    cluster = Cluster(0, deadly=range(1, 100), weights=("w", "other"))
    with pytest.raises(InputError, match=r"could not be replaced\. The last reason: Workers have different weights"):
        run(monkeypatch, cluster, 4, size=1)


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
        "from kvkeep.cli.cluster import ended_with_its_cluster\n"
        "from kvkeep.scale.cluster import LostClusterError\n"
        "import atexit\n"
        "atexit.register(print, 'an ordinary end')\n"
        "with ended_with_its_cluster():\n"
        "    raise LostClusterError('It has gone away.')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: It has gone away.\n"
