"""Messages leave the memory of sessions and chats by their index, or because a client leaves them out."""

from __future__ import annotations

import threading

import pytest

from .running import keys, serve

SYSTEM = {"role": "system", "content": "You tell stories about a dog called Rex."}
FIRST = {"role": "user", "content": "Once upon a time there was a dog. What did it do?"}
RESULT = {"role": "user", "content": "The dog ran over the hills and far away. Then it came home and slept."}
LAST = {"role": "user", "content": "And then?"}
MEMORY = {"conversation_memory": 2**28}


@pytest.fixture(scope="module")
def server():
    with serve(budget=256, engine=MEMORY) as running:
        yield running
        assert running.idle()


@pytest.fixture(scope="module")
def going_on():
    with serve(budget=256, engine={**MEMORY, "conversations": "continue"}) as running:
        yield running


def said(server, messages, **body):
    answer = server.chat(messages=messages, **{"max_tokens": 8, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer


def talk(server, **body):
    """A conversation of two answers, with a long message between them."""
    messages = [SYSTEM, FIRST]
    for more in ([RESULT], [LAST]):
        found = said(server, messages, **body).json()
        messages = [*messages, found["choices"][0]["message"], *more]
    return messages


def text(answer):
    return answer.json()["choices"][0]["message"]["content"]


def usage(answer):
    found = answer.json()["usage"]
    return found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"], found["kvkeep"]["dropped_tokens"]


# sessions


@pytest.mark.long
def test_a_session_drops_messages_and_goes_on(server):
    server.post("/v1/sessions", {"id": "agent"})
    refused = server.refused(server.post("/v1/sessions/agent/drop", {"messages": [0]}))
    assert "no turn yet" in refused["message"]
    for message in ([SYSTEM, FIRST], [RESULT], [LAST]):
        said(server, message, session_id="agent")
    before = server.client.get("/v1/sessions/agent").json()
    card = server.post("/v1/sessions/agent/drop", {"messages": [3, 2]}).json()
    ((start, stop),) = card["dropped"]
    assert card["seen_tokens"] == before["seen_tokens"]
    assert card["kv_bytes"] < before["kv_bytes"]
    held = server.client.get("/v1/sessions/agent/positions").json()["positions"]
    assert not any(start <= position < stop for position in held)
    assert server.post("/v1/sessions/agent/drop", {"messages": [3]}).json()["dropped"] == card["dropped"]
    found = said(server, [FIRST], session_id="agent")
    assert usage(found)[1:] == (before["seen_tokens"] - 1, stop - start)
    server.post("/v1/sessions/agent/rewind", {"turns": 1})
    assert server.client.get("/v1/sessions/agent").json()["dropped"] == card["dropped"]
    server.post("/v1/sessions/agent/rewind", {"turns": 1})  # before the last turn nothing was dropped yet
    assert server.client.get("/v1/sessions/agent").json()["dropped"] == []
    assert text(said(server, [LAST], session_id="agent")) == before["messages"][-1]["content"]
    server.post("/v1/sessions/agent/drop", {"spans": [[start, start + 4], [start + 2, start + 9]]})
    fork = server.post("/v1/sessions/agent/fork", {"id": "other"}).json()
    assert fork["dropped"] == [[start, start + 9]]
    assert text(said(server, [FIRST], session_id="agent")) == text(said(server, [FIRST], session_id="other"))


OF_SESSIONS = [
    ({}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": [4]}, "last answer"),
    ({"messages": [-1]}, "last answer"),
    ({"messages": [5]}, "no message 5"),
    ({"messages": [-6]}, "no message -6"),
    ({"messages": ["1"]}, "messages"),
    ({"messages": [True]}, "messages"),
    ({"messages": 1}, "messages"),
    ({"spans": [[0, 4]]}, "pinned"),
    ({"messages": [0]}, "pinned"),
    ({"spans": [[4, 9999]]}, "has read"),
    ({"spans": [[9, 4]]}, "reversed"),
    ({"spans": [[-2, 4]]}, "negative"),
    ({"spans": [[1]]}, "spans"),
    ({"spans": "all"}, "spans"),
    ({"messages": [1], "reposition": True}, "slot positions"),
    ({"messages": [1], "reposition": [1]}, "reposition"),
    ({"messages": [1], "repositon": False}, "reposition"),
]


@pytest.mark.long
def test_wrong_drops_of_a_session_are_refused(server):
    server.post("/v1/sessions", {"id": "wrong", "policy": "h2o"})
    said(server, [SYSTEM, FIRST], session_id="wrong")
    said(server, [RESULT], session_id="wrong")
    for body, why in OF_SESSIONS:
        assert why in server.refused(server.post("/v1/sessions/wrong/drop", body))["message"]
        assert server.client.get("/v1/sessions/wrong").json()["dropped"] == []


def test_sessions_of_others_are_unknown():
    with serve(keys=keys("first", "second")) as server:
        first, second = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))
        server.post("/v1/sessions", {"id": "mine"}, headers=first)
        server.refused(server.post("/v1/sessions/mine/drop", {"messages": [0]}, headers=second), 404)
        server.refused(server.post("/v1/sessions/mine/drop", {"messages": [0]}), 401)


@pytest.mark.long
def test_a_drop_beside_a_turn_and_two_at_once(server):
    server.post("/v1/sessions", {"id": "busy"})
    said(server, [SYSTEM, FIRST], session_id="busy")
    said(server, [RESULT], session_id="busy")
    body = {
        "messages": [LAST],
        "session_id": "busy",
        "stream": True,
        "max_tokens": 40,
        "ignore_eos": True,
        "model": "tiny",
    }
    with server.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(lines)
        refused = server.refused(server.post("/v1/sessions/busy/drop", {"messages": [1]}), 409)
        assert "is running" in refused["message"]
        list(lines)
    found = []
    threads = [
        threading.Thread(
            target=lambda place=place: found.append(server.post("/v1/sessions/busy/drop", {"messages": [place]}))
        )
        for place in (1, 2, 1, 2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in found] == [200] * 4
    ((start, stop),) = server.client.get("/v1/sessions/busy").json()["dropped"]
    assert stop - start > 5
    assert server.refused(server.post("/v1/sessions/nobody/drop", {"messages": [1]}), 404)


# chats


@pytest.mark.long
def test_a_chat_drops_messages_as_akv_does_and_reads_what_is_new(server):
    messages = talk(server, user="akv")
    with serve(budget=256) as fresh:
        body = {"drop_message": {"5": [3]}, "reposition": False}
        wanted = said(fresh, messages, **body)
        found = said(server, messages, user="akv", **body)
        assert text(found) == text(wanted)
        prompt, cached, dropped = usage(found)
        assert (usage(wanted)[0], usage(wanted)[2]) == (prompt, dropped)
        assert prompt - cached < 20 < dropped
        more = [*messages, found.json()["choices"][0]["message"], FIRST]
        body = {"drop_message": {"5": [3], "7": [3, 4, 2]}}
        again = said(server, more, user="akv", **body)
        assert text(again) == text(said(fresh, more, **body))
        assert usage(again)[1] >= prompt
        assert text(said(server, more, user="akv", drop_message=[2, 3, 4])) == text(
            said(fresh, more, drop_message=[2, 3, 4])
        )


@pytest.mark.long
def test_a_message_that_is_left_out_leaves_the_memory_under_continue(going_on):
    messages = talk(going_on, user="left")
    shorter = [*messages[:3], *messages[4:]]
    found = said(going_on, shorter, user="left")
    prompt, cached, dropped = usage(found)
    assert prompt - cached < 20 < dropped
    assert "x-kvkeep-read-anew" not in found.headers
    more = [*shorter, found.json()["choices"][0]["message"], FIRST]
    again = said(going_on, more, user="left")
    assert usage(again)[1] >= prompt
    assert usage(again)[2] == dropped


@pytest.mark.long
def test_a_message_that_is_left_out_is_read_anew_under_auto_and_the_header_says_why(server):
    messages = talk(server, user="left")
    shorter = [*messages[:3], *messages[4:]]
    found = said(server, shorter, user="left")
    assert "continue alone" in found.headers["x-kvkeep-read-anew"]
    assert text(found) == text(said(server, shorter, user="nobody"))
    body = {"messages": shorter, "user": "left", "stream": True, "max_tokens": 2, "model": "tiny", "seed": 3}
    more = [*messages, found.json()["choices"][0]["message"], FIRST]
    with server.client.stream(
        "POST", "/v1/chat/completions", json={**body, "messages": [more[0], *more[3:]]}
    ) as stream:
        assert stream.status_code == 200
        list(stream.iter_lines())


OF_CHATS = [
    ({"drop_message": {"6": [3]}}, "names message 6"),
    ({"drop_message": {"x": [3]}}, "no index"),
    ({"drop_message": {"\u0663": [3]}}, "no index"),
    ({"drop_message": {"": [3]}}, "no index"),
    ({"drop_message": {"9" * 400: [3]}}, "no index"),
    ({"drop_message": [3] * 50_000 + [2**62]}, "names message 4611686018427387904"),
    ({"drop_message": {"2": [3]}}, "before it is read"),
    ({"drop_message": {"5": [6]}}, "names message 6"),
    ({"drop_message": [-7]}, "names message -7"),
    ({"drop_message": [0]}, "pinned"),
    ({"drop_message": [0, 1, 2, 3, 4, 5], "pin_system": False}, "names all messages"),
    ({"drop_message": "all"}, "drop_message"),
    ({"drop_message": {"5": 3}}, "drop_message"),
    ({"drop_message": [3], "reposition": True}, "slot positions"),
    ({"drop_message": [3], "reposition": [5]}, "slot positions"),
    ({"reposition": [9]}, "names message 9"),
    ({"drop_message": [3], "truncate_prompt_tokens": 20}, "truncate_prompt_tokens"),
    ({"drop_message": [3], "guard": 0.5}, "guard"),
    ({"drop_message": [3], "pin_messages": [3]}, "pinned"),
    ({"drop_messages": [3]}, "drop_message"),
]


@pytest.mark.long
def test_wrong_drops_of_a_chat_are_refused(server):
    for body, why in OF_CHATS:
        if not hasattr(server, "wrong_talk"):
            server.wrong_talk = talk(server, user="wrong")
        answer = server.chat(messages=server.wrong_talk, max_tokens=2, user="wrong", **body)
        assert why in server.refused(answer)["message"]


def test_the_first_message_is_not_dropped_where_the_template_refuses_it_alone(server, monkeypatch):
    messages, tokenizer = talk(server), server.served.checkpoint.tokenizer
    needs_more = "{% if messages | length < 2 %}{{ raise_exception('too few') }}{% endif %}"
    monkeypatch.setattr(tokenizer, "chat_template", needs_more + tokenizer.chat_template)
    answer = server.chat(messages=messages, drop_message=[0], pin_system=False)
    assert "writes message 0 together with" in server.refused(answer)["message"]


def test_very_many_messages_are_dropped_where_they_stand_together(server):
    messages = [SYSTEM, *({"role": role, "content": "a"} for _ in range(300) for role in ("user", "assistant"))]
    apart = server.chat(messages=messages, drop_message=[*range(1, 600, 2)], max_tokens=2)  # a template for each place
    assert "at 601 places" in server.refused(apart)["message"]
    messages = [*messages[:80], LAST]
    found = said(server, messages, drop_message={"79": [*range(1, 40)], "80": [*range(40, 80)]}, max_tokens=2)
    prompt, _, dropped = usage(found)
    assert prompt - dropped < 79 < dropped


@pytest.mark.long
def test_a_turn_of_a_session_names_no_drop(server):
    server.post("/v1/sessions", {"id": "whole"})
    answer = server.chat(messages=[FIRST], session_id="whole", drop_message=[0])
    assert "/drop" in server.refused(answer)["message"]
    assert server.chat(messages=[FIRST], session_id="whole", drop_message={}, max_tokens=2).status_code == 200


@pytest.mark.slow
def test_slot_positions_move_up():
    with serve(budget=64, engine={**MEMORY, "policy": "local", "positions": "slot"}) as sliding:
        messages = talk(sliding)
        for reposition in (True, [5], None):
            body = {} if reposition is None else {"reposition": reposition}
            assert usage(said(sliding, messages, drop_message=[3], **body))[2] > 20
        answer = sliding.chat(messages=messages, drop_message=[3], reposition=False)
        assert "eposition=false" in sliding.refused(answer)["message"]
