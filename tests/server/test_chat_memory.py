"""What the memory of a chat or a session holds, as the API says it."""

from __future__ import annotations

import pytest

from .running import HELLO, events, keys, serve

LONG = [{"role": "user", "content": "Once upon a time there was a dog called Rex, who lived by the sea. " * 4}]


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


def test_an_answer_says_what_its_memory_holds(server):
    body = {"messages": LONG, "policy": "local", "budget": 16, "pins": [[0, 3]], "max_tokens": 4}
    answer = server.chat(**body, return_memory=True).json()
    (memory,) = answer["memory"]
    assert memory["pins"] == [[0, 3]]
    assert memory["seen_tokens"] == answer["usage"]["total_tokens"] - 1  # the last token was drawn, and not read
    assert memory["positions"] == [0, 1, 2, *range(memory["seen_tokens"] - 13, memory["seen_tokens"])]
    assert set(memory["shares"]) == {1}
    assert "".join(memory["texts"]).startswith("<|begin|>")
    assert "memory" not in server.chat(**body).json()


def test_a_stream_ends_with_what_its_memory_holds(server):
    body = {"messages": LONG, "policy": "h2o", "budget": 16, "stream": True, "n": 2, "seed": 1}
    chunks = events(server.chat(**body, return_memory=True, stream_options={"include_usage": True}))
    memories = [chunk["memory"] for chunk in chunks if "memory" in chunk]
    assert chunks[-1]["usage"]
    (pair,) = memories
    for memory in pair:
        assert round(sum(memory["shares"])) <= memory["budget"] == 16
        assert len(memory["positions"]) == len(memory["texts"]) <= 16 * memory["heads"]


@pytest.mark.long
def test_a_turn_of_a_session_says_it_too(server):
    server.post("/v1/sessions", {"id": "trip", "budget": 16})
    for _ in range(3):
        (memory,) = server.chat(session_id="trip", max_tokens=8, return_memory=True).json()["memory"]
    assert server.client.get("/v1/sessions/trip/positions").json().items() >= memory.items()
    assert memory["seen_tokens"] > 16


def test_an_answer_of_one_token_and_twins(server):
    for tokens in (1, 2):
        answer = server.chat(max_tokens=tokens, n=3, return_memory=True, temperature=1).json()
        assert [memory["seen_tokens"] for memory in answer["memory"] if memory]
        assert len(answer["memory"]) == 3


@pytest.mark.parametrize("value", [1, "yes", [True]])
def test_it_is_true_or_false(server, value):
    assert "return_memory" in server.refused(server.chat(messages=HELLO, return_memory=value))["message"]


@pytest.mark.slow
def test_positions_are_those_of_the_memory():
    with serve() as server:
        place = "/v1/sessions/trip/positions"
        server.refused(server.client.get(place), 404)
        server.post("/v1/sessions", {"id": "trip", "budget": 16, "pins": [[0, 3]]})
        empty = server.client.get(place).json()
        assert (empty["positions"], empty["seen_tokens"], empty["budget"]) == ([], 0, 16)
        for _ in range(4):
            server.chat(session_id="trip", max_tokens=10, ignore_eos=True)
        found = server.client.get(place).json()
        assert found["seen_tokens"] > 40
        assert found["pins"] == [[0, 3]]
        assert found["positions"][:3] == [0, 1, 2]
        assert found["shares"][:3] == [1, 1, 1]
        assert round(sum(found["shares"])) <= 16
        assert len(found["texts"]) == len(found["shares"]) == len(found["positions"]) <= 16 * found["heads"]


def test_positions_belong_to_the_key():
    with serve(keys=keys("anna-anna", "ben-ben")) as server:
        anna, ben = ({"Authorization": f"Bearer {one}"} for one in ("anna-anna", "ben-ben"))
        server.post("/v1/sessions", {"id": "trip"}, headers=anna)
        assert server.client.get("/v1/sessions/trip/positions", headers=anna).status_code == 200
        server.refused(server.client.get("/v1/sessions/trip/positions", headers=ben), 404)
        server.refused(server.client.get("/v1/sessions/trip/positions"), 401)
