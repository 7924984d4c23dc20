"""Tools and forms in the bodies of OpenAI's API: what is read, what the model is told, and how calls are read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.engine.structure import MOST_CHARACTERS
from kvkeep.openai.calls import Calls
from kvkeep.openai.messages import ParameterError
from kvkeep.openai.requests import CHAT, COMPLETIONS, read
from kvkeep.openai.tool_text import calls_text

HELLO = [{"role": "user", "content": "Hello"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def tool(name="weather", **more):
    return {"type": "function", "function": {"name": name, "parameters": CITY, **more}}


def asked(**body):
    return read(CHAT, {"messages": HELLO, **body})


def test_the_model_is_told_about_tools_in_the_systems_message():
    (found,) = asked(tools=[tool(description="Says the weather.", strict=True)]).prompts
    assert [one["role"] for one in found] == ["system", "user"]
    (line,) = [line for line in found[0]["content"].splitlines() if line.startswith('{"type"')]
    shown = {"name": "weather", "description": "Says the weather.", "parameters": CITY}
    assert json.loads(line) == {"type": "function", "function": shown}
    (again,) = asked(messages=[{"role": "developer", "content": "Be kind."}, *HELLO], tools=[tool()]).prompts
    assert again[0]["content"].startswith("Be kind.\n\n# Tools\n")
    assert len(again) == 2


@pytest.mark.parametrize("more", [{"tool_choice": "none", "tools": [tool()]}, {"tools": []}, {"tool_choice": "auto"}])
def test_without_tools_nothing_is_told(more):
    found = asked(**more)
    assert (found.prompts, found.tools, dict(found.options)) == ((HELLO,), None, {})


def test_calls_and_their_results_are_texts_of_the_conversation():
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    results = [{"role": "tool", "tool_call_id": "call_1", "content": text} for text in ("sun", "rain")]
    told = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call, call]}, *results]
    (found,) = asked(messages=told).prompts
    once = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert found[1] == {"role": "assistant", "content": f"{once}\n{once}"}
    answer = "<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    assert found[2:] == [{"role": "user", "content": answer}]
    (said,) = asked(messages=[{"role": "assistant", "content": "Well.", "tool_calls": [call]}]).prompts
    assert said[0]["content"] == f"Well.\n{once}"


FORMS = [
    ({"response_format": {"type": "json_object"}}, "json"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}, "json"),
    ({"structured_outputs": {"regex": "[a-z]+"}}, "regex"),
    ({"structured_outputs": {"json": json.dumps(CITY)}}, "json"),
]


@pytest.mark.parametrize(("body", "kind"), FORMS)
def test_forms_become_options(body, kind):
    assert asked(**body).options["structured_outputs"].kind == kind
    assert read(COMPLETIONS, {"prompt": "x", **body}).options["structured_outputs"].kind == kind


BAD = [
    ({"tools": [1]}, "tools[0]"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"tools": [tool("")]}, "tools[0].function.name"),
    ({"tools": [tool("a b")]}, "tools[0].function.name"),
    ({"tools": [tool('a"b')]}, "tools[0].function.name"),
    ({"tools": [tool("a\n")]}, "tools[0].function.name"),
    ({"tools": [tool("x" * 65)]}, "tools[0].function.name"),
    ({"tools": [tool(), tool()]}, "tools"),
    ({"tools": [tool(f"t{n}") for n in range(129)]}, "tools"),
    ({"tools": [tool(parameters=5)]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
    ({"tools": [tool(parameters={"enum": ["\ud83d"]})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"x-guidance": 1})]}, "tools[0].function.parameters"),
    ({"tools": [tool(parameters={"title": "x" * MOST_CHARACTERS})]}, "tools"),
    ({"tools": [tool(description=5)]}, "tools[0].function.description"),
    ({"tools": [tool(description="\ud83d")]}, "tools[0].function.description"),
    ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
    ({"tools": [tool()], "tool_choice": "any"}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": ["weather"]}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [tool()], "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": ["json"]}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": [1]}}},
        "response_format.json_schema.schema",
    ),
    ({"messages": [{"role": "tool", "tool_call_id": "x"}]}, "messages[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "x"}}]}]}, "messages[0].tool_calls[0]"),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[0].tool_calls"),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:60])
def test_what_cannot_be_read_is_refused_by_its_name(body, param):
    with pytest.raises(ParameterError) as caught:
        asked(**body)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


def pieces(text, size):
    return [text[at : at + size] for at in range(0, len(text), size)]


def assembled(parts, *, anywhere=True):
    """What a client makes of the deltas of an answer that comes in pieces."""
    calls, content, found = Calls("x", anywhere=anywhere), "", []
    deltas = [delta for part in parts for delta in calls.add(part)] + list(calls.end())
    for delta in deltas:
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                assert part["index"] == len(found)
                found.append([part["function"]["name"], part["function"]["arguments"]])
            else:
                found[part["index"]][1] += part["function"]["arguments"]
    assert calls.count == len(found)
    return content, [(name, given) for name, given in found]


ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(alphabet='a<>/{}\n"\\ tool_call', max_size=12), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_it-2"]), ARGUMENTS.map(json.dumps)), max_size=3)


@given(
    st.text(alphabet="a< tool_ca>", max_size=15).filter(lambda text: "<tool_call>" not in text),
    CALLS,
    st.integers(1, 9),
)
def test_calls_are_read_back_in_pieces_of_any_size(content, calls, size):
    text = content + calls_text(calls)
    assert assembled(pieces(text, size)) == (content, calls)
    whole = Calls("x", anywhere=True).whole(text)
    if calls:
        assert whole["content"] == (content or None)
        assert [(one["function"]["name"], one["function"]["arguments"]) for one in whole["tool_calls"]] == calls
        assert len({one["id"] for one in whole["tool_calls"]}) == len(calls)
    else:
        assert whole == {"content": content}


@given(st.integers(1, 9))
def test_a_form_may_have_the_words_of_a_call_in_its_texts(size):
    text = json.dumps({"a": calls_text([("f", "{}")])})
    assert assembled(pieces(text, size), anywhere=False) == (text, [])
    calls = [("f", '{"a": "<tool_call>"}')]
    assert assembled(pieces(calls_text(calls), size), anywhere=False) == ("", calls)


@given(st.integers(0, 60), st.integers(1, 9))
def test_a_call_that_is_cut_keeps_its_beginning(length, size):
    calls = [("f", '{"city": {"name": "Ulm"}}')]
    content, found = assembled(pieces(calls_text(calls)[:length], size))
    assert content == calls_text(calls)[:length] if length < len("<tool_call>") else content == ""
    if found:
        assert calls[0][1].startswith(found[0][1])
