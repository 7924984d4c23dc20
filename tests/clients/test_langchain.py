"""langchain-openai."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, Field
from server.running import NAME


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=8)
    age: Literal[1, 2, 3]


@tool
def weather(city: Literal["Ulm", "Rom"]) -> str:
    """Says the weather."""
    return f"It rains in {city}."


@pytest.fixture(scope="module")
def chat(server):
    return ChatOpenAI(model=NAME, base_url=f"{server.url}/v1", api_key="none", max_tokens=100, max_retries=0)


def test_invoke(chat):
    found = chat.invoke("Once upon a time", max_tokens=5, logprobs=True)
    assert found.content
    assert found.usage_metadata["output_tokens"] == 5
    assert found.response_metadata["finish_reason"] == "length"
    assert len(found.response_metadata["logprobs"]["content"]) == 5


def test_stream(chat):
    pieces = list(chat.stream("Once upon a time", max_tokens=5, stream_usage=True))
    assert "".join(one.content for one in pieces)
    assert sum(one.usage_metadata["output_tokens"] for one in pieces if one.usage_metadata) == 5


def test_several_at_once(chat):
    found = asyncio.run(chat.abatch(["a dog", "a cat", "a bird"], max_tokens=4))
    assert len(found) == 3


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(chat, method):
    found = chat.with_structured_output(Person, method=method, strict=True).invoke("Who is it?")
    assert isinstance(found, Person)


@pytest.mark.parametrize("stream", [False, True])
def test_tools(chat, stream):
    asked = chat.bind_tools([weather], tool_choice="required", strict=True, parallel_tool_calls=False)
    if stream:
        first, *rest = asked.stream("What is the weather?")
        found = sum(rest, first)
    else:
        found = asked.invoke("What is the weather?")
    (call,) = found.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Ulm", "Rom")
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    last = chat.bind_tools([weather]).invoke([HumanMessage("What is the weather?"), found, result], max_tokens=4)
    assert last.content is not None


def test_responses(server):
    made = ChatOpenAI(model=NAME, base_url=f"{server.url}/v1", api_key="none", use_responses_api=True, max_tokens=8)
    assert made.invoke("Once upon a time").text


def test_completions(server):
    made = OpenAI(model=NAME, base_url=f"{server.url}/v1", api_key="none", max_tokens=5)
    assert made.invoke("Once upon a time")
