"""Tools and forms in the bodies of OpenAI's API: what is read, what the model is told, and how calls are read back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvkeep.engine.request import MOST_CHARACTERS
from kvkeep.openai.messages import HERMES, LLAMA3, MISTRAL, ParameterError, ToolUse
from kvkeep.openai.requests import CHAT, COMPLETIONS, read
from kvkeep.openai.tools import ToolCallParser

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
    ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": ""}}}, "tool_choice"),
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
    ({"messages": [{"role": "tool", "content": "x", "tool_call_id": 5}]}, "messages[0].tool_call_id"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "x", "arguments": ""}}]}]},
        "messages[0].tool_calls[0].id",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD, ids=lambda value: str(value)[:60])
def test_what_cannot_be_read_is_refused_by_its_name(body, param):
    with pytest.raises(ParameterError) as caught:
        asked(**body)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


def pieces(text, size):
    return [text[at : at + size] for at in range(0, len(text), size)]


NAMES = ("f", "get_it-2")
HIDDEN = [ToolUse(form, token=7) for form in (LLAMA3, MISTRAL)]
USES = [ToolUse(), ToolUse(LLAMA3), ToolUse(MISTRAL), *HIDDEN]


def shown(use, calls):
    """The text of an answer with calls; a special token is not part of it."""
    text = use.form.text(calls)
    return text if use.token is None else text.removeprefix(use.form.mark)


def assembled(parts, *, use=USES[0], anywhere=True):
    """What a client makes of the deltas of an answer that comes in pieces."""
    calls, content, found = ToolCallParser("x", use, NAMES, anywhere=anywhere), "", []
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


TRICKY = 'a<>/{}[]\n"\\\\ tool_call,CALS'
ARGUMENTS = st.dictionaries(st.text(max_size=4), st.text(alphabet=TRICKY, max_size=12), max_size=3)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS.map(json.dumps)), max_size=3)
ALIKE = st.text(alphabet='a<[ {tool_cars}"', max_size=15)


@pytest.mark.parametrize("use", USES, ids=lambda use: f"{use.form.name}-{use.token}")
@given(content=ALIKE, calls=CALLS, size=st.integers(1, 9))
def test_calls_are_read_back_in_pieces_of_any_size(use, content, calls, size):
    """Texts come before calls where a mark can be seen. Some forms have one call in an answer."""
    calls = calls[:1] if use.form.next is None else calls
    can_follow = use.form.needs_mark and use.token is None
    content = content if can_follow or not calls else ""
    text = content + shown(use, calls) if calls else content
    assert assembled(pieces(text, size), use=use) == (content, calls)
    whole = ToolCallParser("x", use, NAMES, anywhere=True).whole(text)
    if calls:
        assert whole["content"] == (content or None)
        assert [(one["function"]["name"], one["function"]["arguments"]) for one in whole["tool_calls"]] == calls
        assert len({one["id"] for one in whole["tool_calls"]}) == len(calls)
    else:
        assert whole == {"content": content}


@given(st.sampled_from(USES), st.integers(1, 9))
def test_a_form_may_have_the_words_of_a_call_in_its_texts(use, size):
    text = json.dumps({"a": shown(use, [("f", "{}")])})
    assert assembled(pieces(text, size), use=use, anywhere=False) == (text, [])
    calls = [("f", '{"a": "<tool_call> [TOOL_CALLS] <|python_tag|>"}')]
    assert assembled(pieces(shown(use, calls), size), use=use, anywhere=False) == ("", calls)


@given(st.sampled_from(USES), st.integers(0, 60), st.integers(1, 9))
def test_a_call_that_is_cut_keeps_its_beginning(use, length, size):
    """Nothing of an answer is lost: it is a text until the arguments begin."""
    calls = [("f", '{"city": {"name": "Ulm"}}')]
    text = shown(use, calls)[:length]
    content, found = assembled(pieces(text, size), use=use)
    if found:
        assert content == ""
        assert calls[0][1].startswith(found[0][1])
        assert text.endswith((found[0][1], *(found[0][1] + (use.form.close + use.form.last)[:n] for n in range(20))))
    else:
        assert content == text


BROKEN = [
    (USES[0], '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    (USES[0], '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>'),
    (USES[0], '<tool_call>{"name": "f"'),
    (USES[1], '{"name": "f", "arguments": {}}'),
    (USES[1], '{"name": "unknown", "parameters": {}}'),
    (USES[1], 'Well: {"name": "f", "parameters": {}}'),
    (USES[2], '[TOOL_CALLS] {"name": "f", "arguments": {}}'),
    (USES[2], '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]'),
    (USES[2], '[{"name": "f", "arguments": {}}]'),
    (USES[4], '[{"name": "f", "arguments": "x"}]'),
]


@pytest.mark.parametrize(("use", "text"), BROKEN, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize("size", [1, 4, 99])
def test_what_is_no_call_is_a_text(use, text, size):
    assert assembled(pieces(text, size), use=use) == (text, [])


def test_a_broken_call_does_not_hide_a_good_one():
    good = HERMES.text([("f", "{}")])
    assert assembled(["<tool_call>\n{oh ", good]) == ("<tool_call>\n{oh ", [("f", "{}")])


SAID = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
TOLD = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [SAID, {**SAID, "id": "call_2"}]},
    {"role": "tool", "tool_call_id": "call_1", "content": "sun"},
    {"role": "tool", "tool_call_id": "call_2", "content": "rain"},
]


def test_a_template_that_takes_tools_gets_them_as_they_are():
    found = read(CHAT, {"messages": TOLD, "tools": [tool(strict=True)]}, use=ToolUse(by_template=True))
    assert found.described == ({"type": "function", "function": {"name": "weather", "parameters": CITY}},)
    hello, said, *results = found.prompts[0]
    assert hello == HELLO[0]
    assert [one["function"]["arguments"] for one in said["tool_calls"]] == [{"city": "Ulm"}] * 2
    assert [one["tool_call_id"] for one in results] == ["call_1", "call_2"]
    assert [one["role"] for one in results] == ["tool", "tool"]


def test_one_call_in_a_message_where_the_form_has_one():
    (found,) = read(CHAT, {"messages": TOLD}, use=ToolUse(LLAMA3, by_template=True)).prompts
    assert [len(one.get("tool_calls", ())) for one in found] == [0, 1, 1, 0, 0]


def test_ids_of_mistral_are_short_and_agree():
    (found,) = read(CHAT, {"messages": TOLD}, use=ToolUse(MISTRAL, by_template=True)).prompts
    ids = [one["id"] for one in found[1]["tool_calls"]]
    assert ids == [one["tool_call_id"] for one in found[2:]]
    assert len({*ids}) == 2
    assert all(len(one) == 9 and one.isalnum() for one in ids)


@pytest.mark.parametrize("given", ["[1]", "{", '{"a": "\\ud83d"}', '{"a": ' * 500 + "1" + "}" * 500, "{}{}"])
def test_arguments_that_are_no_object_stay_a_text(given):
    said = {**SAID, "function": {"name": "f", "arguments": given}}
    told = [*HELLO, {"role": "assistant", "tool_calls": [said]}]
    (found,) = read(CHAT, {"messages": told}, use=ToolUse(by_template=True)).prompts
    assert found[1]["tool_calls"][0]["function"]["arguments"] == given


@pytest.mark.parametrize("form", [LLAMA3, MISTRAL], ids=lambda form: form.name)
def test_other_forms_have_words_for_templates_without_tools(form):
    (found,) = read(CHAT, {"messages": TOLD, "tools": [tool()]}, use=ToolUse(form)).prompts
    assert json.dumps(CITY) in found[0]["content"]
    assert form.middle[3:] in found[0]["content"]
    assert form.text([("weather", '{"city": "Ulm"}')] * 2) == found[2]["content"]
    assert [one["role"] for one in found] == ["system", "user", "assistant", "user"]


def test_json_and_calls_that_begin_alike_are_refused():
    body = {"messages": HELLO, "tools": [tool()], "response_format": {"type": "json_object"}}
    with pytest.raises(ParameterError, match="begin like JSON"):
        read(CHAT, body, use=ToolUse(LLAMA3))
    assert read(CHAT, body, use=ToolUse(LLAMA3, token=7)).begins_with_call
    assert read(CHAT, {**body, "tool_choice": "required"}, use=ToolUse(LLAMA3)).begins_with_call
