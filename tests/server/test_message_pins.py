"""Messages that are never evicted: short system messages unasked, others by their index."""

from __future__ import annotations

import pytest

from .running import checkpoint, serve

SYSTEM = {"role": "system", "content": "Be brief."}
ASKED = [{"role": "user", "content": "Once upon a time there was a dog. It ran home."}]
LONG = "The dog ran over the hills and far away. " * 20
MEMORY = {"conversation_memory": 2**28, "conversations": "continue"}


@pytest.fixture(scope="module")
def server():
    with serve(budget=64, engine=MEMORY) as running:
        yield running


def pinned(server, messages, **body):
    """The texts that a chat pins, as its memory says."""
    before = {entry["id"] for entry in server.client.get("/v1/sessions").json()["data"]}
    answer = server.chat(messages=messages, max_tokens=1, user=str(body), **body)
    assert answer.status_code == 200, answer.text
    names = {entry["id"] for entry in server.client.get("/v1/sessions").json()["data"]} - before
    (name,) = names
    card = server.client.get(f"/v1/sessions/{name}/positions").json()
    tokenizer, ids = checkpoint().tokenizer, server.engine.session(name=f"everybody--{name}").token_ids
    server.client.delete(f"/v1/sessions/{name}")
    texts = [tokenizer.decode(ids[start:stop]).strip() for start, stop in card["pins"]]
    return [SYSTEM["content"] if text.endswith(SYSTEM["content"]) else text for text in texts]  # with what is before it


@pytest.mark.long
def test_a_short_system_message_is_pinned_unasked(server):
    assert pinned(server, [SYSTEM, *ASKED]) == ["Be brief."]
    assert pinned(server, [SYSTEM, *ASKED], pin_system=False) == []
    assert pinned(server, ASKED) == []
    assert pinned(server, [{**SYSTEM, "content": "Be brief and kind. " * 3}, *ASKED]) == []  # more than a quarter
    assert pinned(server, [{**SYSTEM, "content": "Be brief and kind. " * 3}, *ASKED], pin_system=True) != []
    assert pinned(server, [SYSTEM, *ASKED], policy="full") == []
    assert pinned(server, [SYSTEM, *ASKED], budget=40, policy="local") == ["Be brief."]


@pytest.mark.long
def test_messages_are_pinned_by_their_index(server):
    more = [SYSTEM, *ASKED, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}]
    assert pinned(server, more, pin_messages=[1]) == ["Be brief.", ASKED[0]["content"]]
    assert pinned(server, more, pin_messages=[-1, 2], pin_system=False) == ["Yes.", "Why?"]
    assert pinned(server, more, pin_messages=[3], pins=[[0, 1]], pin_system=False)[1:] == ["Why?"]


WRONG = [
    ({"pin_messages": [2]}, "There is no message 2"),
    ({"pin_messages": [-3]}, "There is no message -3"),
    ({"pin_messages": ["1"]}, "pin_messages"),
    ({"pin_system": "on"}, "pin_system"),
    ({"pin_messages": [0], "truncate_prompt_tokens": 20}, "truncate_prompt_tokens"),
    ({"pin_messages": [1], "budget": 16, "policy": "local"}, "pinned"),
    ({"pin_mesages": [1]}, "did you mean pin_messages"),
]


def test_pins_that_cannot_be(server):
    for body, words in WRONG:
        assert words in server.refused(server.chat(messages=[SYSTEM, *ASKED], **body))["message"]


def test_completions_have_no_messages(server):
    assert "pin_system" in server.refused(server.complete(pin_system=True))["message"]


def test_a_pinned_system_message_outlives_the_evictions_of_a_session(server):
    server.post("/v1/sessions", {"id": "kept", "policy": "local", "budget": 56})
    server.chat(messages=[SYSTEM, {"role": "user", "content": LONG}], session_id="kept", max_tokens=2)
    found = server.client.get("/v1/sessions/kept/positions").json()
    ((start, stop),) = found["pins"]
    assert set(range(start, stop)) <= set(found["positions"])
    refused = server.chat(messages=ASKED, session_id="kept", pin_messages=[0])
    assert "first turn" in server.refused(refused)["message"]


def test_instructions_of_a_response_are_pinned(server):
    body = {"input": LONG, "instructions": SYSTEM["content"], "policy": "local", "budget": 56, "max_output_tokens": 2}
    name = server.post("/v1/responses", body).json()["id"]
    (session,) = (entry.session for entry in server.responses._stored if entry.id == name)
    assert len(session.pins) == 1


@pytest.mark.long
def test_a_server_may_leave_system_messages_alone():
    with serve(budget=64, engine=MEMORY, pin_system=False) as server:
        assert pinned(server, [SYSTEM, *ASKED]) == []
        assert pinned(server, [SYSTEM, *ASKED], pin_system=True) == ["Be brief."]
