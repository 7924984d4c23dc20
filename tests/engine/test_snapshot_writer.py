"""Memories go to the disk beside the steps of an engine: nobody waits but the turn that needs the room."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep.engine import Request
from kvkeep.snapshot import snapshot as snapshots
from kvkeep.snapshot.snapshot import Snapshot

from .session_models import answers, engine_of, short
from .test_equal import prompt_of

TURNS = [prompt_of(i, n) for i, n in enumerate((7, 3, 12, 1, 5))]


class SlowDisk:
    """A disk on which nothing is written before it is told to, one file at a time.

    Attributes:
        most: files that were written at the same time.
        began: set when the first file is about to be written.
        goes_on: files wait for it.
    """

    def __init__(self, write):
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.most = self._now = 0
        self._write = write

    def __call__(self, *args):
        self._now += 1
        self.most = max(self.most, self._now)
        self.began.set()
        assert self.goes_on.wait(60)
        self._write(*args)
        self._now -= 1


@pytest.fixture
def disk(monkeypatch):
    found = SlowDisk(snapshots.write_whole)
    monkeypatch.setattr(snapshots, "write_whole", found)
    yield found
    found.goes_on.set()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_other_requests_run_while_a_turn_waits_for_the_disk(disk, tmp_path):
    with engine_of(session_memory=0, session_dir=tmp_path) as engine, ThreadPoolExecutor() as pool:
        session = engine.session(name="anna")
        turn = pool.submit(session.ask, TURNS[0], short())
        assert disk.began.wait(60)
        want = engine_of().generate(Request(prompt=TURNS[2], sampling=short(20)))[0]
        assert engine.generate(Request(prompt=TURNS[2], sampling=short(20)))[0].token_ids == want.token_ids
        assert not turn.done()
        assert session.running
        assert session.token_ids == ()  # the turn has not ended yet
        next_turn = pool.submit(session.ask, TURNS[1], short())
        disk.goes_on.set()
        assert [one.result().token_ids for one in (turn, next_turn)] == answers(TURNS[:2])
        assert not engine.busy


def test_one_memory_is_written_at_a_time(disk, tmp_path):
    with engine_of(rows=4, session_memory=0, session_dir=tmp_path) as engine, ThreadPoolExecutor() as pool:
        sessions = [engine.session(name=name) for name in ("anna", None, "ben", None)]
        turns = [pool.submit(session.ask, TURNS[0], short()) for session in sessions]
        assert disk.began.wait(60)
        disk.goes_on.set()
        assert {turn.result().token_ids for turn in turns} == {answers(TURNS[:1])[0]}
        assert disk.most == 1
        assert len(files(tmp_path)) == 4
        assert engine._sessions._store.held_bytes == 0


def test_the_engine_steps_while_a_session_is_saved(disk, tmp_path):
    with engine_of(session_dir=tmp_path) as engine, ThreadPoolExecutor() as pool:
        session, other = engine.session(name="anna"), engine.session()
        session.ask(TURNS[0], short())
        saved = pool.submit(session.save)
        assert disk.began.wait(60)
        assert other.ask(TURNS[0], short()).token_ids == answers(TURNS[:1])[0]
        assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]  # what is saved is older by now
        assert not saved.done()
        disk.goes_on.set()
        saved.result()
        assert Snapshot.load(tmp_path / "anna.kvkeep").seen == 7 + 4 + 3 + 3
        assert files(tmp_path) == ["anna.kvkeep"]


@pytest.mark.parametrize("name", ["anna", None])
def test_a_turn_that_is_cancelled_while_it_waits_for_the_disk_never_was(name, disk, tmp_path):
    with engine_of(session_memory=0, session_dir=tmp_path) as engine:
        session = engine.session(name=name)
        disk.goes_on.set()
        session.ask(TURNS[0], short())
        before, told = files(tmp_path), session.token_ids
        disk.goes_on.clear()
        disk.began.clear()
        events = session.send(TURNS[1], short(2))
        next(events)
        with ThreadPoolExecutor() as pool:
            last = pool.submit(list, events)
            assert disk.began.wait(60)
            assert engine.cancel(session._running.id).finish_reason == "cancelled"
            assert last.result()[-1].result.finish_reason == "cancelled"
        assert session.token_ids == told
        assert not session.running
        disk.goes_on.set()
        assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]
        del events, last
        assert len(files(tmp_path)) == len(before)


def test_a_cancelled_turn_is_not_written_by_the_next_one_that_needs_room(disk, tmp_path):
    with engine_of(session_memory=0, session_dir=tmp_path) as engine, ThreadPoolExecutor() as pool:
        anna, ben = engine.session(name="anna"), engine.session()
        disk.goes_on.set()
        anna.ask(TURNS[0], short())
        disk.goes_on.clear()
        disk.began.clear()
        cancelled = pool.submit(anna.ask, TURNS[3], short())
        assert disk.began.wait(60)
        other = pool.submit(ben.ask, TURNS[0], short())
        while len(engine._parked) < 2:
            time.sleep(0.01)
        engine.cancel(anna._running.id)
        disk.goes_on.set()
        assert (cancelled.result().finish_reason, other.result().finish_reason) == ("cancelled", "length")
        assert Snapshot.load(tmp_path / "anna.kvkeep").seen == 7 + 3
        assert anna.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]


def test_a_session_that_is_deleted_while_it_is_moved_does_not_come_back(disk, tmp_path):
    with engine_of(session_memory=0, session_dir=tmp_path) as engine, ThreadPoolExecutor() as pool:
        engine._sessions._store._most_bytes = None
        anna, ben = engine.session(name="anna"), engine.session()
        anna.ask(TURNS[0], short())
        engine._sessions._store._most_bytes = 0
        moves_anna = pool.submit(ben.ask, TURNS[0], short())
        assert disk.began.wait(60)
        closed = pool.submit(anna.close, delete=True)
        disk.goes_on.set()
        closed.result()
        moves_anna.result()
        assert not (tmp_path / "anna.kvkeep").exists()
        assert engine.session(name="anna").token_ids == ()


@pytest.mark.parametrize("close", ["engine", "session"])
def test_closing_waits_for_the_disk_and_keeps_the_turn(close, disk, tmp_path):
    engine = engine_of(session_memory=0, session_dir=tmp_path)
    session = engine.session(name="anna")
    with ThreadPoolExecutor() as pool:
        turn = pool.submit(session.ask, TURNS[0], short())
        assert disk.began.wait(60)
        closed = pool.submit(engine.close if close == "engine" else session.close)
        assert not closed.done()
        disk.goes_on.set()
        closed.result()
        assert turn.result().finish_reason == "length"
    engine.close()
    assert files(tmp_path) == ["anna.kvkeep"]
    assert Snapshot.load(tmp_path / "anna.kvkeep").seen == 7 + 3


def test_an_older_memory_never_takes_the_place_of_a_newer_one(disk, tmp_path):
    """While a memory is moved to the disk for the room, its session goes on, and is moved there as well."""
    with engine_of(session_memory=0, session_dir=tmp_path) as engine, ThreadPoolExecutor() as pool:
        disk.goes_on.set()
        engine._sessions._store._most_bytes = None
        anna, ben = engine.session(name="anna"), engine.session()
        anna.ask(TURNS[0], short())
        engine._sessions._store._most_bytes = 0
        disk.goes_on.clear()
        disk.began.clear()
        moves_anna = pool.submit(ben.ask, TURNS[3], short())
        assert disk.began.wait(60)
        second = pool.submit(anna.ask, TURNS[1], short())
        disk.goes_on.set()
        assert second.result().token_ids == answers(TURNS[:2])[1]
        moves_anna.result()
        assert Snapshot.load(tmp_path / "anna.kvkeep").seen == 7 + 4 + 3 + 3
        assert anna.ask(TURNS[2], short()).token_ids == answers(TURNS[:3])[2]


def test_a_process_that_was_forked_while_something_is_written_is_told(disk, tmp_path):
    engine = engine_of(session_memory=0, session_dir=tmp_path)
    session = engine.session()
    with ThreadPoolExecutor() as pool:
        turn = pool.submit(session.ask, TURNS[0], short())
        assert disk.began.wait(60)
        there, told = os.pipe()
        child = os.fork()
        if not child:
            try:
                engine.generate(Request(prompt=TURNS[0], sampling=short()))
            except Exception as error:
                os.write(told, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        disk.goes_on.set()
        assert turn.result().finish_reason == "length"
    os.close(told)
    assert "forked while the engine was at work" in os.read(there, 1000).decode()
    engine.close()
