"""The official Python client of OpenAI's API."""

from __future__ import annotations

from typing import Literal

import pytest

from .running import HELLO, NAME, WAIT_S, serve

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def client():
    with serve() as running:
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made:
            yield made
        assert running.idle()


def test_chat(client):
    assert [one.id for one in client.models.list()] == [NAME]
    found = client.chat.completions.create(model=NAME, messages=HELLO, max_tokens=5, logprobs=True, top_logprobs=1)
    assert found.usage.completion_tokens == 5
    assert len(found.choices[0].logprobs.content) <= 5


def test_stream(client):
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 5, "seed": 3}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].delta.content or "" for one in pieces if one.choices) == whole
    assert pieces[-1].usage.completion_tokens == 5


def test_a_stream_that_is_left_frees_its_row(client):
    with client.chat.completions.create(
        model=NAME, messages=HELLO, max_tokens=100_000, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        assert next(iter(stream)).choices


def test_completions(client):
    found = client.completions.create(model=NAME, prompt=["a dog", "a cat"], max_tokens=3, echo=True, logprobs=1)
    assert [one.text[:5] for one in found.choices] == ["a dog", "a cat"]
    assert found.choices[1].logprobs.token_logprobs[0] is None


def test_extra_fields_and_errors(client):
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 2}
    found = client.chat.completions.create(**asked, extra_body={"policy": "h2o", "budget": 64})
    assert found.usage.kvkeep["seen_tokens"] > 2
    with pytest.raises(openai.BadRequestError, match="did you mean policy") as caught:
        client.chat.completions.create(**asked, extra_body={"polici": "h2o"})
    assert (caught.value.param, caught.value.type) == ("polici", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(**{**asked, "model": "other"})


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=8)
    age: Literal[1, 2, 3]


class Weather(pydantic.BaseModel):
    """Says the weather."""

    city: str = pydantic.Field(max_length=8)


@pytest.mark.slow
def test_structured_output_is_parsed(client):
    asked = {"model": NAME, "messages": HELLO, "response_format": Person, "max_tokens": 80}
    found = client.chat.completions.parse(**asked).choices[0]
    assert isinstance(found.message.parsed, Person)
    assert found.finish_reason == "stop"
    with client.chat.completions.stream(**asked) as stream:
        kinds = {event.type for event in stream}
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    assert {"content.delta", "content.done"} <= kinds
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**{**asked, "max_tokens": 2})


@pytest.mark.slow
def test_tools_are_called_and_parsed(client):
    tools = [openai.pydantic_function_tool(Weather)]
    asked = {"model": NAME, "messages": HELLO, "tools": tools, "tool_choice": "required", "max_tokens": 120}
    found = client.chat.completions.parse(**asked, parallel_tool_calls=False).choices[0]
    (call,) = found.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)
    assert found.finish_reason == "tool_calls"
    with client.chat.completions.stream(**asked, parallel_tool_calls=False) as stream:
        events = list(stream)
        (last,) = stream.get_final_completion().choices[0].message.tool_calls
    assert isinstance(last.function.parsed_arguments, Weather)
    assert "tool_calls.function.arguments.delta" in {event.type for event in events}
    told = [*HELLO, found.message, {"role": "tool", "tool_call_id": call.id, "content": "It rains."}]
    assert client.chat.completions.create(model=NAME, messages=told, tools=tools, max_tokens=4).choices[0].message


@pytest.mark.slow
def test_responses(client):
    found = client.responses.create(model=NAME, input="Once upon a time", max_output_tokens=5)
    assert found.output_text
    on = client.responses.create(model=NAME, input="And then?", previous_response_id=found.id, max_output_tokens=5)
    assert on.usage.input_tokens_details.cached_tokens > 0
    with client.responses.stream(model=NAME, input="Once upon a time", max_output_tokens=5) as stream:
        *events, last = stream
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert last.response.output_text == text
    parsed = client.responses.parse(model=NAME, input="Who?", text_format=Person, max_output_tokens=80)
    assert isinstance(parsed.output_parsed, Person)


@pytest.mark.slow
def test_answers_and_events_have_all_fields_that_the_types_require(client):
    """The client itself does not check them; strict clients of the same API do."""
    tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
    for more in ({"top_logprobs": 1, "max_output_tokens": 4}, {"tools": tools, "tool_choice": "required"}):
        asked = {"model": NAME, "input": "Who?", "temperature": 0, "max_output_tokens": 30, **more}
        for found in client.responses.create(**asked, stream=True):  # the last one has the whole answer
            type(found).model_validate(found.model_dump(exclude_unset=True, by_alias=True))
    asked = {"model": NAME, "messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    for found in (client.chat.completions.create(**asked), *stream):
        type(found).model_validate(found.model_dump(exclude_unset=True, by_alias=True))


@pytest.mark.slow
def test_tools_of_responses(client):
    tools = [openai.pydantic_function_tool(Weather)["function"] | {"type": "function"}]
    asked = {"model": NAME, "input": "Who?", "tools": tools, "tool_choice": "required", "max_output_tokens": 120}
    with client.responses.stream(**asked, parallel_tool_calls=False) as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_response().output
    assert "response.function_call_arguments.delta" in kinds
    assert Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    follow = client.responses.create(model=NAME, input=[HELLO[0], call, result], max_output_tokens=4)
    assert follow.output_text


def test_a_schema_that_is_refused(client):
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "objekt"}}}
    with pytest.raises(openai.BadRequestError, match="Invalid type: objekt"):
        client.chat.completions.create(model=NAME, messages=HELLO, response_format=bad)
