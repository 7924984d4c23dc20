"""``/v1/responses``: the forms of input that OpenAI's types allow, log-probabilities, and what is refused."""

import json

import pytest

from .running import serve

pytest.importorskip("llguidance")
RESPONSES = "/v1/responses"
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module")
def server():
    with serve() as running:
        yield running


def respond(server, **body):
    answer = server.post(RESPONSES, {"input": "Once upon a time", "max_output_tokens": 5, "temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(server, **body):
    answer = server.post(RESPONSES, {"input": "Once upon a time", "max_output_tokens": 5, "temperature": 0, **body, "stream": True})
    assert answer.status_code == 200, answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line.startswith("data: ")]


def test_log_probabilities_are_those_of_a_chat_also_in_a_stream(server):
    chat = server.chat(logprobs=True, top_logprobs=2, max_tokens=5).json()["choices"][0]
    response = respond(server, **LOGPROBS)
    (part,) = response["output"][0]["content"]
    assert part["text"] == chat["message"]["content"]
    assert part["logprobs"] == chat["logprobs"]["content"]
    assert response["top_logprobs"] == 2
    events = streamed(server, **LOGPROBS)
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert [entry for event in deltas for entry in event["logprobs"]] == part["logprobs"] == done["logprobs"]
    assert events[-1]["response"]["output"][0]["content"] == [part]


def test_without_being_asked_for_there_are_no_log_probabilities(server):
    for body in ({}, {"include": []}, {"include": ["reasoning.encrypted_content"]}, {"top_logprobs": 0}):
        assert respond(server, **body)["output"][0]["content"][0]["logprobs"] == []
    assert len(respond(server, top_logprobs=1)["output"][0]["content"][0]["logprobs"]) == 5


def test_every_token_has_an_entry_also_special_ones(server):
    bias = server.served.checkpoint.tokenizer.eos_token_id
    assert bias is not None
    chat = server.chat(messages=[{"role": "user", "content": "🎉 naïve 你好"}], logprobs=True, temperature=2, seed=3, max_tokens=30)
    entries = respond(
        server, input="🎉 naïve 你好", **LOGPROBS, temperature=2, seed=3, max_output_tokens=30
    )["output"][0]["content"][0]
    assert b"".join(bytes(entry["bytes"]) for entry in entries["logprobs"]).decode("utf-8", "replace") == entries["text"]
    assert len(entries["logprobs"]) == len(chat.json()["choices"][0]["logprobs"]["content"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"include": ["message.output_text"]}, "include"),
        ({"include": "message.output_text.logprobs"}, "include"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": -1}, "top_logprobs"),
        ({"top_logprobs": "1"}, "top_logprobs"),
    ],
    ids=str,
)
def test_what_is_refused_names_its_parameter(server, body, param):
    assert server.refused(server.post(RESPONSES, {"input": "a", **body}))["param"] == param
