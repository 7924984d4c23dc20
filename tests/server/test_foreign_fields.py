"""Fields that other servers have: those that shape the answer are honoured or refused, and unknown ones are named."""

import json
import logging

import pytest
from tokenizers.processors import TemplateProcessing

from .running import HELLO, alone, events, serve

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


def text_of(answer):
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice["message"]["content"] if "message" in choice else choice["text"]


SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
WORDS = ["yes", "no"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("guided_json", value) for value in (SCHEMA, json.dumps(SCHEMA))),
        *(("json_schema", SCHEMA), ("response_format", {"type": "json_object", "schema": SCHEMA})),
        *(("guided_regex", "yes|no"), ("regex", "yes|no"), ("guided_choice", WORDS)),
        *((name, 'root ::= "yes" | "no"') for name in ("guided_grammar", "grammar", "ebnf")),
    ],
)
def test_a_form_under_any_of_its_names_holds_the_answer(server, field, value):
    is_json = "json" in json.dumps({field: value})
    for answer in (server.chat(**{field: value}, max_tokens=40), server.complete(**{field: value}, max_tokens=40)):
        found = text_of(answer)
        assert json.loads(found)["a"] in (1, 2) if is_json else found in WORDS
    streamed = events(server.chat(**{field: value}, max_tokens=40, stream=True))
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == text_of(
        server.chat(**{field: value}, max_tokens=40)
    )


@pytest.mark.slow
def test_stop_tokens_end_a_text_and_are_no_part_of_it(server):
    whole = alone("Once upon a time", raw=True, max_new_tokens=6)
    third = whole.token_ids[2]
    places = whole.token_ids.index(third)
    stopped = server.complete(stop_token_ids=[third], max_tokens=6, ignore_eos=True)
    assert stopped.json()["usage"]["completion_tokens"] == places + 1
    assert stopped.json()["choices"][0]["finish_reason"] == "stop"
    kept = text_of(server.complete(stop_token_ids=[third], max_tokens=6, include_stop_str_in_output=True))
    assert kept.startswith(text_of(stopped))
    assert len(kept) > len(text_of(stopped))
    assert text_of(server.chat(stop_token_ids=list(range(server.served.vocabulary)))) == ""


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_is_kept_if_asked_for(server, stream):
    whole = text_of(server.complete(max_tokens=12))
    stop = whole[4:9]
    answer = server.complete(max_tokens=12, stop=[stop], include_stop_str_in_output=True, stream=stream)
    found = "".join(chunk["choices"][0]["text"] for chunk in events(answer)) if stream else text_of(answer)
    assert found == whole[: whole.index(stop) + len(stop)]


def test_special_tokens_are_shown_if_asked_for(server):
    bias = {str(server.served.checkpoint.tokenizer.eos_token_id): 100}
    shown = {"skip_special_tokens": False, "logit_bias": bias, "max_tokens": 2}
    assert text_of(server.chat(**shown, ignore_eos=True)) == "<|end|><|end|>"
    assert text_of(server.chat(**shown)) == ""
    assert text_of(server.chat(**shown, include_stop_str_in_output=True)) == "<|end|>"


@pytest.mark.long
def test_a_prompt_is_cut_to_its_last_tokens(server):
    ids = server.post("/tokenize", {"prompt": "Once upon a time"}).json()["tokens"]
    cut = server.complete(truncate_prompt_tokens=2, echo=True)
    assert cut.json()["usage"]["prompt_tokens"] == 2
    assert text_of(cut) == text_of(server.complete(prompt=ids[-2:], echo=True))
    assert server.chat(truncate_prompt_tokens=3).json()["usage"]["prompt_tokens"] == 3
    with serve(max_model_len=20) as small:
        answer = small.complete(prompt=list(range(5, 45)), truncate_prompt_tokens=-1, max_tokens=4)
        assert answer.json()["usage"]["prompt_tokens"] == 16


def test_the_last_message_is_continued_and_no_answer_is_begun(server):
    begun = [*HELLO, {"role": "assistant", "content": "there was a "}]

    def count(messages, **body):
        found = server.post("/tokenize", {"messages": messages, **body}).json()
        return server.post("/detokenize", {"tokens": found["tokens"]}).json()["prompt"], found["count"]

    text, tokens = count(begun, continue_final_message=True)
    assert text.rstrip().endswith("there was a")
    assert server.chat(messages=begun, continue_final_message=True).json()["usage"]["prompt_tokens"] == tokens
    bare, asked = count(HELLO, add_generation_prompt=False)[0], count(HELLO)[0]
    assert asked.startswith(bare)
    assert len(asked) > len(bare)
    both = server.chat(messages=begun, continue_final_message=True, add_generation_prompt=True)
    assert server.refused(both)["param"] == "add_generation_prompt"


@pytest.mark.slow
def test_variables_reach_the_template(server, monkeypatch):
    tokenizer = server.served.checkpoint.tokenizer
    extra = "{% if enable_thinking is false %}no thoughts {% endif %}{{ reasoning_effort }}"
    plain = server.chat().json()["usage"]["prompt_tokens"]
    assert server.refused(server.chat(reasoning_effort="low"))["message"].startswith("reasoning_effort has no effect")
    monkeypatch.setattr(tokenizer, "chat_template", tokenizer.chat_template + extra)
    quiet = {"chat_template_kwargs": {"enable_thinking": False}}
    assert server.chat().json()["usage"]["prompt_tokens"] == plain
    assert server.chat(**quiet).json()["usage"]["prompt_tokens"] > plain
    assert server.chat(reasoning_effort="low").json()["usage"]["prompt_tokens"] > plain
    server.post("/v1/sessions", {"id": "quiet"})
    assert server.chat(**quiet, session_id="quiet").json()["usage"]["prompt_tokens"] > plain
    assert "session" in server.refused(server.chat(continue_final_message=True, session_id="quiet"))["message"]


@pytest.mark.slow
def test_the_tokenizers_own_tokens_are_put_around_a_prompt_as_in_vllm(server, monkeypatch):
    backend = server.served.checkpoint.tokenizer.backend_tokenizer
    before = backend.post_processor

    def count(ask, **body):
        answer = ask(**body)
        assert answer.status_code == 200, answer.text
        return answer.json()["usage"]["prompt_tokens"]

    bare = [count(ask) for ask in (server.chat, server.complete)]
    backend.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    try:
        for wanted, more in ((None, (0, 1)), (False, (0, 0)), (True, (1, 1))):
            found = [count(ask, add_special_tokens=wanted) for ask in (server.chat, server.complete)]
            assert found == [tokens + added for tokens, added in zip(bare, more, strict=True)]
            told = server.post("/tokenize", {"messages": HELLO, "add_special_tokens": wanted}).json()["count"]
            assert told == found[0]
        monkeypatch.setattr(server.served.checkpoint.tokenizer, "chat_template", None)
        assert count(server.chat) == count(server.chat, add_special_tokens=True)
        monkeypatch.undo()
    finally:
        backend.post_processor = before
    server.post("/v1/sessions", {"id": "special"})
    assert server.chat(session_id="special", add_special_tokens=False).status_code == 200
    for body in ({"add_special_tokens": True}, {"chat_template_kwargs": {"add_generation_prompt": False}}):
        assert "session" in server.refused(server.chat(session_id="special", **body))["message"]


REFUSED = [
    *(({name: "sql"}, name) for name in ("adapter", "adapters", "adapter_id", "lora_name", "lora_request")),
    *(
        ({name: value}, name)
        for name, value in {"bad_words": ["a"], "allowed_token_ids": [1], "prompt_logprobs": 0}.items()
    ),
    *(
        ({name: value}, name)
        for name, value in {"functions": [{}], "function_call": {"name": "f"}, "do_sample": False}.items()
    ),
    *(
        ({name: value}, name)
        for name, value in {"enable_thinking": False, "n_predict": 3, "use_beam_search": True}.items()
    ),
    *(
        ({name: value}, name)
        for name, value in {"echo": True, "prompt": "x", "chat_template": "x", "top_a": 0.5}.items()
    ),
    *(({name: "x"}, name) for name in ("guided_jsn", "stop_token_id", "chat_template_kwarg")),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
    ({"guided_choice": ["a"], "response_format": {"type": "json_object"}}, "guided_choice"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"chat_template_kwargs": {"messages": []}}, None),
    ({"chat_template_kwargs": {"add_generation_prompt": 1}}, "chat_template_kwargs.add_generation_prompt"),
]


@pytest.mark.long
def test_what_is_known_and_not_built_is_refused_by_its_name(server):
    for body, param in REFUSED:
        for stream in (False, True):
            error = server.refused(server.chat(**body, stream=stream))
            assert error["param"] == param
            assert (param or "messages") in error["message"].lower()


def test_all_tokens_cannot_be_ends_of_a_text_with_a_least_length(server):
    everything = list(range(server.served.vocabulary))
    assert "none is left" in server.refused(server.chat(stop_token_ids=everything, min_tokens=2))["message"]


def test_fields_that_ask_for_nothing_are_taken_and_labels_are(server):
    nothing = {"functions": [], "bad_words": [], "use_beam_search": False, "repeat_penalty": 1.0, "best_of": 1}
    labels = {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "cache_prompt": True, "echo": False}
    answer = server.chat(**nothing, **labels, enable_thinking=None)
    assert answer.status_code == 200
    assert "x-kvkeep-ignored" not in answer.headers


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/sessions", "/tokenize"])
def test_unknown_fields_are_named_in_a_header_and_once_in_the_log(path, caplog):
    body = {"/v1/responses": {"input": "a"}, "/v1/sessions": {}, "/tokenize": {"prompt": "a"}}
    sent = {**body.get(path, {"messages": HELLO, "max_tokens": 1}), "foo": 1, "a\r\nb": 2, "\ud83d": {"x": []}, "": 0}
    with serve() as server, caplog.at_level(logging.INFO, "kvkeep.access"):
        for _ in range(2):
            answer = server.client.post(path, content=json.dumps(sent))
            assert answer.headers["x-kvkeep-ignored"] == 'foo, a%0D%0Ab, %3F, ""'
    assert sum("ignored: foo" in line for line in caplog.messages) == 1


PARTS = {
    "stream_options": {"include_usage": True, "foo": 1, "bar": None, "include_obfuscation": False},
    "response_format": {
        "type": "json_schema",
        "kind": 1,
        "json_schema": {"name": "a", "schema": SCHEMA, "strictly": True},
    },
    "chat_template_kwargs": {"enable_thinking": False, "message": 1, "messag": 2},
}
UNKNOWN = ["stream_options.foo", "response_format.kind", "response_format.json_schema.strictly"]
UNREAD = ["chat_template_kwargs.enable_thinking", "chat_template_kwargs.messag"]


@pytest.mark.slow
def test_unknown_keys_of_objects_and_variables_that_the_template_does_not_read_are_named(caplog):
    with serve() as server, caplog.at_level(logging.INFO, "kvkeep.access"):
        server.post("/v1/sessions", {"id": "parts"})
        for more in ({"stream": True}, {"stream": True, "session_id": "parts"}):
            answer = server.chat(**PARTS, **more)
            assert answer.status_code == 200
            assert answer.headers["x-kvkeep-ignored"] == ", ".join(UNKNOWN + UNREAD)
        told = {"messages": HELLO, "chat_template_kwargs": PARTS["chat_template_kwargs"]}
        assert server.post("/tokenize", told).headers["x-kvkeep-ignored"] == ", ".join(UNREAD)
        parts = {
            "text": {"format": {"type": "text", "foo": 1}, "tone": "x"},
            "reasoning": {"summary": "auto", "why": 1},
        }
        response = server.post("/v1/responses", {"input": "a", "max_output_tokens": 1, **parts})
        assert response.headers["x-kvkeep-ignored"] == "text.tone, text.format.foo, reasoning.why"
    assert sum("chat_template_kwargs.messag" in line for line in caplog.messages) == 1


@pytest.mark.long
@pytest.mark.parametrize("value", [5, "x", [], {"a": {"b": [1]}}, {"": 1}], ids=str)
def test_objects_of_other_forms_fail_no_server(server, value):
    for name in (*PARTS, "text", "reasoning"):
        sent = {"messages": HELLO, "max_tokens": 1, name: value}
        assert server.post("/v1/chat/completions", sent).status_code in (200, 400)
        assert server.post("/v1/responses", {"input": "a", "max_output_tokens": 1, name: value}).status_code in (
            200,
            400,
        )


def test_unknown_options_of_a_stream_are_named(server):
    answer = server.chat(stream=True, stream_options={"include_usage": False, "include_obfuscation": False, "foo": 1})
    assert answer.headers["x-kvkeep-ignored"] == "stream_options.foo"


@pytest.mark.slow
def test_bodies_of_responses_refuse_what_they_do_not_build(server):
    for name, value in {"max_tokens": 3, "response_format": {"type": "json_object"}, "truncation": "auto"}.items():
        assert server.refused(server.post("/v1/responses", {"input": "a", name: value}))["param"] == name
    assert server.post("/v1/responses", {"input": "a", "truncation": "disabled", "include": []}).status_code == 200
