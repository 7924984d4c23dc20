"""The sessions that clients name: turns that have ended, and were not noted yet, count like all others."""

from __future__ import annotations

import pytest

pytest.importorskip("fastapi")

import kvkeep
from kvkeep.engine.session import MOST_TURNS_BACK
from kvkeep.server.errors import RefusalError
from kvkeep.server.schemas import DropBody, SessionBody
from kvkeep.server.session_registry import SessionRegistry

from .running import checkpoint, model

SHORT = kvkeep.SamplingParams(max_new_tokens=2)


@pytest.fixture
def sessions(tmp_path):
    with kvkeep.Engine(model(), checkpoint().tokenizer, budget=96, rows=1, session_dir=tmp_path) as engine:
        yield SessionRegistry(engine, 4, str(tmp_path))


@pytest.fixture
def entry(sessions):
    """A session with a turn that is noted, and one of which the last chunk has not been sent yet."""
    made = sessions.make("anna", SessionBody(id="trip"))
    made.session.ask("Once", SHORT)
    sessions.ran(made)
    made.session.ask("And then?", SHORT)
    return made


def test_a_turn_that_was_not_noted_yet_is_the_one_that_is_taken_back(sessions, entry):
    messages = entry.session.messages
    assert sessions.rewind("anna", "trip", 1).session.messages == messages[:2]
    sessions.ran(entry)
    assert entry.turns_to_rewind == 1
    assert sessions.rewind("anna", "trip", 1).session.messages == ()


@pytest.mark.parametrize(
    "change",
    [
        lambda sessions: sessions.pin("anna", "trip", ((0, 4),)),
        lambda sessions: sessions.drop("anna", "trip", DropBody(spans=[[2, 5]])),
    ],
    ids=["pin", "drop"],
)
def test_a_change_replaces_the_state_after_the_turn_that_was_not_noted_yet(sessions, entry, change):
    messages = entry.session.messages
    change(sessions)
    sessions.ran(entry)
    assert entry.turns_to_rewind == 2
    assert entry.states[-1].note == entry.session.snapshot().note
    assert sessions.rewind("anna", "trip", 1).session.messages == messages[:2]
    assert (entry.session.pins, entry.session.history.dropped) == ((), ())
    assert sessions.rewind("anna", "trip", 1).session.messages == ()


def test_a_turn_whose_client_has_gone_is_noted_before_the_next_one(sessions, entry):
    messages = entry.session.messages
    sessions.find("anna", "trip").session.ask("Why?", SHORT)
    sessions.ran(entry)
    sessions.ran(entry)  # once is enough
    assert entry.turns_to_rewind == 3
    assert sessions.rewind("anna", "trip", 1).session.messages == messages


def test_what_was_restored_is_a_state_of_its_own(sessions, entry):
    sessions.save("anna", "trip")
    messages = entry.session.messages
    for turns in (3, 4):
        sessions.restore("anna", "trip")
        assert entry.turns_to_rewind == turns <= MOST_TURNS_BACK
    sessions.pin("anna", "trip", ((0, 4),))
    assert entry.turns_to_rewind == 4
    assert sessions.rewind("anna", "trip", 2).session.messages == messages
    assert entry.session.pins == ()


def test_a_session_is_not_changed_while_a_turn_runs(sessions, entry):
    turn = entry.session.send("Why?", SHORT)
    next(turn)
    for change in (
        lambda: sessions.rewind("anna", "trip", 1),
        lambda: sessions.pin("anna", "trip", ()),
        lambda: sessions.drop("anna", "trip", DropBody(messages=[0])),
        lambda: sessions.restore("anna", "trip"),
    ):
        with pytest.raises(RefusalError, match="A turn of the session trip is running") as refused:
            change()
        assert refused.value.status == 409
    turn.close()
    assert entry.turns_to_rewind == 2
