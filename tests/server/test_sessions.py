"""Sessions and responses: only new messages are read, and each belongs to its key."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvkeep.server import responses_routes

from .running import NAME, WAIT_S, keys, serve

A, B = "Once upon a time there was a dog.", "What did the dog do?"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("sessions"))
    with serve(engine={"session_dir": folder}, session_dir=folder) as running:
        yield running
        assert running.idle()


def said(text):
    return [{"role": "user", "content": text}]


def turn(server, name, text, **body):
    answer = server.chat(messages=said(text), session_id=name, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.long
def test_a_turn_reads_its_own_messages_only(server):
    made = server.post("/v1/sessions", {"id": "one"})
    assert (made.status_code, made.json()["id"], made.json()["messages"]) == (201, "one", [])
    first = turn(server, "one", A)
    second = turn(server, "one", B)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["usage"]["prompt_tokens"]
    with server.engine.session() as alone:
        (want,) = [alone.ask(said(text), _sampling()).text for text in (A, B)][1:]
    assert second["choices"][0]["message"]["content"] == want
    card = server.client.get("/v1/sessions/one").json()
    assert [message["role"] for message in card["messages"]] == ["user", "assistant"] * 2
    assert card["kv_bytes"] > 0
    assert {"id": "one", "object": "session"} in server.client.get("/v1/sessions").json()["data"]


def _sampling():
    import kvkeep

    return kvkeep.SamplingParams(max_new_tokens=4)


@pytest.mark.parametrize("pins", [[[0, 10**9]], [[0, 17]]])
def test_pins_that_no_turn_could_keep_are_refused_at_once(server, pins):
    body = {"id": "full", "policy": "local", "budget": 16, "pins": pins}
    assert "pinned" in server.refused(server.post("/v1/sessions", body))["message"]
    server.refused(server.client.get("/v1/sessions/full"), 404)


@pytest.mark.long
def test_tokens_are_pinned_afterwards(server):
    server.post("/v1/sessions", {"id": "pinned", "policy": "local", "budget": 16})
    assert "no turn yet" in server.refused(server.post("/v1/sessions/pinned/pin", {"pins": [[0, 1]]}))["message"]
    server.chat(session_id="pinned", max_tokens=4)
    kept = server.client.get("/v1/sessions/pinned/positions").json()["positions"][-3]
    for body in ({}, {"pins": None}, {"pins": [[0]]}, {"pins": [[3, 1]]}, {"pins": [[0, 10**9]]}, {"pins": "all"}):
        server.refused(server.post("/v1/sessions/pinned/pin", body))
    assert server.refused(server.post("/v1/sessions/nobody/pin", {"pins": []}), 404)
    card = server.post("/v1/sessions/pinned/pin", {"pins": [[kept, kept + 1]]}).json()
    assert card["turns_to_rewind"] == 1
    for _ in range(3):
        server.chat(session_id="pinned", max_tokens=10, ignore_eos=True)
    found = server.client.get("/v1/sessions/pinned/positions").json()
    assert found["pins"] == [[kept, kept + 1]]
    assert found["positions"][0] == kept
    server.post("/v1/sessions/pinned/pin", {"pins": []})
    assert server.client.get("/v1/sessions/pinned/positions").json()["pins"] == []


@pytest.mark.long
def test_the_first_turn_can_be_taken_back(server):
    server.post("/v1/sessions", {"id": "first", "policy": "h2o", "budget": 64})
    one = turn(server, "first", A)["choices"][0]["message"]["content"]
    turn(server, "first", B)
    card = server.post("/v1/sessions/first/rewind", {"turns": 2}).json()
    assert (card["messages"], card["seen_tokens"], card["turns_to_rewind"]) == ([], 0, 0)
    assert (card["policy"], card["budget"]) == ("h2o", 64)
    assert turn(server, "first", A)["choices"][0]["message"]["content"] == one
    assert server.post("/v1/sessions/first/rewind").json()["messages"] == []
    assert "can go back 0 turns" in server.refused(server.post("/v1/sessions/first/rewind"))["message"]


@pytest.mark.long
def test_the_first_turn_of_a_fork_can_be_taken_back(server):
    server.post("/v1/sessions", {"id": "seed", "policy": "h2o", "budget": 64, "pins": [[0, 2]]})
    server.post("/v1/sessions/seed/fork", {"id": "early"})
    one = turn(server, "seed", A)["choices"][0]["message"]["content"]
    turn(server, "seed", B)
    assert server.post("/v1/sessions/seed/fork", {"id": "late"}).json()["turns_to_rewind"] == 2
    assert turn(server, "early", A)["choices"][0]["message"]["content"] == one
    for name, turns in (("early", 1), ("late", 2)):
        card = server.post(f"/v1/sessions/{name}/rewind", {"turns": turns}).json()
        assert (card["messages"], card["policy"], card["budget"]) == ([], "h2o", 64)
        assert turn(server, name, A)["choices"][0]["message"]["content"] == one
        assert server.client.get(f"/v1/sessions/{name}/positions").json()["pins"] == [[0, 2]]
    assert server.post("/v1/sessions/seed/fork", {"id": "again"}).json()["turns_to_rewind"] == 2
    card = server.post("/v1/sessions/again/rewind").json()
    assert [message["content"] for message in card["messages"]] == [A, one]
    assert server.client.get("/v1/sessions/seed").json()["turns_to_rewind"] == 2


@pytest.mark.long
def test_a_session_of_an_earlier_server_takes_back_all_turns_or_says_why_not(tmp_path):
    engine = {"session_dir": tmp_path}
    with serve(engine=engine, session_dir=str(tmp_path)) as server:
        for name, texts in (("one", (A,)), ("two", (A, B))):
            server.post("/v1/sessions", {"id": name, "policy": "h2o", "budget": 64})
            said = [turn(server, name, text)["choices"][0]["message"]["content"] for text in texts]
    with serve(engine=engine, session_dir=str(tmp_path)) as server:
        assert [server.client.get(f"/v1/sessions/{name}").json()["turns_to_rewind"] for name in ("one", "two")] == [
            1,
            0,
        ]
        assert "when the server ends" in server.refused(server.post("/v1/sessions/two/rewind"))["message"]
        for name, turns in (("one", 1), ("two", 2)):
            card = server.post(f"/v1/sessions/{name}/rewind", {"turns": turns}).json()
            assert (card["messages"], card["policy"], card["budget"]) == ([], "h2o", 64)
            assert turn(server, name, A)["choices"][0]["message"]["content"] == said[0]


@pytest.mark.long
def test_fork_and_rewind(server):
    server.post("/v1/sessions", {"id": "root", "policy": "h2o", "budget": 64})
    turn(server, "root", A)
    fork = server.post("/v1/sessions/root/fork", {"id": "branch"}).json()
    assert (fork["policy"], fork["budget"]) == ("h2o", 64)
    one, two = (turn(server, name, B)["choices"][0]["message"]["content"] for name in ("root", "branch"))
    assert one == two
    back = server.post("/v1/sessions/root/rewind", {"turns": 1}).json()
    assert len(back["messages"]) == 2
    assert turn(server, "root", B)["choices"][0]["message"]["content"] == one
    assert "can go back 2 turns" in server.refused(server.post("/v1/sessions/root/rewind", {"turns": 3}))["message"]
    server.refused(server.post("/v1/sessions/root/rewind", {"turns": 0}))
    assert server.post("/v1/sessions/root/fork").json()["id"].startswith("sess_")


def test_streamed_turns_count(server):
    server.post("/v1/sessions", {"id": "streamed"})
    answer = server.chat(messages=said(A), session_id="streamed", stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert len(server.client.get("/v1/sessions/streamed").json()["messages"]) == 2


@pytest.mark.long
def test_save_restore_and_delete(server):
    server.post("/v1/sessions", {"id": "kept"})
    assert "no turn yet" in server.refused(server.post("/v1/sessions/kept/save"))["message"]
    server.refused(server.post("/v1/sessions/kept/restore"), 404)
    turn(server, "kept", A)
    assert server.post("/v1/sessions/kept/save").status_code == 200
    after = turn(server, "kept", B)["choices"][0]["message"]["content"]
    assert len(server.post("/v1/sessions/kept/restore").json()["messages"]) == 2
    assert turn(server, "kept", B)["choices"][0]["message"]["content"] == after
    assert server.client.delete("/v1/sessions/kept").json()["deleted"]
    server.refused(server.client.get("/v1/sessions/kept"), 404)
    server.refused(server.client.delete("/v1/sessions/kept"), 404)


@pytest.mark.long
def test_saved_sessions_are_there_after_a_restart(tmp_path):
    folder = str(tmp_path)
    options = {"engine": {"session_dir": folder}, "session_dir": folder}
    with serve(**options) as server:
        server.post("/v1/sessions", {"id": "trip"})
        turn(server, "trip", A)
        server.post("/v1/sessions/trip/save")
    with serve(**options) as server:
        assert server.client.get("/v1/sessions").json()["data"] == [{"id": "trip", "object": "session"}]
        assert turn(server, "trip", B)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


@pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 65, "ä", "a--b\n", ".hidden"])
def test_names_that_are_no_names(server, name):
    assert server.refused(server.post("/v1/sessions", {"id": name}))["param"] == "id"


def test_mistakes(server):
    server.post("/v1/sessions", {"id": "taken"})
    server.refused(server.post("/v1/sessions", {"id": "taken"}), 409)
    assert "h2o" in server.refused(server.post("/v1/sessions", {"policy": "h20"}))["message"]
    server.refused(server.post("/v1/sessions", {"budget": 10**6}))
    server.refused(server.chat(session_id="nobody"), 404)
    for body in ({"policy": "h2o"}, {"budget": 32}, {"keep_ratio": 0.5}, {"n": 2}):
        error = server.refused(server.chat(session_id="taken", **body))
        assert error["param"] == next(iter(body))


@pytest.mark.long
def test_a_session_belongs_to_its_key():
    with serve(keys=keys("anna-anna", "bert-bert")) as server:
        anna, bert = ({"Authorization": f"Bearer {key}"} for key in ("anna-anna", "bert-bert"))
        assert server.post("/v1/sessions", {"id": "mine"}, headers=anna).status_code == 201
        found = server.post("/v1/responses", {"input": A, "max_output_tokens": 2}, headers=anna).json()["id"]
        for path in ("/v1/sessions/mine", f"/v1/responses/{found}"):
            server.refused(server.client.get(path, headers=bert), 404)
            server.refused(server.client.delete(path, headers=bert), 404)
            assert server.client.get(path, headers=anna).status_code == 200
        assert server.client.get("/v1/sessions", headers=bert).json()["data"] == []
        body = {"messages": said(A), "max_tokens": 2, "session_id": "mine"}
        server.refused(server.post("/v1/chat/completions", body, headers=bert), 404)
        server.refused(server.post("/v1/responses", {"input": B, "previous_response_id": found}, headers=bert), 404)
        assert server.post("/v1/sessions", {"id": "mine"}, headers=bert).status_code == 201  # a name of his own


def test_a_name_is_given_once_however_many_ask(server):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: server.post("/v1/sessions", {"id": "race"}).status_code, range(8)))
    assert sorted(found) == [201] + [409] * 7


def test_a_session_may_be_deleted_in_the_middle_of_a_turn(server):
    server.post("/v1/sessions", {"id": "short-lived"})
    with ThreadPoolExecutor(1) as pool:
        turn = pool.submit(server.chat, session_id="short-lived", max_tokens=1500, ignore_eos=True)
        while not server.engine.n_running:
            time.sleep(0.01)
        assert server.client.delete("/v1/sessions/short-lived").status_code == 200
        assert "its session was deleted" in server.refused(turn.result(), 503)["message"]
    assert server.idle()


def test_there_may_be_so_many_sessions():
    with serve(max_sessions=2) as server:
        assert [server.post("/v1/sessions").status_code for _ in range(3)] == [201, 201, 429]


@pytest.mark.long
def test_common_beginnings_are_read_once():
    with serve(engine={"prefill_chunk": 32, "prefix_memory": 2**24}) as server:
        long = "the dog saw a cat " * 20
        cached = [
            server.complete(prompt=long + end).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            for end in ("and", "but")
        ]
        assert cached[0] == 0
        assert cached[1] >= 32


# --------------------------------------------------------------- responses


@pytest.fixture
def client(server):
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made:
        yield made


SHORT = {"model": NAME, "max_output_tokens": 4, "temperature": 0}


@pytest.mark.long
def test_a_response_is_continued_by_its_id(client):
    first = client.responses.create(input=A, **SHORT)
    assert (first.status, first.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    second = client.responses.create(input=B, previous_response_id=first.id, **SHORT)
    again = client.responses.create(input=B, previous_response_id=first.id, **SHORT)
    assert second.output_text == again.output_text
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    client.responses.delete(second.id)
    with pytest.raises(Exception, match="There is no response"):
        client.responses.retrieve(second.id)
    third = client.responses.create(input=said(B), previous_response_id=again.id, **SHORT)
    assert third.usage.input_tokens > again.usage.input_tokens


def test_items_that_clients_send_back_are_taken(client):
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
    answer = {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "id": "msg_1"}
    items = [{"role": "user", "content": A}, thought, answer, {"role": "user", "content": B}]
    plain = [items[0], {"role": "assistant", "content": "No."}, items[3]]
    sizes = [client.responses.create(input=given, **SHORT).usage.input_tokens for given in (items, plain)]
    assert sizes[0] == sizes[1]
    (_, found, _) = responses_routes._messages(items)
    assert found == {"role": "assistant", "content": "No.", "reasoning_content": "hm"}
    odd = [{"type": "reasoning", "content": given} for given in (None, "x", [1, {"text": 5}], {})]
    assert responses_routes._messages([*odd, items[0]]) == items[:1]


@pytest.mark.long
def test_a_response_is_streamed(client):
    whole = client.responses.create(input=A, instructions="Be brief.", **SHORT)
    found = list(client.responses.create(input=A, instructions="Be brief.", stream=True, **SHORT))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert "".join(event.delta for event in found if event.type == "response.output_text.delta") == whole.output_text
    assert found[-1].response.output_text == whole.output_text
    assert client.responses.create(input=B, previous_response_id=found[-1].response.id, **SHORT).id


def test_a_response_that_is_not_stored_is_gone(client):
    first = client.responses.create(input=A, store=False, **SHORT)
    with pytest.raises(Exception, match="There is no response"):
        client.responses.create(input=B, previous_response_id=first.id, **SHORT)


@pytest.mark.long
def test_old_responses_are_dropped():
    with serve(max_responses=2) as server:
        names = [server.post("/v1/responses", {"input": A, "max_output_tokens": 1}).json()["id"] for _ in range(3)]
        found = [server.client.get(f"/v1/responses/{name}").status_code for name in names]
        assert found == [404, 200, 200]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "input"),
        ({"input": []}, "no message"),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only texts"),
        ({"input": "x", "tools": [{}]}, "tools"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens=0"),
        ({"input": "x", "temperature": 10**9}, "temperature"),
        ({"input": "x", "polici": "h2o"}, "did you mean policy"),
        ({"input": "\ud83d"}, "half of a character"),
    ],
    ids=str,
)
def test_responses_that_are_refused(server, body, words):
    answer = server.client.post("/v1/responses", content=json.dumps(body), headers={"Content-Type": "application/json"})
    assert words in server.refused(answer)["message"]


@pytest.mark.slow
def test_a_seed_draws_the_same_texts_again():
    asked = {"max_output_tokens": 12, "temperature": 3, "seed": 7}
    with serve() as server:

        def respond(**more):
            found = server.post("/v1/responses", {"input": "Once upon a time", **asked, **more}).json()
            return found["id"], found["output"][0]["content"][0]["text"]

        (first, text), (second, again) = respond(), respond()
        assert text == again != respond(seed=8)[1]
        texts = [respond(previous_response_id=name)[1] for name in (first, first, second)]
        assert texts[0] == texts[1] == texts[2]
        for name in ("one", "other"):
            server.post("/v1/sessions", {"id": name})
        body = {"max_tokens": 12, "temperature": 3, "seed": 7}
        two = ("one", "other")
        turns = [[server.chat(session_id=name, **body).json()["choices"] for _ in range(2)] for name in two]
        assert turns[0] == turns[1]
        assert turns[0][0] != turns[0][1]
