"""Idle sessions on the disk: the same tokens, whole files, one engine at a time, nothing lost on a full disk."""

import gc
import itertools
import os
import random
import signal
import time
from dataclasses import replace

import pytest
from sweeps import sweep

import kvkeep
from kvkeep.engine import Engine
from kvkeep.engine.dispatcher import FairLock
from kvkeep.engine.session_store import SessionStore, joined
from kvkeep.errors import InputError, SnapshotError
from kvkeep.snapshot.snapshot import Pending, Snapshot

from .models import model
from .session_models import answers, engine_of, short
from .test_equal import POLICIES, prompt_of

KINDS = ("h2o", "random", "adakv:window=4", "spatten")
TURNS = [prompt_of(i, n) for i, n in enumerate((7, 3, 12, 1, 5))]


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def one_memory():
    session = engine_of().session()
    session.ask(TURNS[0], short())
    return session.nbytes


@pytest.mark.slow
@pytest.mark.parametrize("policy", sweep(POLICIES, KINDS.__contains__))
def test_sessions_that_always_lie_on_the_disk_get_the_same_tokens(policy, tmp_path):
    found = kvkeep.parse(policy)
    budget = 14 if found.evicts and not found.grows else 64
    with engine_of(policy, budget, session_memory=0, session_dir=tmp_path) as engine:
        sessions, want = [engine.session() for _ in range(2)], answers(TURNS, policy=policy, budget=budget)
        for turn, answer in zip(TURNS, want, strict=True):
            assert [session.ask(turn, short()).token_ids for session in sessions] == [answer] * 2
            assert engine._sessions._store.held_bytes == 0
    assert files(tmp_path) == []


@pytest.mark.long
def test_the_least_recently_used_sessions_go_to_the_disk(tmp_path):
    with engine_of(session_memory=int(2.5 * one_memory()), session_dir=tmp_path) as engine:
        sessions = [engine.session() for _ in range(4)]
        for session in sessions:
            session.ask(TURNS[0], short())
        assert [s._state.kept.held is not None for s in sessions] == [False, False, True, True]
        sessions[2].snapshot()
        sessions[0].ask(TURNS[1], short())
        assert [s._state.kept.held is not None for s in sessions] == [True, False, True, False]
        assert len(files(tmp_path)) == 2
        for session in sessions[1:]:
            assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]
        del session, sessions
        assert files(tmp_path) == []


@pytest.mark.slow
def test_memory_stays_within_its_limit_with_many_sessions(tmp_path):
    limit = 5 * one_memory()
    with engine_of(session_memory=limit, session_dir=tmp_path) as engine:
        shelf, rng = engine._sessions._store, random.Random(1)
        sessions = [engine.session() for _ in range(20)]
        turns = [0] * 20
        want = answers(TURNS)
        for _ in range(60):
            i = rng.choice([i for i in range(20) if turns[i] < 5])
            assert sessions[i].ask(TURNS[turns[i]], short()).token_ids == want[turns[i]]
            turns[i] += 1
            assert shelf.held_bytes <= limit + sessions[i].nbytes


@pytest.mark.long
def test_forks_of_a_session_on_the_disk_share_nothing(tmp_path):
    with engine_of(session_memory=0, session_dir=tmp_path) as engine:
        for name in (None, "anna"):
            session = engine.session(name=name)
            session.ask(TURNS[0], short())
            engine.session().ask(TURNS[3], short())  # moves it to the disk
            forks = session.fork(2)
            session.ask(TURNS[1], short())
            session.ask(TURNS[2], short())
            session.close(delete=True)
            for fork, turn in zip(forks, (TURNS[2], TURNS[4]), strict=True):
                assert fork.ask(turn, short()).token_ids == answers([TURNS[0], turn])[1]


@pytest.mark.slow
def test_a_named_session_is_opened_again_by_a_later_engine(tmp_path):
    with engine_of(session_dir=tmp_path) as engine:
        session = engine.session(name="anna", policy="tova", budget=9, sequence=5)
        session.ask(TURNS[0], short())
        assert engine.session(name="anna") is session
        assert engine.session_names == ["anna"]
    assert files(tmp_path) == ["anna.kvkeep"]
    with engine_of(session_dir=tmp_path) as engine:
        assert engine.session_names == ["anna"]
        session = engine.session(name="anna")
        assert (str(session.policy), session.budget, session.sequence) == ("tova", 9, 5)
        assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2], policy="tova", budget=9)[1]
        session.close()
        assert files(tmp_path) == ["anna.kvkeep"]
        session = engine.session(name="anna")
        assert session.ask(TURNS[2], short()).token_ids == answers(TURNS[:3], policy="tova", budget=9)[2]
        session.close(delete=True)
        assert files(tmp_path) == engine.session_names == []
        assert engine.session(name="anna").token_ids == ()


def test_names_work_without_a_folder_as_long_as_the_engine_lives():
    engine = engine_of()
    session = engine.session(name="anna")
    session.ask(TURNS[0], short())
    assert engine.session(name="anna").ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]
    session.save()
    session.close()
    assert engine.session(name="anna") is not session


@pytest.mark.parametrize(
    "name", ["", " ", "a/b", "../a", "a\\b", ".hidden", "a\0b", "a\nb", "x" * 300, "ä" * 150, "c:d", 7, b"a", "\ud800"]
)
def test_names_that_are_no_names_of_files_are_refused(name, tmp_path, no_checked_annotations):
    with engine_of(session_dir=tmp_path) as engine, pytest.raises(InputError, match="name="):
        engine.session(name=name)
    assert files(tmp_path) == []


def test_names_may_have_letters_of_any_language(tmp_path):
    with engine_of(session_dir=tmp_path) as engine:
        for name in ("Zoë 1", "会話", "a.b-c_d"):
            engine.session(name=name).ask(TURNS[0], short())
    assert len(files(tmp_path)) == 3
    with engine_of(session_dir=tmp_path) as engine:
        assert engine.session(name="会話").ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]


def test_a_name_that_exists_is_not_overwritten(tmp_path):
    with engine_of(session_dir=tmp_path) as engine:
        session = engine.session(name="anna")
        session.ask(TURNS[0], short())
        with pytest.raises(InputError, match="already"):
            engine.session(name="anna", snapshot=session.snapshot())
        with pytest.raises(InputError, match="under h2o"):
            engine.session(name="anna", policy="tova")
        snapshot = session.snapshot()
        session.close()
        with pytest.raises(InputError, match="already"):
            engine.session(name="anna", snapshot=snapshot)
        with pytest.raises(SnapshotError, match="policy"):
            engine.session(name="anna", policy="tova")
        assert engine.session(name="anna").token_ids == (*TURNS[0], *answers(TURNS[:1])[0])


def test_a_folder_belongs_to_one_engine(tmp_path):
    engine = engine_of(session_dir=tmp_path)
    with pytest.raises(InputError, match="Another engine uses"):
        engine_of(session_dir=tmp_path)
    there, told = os.pipe()
    child = os.fork()
    if not child:
        try:
            SessionStore(0, tmp_path)
        except InputError as error:
            os.write(told, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(there, 1000).decode().startswith("Another engine uses the session folder")
    engine.close()
    engine_of(session_dir=tmp_path).close()


def test_a_session_that_is_written_is_closed_in_one_turn_of_the_engine(tmp_path, monkeypatch):
    """A server that is about to end closes hundreds of them between the steps of its last answers."""
    taken, take = [], FairLock._take
    with engine_of(session_dir=tmp_path) as engine:
        session = engine.session(name="a")
        session.ask(TURNS[0], short())
        session.save()
        monkeypatch.setattr(FairLock, "_take", lambda self: (taken.append(1), take(self))[1])
        session.close()
        assert len(taken) == 1
        assert engine.session_names == ["a"]


@pytest.mark.usefixtures("only_new_garbage")
def test_an_engine_that_is_forgotten_gives_its_folder_back(tmp_path):
    engine = engine_of(session_dir=tmp_path)
    engine.session().ask(TURNS[0], short())
    del engine
    gc.collect()
    engine_of(session_dir=tmp_path).close()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for place in ("file", "file/below"):
        with pytest.raises(InputError, match="session folder"):
            engine_of(session_dir=tmp_path / place)


@pytest.mark.parametrize("limit", [1.5, -1, "1GB", True])
def test_limits_that_make_no_sense_are_refused(limit, tmp_path, no_checked_annotations):
    with pytest.raises(InputError, match="session_memory"):
        engine_of(session_memory=limit, session_dir=tmp_path)


def test_a_limit_without_a_folder_is_refused():
    with pytest.raises(InputError, match="session_dir"):
        engine_of(session_memory=100)


def full_disk(*args, **options):
    raise OSError(28, "No space left on device")


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    with engine_of(session_memory=0, session_dir=tmp_path) as engine:
        anna, ben = engine.session(name="anna"), engine.session()
        anna.ask(TURNS[0], short())
        ben.ask(TURNS[0], short())
        with monkeypatch.context() as patched:
            patched.setattr("kvkeep.snapshot.snapshot.write_whole", full_disk)
            failed = anna.ask(TURNS[1], short())
            assert failed.finish_reason == "error"
            assert "No space left on device" in failed.error
            assert len(failed.token_ids) == 4
            assert anna.token_ids == ben.token_ids
        for session in (anna, ben):
            assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]


def test_a_full_disk_at_the_end_loses_nothing(tmp_path, monkeypatch):
    with engine_of(session_dir=tmp_path) as engine:
        session = engine.session(name="anna")
        session.ask(TURNS[0], short())
        with monkeypatch.context() as patched:
            patched.setattr("kvkeep.snapshot.snapshot.write_whole", full_disk)
            for close in (session.save, session.close, engine.close):
                with pytest.raises(SnapshotError, match="No space left"):
                    close()
        assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]
    assert Snapshot.load(tmp_path / "anna.kvkeep").seen == 7 + 4 + 3 + 3


@pytest.mark.parametrize("damage", ["gone", "cut", "foreign"])
def test_a_file_that_was_damaged_is_an_error_of_its_session_only(damage, tmp_path):
    with engine_of(session_memory=0, session_dir=tmp_path) as engine:
        bad, good = engine.session(), engine.session()
        bad.ask(TURNS[0], short())
        good.ask(TURNS[0], short())
        path = bad._state.kept.path
        whole = path.read_bytes()
        {
            "gone": path.unlink,
            "cut": lambda: path.write_bytes(whole[:-9]),
            "foreign": lambda: path.write_text("x" * 99),
        }[damage]()
        result = bad.ask(TURNS[1], short())
        assert result.finish_reason == "error"
        assert str(path) in result.error
        with pytest.raises(SnapshotError):
            bad.snapshot()
        assert good.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]
        path.write_bytes(whole)
        assert bad.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]


def test_a_damaged_named_session_is_refused_and_stays(tmp_path):
    (tmp_path / "anna.kvkeep").write_bytes(b"x" * 50)
    with engine_of(session_dir=tmp_path) as engine:
        with pytest.raises(SnapshotError, match=r"anna\.kvkeep"):
            engine.session(name="anna")
        assert engine.session_names == ["anna"]
    assert (tmp_path / "anna.kvkeep").read_bytes() == b"x" * 50


def test_other_files_of_the_folder_are_left_alone(tmp_path):
    for name in ("notes.txt", "ben.kvkeep", ".unnamed-x.txt", ".hidden.kvkeep"):
        (tmp_path / name).write_text(name)
    (tmp_path / ".unnamed-3.kvkeep").write_text("of a process that was killed")
    (tmp_path / ".anna.kvkeep.a1b2c3d4.new").write_text("half a file")
    with engine_of(session_memory=0, session_dir=tmp_path) as engine:
        engine.session().ask(TURNS[0], short())
    assert files(tmp_path) == [".hidden.kvkeep", ".unnamed-x.txt", "ben.kvkeep", "notes.txt"]


def talk_for_ever(folder, begun):
    """Two sessions that are written to the disk after each of their turns."""
    engine = engine_of(session_memory=0, session_dir=folder)
    session, other = engine.session(name="anna"), engine.session()
    for turn in itertools.count():
        session.ask(TURNS[turn % 5], short(2))
        other.ask(TURNS[3], short(1))
        os.write(begun, b".")


@pytest.mark.slow
@pytest.mark.parametrize("kills", sweep([6, 20], lambda kills: kills == 6))
def test_a_kill_at_any_moment_leaves_the_old_or_the_new_file(kills, tmp_path):
    """One process writes all the time. Whenever it is killed, the file is a whole one of some turn."""
    rng, before = random.Random(3), 0
    model("llama")
    for _ in range(kills):
        there, begun = os.pipe()
        child = os.fork()
        if not child:
            try:
                talk_for_ever(tmp_path, begun)
            finally:
                os._exit(1)
        os.read(there, 1)
        time.sleep(rng.random() * 0.05)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(there)
        os.close(begun)
        told = Snapshot.load(tmp_path / "anna.kvkeep").seen
        assert told > before
        before = told
    with engine_of(session_dir=tmp_path) as engine:
        assert files(tmp_path) == ["anna.kvkeep"]
        assert engine.session(name="anna").ask(TURNS[0], short(2)).finish_reason == "length"


def test_engines_are_closed_with_their_folders_when_a_block_ends(tmp_path):
    for i in range(3):
        with Engine(model("llama"), policy="h2o", budget=10, session_dir=tmp_path) as engine:
            engine.session(name="anna").read(TURNS[i])
    assert Snapshot.load(tmp_path / "anna.kvkeep").tokens.tolist() == [*TURNS[0], *TURNS[1], *TURNS[2]]


def test_a_conversation_that_is_too_long_for_a_file_is_refused_before_it_is_written(tmp_path, monkeypatch):
    with engine_of(session_dir=tmp_path) as engine:
        session = engine.session()
        session.ask(TURNS[0], short())
        snapshot = replace(session.snapshot(), note={"messages": "x" * 20_000})
        monkeypatch.setattr("kvkeep.snapshot.snapshot.LONGEST_HEADER", 10_000)
        with pytest.raises(SnapshotError, match="shorter conversation"):
            snapshot.save(tmp_path / "a.kvkeep")
    assert files(tmp_path) == []


@pytest.mark.parametrize("obstacle", ["folder of its name", "no folder", "no rights"])
def test_what_stands_in_the_way_of_a_file_is_an_error_and_loses_nothing(obstacle, tmp_path):
    folder = tmp_path / "sessions"
    engine = engine_of(session_memory=0, session_dir=folder)
    session = engine.session(name="anna")
    session.ask(TURNS[0], short())
    saved = (folder / "anna.kvkeep").read_bytes()
    (folder / "anna.kvkeep").unlink()
    if obstacle == "folder of its name":
        (folder / "anna.kvkeep").mkdir()
    elif obstacle == "no folder":
        folder.rmdir()
    else:
        (folder / "anna.kvkeep").symlink_to("/proc/nothing/here")
    failed = session.ask(TURNS[1], short())
    assert failed.finish_reason == "error"
    assert "anna.kvkeep" in failed.error
    if obstacle == "no folder":
        folder.mkdir()
    elif obstacle == "folder of its name":
        (folder / "anna.kvkeep").rmdir()
    else:
        (folder / "anna.kvkeep").unlink()
    (folder / "anna.kvkeep").write_bytes(saved)
    assert session.ask(TURNS[1], short()).token_ids == answers(TURNS[:2])[1]


def test_several_ends_of_a_turn_are_one_that_waits_for_the_last():
    said = []

    def end(name, fails=False):
        def finish():
            said.append(f"{name} ends")
            if fails:
                raise SnapshotError(name)

        return Pending(f"the writing of {name}", finish, lambda: said.append(f"{name} is cancelled"))

    first, second = end("a", fails=True), end("b")
    assert joined([None, None]) is None
    assert joined([None, first]) is first
    both = joined([first, None, second])
    assert both.writing == "the writing of b"
    with pytest.raises(SnapshotError, match="a"):
        both.finish()
    both.cancel()
    assert said == ["a ends", "b ends", "a is cancelled", "b is cancelled"]
