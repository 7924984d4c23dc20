"""What the routes answer: the texts of the engine, in the shapes of OpenAI's API."""

from __future__ import annotations

import re

import pytest

import kvkeep

from .running import HELLO, NAME, alone, events, keys, serve


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


@pytest.fixture(autouse=True)
def _rows_are_back(server):
    yield
    assert server.idle()


def test_models_health_and_version(server):
    get = server.client.get
    (card,) = get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (NAME, "model", 2048)
    assert get(f"/v1/models/{NAME}").json() == card
    assert get("/v1/models/other").status_code == 404
    assert get("/version").json() == {"version": kvkeep.__version__}
    found = get("/health").json()
    assert (found["status"], found["rows"], found["rows_free"], found["waiting"]) == ("ready", 4, 4, 0)
    assert found["row_bytes"] == server.engine.row_bytes
    assert get("/health", params={"check": "live"}).status_code == 200


def test_a_chat_is_what_the_engine_writes(server):
    found = server.chat(max_tokens=8).json()
    assert found["object"] == "chat.completion"
    (choice,) = found["choices"]
    result = alone(None, messages=HELLO, max_new_tokens=8)
    assert choice["message"]["content"] == result.text
    assert choice["finish_reason"] == "length"
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (result.prompt_tokens, 8)
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert usage["kvkeep"]["seen_tokens"] == usage["kvkeep"]["kept_tokens"] == usage["total_tokens"]
    assert usage["kvkeep"]["kv_bytes"] == server.engine.row_bytes


def test_a_long_prompt_is_kept_within_its_budget(server):
    long = [{"role": "user", "content": "the dog saw a cat " * 40}]
    found = server.chat(messages=long, budget=64, policy="tova").json()["usage"]["kvkeep"]
    assert (found["kept_tokens"], found["seen_tokens"]) == (64, found["seen_tokens"])
    assert found["seen_tokens"] > 200
    assert 0 < found["lost_mass"]["prompt"] < 1


def test_a_stream_says_the_same(server):
    whole = server.chat(max_tokens=8, n=2, seed=5, temperature=1).json()
    body = {"max_tokens": 8, "n": 2, "seed": 5, "temperature": 1, "stream": True}
    answer = server.chat(**body, stream_options={"include_usage": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    *pieces, last = events(answer)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert all(piece["usage"] is None for piece in pieces)
    for place, choice in enumerate(whole["choices"]):
        mine = [one for piece in pieces for one in piece["choices"] if one["index"] == place]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in mine) == choice["message"]["content"]
        assert [one["finish_reason"] for one in mine if one["finish_reason"]] == [choice["finish_reason"]]
    assert all("usage" not in piece for piece in events(server.chat(stream=True)))


def test_each_chunk_may_have_the_numbers_of_tokens_so_far(server):
    body = {"max_tokens": 6, "n": 2, "seed": 5, "temperature": 1, "stream": True}
    both = {"include_usage": True, "continuous_usage_stats": True}
    *pieces, last = events(server.chat(**body, stream_options=both))
    want, found = last["usage"], [piece["usage"] for piece in pieces]
    assert found[0] == {
        "prompt_tokens": want["prompt_tokens"],
        "completion_tokens": 0,
        "total_tokens": found[0]["prompt_tokens"],
    }
    assert found[-1]["completion_tokens"] == want["completion_tokens"]
    counts = [one["completion_tokens"] for one in found]
    assert counts == sorted(counts)
    assert len(set(counts)) > 4
    assert all(one["prompt_tokens"] == want["prompt_tokens"] for one in found)
    # alone it has no effect, as in vLLM
    assert all(
        "usage" not in one for one in events(server.chat(**body, stream_options={"continuous_usage_stats": True}))
    )
    name = server.post("/v1/sessions", {}).json()["id"]
    for _ in range(2):
        *_, piece, last = events(server.chat(session_id=name, stream=True, stream_options=both))
        assert piece["usage"] == {key: last["usage"][key] for key in piece["usage"]}


@pytest.mark.long
def test_texts_of_n_differ_and_the_first_is_the_single_one(server):
    many = [one["message"]["content"] for one in server.chat(n=4, seed=3, temperature=1).json()["choices"]]
    assert len(set(many)) > 1
    assert many[0] == server.chat(seed=3, temperature=1).json()["choices"][0]["message"]["content"]
    unseeded = {server.chat(temperature=5).json()["choices"][0]["message"]["content"] for _ in range(4)}
    assert len(unseeded) > 1


@pytest.mark.slow
def test_stop_bias_and_penalties(server):
    plain = server.complete(max_tokens=12).json()["choices"][0]
    word = plain["text"].split()[1]
    stopped = server.complete(max_tokens=12, stop=[word]).json()["choices"][0]
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"].partition(word)[0], "stop")
    (token,) = server.post("/tokenize", {"prompt": " dog"}).json()["tokens"][-1:]
    assert server.complete(logit_bias={str(token): 100}).json()["choices"][0]["text"] == " dog" * 4
    loop = {"logit_bias": {str(token): 100}, "repetition_detection": {"max_pattern_size": 3, "min_count": 3}}
    for answer in (server.complete(**loop, max_tokens=9), server.chat(**loop, max_tokens=9)):
        choice, count = answer.json()["choices"][0], answer.json()["usage"]["completion_tokens"]
        assert (choice["finish_reason"], count) == ("repetition", 3)
    changed = server.complete(max_tokens=12, frequency_penalty=2, presence_penalty=2).json()["choices"][0]["text"]
    want = alone(
        "Once upon a time", raw=True, max_new_tokens=12, frequency_penalty=2.0, presence_penalty=2.0, temperature=0.0
    )
    assert changed == want.text


@pytest.mark.long
def test_completions_of_texts_and_token_ids(server):
    ids = server.post("/tokenize", {"prompt": "Anna had"}).json()["tokens"]
    prompts = ["Anna had", "The dog"]
    texts = [one["text"] for one in server.complete(prompt=prompts).json()["choices"]]
    assert texts == [alone(prompt, raw=True).text for prompt in prompts]
    assert server.complete(prompt=ids).json()["choices"][0]["text"] == texts[0]
    assert [one["text"] for one in server.complete(prompt=[ids, ids]).json()["choices"]] == [texts[0]] * 2
    streamed = events(server.complete(prompt=prompts, stream=True, echo=True))
    for place, prompt in enumerate(prompts):
        mine = [one["text"] for piece in streamed for one in piece["choices"] if one["index"] == place]
        assert "".join(mine) == prompt + texts[place]
    assert len(server.post("/v1/completions", {"prompt": "a", "ignore_eos": True}).json()["choices"]) == 1


@pytest.mark.long
def test_an_answer_may_be_as_long_as_the_server_allows(server):
    with serve(max_new_tokens=40) as short:
        for path in ("/v1/chat/completions", "/v1/completions"):
            asked = {"messages": HELLO} if "chat" in path else {"prompt": " \n"}  # white space is a text to go on with
            found = short.post(path, {**asked, "max_tokens": -1, "ignore_eos": True, "temperature": 0}).json()
            assert found["usage"]["completion_tokens"] == 40
    assert server.post("/tokenize", {"prompt": " \n"}).json()["count"] > 0
    assert "empty" in server.refused(server.complete(prompt=""))["message"]
    server.refused(server.complete(max_tokens=-2))


def test_a_load_balancer_asks_for_the_status_alone(server):
    for path in ("/health", "/v1/models", "/metrics", "/version", "/"):
        answer = server.client.head(path)
        assert (answer.status_code, answer.content) == (server.client.get(path).status_code, b"")
    assert server.client.head("/v1/sessions/nobody").status_code == 404


def test_echo_with_logprobs_scores_the_prompt(server):
    """As lm-eval asks: token ids, one new token, ``echo``, ``logprobs``."""
    ids = server.post("/tokenize", {"prompt": "Once upon a time there was a dog"}).json()["tokens"]
    (choice,) = server.complete(prompt=ids, echo=True, logprobs=1, max_tokens=1).json()["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["top_logprobs"]) == len(ids) + 1
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    (want,) = server.engine.generate(
        kvkeep.Request(prompt=ids, sampling=kvkeep.SamplingParams(max_new_tokens=1), prompt_logprobs=1)
    )
    assert found["token_logprobs"][1:-1] == [one.value for one in want.prompt_logprobs]
    assert "".join(found["tokens"]) == choice["text"]
    assert found["text_offset"][1] == len(found["tokens"][0])
    (only,) = server.complete(prompt=ids, echo=True, logprobs=1, max_tokens=0).json()["choices"]
    assert only["logprobs"]["token_logprobs"] == found["token_logprobs"][:-1]
    assert server.complete(prompt=ids, echo=True, max_tokens=0).json()["usage"]["completion_tokens"] == 0


def test_logprobs_of_chats_and_streams(server):
    (choice,) = server.chat(logprobs=True, top_logprobs=2).json()["choices"]
    content = choice["logprobs"]["content"]
    assert "".join(one["token"] for one in content) == choice["message"]["content"]
    assert all(len(one["top_logprobs"]) == 2 for one in content)
    pieces = events(server.chat(logprobs=True, top_logprobs=2, stream=True))
    streamed = [
        one for piece in pieces for part in piece["choices"] for one in (part["logprobs"] or {"content": []})["content"]
    ]
    assert streamed == content
    (text,) = server.complete(logprobs=1).json()["choices"]
    parts = [one["logprobs"] for piece in events(server.complete(logprobs=1, stream=True)) for one in piece["choices"]]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [one for part in parts if part for one in part[name]] == text["logprobs"][name]


@pytest.mark.slow
def test_parts_of_characters_have_entries_in_answers_and_streams(server):
    asked = {"structured_outputs": {"choice": ["a 😀 好"]}, "max_tokens": 32}
    whole = server.chat(**asked, logprobs=True, top_logprobs=20).json()
    (choice,) = whole["choices"]
    content = choice["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"] > len("a 😀 好")
    assert bytes(byte for one in content for byte in one["bytes"]).decode() == choice["message"]["content"] == "a 😀 好"
    pieces = events(server.chat(**asked, logprobs=True, top_logprobs=20, stream=True))
    parts = [one["logprobs"] for piece in pieces for one in piece["choices"] if one["logprobs"]]
    assert [one for part in parts for one in part["content"]] == content
    (text,) = server.complete(**asked, logprobs=20).json()["choices"]
    found = text["logprobs"]
    assert {len(column) for column in found.values()} == {len(content)}
    assert {len(named) for named in found["top_logprobs"]} == {20}
    pieces = events(server.complete(**asked, logprobs=20, stream=True))
    parts = [one["logprobs"] for piece in pieces for one in piece["choices"] if one["logprobs"]]
    assert {name: [one for part in parts for one in part[name]] for name in found} == found


def test_tokens_and_texts(server):
    found = server.post("/tokenize", {"prompt": "Once upon a time"}).json()
    assert found["count"] == len(found["tokens"])
    assert server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"] == "Once upon a time"
    chat = server.post("/tokenize", {"messages": HELLO}).json()
    assert chat["count"] == server.chat().json()["usage"]["prompt_tokens"]
    assert server.post("/tokenize", {"prompt": ""}).json()["count"] == 0
    info = server.client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|end|>"
    assert info["chat_template"]


@pytest.mark.slow
def test_own_fields_reach_the_engine(server):
    long = "the dog saw a cat " * 20
    for body in ({"policy": "h2o", "budget": 40}, {"pins": [[0, 8]]}, {"policy": "tova", "guard": 0.5}):
        (choice,) = server.complete(prompt=long, **body).json()["choices"]
        own = {name: value for name, value in body.items() if name != "pins"}
        pins = [tuple(pin) for pin in body.get("pins", ())]
        (want,) = server.engine.generate(
            kvkeep.Request(prompt=long, raw=True, pins=pins, sampling=kvkeep.SamplingParams(max_new_tokens=4), **own)
        )
        assert choice["text"] == want.text
    usage = server.complete(prompt=long, keep_ratio=0.25).json()["usage"]
    assert usage["kvkeep"]["kept_tokens"] == usage["prompt_tokens"] // 4


REFUSED = [
    ({"polcy": "h2o"}, "polcy", "did you mean policy?"),
    ({"pin": [[0, 1]]}, "pin", "did you mean pins?"),
    ({"policy": "h20"}, "policy", "Did you mean 'h2o'?"),
    ({"policy": "os:path"}, "policy", "Unknown policy"),
    ({"policy": "h2o:recnt=3"}, "policy", "recent"),
    ({"budget": 999}, None, "more than the engine's 128"),
    ({"budget": 0}, "budget", "budget"),
    ({"budget": 32, "keep_ratio": 0.5}, "keep_ratio", "give one of them"),
    ({"keep_ratio": 2.0}, "keep_ratio", "(0, 1]"),
    ({"pins": [[5, 2]]}, None, "pin"),
    ({"pins": [[0]]}, "pins[0]", "at least 2"),
    ({"pins": [[0, 10**6]]}, None, "prompt"),
    ({"guard": 7}, "guard", "from 0 to 1"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"temperature": -1}, "temperature", "outside"),
    ({"max_tokens": True}, "max_tokens", "integer"),
    ({"max_tokens": 0}, "max_tokens", "no token"),
    ({"n": 0}, "n", "0 texts"),
    ({"messages": []}, "messages", "no message"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only texts"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "vocabulary"),
    ({"modalities": ["audio"]}, "modalities", "leave it out"),
    ({"session_id": "none"}, None, "session"),
]


@pytest.mark.long
def test_mistakes_are_named(server):
    for body, param, words in REFUSED:
        for stream in (False, True) if "stream_options" not in body else (False,):
            answer = server.chat(**body, stream=stream)
            error = server.refused(answer, 404 if "session_id" in body else 400)
            assert words in error["message"]
            assert error["param"] == param


@pytest.mark.slow
def test_sequences_are_as_long_as_the_model_has_positions():
    with serve(max_model_len=40) as server:
        ids = list(range(5, 35))
        assert server.complete(prompt=ids, max_tokens=10).status_code == 200
        for body in ({"max_tokens": 11}, {"prompt": list(range(5, 45))}):
            error = server.refused(server.complete(**{"prompt": ids, "max_tokens": 10, **body}))
            assert error["code"] == "context_length_exceeded"
        assert "Give max_tokens: 10 or less" in server.refused(server.complete(prompt=ids, max_tokens=11))["message"]
        answer = server.post("/v1/chat/completions", {"messages": HELLO, "ignore_eos": True}).json()
        assert answer["usage"]["total_tokens"] == 40
        assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 40
        server.post("/v1/sessions", {"id": "long"})
        turns = [server.chat(session_id="long", max_tokens=8, ignore_eos=True).status_code for _ in range(3)]
        assert turns == [200, 200, 400]
        found = server.post("/v1/responses", {"input": "a " * 50})
        assert server.refused(found)["code"] == "context_length_exceeded"


def test_another_model_is_not_there(server):
    assert server.refused(server.chat(model="gpt-5"), 404)["code"] == "model_not_found"
    assert server.chat(model=NAME).status_code == 200


def test_routes_that_are_not_there(server):
    assert server.refused(server.client.get("/v1/embeddings"), 404)["type"] == "not_found_error"
    server.refused(server.client.get("/v1/chat/completions"), 405)


def test_the_document_names_all_routes_and_bodies(server):
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/tokenize", "/health"} <= set(paths)
    body = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "policy" in body["properties"]
    assert "$ref" not in str(body)
    for path, methods in paths.items():
        for route in methods.values():
            named = [
                one["name"] for one in route.get("parameters", []) if (one["in"], one["required"]) == ("path", True)
            ]
            assert named == re.findall(r"{(\w+)}", path)


@pytest.mark.long
def test_every_route_but_health_needs_a_key():
    with serve(keys=keys("0123456789", "abcdefghij")) as server:
        assert server.client.get("/health").status_code == 200
        for path in ("/v1/models", "/version", "/tokenizer_info", "/openapi.json", "/nowhere", "/health/"):
            assert server.refused(server.client.get(path), 401)["code"] == "invalid_api_key"
        for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
            server.refused(server.post(path, {}), 401)
        for header in ("Bearer", "Basic 0123456789", "Bearer 0123", "Bearer 0123456789x", "\xff"):
            server.refused(server.client.get("/v1/models", headers={"Authorization": header.encode("latin-1")}), 401)
        for key in ("0123456789", "abcdefghij"):
            assert server.client.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


@pytest.mark.slow
def test_no_end_comes_before_the_least_number_of_tokens():
    with serve() as server:
        whole = server.complete(max_tokens=12, ignore_eos=True).json()["choices"][0]["text"]
        stop = whole.split()[1]
        asked = {"max_tokens": 12, "stop": [stop], "ignore_eos": True}
        assert server.complete(**asked).json()["usage"]["completion_tokens"] < 5
        later = server.complete(**asked, min_tokens=5).json()
        assert stop in later["choices"][0]["text"]
        assert later["usage"]["completion_tokens"] >= 5
        (end,) = {server.engine.model.generation_config.eos_token_id}
        ends = {"max_tokens": 12, "logit_bias": {str(end): 100}}
        assert server.complete(**ends).json()["usage"]["completion_tokens"] == 1
        assert server.complete(**ends, min_tokens=4).json()["usage"]["completion_tokens"] == 5
        for wrong in (-1, 13):
            assert server.refused(server.complete(max_tokens=12, min_tokens=wrong))["param"] == "min_tokens"


@pytest.mark.long
def test_a_negative_seed_is_a_seed_and_minus_one_is_none(server):
    def drawn(**body):
        answer = server.chat(n=3, temperature=2, max_tokens=8, **body)
        assert answer.status_code == 200, answer.text
        return [choice["message"]["content"] for choice in answer.json()["choices"]]

    first, again, other, fresh = drawn(seed=-2), drawn(seed=-2), drawn(seed=-3), [drawn(seed=-1) for _ in range(2)]
    assert first == again != other
    assert len(set(first)) == 3
    assert fresh[0] != fresh[1]
