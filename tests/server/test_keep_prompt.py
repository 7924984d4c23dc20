"""`keep_prompt` in requests to a server: chats, completions, sessions and responses."""

import pytest

from .running import serve

PROMPT = "Anna has a red ball. Tom has a blue car."
MESSAGES = [{"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def server():
    with serve(budget=48) as running:
        yield running


def positions(server, name):
    return set(server.client.get(f"/v1/sessions/{name}/positions").json()["positions"])


@pytest.mark.long
@pytest.mark.parametrize("keep", [True, False])
def test_a_session_keeps_the_prompts_of_its_turns(server, keep):
    name = f"s-{keep}".lower()
    server.post("/v1/sessions", {"id": name, "policy": "local", "keep_prompt": keep})
    answer = server.chat(messages=MESSAGES, session_id=name, max_tokens=60, ignore_eos=True)
    assert answer.status_code == 200, answer.text
    read = answer.json()["usage"]["prompt_tokens"]
    assert ({*range(read)} <= positions(server, name)) == keep
    refused = server.chat(messages=MESSAGES, session_id=name, keep_prompt=True)
    assert "belongs to the session" in server.refused(refused)["message"]


@pytest.mark.slow
def test_chats_completions_and_responses(server):
    common = {"policy": "local", "max_tokens": 60, "ignore_eos": True, "budget": 24}
    texts = {
        keep: server.complete(prompt=PROMPT, keep_prompt=keep, **common).json()["choices"][0]["text"]
        for keep in (True, False, 0.25)
    }
    assert texts[True] != texts[False]
    assert server.chat(messages=MESSAGES, keep_prompt=0.5, max_tokens=3).status_code == 200
    body = {"input": PROMPT, "policy": "local", "keep_prompt": True, "max_output_tokens": 3}
    first = server.post("/v1/responses", body)
    assert first.status_code == 200, first.text
    more = {"input": "Why?", "previous_response_id": first.json()["id"], "max_output_tokens": 3}
    assert server.post("/v1/responses", more).status_code == 200
    refused = server.post("/v1/responses", {**more, "keep_prompt": False})
    assert "brings its own" in server.refused(refused)["message"]


@pytest.mark.parametrize("keep", [0, -1, 1.5, "half", [0.5]])
def test_what_is_no_share_is_refused(server, keep):
    error = server.refused(server.complete(prompt=PROMPT, keep_prompt=keep))
    assert error["param"] == "keep_prompt"
    if not isinstance(keep, int | float):
        assert "valid boolean, or input should be a valid number" in error["message"]


def test_a_prompt_without_room_is_refused(server):
    refused = server.complete(prompt=PROMPT * 5, keep_prompt=True, policy="local", max_tokens=3)
    message = server.refused(refused)["message"]
    assert message.startswith("keep_prompt keeps all")  # the name as a client writes it
    assert "keep_prompt=0.5 cuts it" in message
