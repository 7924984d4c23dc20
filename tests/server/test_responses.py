"""``/v1/responses``: the forms of input that OpenAI's types allow, log-probabilities, and what is refused."""

import json

import pytest

from .running import serve

pytest.importorskip("llguidance")

from kvkeep.server.responses_routes import _messages

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
    answer = server.post(
        RESPONSES, {"input": "Once upon a time", "max_output_tokens": 5, "temperature": 0, **body, "stream": True}
    )
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


@pytest.mark.long
def test_without_being_asked_for_there_are_no_log_probabilities(server):
    for body in ({}, {"include": []}, {"include": ["reasoning.encrypted_content"]}, {"top_logprobs": 0}):
        assert respond(server, **body)["output"][0]["content"][0]["logprobs"] == []
    assert len(respond(server, top_logprobs=1)["output"][0]["content"][0]["logprobs"]) == 5


@pytest.mark.long
def test_every_token_has_an_entry_also_special_ones(server):
    bias = server.served.checkpoint.tokenizer.eos_token_id
    assert bias is not None
    chat = server.chat(
        messages=[{"role": "user", "content": "🎉 naïve 你好"}], logprobs=True, temperature=2, seed=3, max_tokens=30
    )
    entries = respond(server, input="🎉 naïve 你好", **LOGPROBS, temperature=2, seed=3, max_output_tokens=30)["output"][
        0
    ]["content"][0]
    assert (
        b"".join(bytes(entry["bytes"]) for entry in entries["logprobs"]).decode("utf-8", "replace") == entries["text"]
    )
    assert len(entries["logprobs"]) == len(chat.json()["choices"][0]["logprobs"]["content"])


USER = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]}
TOOL = {"type": "function", "name": "weather", "parameters": None, "strict": None, "description": None}
OTHER = {**TOOL, "name": "time"}
NOTHING = (
    *("instructions", "previous_response_id", "include", "metadata", "reasoning", "store", "stream", "temperature"),
    *("text", "tool_choice", "tools", "top_p", "top_logprobs", "truncation", "user", "parallel_tool_calls", "prompt"),
    *("background", "max_tool_calls", "service_tier", "conversation", "stream_options", "prompt_cache_key", "seed"),
)


ALLOWED = [
    dict.fromkeys(NOTHING),
    {"input": [{**USER, "type": None, "id": None, "status": None, "phase": None}]},
    {"input": [USER, {"role": "assistant", "content": None}, USER]},
    {"input": [USER, {**CALL, "id": None, "status": None, "caller": None}, {**RESULT, "name": None}]},
    {
        "input": [
            USER,
            {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
            CALL,
            RESULT,
        ]
    },
    {"stream": True, "stream_options": {"include_obfuscation": False}},
    {"max_tool_calls": 3, "text": {"format": None, "verbosity": "medium"}, "service_tier": "flex"},
]


@pytest.mark.long
def test_what_the_types_of_the_api_allow_is_taken(server):
    for body in ALLOWED:
        answer = server.post(RESPONSES, {"input": "a", "max_output_tokens": 2, **body})
        assert answer.status_code == 200, answer.text
        assert "x-kvkeep-ignored" not in answer.headers


def test_a_call_belongs_to_the_message_before_it():
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    said = {"role": "assistant", "content": "Let me see."}
    user, answer, *results = _messages([USER, said, thought, CALL, {**CALL, "call_id": "c2"}, RESULT, RESULT])
    assert (user, len(results)) == (USER, 2)
    assert {**answer, "tool_calls": None} == {**said, "reasoning_content": "hm", "tool_calls": None}
    assert [call["id"] for call in answer["tool_calls"]] == ["c1", "c2"]


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_only_allowed_tools_are_called(server, chat):
    allowed = {"mode": "required", "tools": [{"type": "function", "name": "time"}]}
    if chat:
        nested = [{"type": "function", "function": {"name": tool["name"]}} for tool in (TOOL, OTHER)]
        choice = {"type": "allowed_tools", "allowed_tools": {**allowed, "tools": nested[1:]}}
        answer = server.chat(tools=nested, tool_choice=choice, max_tokens=80, temperature=1)
        calls = [call["function"]["name"] for call in answer.json()["choices"][0]["message"]["tool_calls"]]
    else:
        choice = {"type": "allowed_tools", **allowed}
        found = respond(server, tools=[TOOL, OTHER], tool_choice=choice, max_output_tokens=80, temperature=1)
        calls = [call["name"] for call in found["output"]]
    assert set(calls) == {"time"}


REFUSED = [
    ({"include": ["message.output_text"]}, "include"),
    ({"include": "message.output_text.logprobs"}, "include"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": "1"}, "top_logprobs"),
    ({"instructions": "\ud83d"}, "instructions"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
    ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1].type"),
    ({"input": [USER, {**CALL, "name": "a b"}], "instructions": "Be nice."}, "input[1]"),
    ({"input": [USER, {**CALL, "call_id": 5}]}, "input[1].call_id"),
    ({"input": [USER, {**CALL, "arguments": "\ud83d"}]}, "input[1].arguments"),
    ({"input": [USER, CALL, {**RESULT, "output": "\ud83d"}]}, "input[2].output"),
    ({"input": []}, "input"),
    ({"input": [{"type": "message", "role": "robot", "content": "a"}]}, "input[0]"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content"),
    ({"text": {"format": "json"}}, "text.format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format"),
    ({"max_output_tokens": 10**30}, "max_output_tokens"),
    ({"stream_options": {}}, "stream_options"),
    ({"context_management": [{"type": "compaction"}]}, "context_management"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": ["weather"]}, "tools[0]"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "time"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [OTHER]}}, "tool_choice"),
]


@pytest.mark.long
def test_what_is_refused_names_its_parameter(server):
    for body, param in REFUSED:
        answer = server.client.post(RESPONSES, content=json.dumps({"input": "a", **body}))
        assert server.refused(answer)["param"] == param
