"""Replicas that are about to end: their idle sessions go on elsewhere at once, others after their answer."""

from __future__ import annotations

import json
import threading
import time

import pytest

from kvkeep.errors import SnapshotError
from kvkeep.server import session_registry

from .routed import fronted
from .running import WAIT_S

CHAT, SESSIONS = "/v1/chat/completions", "/v1/sessions"
LONG = 250


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Two replicas whose front waits for a slow machine's answers."""
    from kvkeep.server import router

    monkeypatch.setattr(router, "_HELD_S", WAIT_S)
    with fronted(folder=tmp_path) as running:
        yield running


def turn(running, name, text="And then?", **more):
    body = {"messages": [{"role": "user", "content": text}], "session_id": name, "max_tokens": 6, "temperature": 0}
    return running.post(CHAT, {**body, "ignore_eos": True, **more})


def said(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def holders(running, name):
    return [one for one, app in running.replicas.apps.items() if app.state.sessions.holds("everybody", name)]


def made(running, *names):
    """Sessions with a turn each, on one replica, which is returned."""
    home = None
    for name in names:
        if home is None:
            assert running.post(SESSIONS, {"id": name}).status_code == 201
            said(turn(running, name, "Once upon a time"))
            (home,) = holders(running, name)
        else:
            assert running.post(f"{SESSIONS}/{names[0]}/fork", {"id": name}).status_code == 201
    assert [holders(running, name) for name in names] == [[home]] * len(names)
    return home


def other(home):
    return "two" if home == "one" else "one"


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


class Answer(threading.Thread):
    """A long answer that is streamed to a client.

    Attributes:
        texts: its pieces.
        ends: its last lines.
        leave: set to make the client hang up.
    """

    def __init__(self, running, name, tokens=LONG):
        super().__init__(daemon=True)
        self._running, self._name, self._tokens = running, name, tokens
        self.begun, self.leave, self.texts, self.lines = threading.Event(), threading.Event(), [], []
        self.start()
        assert self.begun.wait(WAIT_S)

    def run(self):
        body = {"messages": [{"role": "user", "content": "Go on."}], "session_id": self._name, "stream": True}
        body |= {"max_tokens": self._tokens, "ignore_eos": True, "temperature": 0}
        with self._running.client.stream("POST", CHAT, json=body) as answer:
            for line in answer.iter_lines():
                self.begun.set()
                if self.leave.is_set():
                    return
                if line:
                    self.lines.append(line)

    @property
    def text(self):
        found = [json.loads(line.removeprefix("data: ")) for line in self.lines[:-1]]
        return "".join(one["choices"][0]["delta"].get("content") or "" for one in found if one["choices"])


@pytest.mark.slow
def test_idle_sessions_go_on_elsewhere_while_an_answer_ends(two):
    with fronted() as alone:
        assert alone.post(SESSIONS, {"id": "idle"}).status_code == 201
        said(turn(alone, "idle", "Once upon a time"))
        wanted = [said(turn(alone, "idle")) for _ in range(2)]
    home = made(two, "idle", "busy")
    answer = Answer(two, "busy")
    two.replicas.leaving.add(home)
    first = said(turn(two, "idle"))
    assert holders(two, "idle") == [other(home)]
    held = holders(two, "busy")
    assert held == [home] or not answer.is_alive()  # it has ended already where other replicas are slow
    assert [first, said(turn(two, "idle"))] == wanted
    answer.join(WAIT_S)
    assert answer.lines[-1] == "data: [DONE]"
    assert two.client.get(f"{SESSIONS}/busy").json()["seen_tokens"] > LONG
    until(lambda: holders(two, "busy") == [other(home)])
    assert said(turn(two, "busy"))


@pytest.mark.slow
def test_a_turn_during_an_answer_waits_for_its_end(two):
    home = made(two, "busy")
    before = two.client.get(f"{SESSIONS}/busy").json()["seen_tokens"]
    answer = Answer(two, "busy", tokens=300)
    two.replicas.leaving.add(home)
    assert said(turn(two, "busy"))
    answer.join(WAIT_S)
    assert answer.lines[-1] == "data: [DONE]"
    card = two.client.get(f"{SESSIONS}/busy").json()
    assert len(card["messages"]) == 6
    assert card["seen_tokens"] > before + 300


@pytest.mark.long
def test_turns_of_one_session_that_are_sent_at_once_are_all_answered(two):
    home, found = made(two, "idle"), []
    clients = [threading.Thread(target=lambda: found.append(turn(two, "idle"))) for _ in range(4)]
    for n, client in enumerate(clients):
        client.start()
        if n == 1:
            two.replicas.leaving.add(home)
    for client in clients:
        client.join(WAIT_S)
    assert [said(one) != "" for one in found] == [True] * 4
    assert len(two.client.get(f"{SESSIONS}/idle").json()["messages"]) == 10


@pytest.mark.long
def test_a_session_that_cannot_be_written_waits_until_it_can(two, tmp_path, monkeypatch, caplog):
    from kvkeep.server import router

    monkeypatch.setattr(router, "_HELD_S", 0.5)
    home = made(two, "idle")
    (path,) = tmp_path.glob("*/*--idle.kvkeep")
    path.unlink()
    path.mkdir()  # as a full disk
    assert said(turn(two, "idle"))
    two.replicas.leaving.add(home)
    assert two.refused(turn(two, "idle"), 503)["code"] == "session_elsewhere"
    assert holders(two, "idle") == [home]
    assert caplog.text.count("so no other replica gets it yet") == 1
    path.rmdir()
    until(lambda: not holders(two, "idle"))
    assert said(turn(two, "idle"))
    assert len(two.client.get(f"{SESSIONS}/idle").json()["messages"]) == 6


def test_a_session_that_cannot_be_written_is_not_tried_at_each_look(two, monkeypatch):
    from kvkeep.engine import Session

    home = made(two, "idle")
    tried = []

    def close(self):
        tried.append(self.name)
        raise SnapshotError("The disk is full.")

    monkeypatch.setattr(Session, "close", close)
    sessions = two.replicas.apps[home].state.sessions
    for _ in range(50):
        sessions.let_go()
    assert len(tried) == 1


def test_a_session_without_a_turn_has_no_file_and_stays(two):
    assert two.post(SESSIONS, {"id": "new"}).status_code == 201
    made(two, "idle")
    two.replicas.late.update(("one", "two"))
    until(lambda: not holders(two, "idle"))
    assert len(holders(two, "new")) == 1
    assert said(turn(two, "new"))


@pytest.mark.slow
def test_changes_of_a_session_do_not_show_it_closed(two, monkeypatch):
    """A session that is let go right after a change is described as it was then."""
    home = made(two, "idle")
    assert said(turn(two, "idle"))
    sessions = two.replicas.apps[home].state.sessions
    let_go, keep = sessions.let_go, sessions.keep

    def kept(entry):
        keep(entry)
        threading.Thread(target=let_go).start()
        time.sleep(0.1)

    monkeypatch.setattr(sessions, "keep", kept)
    for path, body in (("fork", {"id": "copy"}), ("pin", {"pins": [[0, 4]]}), ("rewind", {"turns": 1})):
        if path == "rewind":
            assert said(turn(two, "idle"))
        answer = two.post(f"{SESSIONS}/idle/{path}", body)
        assert answer.json()["seen_tokens"] > 8, answer.text


@pytest.mark.long
def test_a_session_whose_client_hangs_up_goes_on_from_its_last_turn(two):
    home = made(two, "busy")
    before = two.client.get(f"{SESSIONS}/busy").json()
    answer = Answer(two, "busy")
    two.replicas.leaving.add(home)
    answer.leave.set()
    answer.join(WAIT_S)
    after = two.client.get(f"{SESSIONS}/busy").json()
    assert holders(two, "busy") == [other(home)]
    assert after["messages"] == before["messages"]
    assert after["seen_tokens"] == before["seen_tokens"]


@pytest.mark.long
def test_a_router_that_has_not_heard_of_it_yet_goes_on(two):
    """The replica takes a session again for a turn, and lets it go afterwards."""
    home = made(two, "idle")
    two.replicas.late.add(home)
    for _ in range(4):
        until(lambda: not holders(two, "idle"))
        assert said(turn(two, "idle"))
        assert two.replicas.of(CHAT)[-1] == home
    two.replicas.leaving.add(home)
    assert said(turn(two, "idle"))
    assert holders(two, "idle") == [other(home)]
    assert len(two.client.get(f"{SESSIONS}/idle").json()["messages"]) == 12


@pytest.mark.slow
def test_turns_that_race_with_the_handover_are_all_answered_and_kept(two):
    """Replicas change places while clients talk: no turn is refused or lost."""
    names, counts, failed, over = [f"talk-{n}" for n in range(4)], {}, [], threading.Event()
    made(two, *names)

    def talk(name):
        while not over.is_set():
            answer = turn(two, name, max_tokens=1)
            if answer.status_code != 200:
                failed.append(answer.text)
                return
            counts[name] = counts.get(name, 0) + 1

    def there(replica):
        return failed or [holders(two, name) for name in names] == [[replica]] * len(names)

    clients = [threading.Thread(target=talk, args=(name,)) for name in names]
    for client in clients:
        client.start()
    for leaving, stays in [("one", "two"), ("two", "one")] * 3:
        two.replicas.leaving, two.replicas.late = {leaving}, set()
        until(lambda stays=stays: there(stays))
        two.replicas.leaving, two.replicas.late = set(), {stays}
        enough = sum(counts.values()) + len(names)
        until(lambda enough=enough: failed or sum(counts.values()) >= enough)
    over.set()
    for client in clients:
        client.join(WAIT_S)
    assert not failed
    for name in names:
        assert counts[name] > 2
        assert len(two.client.get(f"{SESSIONS}/{name}").json()["messages"]) == 2 + 2 * counts[name]
        assert len(holders(two, name)) <= 1


@pytest.mark.long
def test_a_session_whose_file_was_removed_is_written_again(two, tmp_path):
    home = made(two, "idle")
    for path in tmp_path.glob("*/*--idle.kvkeep"):
        path.unlink()
    two.replicas.leaving.add(home)
    until(lambda: not holders(two, "idle"))
    assert said(turn(two, "idle"))
    assert len(two.client.get(f"{SESSIONS}/idle").json()["messages"]) == 4


@pytest.mark.long
def test_a_session_that_fails_keeps_no_other_one_here(two, monkeypatch, caplog):
    home = made(two, "first", "second")
    entry = two.replicas.apps[home].state.sessions.find("everybody", "first")
    with monkeypatch.context() as patch:
        patch.setattr(entry.session, "close", lambda: 1 / 0)
        two.replicas.leaving.add(home)
        until(lambda: "ZeroDivisionError" in caplog.text and not holders(two, "second"))  # either may be first
        assert holders(two, "first") == [home]
        assert caplog.text.count("ZeroDivisionError") == 1
    until(lambda: not holders(two, "first"))


@pytest.mark.long
def test_the_handover_goes_on_after_a_look_that_fails(two, monkeypatch, caplog):
    monkeypatch.setattr(session_registry, "_HANDOVER_AGAIN_S", 0.01)
    looks, times, sessions = (
        iter([RuntimeError("gone"), True, OSError("no locks"), False]),
        [],
        two.replicas.apps["one"].state.sessions,
    )
    monkeypatch.setattr(sessions, "let_go", lambda: times.append(1))

    def stays():
        found = next(looks, False)
        if isinstance(found, Exception):
            raise found
        return found

    found = session_registry.Handover(sessions, stays)
    until(lambda: len(times) > 1)
    found.end()
    assert caplog.text.count("could not be handed over") == 2
