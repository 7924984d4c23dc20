"""Bodies in OpenAI's format: each parameter is honoured or refused by its name, and answers have the API's shape."""

import json

import pytest
from commands import result_of
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.batch.input import InputLine, parse
from kvkeep.engine.detokenizer import TokenTexts
from kvkeep.engine.request import Logprob
from kvkeep.engine.sampling_params import RepetitionDetectionParams, SamplingParams
from kvkeep.errors import InputError
from kvkeep.models.load import find
from kvkeep.models.tiny import embedded
from kvkeep.openai.messages import ParameterError, ToolUse
from kvkeep.openai.requests import CHAT, COMPLETIONS, MOST_CHOICES, read
from kvkeep.openai.responses import answer, echoed, error
from kvkeep.parameters import REPETITION_RULE

HELLO = [{"role": "user", "content": "Hello"}]
DEFAULTS = SamplingParams(max_new_tokens=9, temperature=0.5, top_p=0.8, seed=4)


def chat(**body):
    return read(CHAT, {"messages": HELLO, **body})


def text(**body):
    return read(COMPLETIONS, {"prompt": "Hello", **body})


def request_of(url=CHAT, number=1, defaults=DEFAULTS, **body):
    """The first request of a line with this body."""
    main = {"messages": HELLO} if url == CHAT else {"prompt": "Hello"}
    fields = {"custom_id": "a", "method": "POST", "url": url, "body": {**main, **body}}
    line = parse(number, json.dumps(fields).encode(), lambda prompt, raw=False: [1, 2], defaults)
    assert isinstance(line, InputLine), line
    return line.request


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, {}),
        ({"max_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"max_tokens": 5, "max_completion_tokens": 5}, {"max_new_tokens": 5}),
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"temperature": 0}, {"temperature": 0.0, "top_p": None}),
        ({"temperature": 0, "top_p": 0.3, "top_k": 7, "min_p": 0.1}, {"temperature": 0.0, "top_p": None}),
        ({"top_p": 0.3, "top_k": 7, "min_p": 0.1}, {"top_p": 0.3, "top_k": 7, "min_p": 0.1}),
        ({"top_p": 1, "top_k": -1, "min_p": 0}, {"top_p": None}),
        ({"seed": 11}, {"seed": 11}),
        ({"seed": -1}, {}),
        ({"seed": -2}, {"seed": 2**63 - 2}),
        ({"seed": 1 - 2**63}, {"seed": 1}),
        ({"repetition_penalty": 1.2}, {"repetition_penalty": 1.2}),
        ({"repetition_detection": False}, {"repetition_detection": None}),
        ({"repetition_detection": True}, {"repetition_detection": RepetitionDetectionParams(**REPETITION_RULE)}),
        (
            {"repetition_detection": {"max_pattern_size": 9, "min_count": 3}},
            {"repetition_detection": RepetitionDetectionParams(max_pattern_size=9, min_count=3)},
        ),
        ({"presence_penalty": 1, "frequency_penalty": -0.5}, {"presence_penalty": 1.0, "frequency_penalty": -0.5}),
        ({"logit_bias": {"5": 1, "3": -100}}, {"logit_bias": ((3, -100.0), (5, 1.0))}),
        ({"temperature": None, "top_p": None, "seed": None, "max_tokens": None}, {}),
        ({"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "stream": False}, {}),
        ({"tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "store": False}, {}),
        ({"store": True, "metadata": {"a": "b"}}, {}),
        ({"max_tokens": -1}, {}),
        ({"max_completion_tokens": -1, "max_tokens": -1}, {}),
        ({"user": "me", "metadata": {"a": "b"}, "model": "gpt", "parallel_tool_calls": True}, {}),
    ],
)
def test_parameters_become_sampling(body, expected):
    found = request_of(**body).sampling
    assert {name: value for name, value in vars(found).items() if value != getattr(DEFAULTS, name)} == {
        name: value for name, value in expected.items() if value != getattr(DEFAULTS, name)
    }


def test_parameters_become_options_of_the_request():
    found = request_of(stop="x", policy="tova", budget=7, ignore_eos=True, logprobs=True, top_logprobs=3)
    assert (found.stop, found.policy, found.budget, found.ignore_end, found.logprobs) == (("x",), "tova", 7, True, 3)
    assert request_of(logprobs=True).logprobs == 0
    assert request_of(logprobs=False).logprobs is None
    assert request_of(COMPLETIONS, logprobs=2, stop=["a", "b"]).logprobs == 2
    assert request_of(COMPLETIONS, stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_pins_and_a_guard_become_options_of_the_request(url):
    found = request_of(url, pins=[[5, 9], [0, 2], [1, 3]], guard=1)
    assert (found.pins, found.guard) == (((0, 3), (5, 9)), 1.0)
    assert request_of(url, pins=[], guard=None).pins == request_of(url, pins=None).pins == ()


def test_fields_of_vllm_become_options_of_the_request():
    found = request_of(
        stop_token_ids=[5, 3, 5], include_stop_str_in_output=True, skip_special_tokens=False, guided_choice=["a"]
    )
    assert (found.stop_token_ids, found.include_stop_str_in_output, found.skip_special_tokens) == ((3, 5), True, False)
    assert found.structured_outputs.kind == "choice"
    assert len(request_of(truncate_prompt_tokens=1).prompt) == 1
    asked = chat(chat_template_kwargs={"a": 1, "add_generation_prompt": False}, reasoning_effort="low")
    assert asked.template == {
        "chat_template_kwargs": {"a": 1, "reasoning_effort": "low"},
        "add_generation_prompt": False,
    }
    assert chat(continue_final_message=True, add_generation_prompt=False).template == {"continue_final_message": True}


@pytest.mark.parametrize(("url", "usual"), [(CHAT, False), (COMPLETIONS, True)])
def test_a_line_says_whether_the_tokenizers_own_tokens_are_put_around_its_prompt(url, usual):
    def encode(prompt, raw=False, add_special_tokens=usual):
        return [1, 2] if add_special_tokens else [2]

    body = {"messages": HELLO} if url == CHAT else {"prompt": "a"}
    for wanted in (None, False, True):
        fields = {"custom_id": "a", "method": "POST", "url": url, "body": {**body, "add_special_tokens": wanted}}
        found = parse(1, json.dumps(fields).encode(), encode, SamplingParams())
        assert len(found.request.prompt) == 1 + (usual if wanted is None else wanted)


@pytest.mark.parametrize("body", [{"max_token": 5, "foo": [1]}, {"foo": None, "max_token": 0}])
def test_fields_that_nobody_knows_are_ignored_and_named(body):
    asked = chat(**body, user="me", store=True, metadata={"a": 1}, service_tier="flex")
    assert set(asked.ignored) == {name for name, value in body.items() if value is not None}
    found = chat(chat_template_kwargs={}, functions=[], logprobs=None).ignored
    assert found == ()


def test_messages_become_texts():
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "d", "name": None},
    ]
    (found,) = chat(messages=messages).prompts
    assert found == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]


THOUGHT = {"role": "assistant", "content": "c", "reasoning_content": "r"}
CALL = {"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "want"),
    [
        ({"role": "user", "content": "d", "name": "Tom"}, {"role": "user", "content": "d", "name": "Tom"}),
        ({"role": "system", "content": "d", "name": "Tom"}, {"role": "system", "content": "d", "name": "Tom"}),
        ({**THOUGHT}, THOUGHT),
        ({**THOUGHT, "reasoning": "r"}, THOUGHT),
        ({"role": "assistant", "content": "c", "reasoning": "r"}, THOUGHT),
        ({"role": "assistant", "content": None, "reasoning_content": "r"}, {**THOUGHT, "content": ""}),
        ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": [], "refusal": "no"}, {"role": "assistant", "content": "no"}),
        ({"role": "assistant", "content": "c", "refusal": "no"}, {"role": "assistant", "content": "c"}),
        (
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
            {"role": "assistant", "content": "no"},
        ),
        ({"role": "assistant", "content": None}, {"role": "assistant", "content": ""}),
        ({"role": "assistant", "content": "c", "annotations": [{"type": "x"}]}, {"role": "assistant", "content": "c"}),
        (
            {"role": "assistant", "content": "c", "audio": None, "function_call": None, "tool_calls": []},
            {"role": "assistant", "content": "c"},
        ),
        ({"role": "user", "content": "d", "tool_calls": [], "reasoning": "r"}, {"role": "user", "content": "d"}),
        ({"role": "user", "content": [{"type": "input_text", "text": "d"}]}, {"role": "user", "content": "d"}),
        ({"role": "user", "content": "d", "id": 5, "cache_control": {}}, {"role": "user", "content": "d"}),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": {}}}]},
        ),
        (
            {"role": "function", "name": "f", "content": "1"},
            {"role": "tool", "name": "f", "content": "1", "tool_call_id": ""},
        ),
        (
            {"role": "tool", "content": "1", "tool_call_id": [], "name": []},
            {"role": "tool", "content": "1", "tool_call_id": ""},
        ),
    ],
)
def test_messages_that_agents_send_back(message, want):
    found = read(CHAT, {"messages": [*HELLO, message]}, use=ToolUse(by_template=True))
    assert found.prompts[0][-1] == want
    assert set(found.ignored) == {f"messages[].{name}" for name in message.keys() & {"id", "cache_control"}}
    if "tool_call_id" not in want and "tool_calls" not in want:
        assert chat(messages=[*HELLO, message]).prompts[0][-1] == want


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
        (["a", [1]], ("a", [1])),
    ],
)
def test_prompts_of_completions(prompt, expected):
    assert text(prompt=prompt).prompts == expected


def test_choices_are_drawn_apart_and_the_first_as_a_line_of_its_own():
    fields = {"custom_id": "a", "method": "POST", "url": COMPLETIONS, "body": {"prompt": ["a", "b"], "n": 2}}
    own = parse(3, b'{"prompt": "a"}', lambda prompt: [1], DEFAULTS, raws=True)
    found = parse(3, json.dumps(fields).encode(), lambda prompt, raw: [1], DEFAULTS).requests
    assert len({request.sequence for request in found}) == len(found) == 4
    assert found[0] == own.request
    fields["body"]["seed"] = 5
    seeded = [parse(n, json.dumps(fields).encode(), lambda prompt, raw: [1], DEFAULTS).requests for n in (1, 8)]
    assert seeded[0] == seeded[1]


REFUSED = [
    ({"pins": [[5, 1]]}, "pins", "reversed"),
    ({"pins": [0, 5]}, "pins", "no pair of whole numbers"),
    ({"pins": [[0, 2**70]]}, "pins", "goes beyond"),
    ({"pins": "0-5"}, "pins", "not a list"),
    ({"guard": "x"}, "guard", "not a number"),
    ({"guard": True}, "guard", "not a number"),
    ({"presence_penalty": 2.5}, "presence_penalty", "outside -2"),
    ({"repetition_detection": "on"}, "repetition_detection", "an object"),
    ({"repetition_detection": {"max_pattern_size": 9}}, "repetition_detection", "min_count=0 is no repetition"),
    ({"repetition_detection": {"size": 9}}, "repetition_detection", "there is no 'size'"),
    ({"frequency_penalty": -3}, "frequency_penalty", "outside -2"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "in place of a token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
    ({"logit_bias": {"5": True}}, "logit_bias", "-100 to 100"),
    ({"stream": True}, "stream", "cannot be true here"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "leave it out"),
    ({"tools": [{"type": "function"}]}, "tools[0]", "is not like"),
    ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({"verbosity": "low"}, "verbosity", "leave it out"),
    ({"modalities": ["text", "audio"]}, "modalities", "leave it out"),
    ({"echo": True}, "echo", "belongs to /v1/completions"),
    ({"prompt": "x"}, "prompt", "belongs to /v1/completions"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0 asks for no token"),
    ({"max_completion_tokens": -2}, "max_completion_tokens", "max_completion_tokens=-2"),
    ({"max_tokens": 5.0}, "max_tokens", "is 5.0 and not a whole number"),
    ({"max_tokens": True}, "max_tokens", "is true and not a whole number"),
    ({"max_tokens": 2**63}, "max_tokens", "too large"),
    ({"temperature": "hot"}, "temperature", 'is "hot" and not a number'),
    ({"temperature": -1}, "temperature", "outside 0"),
    ({"temperature": 0, "top_p": 7}, "top_p", "outside"),
    ({"top_p": 0}, "top_p", "outside"),
    ({"top_k": -2}, "top_k", "leaves no token"),
    ({"seed": -(2**63)}, "seed", "too large"),
    ({"seed": 2**63}, "seed", "too large"),
    ({"n": 0}, "n", "asks for 0 texts"),
    ({"n": MOST_CHOICES + 1}, "n", "1 to 128"),
    ({"n": 2**62}, "n", "1 to 128"),
    ({"top_logprobs": 2}, "top_logprobs", "without logprobs: true"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
    ({"logprobs": 2}, "logprobs", "true or false"),
    ({"stop": [""]}, "stop", "empty"),
    ({"stop": ["a", 1]}, "stop", "no text"),
    ({"stop": "\ud83d"}, "stop", "half of a character"),
    ({"budget": 0}, "budget", "budget"),
    ({"messages": []}, "messages", "no message"),
    ({"messages": None}, "messages", "no message"),
    ({"messages": "Hello"}, "messages", "not a list"),
    ({"messages": [1]}, "messages[0]", "is not like"),
    ({"messages": [{"role": "user"}]}, "messages[0]", "is not like"),
    ({"messages": [*HELLO, {"role": "wizard", "content": "x"}]}, "messages[1].role", 'is "wizard"'),
    ({"messages": [{"role": "user", "content": "x", "name": 5}]}, "messages[0].name", "no text"),
    ({"messages": [{"role": "user", "content": 0}]}, "messages[0].content", "no list of parts"),
    ({"messages": [{"role": "user", "content": None, "refusal": "no"}]}, "messages[0]", "is not like"),
    ({"messages": [{"role": "assistant", "content": "x", "reasoning": {}}]}, "messages[0].reasoning", "no text"),
    ({"messages": [{"role": "assistant", "refusal": "\ud83d"}]}, "messages[0].refusal", "half of a character"),
    ({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}, "messages[0].audio", "only texts"),
    ({"messages": [{"role": "assistant", "content": "x", "prefix": True}]}, "messages[0].prefix", "continue_final"),
    ({"messages": [{"role": "user", "content": "x", "name": 5, "refusal": 5}]}, "messages[0].name", "no text"),
    ({"messages": [{"role": "user", "content": "x", "refusal": 5, "name": 5}]}, "messages[0].refusal", "no text"),
    ({"messages": [{"role": "user", "content": "x", "audio": 5, "name": 5}]}, "messages[0].audio", "only texts"),
    ({"messages": [{"role": "user", "content": "x", "name": 5, "audio": 5}]}, "messages[0].name", "no text"),
    ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, "messages[0].images", "only texts"),
    ({"messages": [{"role": "assistant", "function_call": {"name": 1}}]}, "messages[0].tool_calls[0]", "not like"),
    ({"messages": [{"role": "user", "content": [{"type": []}]}]}, "messages[0].content", "only texts"),
    ({"messages": [{"role": "user", "content": {"text": "x"}}]}, "messages[0].content", "no list of parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "only texts"),
    ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages[0].content", "half of a character"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_cannot_be_honoured_is_refused_by_its_name(body, param, words):
    fields = {"custom_id": "a", "method": "POST", "url": CHAT, "body": {"messages": HELLO, **body}}
    found = parse(1, json.dumps(fields).encode(), lambda prompt, raw=False: [1], SamplingParams(temperature=0.5))
    assert words in found.reason
    assert found.reason.startswith(f"the parameter {param} ")
    assert (found.custom_id, found.param) == ("a", param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": ["a"] * (MOST_CHOICES + 1)}, "n"),
        ({"echo": True}, "echo"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": HELLO}, "messages"),
    ],
)
def test_completions_that_are_refused(body, param):
    with pytest.raises(ParameterError) as found:
        text(**body)
    assert found.value.param == param


@pytest.mark.parametrize(("url", "body"), [("/v1/embeddings", {}), (CHAT, []), (CHAT, None), (CHAT, "x")])
def test_other_routes_and_bodies(url, body):
    with pytest.raises(InputError):
        read(url, body)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["messages", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "seed", "stop", "logprobs"]
NAMES += [
    "top_logprobs",
    "tools",
    "response_format",
    "structured_outputs",
    "tool_choice",
    "model",
    "user",
    "metadata",
    "stream",
    "best_of",
    "budget",
    "policy",
]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sampled_from([CHAT, COMPLETIONS]), st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=9), JSON))
def test_any_body_is_read_or_refused(url, body):
    main = {"messages": HELLO} if url == CHAT else {"prompt": "Hello"}
    fields = {"custom_id": "a", "method": "POST", "url": url, "body": {**main, **body}}
    raw = json.dumps(fields).encode()
    found = parse(1, raw, lambda prompt, raw=False: [1], SamplingParams())
    assert isinstance(found, InputLine) or (found.reason and found.custom_id == "a")


# ------------------------------------------------------------------ answers


TOKENIZER = find(embedded()).tokenizer
WORDS = TokenTexts(TOKENIZER)
A, B, PART, END = TOKENIZER.convert_tokens_to_ids(["a", "Ġb", "ð", "<|end|>"])


def logprob(token, value=-0.5, top=()):
    return Logprob(token, value, top)


TOKENS = (logprob(A, top=((A, -0.5), (B, float("-inf")))), logprob(B, -1.5, ((PART, -0.1),)), logprob(END))


def test_an_answer_to_a_chat():
    asked = chat(n=2, logprobs=True, top_logprobs=2)
    one = result_of(text="a b", token_ids=(1, 2, 9), prompt_tokens=4, logprobs=TOKENS, end_token=True)
    two = result_of(text="a", finish_reason="length", prompt_tokens=4, logprobs=TOKENS[:1])
    found = answer(asked, [one, two], name="7", created=12, model="m", texts=WORDS)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["id"], found["object"], found["created"], found["model"]) == (
        "chatcmpl-7",
        "chat.completion",
        12,
        "m",
    )
    assert found["usage"]["prompt_tokens"] == 4
    assert (found["usage"]["completion_tokens"], found["usage"]["total_tokens"]) == (4, 8)
    first, second = found["choices"]
    assert first["message"] == {"role": "assistant", "content": "a b", "refusal": None}
    assert [first["index"], second["index"]] == [0, 1]
    assert [first["finish_reason"], second["finish_reason"]] == ["stop", "length"]
    content = first["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "a b"
    assert content[0]["top_logprobs"][1] == {"token": " b", "logprob": -9999.0, "bytes": [32, 98]}
    assert content[1]["top_logprobs"][0] == {"token": "\ufffd", "logprob": -0.1, "bytes": [0xF0]}
    assert chat().options == {}
    plain = answer(chat(), [one], name="7", created=12, model="m", texts=WORDS)
    assert plain["choices"][0]["logprobs"] is None


def test_an_answer_to_a_completion():
    asked = text(prompt=["x", "y"], logprobs=2)
    results = [
        result_of(text="a b", logprobs=TOKENS, prompt_tokens=n, token_ids=(1, 2, 9), end_token=True) for n in (3, 5)
    ]
    found = answer(asked, results, name="7", created=12, model="m", texts=WORDS)
    assert (found["id"], found["object"]) == ("cmpl-7", "text_completion")
    assert (found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]) == (8, 6)
    choice = found["choices"][1]
    assert (choice["index"], choice["text"]) == (1, "a b")
    assert choice["logprobs"] == {
        "tokens": ["a", " b"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"a": -0.5, " b": -9999.0}, {"bytes:\\xf0": -0.1}],
        "text_offset": [0, 1],
    }
    nothing = answer(
        asked, [result_of(text="", logprobs=TOKENS[2:], end_token=True)], name="7", created=12, model="m", texts=WORDS
    )
    assert nothing["choices"][0]["logprobs"]["text_offset"] == []


@pytest.mark.parametrize("shows", [True, False])
def test_an_echo_has_the_places_of_tokens_behind_special_ones(shows):
    asked = text(prompt="a", logprobs=1, max_tokens=4, skip_special_tokens=not shows)
    said = "a<|end|> b" if shows else "a b"
    result = result_of(text=said, finish_reason="length", logprobs=[logprob(token) for token in (A, END, B)])
    (choice,) = answer(asked, [result], name="7", created=12, model="m", texts=WORDS)["choices"]
    found = echoed(asked, choice, "a", [A], result, WORDS)
    assert found["text"] == f"a{said}"
    offsets = found["logprobs"]["text_offset"]
    assert offsets == [0, 1, 2, len(found["text"]) - 2]
    assert offsets[1:] == [1 + place for place in choice["logprobs"]["text_offset"]]


def test_errors():
    assert error("no", status=400, param="n")["error"]["type"] == "invalid_request_error"
    assert error("no", status=500)["error"] == {"message": "no", "type": "server_error", "param": None, "code": None}
