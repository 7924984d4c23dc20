"""Tools in the forms of several families of models: chosen by the chat template, told, called and read back."""

from __future__ import annotations

import shutil

import pytest

from kvkeep.errors import InputError
from kvkeep.models.tiny import embedded
from kvkeep.openai.messages import HERMES, LLAMA3, MISTRAL
from kvkeep.openai.requests import CHAT, read
from kvkeep.server.model import tool_use_of

from .running import HELLO, checkpoint, events, serve
from .test_structured import TOOLS, assembled, is_call

llguidance = pytest.importorskip("llguidance")

_BEGIN = "{{ bos_token }}"
_SAID = "{{ '<|' + message['role'] + '|> ' + message['content'] + '<|end|>' }}"
_END = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
LIKE_QWEN = (
    f"{_BEGIN}{{% if tools %}}{{{{ '<|system|> # Tools' }}}}{{% for tool in tools %}}{{{{ tool | tojson }}}}"
    f"{{% endfor %}}<|end|>{{% endif %}}{{% for message in messages %}}{_SAID}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}"
    f"{{% endfor %}}{{% endfor %}}{_END}"
)
LIKE_LLAMA = (
    f"{_BEGIN}{{% for message in messages %}}{{% if tools is not none and loop.first %}}{{% for tool in tools %}}"
    "{{ tool | tojson(indent=4) }}{% endfor %}{% endif %}{% if 'tool_calls' in message %}"
    "{% if message.tool_calls | length != 1 %}{{ raise_exception('one call') }}{% endif %}"
    "{% set call = message.tool_calls[0].function %}{{ '<|assistant|>{\"name\": \"' + call.name + '\", ' }}"
    "{{ '\"parameters\": ' }}{{ call.arguments | tojson }}{{ '}<|end|>' }}{% elif message.role == 'tool' %}"
    f"{{{{ '<|ipython|>' + message.content }}}}{{% else %}}{_SAID}{{% endif %}}{{% endfor %}}{_END}"
)
LIKE_MISTRAL = (
    f"{_BEGIN}{{% for message in messages %}}{{% if tools is not none and loop.last %}}"
    "{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% if message.tool_calls is defined %}"
    "{{ '[TOOL_CALLS] [' }}{% for call in message.tool_calls %}{% if call.id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ (call.function | tojson)[:-1] }}"
    "{{ ', \"id\": \"' + call.id + '\"}' }}{% if not loop.last %}, {% endif %}{% endfor %}]"
    "{% elif message.role == 'tool' %}{% if message.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids have 9 characters') }}{% endif %}{{ '[TOOL_RESULTS]' + message.content }}"
    f"{{% else %}}{_SAID}{{% endif %}}{{% endfor %}}{_END}"
)
TEMPLATES = {"hermes": LIKE_QWEN, "llama3": LIKE_LLAMA, "mistral": LIKE_MISTRAL}
MARKS = {"llama3": LLAMA3.mark, "mistral": MISTRAL.mark, "hermes": HERMES.mark}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Makes the embedded model with another chat template, and maybe with a mark as a special token."""
    made = {}

    def make(form, *, special, template=None):
        key = form, special, template
        if key not in made:
            place = tmp_path_factory.mktemp("model") / "model"
            shutil.copytree(embedded(), place)
            (place / "chat_template.jinja").write_text(template or TEMPLATES[form])
            if special:
                for name in ("tokenizer.json", "tokenizer_config.json"):
                    file = place / name
                    file.write_text(file.read_text().replace("<|pad|>", MARKS[form]))
            made[key] = str(place)
        return made[key]

    return make


SERVED = [("hermes", False), ("llama3", True), ("mistral", False)]
SERVED += [pytest.param(one, marks=pytest.mark.slow) for one in (("llama3", False), ("mistral", True))]


@pytest.fixture(params=SERVED, ids=str, scope="module")
def served(request, folder):
    form, special = request.param
    with serve(budget=512, folder=folder(form, special=special)) as server:
        yield form, special, server


def use(folder, name="auto"):
    return tool_use_of(checkpoint(folder), name)


@pytest.mark.parametrize("form", TEMPLATES)
@pytest.mark.parametrize("special", [False, True])
def test_the_form_is_that_of_the_template(folder, form, special):
    found = use(folder(form, special=special))
    assert (found.form.name, found.by_template, found.token is not None) == (form, True, special and form != "hermes")


def test_without_a_known_form_the_model_is_told_in_words(folder):
    assert use(None) == use(None, "hermes")
    assert not use(None).by_template
    unknown = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
    broken = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content }}"
    for template in (unknown, broken):
        found = use(folder("hermes", special=False, template=template))
        assert (found.form, found.by_template) == (HERMES, False)


def test_a_form_can_be_chosen(folder):
    found = use(folder("hermes", special=False), "mistral")
    assert (found.form, found.by_template) == (MISTRAL, False)
    with pytest.raises(InputError, match="none of auto, hermes"):
        use(None, "gemma")


def asked(server, **body):
    """A choice, after a check that a stream tells the same."""
    body = {"tools": TOOLS, "max_tokens": 200, "temperature": 1, "seed": 3, **body}
    answer = server.chat(**body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["choices"][0]
    content, calls, reason = assembled(events(server.chat(**body, stream=True)))
    message = found["message"]
    assert (content or None, reason) == (message["content"] or None, found["finish_reason"])
    assert [one["function"] for one in calls] == [one["function"] for one in message.get("tool_calls", ())]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "clock"}}], ids=str)
def test_a_forced_call(served, choice):
    found = asked(served[2], tool_choice=choice, parallel_tool_calls=False)
    (call,) = found["message"]["tool_calls"]
    assert is_call(call)
    assert (found["message"]["content"], found["finish_reason"]) == (None, "tool_calls")
    assert choice == "required" or call["function"]["name"] == "clock"


@pytest.mark.slow
def test_calls_beside_each_other(served):
    form, _, server = served
    body = {"tools": TOOLS, "tool_choice": "required", "ignore_eos": True, "max_tokens": 120, "temperature": 1}
    vocabulary = server.served.checkpoint.tokenizer.get_vocab()
    body["logit_bias"] = {str(token): -100 for text, token in vocabulary.items() if "]" in text}
    counts = []
    for choice in server.chat(**body, n=4, seed=1).json()["choices"]:
        *whole, last = choice["message"]["tool_calls"]
        assert all(map(is_call, whole))
        assert choice["finish_reason"] == "length" or is_call(last)
        counts.append(len(whole) + 1)
    assert max(counts) == 1 if form == "llama3" else max(counts) > 1


@pytest.mark.long
def test_without_a_call_the_answer_is_text(served):
    found = asked(served[2], max_tokens=12)
    assert found["message"]["content"]
    assert "tool_calls" not in found["message"]


TEXTS = {
    "hermes": (
        ["Hello", '{"a": 1}', 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'],
        ['<tool_call>\n{"name": "rain', '<tool_call>\n{"name": "weather", "arguments": {"town": '],
    ),
    "llama3": (
        ["Hello", '{"a": 1}', '{"name": 5}', '{"name": "weather", "parameters": {"city": "Ulm"}}'],
        ['{"name": "rain', '{"name": "weather", "parameters": {"town": ', '{"name": "weather", "arguments'],
    ),
    "mistral": (
        ["Hello", "[1]", '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}]'],
        ['[TOOL_CALLS] {"name"', '[TOOL_CALLS] [{"name": "rain', '[TOOL_CALLS][{"name": "weather", "arguments": {"t'],
    ),
}


@pytest.mark.parametrize(
    ("form", "special"), [("hermes", False), *((n, s) for n in MARKS for s in (False, True) if n != "hermes")]
)
def test_a_call_that_the_model_begins_by_itself_is_held_to_the_form(folder, form, special):
    """Any text may be written until a call begins; from then on names and arguments are those of the tools."""
    place = folder(form, special=special)
    known = checkpoint(place).tokenizer
    backend, ends = known.backend_tokenizer, [known.eos_token_id]
    tokenizer = llguidance.LLTokenizer(backend.to_str(), n_vocab=backend.get_vocab_size(), eos_token=ends)
    asked = read(CHAT, {"messages": HELLO, "tools": TOOLS}, use=use(place))
    grammar = llguidance.grammar_from("lark", asked.options["structured_outputs"].text)
    fine, wrong = TEXTS[form]
    for text in (*fine, *wrong):
        matcher = llguidance.LLMatcher(tokenizer, grammar)
        ids = known(text, add_special_tokens=False)["input_ids"]
        assert (matcher.try_consume_tokens(ids) == len(ids)) is (text not in wrong), text
        assert text in wrong or matcher.is_accepting()


@pytest.mark.slow
def test_json_or_a_call(served):
    form, special, server = served
    body = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "boolean"}}}, "tools": TOOLS}
    if form == "llama3" and not special:
        assert server.refused(server.chat(**body))["param"] == "response_format"
        return
    for seed in range(4):
        message = asked(server, **body, seed=seed, parallel_tool_calls=False)["message"]
        if message["content"] is not None:
            assert message["content"] in ("true", "false")
        else:
            assert is_call(message["tool_calls"][0])


@pytest.mark.long
def test_a_conversation_with_calls_goes_on(served):
    server = served[2]
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    results = [{"role": "tool", "tool_call_id": name, "content": "It rains."} for name in ("call_1", "call_2")]
    said = {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "call_2"}]}
    for more in ({}, {"tools": TOOLS}):
        found = server.chat(messages=[*HELLO, said, *results], max_tokens=5, **more)
        assert found.status_code == 200, found.text
        assert found.json()["choices"][0]["message"]["content"]


def test_the_template_tells_the_tools(served):
    server = served[2]
    plain, told = (server.chat(**more).json()["usage"]["prompt_tokens"] for more in ({}, {"tools": TOOLS}))
    assert told > plain + 50
    prompt = server.served.encode(HELLO, tools=TOOLS)
    text = server.served.text_of(prompt)
    assert text.count("weather") >= 2
    assert "# Tools\n\nYou may" not in text


@pytest.mark.slow
def test_sessions_and_responses_use_the_template_too(served):
    server = served[2]
    assert server.post("/v1/sessions", {"id": "tools", "budget": 512}).status_code == 201
    body = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 200, "session_id": "tools", "temperature": 1}
    body["parallel_tool_calls"] = False
    result = [{"role": "tool", "tool_call_id": "call_1", "content": "It rains."}]
    for messages in (HELLO, result):
        answer = server.chat(messages=messages, **body)
        assert answer.status_code == 200, answer.text
        assert is_call(answer.json()["choices"][0]["message"]["tool_calls"][0])
    server.client.delete("/v1/sessions/tools")
    flat = [{"type": "function", **one["function"]} for one in TOOLS]
    call = {"type": "function_call", "call_id": "call_1", "name": "clock", "arguments": "{}"}
    told = [
        {"role": "user", "content": "Hi"},
        call,
        {"type": "function_call_output", "call_id": "call_1", "output": "x"},
    ]
    asked = {"input": told, "tools": flat, "tool_choice": "required", "max_output_tokens": 200, "seed": 4}
    answer = server.post("/v1/responses", {**asked, "parallel_tool_calls": False})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["type"] == "function_call"
