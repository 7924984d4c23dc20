"""Several servers in one folder of sessions: a session is held by one of them, and its file follows the holder."""

from __future__ import annotations

import sys
import threading

import pytest
from lease_holder import Other

pytest.importorskip("fastapi")

import kvkeep
from kvkeep.errors import InputError
from kvkeep.server.errors import RefusalError
from kvkeep.server.schemas import SessionBody
from kvkeep.server.session_leases import HELD, SharedFolder, elsewhere
from kvkeep.server.session_registry import SessionRegistry

from .running import checkpoint, model

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no locks that processes share")


@pytest.fixture
def other(tmp_path):
    made = Other(tmp_path)
    yield made
    made.kill()


@pytest.fixture
def here(tmp_path):
    made = SharedFolder(tmp_path, "here")
    yield made
    made.close()


def test_a_session_is_held_once_and_its_file_follows(here, other):
    (other.own / "a--trip.kvkeep").write_bytes(b"memory")
    assert sorted(here.names()) == ["a--trip"]
    assert other.take("a--trip")
    assert other.take("a--trip")  # it has it
    assert not here.take("a--trip")
    assert here.take("a--other")
    other.give("a--trip")
    assert here.take("a--trip")
    assert not other.take("a--trip")
    assert (here.own / "a--trip.kvkeep").read_bytes() == b"memory"
    assert not list(other.own.iterdir())


def test_the_folder_of_a_server_that_runs_stays_and_that_of_a_killed_one_goes(here, other):
    for name in ("one", "two"):
        (other.own / f"{name}.kvkeep").write_bytes(b"x")
    assert here.take("one")
    assert other.take("two")
    assert not here.take("two")
    other.kill()
    assert here.take("two")
    assert not other.own.exists()
    assert sorted(path.name for path in here.own.iterdir()) == ["one.kvkeep", "two.kvkeep"]


def test_a_new_server_takes_over_the_conversations_of_those_that_have_ended(tmp_path, other):
    other.kill()
    for folder, name in ((other.own, "a--conv_1"), (other.own, "a--trip"), (tmp_path, "b--conv_2")):
        (folder / f"{name}.kvkeep").write_bytes(b"x")
    one = SharedFolder(tmp_path, "one")
    assert sorted(path.stem for path in one.own.iterdir()) == ["a--conv_1", "b--conv_2"]
    assert [path.stem for path in other.own.iterdir()] == ["a--trip"]  # it has a lease, and waits for whoever asks
    one.close()


def test_the_conversations_of_a_server_that_runs_stay(tmp_path, other):
    (other.own / "a--conv_1.kvkeep").write_bytes(b"x")
    one = SharedFolder(tmp_path, "one")
    assert not list(one.own.iterdir())
    assert other.own.exists()
    one.close()


def test_an_emptied_folder_of_a_server_that_runs_stays(here, other):
    (other.own / "one.kvkeep").write_bytes(b"x")
    assert here.take("one")
    assert other.own.exists()


def test_a_single_server_and_replicas_do_not_share_a_folder(tmp_path):
    one = kvkeep.Engine(model(), checkpoint().tokenizer, budget=96, rows=1, session_dir=tmp_path)
    with one, pytest.raises(InputError, match="A server without replicas uses the session folder"):
        SharedFolder(tmp_path, "here")
    here = SharedFolder(tmp_path, "here")
    with pytest.raises(InputError, match="Another engine uses the session folder"):
        kvkeep.Engine(model(), checkpoint().tokenizer, budget=96, rows=1, session_dir=tmp_path)
    here.close()


def test_a_folder_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"`session_dir=.*` cannot be shared by servers"):
        SharedFolder(tmp_path / "file", "here")


class Serving:
    """The sessions of a replica."""

    def __init__(self, root, own="here"):
        self.leases = SharedFolder(root, own)
        options = {"budget": 96, "rows": 1, "session_dir": self.leases.own}
        self.engine = kvkeep.Engine(model(), checkpoint().tokenizer, **options)
        self.sessions = SessionRegistry(self.engine, 4, str(self.leases.own), self.leases)

    def turn(self, entry, text="Once upon a time"):
        entry.session.ask(text, kvkeep.SamplingParams(max_new_tokens=2))
        self.sessions.note(entry)
        self.sessions.keep(entry)

    def close(self):
        self.engine.close()
        self.leases.close()


@pytest.fixture
def serving(tmp_path):
    made = Serving(tmp_path)
    yield made
    made.close()


def test_an_own_folder_without_sessions_goes_with_its_server(tmp_path):
    here = SharedFolder(tmp_path, "here")
    here.close()
    here.close()
    assert not here.own.exists()


def status(work):
    with pytest.raises(RefusalError) as refusal:
        work()
    return refusal.value


def test_a_book_makes_no_session_that_another_server_holds(serving, other):
    assert other.take("anna--trip")
    assert status(lambda: serving.sessions.make("anna", SessionBody(id="trip"))).status == 409
    entry = serving.sessions.make("anna", SessionBody(id="mine"))
    assert not other.take("anna--mine")
    serving.turn(entry)
    assert status(lambda: serving.sessions.fork("anna", "mine", "trip")).status == 409
    serving.sessions.remove("anna", "mine")
    assert other.take("anna--mine")


def test_a_refused_session_is_held_by_nobody(serving, other):
    with pytest.raises(kvkeep.BudgetError):
        serving.sessions.make("anna", SessionBody(id="trip", budget=999))
    assert other.take("anna--trip")
    other.give("anna--trip")
    with pytest.raises(kvkeep.PolicyError):
        serving.sessions.make("anna", SessionBody(id="trip", policy="nothing"))
    assert other.take("anna--trip")


def test_a_session_goes_on_from_its_file_when_its_holder_has_ended(tmp_path, serving, other):
    entry = serving.sessions.make("anna", SessionBody(id="trip"))
    serving.turn(entry)
    ids = entry.session.token_ids
    serving.close()  # as a replica that shall end
    assert (tmp_path / "here" / "anna--trip.kvkeep").exists()
    assert other.take("anna--trip")
    after = Serving(tmp_path, "after")
    refusal = status(lambda: after.sessions.find("anna", "trip"))
    assert (refusal.status, refusal.code, refusal.headers[HELD]) == (503, "session_elsewhere", "1")
    assert after.sessions.names("anna") == ["trip"]
    other.kill()
    found = after.sessions.find("anna", "trip")
    assert found.session.token_ids == ids
    after.turn(found, "And then?")
    assert len(found.session.token_ids) > len(ids)
    assert status(lambda: after.sessions.find("anna", "nobody")).status == 404
    after.close()


def test_a_session_is_let_go_when_no_request_uses_it(serving, other):
    used = [threading.Event(), threading.Event()]
    serving.turn(serving.sessions.make("anna", SessionBody(id="trip")))
    for one in used:
        assert serving.sessions.find("anna", "trip", one).session.token_ids
    for one in used:
        serving.sessions.let_go()
        assert not other.take("anna--trip")
        one.set()
    serving.sessions.let_go()
    assert not serving.sessions.holds("anna", "trip")
    assert other.take("anna--trip")
    assert status(lambda: serving.sessions.find("anna", "trip")).code == "session_elsewhere"


def test_a_server_that_shares_nothing_lets_no_session_go(tmp_path):
    with kvkeep.Engine(model(), checkpoint().tokenizer, budget=96, rows=1) as engine:
        sessions = SessionRegistry(engine, 4)
        sessions.make("anna", SessionBody(id="trip")).session.ask("Once", kvkeep.SamplingParams(max_new_tokens=1))
        sessions.let_go()
        assert sessions.holds("anna", "trip")


def test_a_turn_is_written_only_where_servers_share_sessions(tmp_path, serving):
    entry = serving.sessions.make("anna", SessionBody(id="trip"))
    serving.turn(entry)
    path = serving.leases.own / "anna--trip.kvkeep"
    first = path.read_bytes()
    serving.turn(entry, "And then?")
    assert path.read_bytes() != first
    with kvkeep.Engine(model(), checkpoint().tokenizer, budget=96, rows=1, session_dir=tmp_path / "alone") as engine:
        sessions = SessionRegistry(engine, 4, str(tmp_path / "alone"))
        entry = sessions.make("anna", SessionBody(id="trip"))
        entry.session.ask("Once", kvkeep.SamplingParams(max_new_tokens=1))
        sessions.keep(entry)
        assert not list((tmp_path / "alone").iterdir())


def test_a_turn_that_cannot_be_written_is_answered_and_logged(serving, caplog):
    entry = serving.sessions.make("anna", SessionBody(id="trip"))
    (serving.leases.own / "anna--trip.kvkeep").mkdir()
    serving.turn(entry)
    assert "Session trip was not written" in caplog.text
    (serving.leases.own / "anna--trip.kvkeep").rmdir()


def test_a_holder_elsewhere_is_a_refusal_with_a_time():
    assert elsewhere("trip").headers == {"Retry-After": "1", HELD: "1"}


def test_a_file_of_locks_that_was_removed_gives_no_more_leases(tmp_path, here):
    assert here.take("a--held")
    (tmp_path / ".leases").unlink()
    refusal = status(lambda: here.take("a--trip"))
    assert (refusal.status, "was removed or replaced" in refusal.message) == (500, True)
    assert here.take("a--held")
    there = SharedFolder(tmp_path, "there")  # has made the file anew
    assert "was removed or replaced" in status(lambda: here.take("a--trip")).message
    assert there.take("a--trip")
    there.close()


def test_a_session_that_cannot_be_locked_is_a_refusal(here, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(here, "_lock", no_locks)
    assert "cannot be locked: No locks available" in status(lambda: here.take("a--trip")).message
    monkeypatch.undo()
    assert here.take("a--trip")


@pytest.mark.parametrize("what", ["folder", "nowhere"])
def test_a_file_of_locks_that_is_none_leaves_no_folder_behind(tmp_path, what):
    if what == "folder":
        (tmp_path / ".leases").mkdir()
    else:
        (tmp_path / ".leases").symlink_to(tmp_path / "no" / "file")
    with pytest.raises(InputError, match="cannot be shared by servers"):
        SharedFolder(tmp_path, "here")
    assert [path.name for path in tmp_path.iterdir()] == [".leases"]
