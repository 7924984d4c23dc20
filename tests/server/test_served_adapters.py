"""Adapters of a server: each is a model of its own to clients, and answers as it would alone."""

from __future__ import annotations

import concurrent.futures

import adapter_folders
import pytest

import kvkeep

from .running import NAME, checkpoint, events, model, serve

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")

HELLO = [{"role": "user", "content": "the dog"}]
MODELS = {None: NAME, "a": f"{NAME}:a", "b.1": f"{NAME}:b.1"}
OPTIONS = {"budget": 24, "folder": adapter_folders.with_template(), "rows": 4}


@pytest.fixture(scope="module")
def adapters():
    return (("a", str(adapter_folders.folder("a"))), ("b.1", str(adapter_folders.folder("b"))))


@pytest.fixture(scope="module")
def server(adapters):
    with serve(adapters=adapters, **OPTIONS) as running:
        yield running


@pytest.fixture(scope="module")
def texts(adapters):
    """Adapter → what it says to a chat, alone."""
    made = kvkeep.Engine(model(OPTIONS["folder"], adapters), checkpoint(OPTIONS["folder"]).tokenizer, budget=24, rows=1)
    sampling = kvkeep.SamplingParams(max_new_tokens=8)
    asked = [kvkeep.Request(messages=HELLO, sampling=sampling, adapter=adapter) for adapter in MODELS]
    found = dict(zip(MODELS, (result.text for result in made.generate(asked)), strict=True))
    assert len(set(found.values())) == 3
    return found


def said(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def chat(server, **body):
    return server.chat(**{"messages": HELLO, "max_tokens": 8, **body})


def test_adapters_are_models(server):
    cards = server.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == list(MODELS.values())
    assert [card.get("parent") for card in cards] == [None, NAME, NAME]
    for card in cards:
        assert server.client.get(f"/v1/models/{card['id']}").json() == card
    assert server.client.get(f"/v1/models/{NAME}:c").status_code == 404


@pytest.mark.long
def test_a_chat_names_its_adapter(server, texts):
    assert said(chat(server)) == texts[None]
    for adapter, name in MODELS.items():
        answer = chat(server, model=name)
        assert (said(answer), answer.json()["model"]) == (texts[adapter], name)
        *_, last = pieces = events(chat(server, model=name, stream=True))
        assert last["model"] == name
        assert "".join(piece["choices"][0]["delta"].get("content", "") for piece in pieces) == texts[adapter]
    found = {server.complete(model=name, max_tokens=8).json()["choices"][0]["text"] for name in MODELS.values()}
    assert len(found) == 3


@pytest.mark.long
def test_many_clients_of_several_adapters_at_once(server, texts):
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        asked = [(adapter, pool.submit(chat, server, model=name)) for _ in range(4) for adapter, name in MODELS.items()]
        for adapter, answer in asked:
            assert said(answer.result()) == texts[adapter]


@pytest.mark.parametrize("name", [f"{NAME}:c", f"{NAME}:", f"{NAME}:A", "a", f"{NAME}/a", f"{NAME}:a:a", "other", ""])
def test_an_unknown_adapter_is_an_unknown_model(server, name):
    for path, body in {
        "/v1/chat/completions": {"messages": HELLO},
        "/v1/completions": {"prompt": "the"},
        "/v1/responses": {"input": "the"},
        "/v1/sessions": {},
    }.items():
        error = server.refused(server.post(path, {"model": name, **body}), 404)
        assert error["code"] == "model_not_found"
        assert "tiny, tiny:a, tiny:b.1" in error["message"]


@pytest.mark.long
def test_sessions_keep_their_adapter(server, texts):
    made = server.post("/v1/sessions", {"id": "talk", "model": MODELS["a"]}).json()
    assert made["model"] == MODELS["a"]
    assert said(chat(server, session_id="talk", model=MODELS["a"])) == texts["a"]
    for name in (NAME, MODELS["b.1"]):
        error = server.refused(chat(server, session_id="talk", model=name))
        assert error["param"] == "model"
        assert "was begun with tiny:a" in error["message"]
    assert server.post("/v1/sessions/talk/fork", {"id": "fork"}).json()["model"] == MODELS["a"]
    again = chat(server, session_id="talk")  # it names no model
    assert again.json()["model"] == MODELS["a"]
    assert said(chat(server, session_id="fork")) == said(again)
    assert server.post("/v1/sessions/talk/rewind", {"turns": 2}).json()["model"] == MODELS["a"]
    assert said(chat(server, session_id="talk")) == texts["a"]
    assert server.post("/v1/sessions", {"id": "plain"}).json()["model"] == NAME
    assert said(chat(server, session_id="plain")) == texts[None]


@pytest.mark.long
def test_saved_sessions_go_on_with_their_adapter(adapters, texts, tmp_path):
    options = {**OPTIONS, "session_dir": str(tmp_path), "engine": {"session_dir": str(tmp_path)}}
    with serve(adapters=adapters, **options) as server:
        server.post("/v1/sessions", {"id": "talk", "model": MODELS["a"]})
        assert said(chat(server, session_id="talk")) == texts["a"]
        assert server.post("/v1/sessions/talk/save").status_code == 200
        want = said(chat(server, session_id="talk"))
        assert server.post("/v1/sessions/talk/restore").status_code == 200
        assert said(chat(server, session_id="talk")) == want
        server.post("/v1/sessions/talk/rewind", {"turns": 1})
    others = (("z", adapters[1][1]), ("renamed", adapters[0][1]))
    with serve(adapters=others, **options) as server:
        assert server.client.get("/v1/sessions/talk").json()["model"] == f"{NAME}:renamed"
        assert said(chat(server, session_id="talk")) == want
    with serve(**options) as server:
        error = server.refused(server.client.get("/v1/sessions/talk"))
        assert "made with the adapter a" in error["message"] or "made with the adapter renamed" in error["message"]


@pytest.mark.long
def test_responses_have_adapters(server):
    body = {"input": "the dog", "max_output_tokens": 8, "temperature": 0}
    first = server.post("/v1/responses", {**body, "model": MODELS["a"]}).json()
    assert first["model"] == MODELS["a"]
    plain = server.post("/v1/responses", body).json()
    assert plain["model"] == NAME
    assert plain["output"][0]["content"][0]["text"] != first["output"][0]["content"][0]["text"]
    more = {**body, "previous_response_id": first["id"]}
    assert server.post("/v1/responses", more).json()["model"] == MODELS["a"]
    assert server.post("/v1/responses", {**more, "model": MODELS["a"]}).status_code == 200
    error = server.refused(server.post("/v1/responses", {**more, "model": NAME}))
    assert error["param"] == "model"
