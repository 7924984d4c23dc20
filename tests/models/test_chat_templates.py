"""Chat templates: the same text as transformers gives, and an end to those that have none."""

import os
import signal
import sys
import threading

import model_folders
import pytest
from transformers import AutoTokenizer

from kvkeep.errors import InputError
from kvkeep.models import chat_templates, sandbox, tiny
from kvkeep.openai import requests

MESSAGES = [{"role": "user", "content": "Grüße, \ud55c\uad6d \n{{ 7 }}"}, {"role": "assistant", "content": "ja"}]


@pytest.fixture
def tokenizer():
    return model_folders.tokenizer().__class__(
        tokenizer_object=model_folders.tokenizer()._tokenizer, bos_token="<s>", eos_token="</s>"
    )


TEMPLATES = {
    "messages": model_folders.TEMPLATE,
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m['content'] | trim }}{{ eos_token }}{% endfor %}",
    "loop controls": "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "JSON": "{{ messages | tojson(indent=2) }}",
    "generation blocks": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "a namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ messages[0].content }}",
    "the prompt of an answer": "{{ messages[0].content }}{% if add_generation_prompt %}answer:{% endif %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_the_text_is_that_of_transformers(template, tokenizer):
    tokenizer.chat_template = template
    want = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert chat_templates.fill(tokenizer, MESSAGES) == want


def test_the_tokens_are_those_of_transformers():
    tokenizer = AutoTokenizer.from_pretrained(tiny.path())
    want = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert tokenizer(chat_templates.fill(tokenizer, MESSAGES), add_special_tokens=False)["input_ids"] == want


PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
IN_PARTS = {
    "all roles": "{% for m in messages %}[{{ m.role }}]" + PARTS + "{% endfor %}",
    "the user's only": "{% for m in messages %}[{{ m.role }}]{% if m.role == 'user' %}"
    + PARTS
    + "{% else %}{{ m.content + '' }}{% endif %}{% endfor %}",
    "by a filter": "{% for m in messages %}[{{ m.role }}]{% for part in m.content | selectattr('type', 'equalto', "
    "'text') %}{{ part['text'] }}{% endfor %}{% endfor %}",
    "or an error": "{% for m in messages %}{% if m.content is string %}{{ raise_exception('parts only') }}{% endif %}"
    "[{{ m.role }}]" + PARTS + "{% endfor %}",
    "either": "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    + PARTS
    + "{% endif %}{% endfor %}",
}


@pytest.mark.parametrize("template", IN_PARTS.values(), ids=IN_PARTS.keys())
def test_content_has_the_form_that_a_template_reads(template, tokenizer):
    tokenizer.chat_template = template
    assert chat_templates.fill(tokenizer, [{"role": "system", "content": "be brief"}, *MESSAGES]) == (
        f"[system]be brief[user]{MESSAGES[0]['content']}[assistant]ja"
    )


@pytest.mark.parametrize(
    "template", ["{{ messages | length }}", "{% for m in messages if m.role != 'user' %}{{ m.content }}{% endfor %}"]
)
def test_a_prompt_without_the_users_message_is_an_error(template, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"leaves out the user's last message.*/v1/completions"):
        chat_templates.fill(tokenizer, MESSAGES)
    with pytest.raises(InputError, match=r"leaves out .*/v1/completions"):
        chat_templates.fill(tokenizer, [{"role": "system", "content": "x y"}, MESSAGES[0]])


@pytest.mark.parametrize("change", ["upper", "trim", "tojson", "replace('w', 'x')", "truncate(9, true)", "e"])
def test_a_template_may_change_the_users_message(change, tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m.content | " + change + " }}{% endfor %}"
    assert chat_templates.fill(tokenizer, [{"role": "user", "content": ' where\n"is" <it>?'}])


TURNS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
NO_SYSTEM = {
    "refused": "{% for m in messages if m.role not in ('user', 'assistant') %}{{ raise_exception('no') }}{% endfor %}",
    "left out": "{% set messages = messages | rejectattr('role', 'in', ['system', 'developer']) | list %}",
}
STRICT = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}"
)
SYSTEM = {"role": "system", "content": "be brief"}
USER, ANSWER = {"role": "user", "content": "hello"}, {"role": "assistant", "content": "ja"}


@pytest.mark.parametrize("template", NO_SYSTEM.values(), ids=NO_SYSTEM.keys())
def test_system_messages_without_a_role_of_their_own(template, tokenizer):
    tokenizer.chat_template = template + TURNS
    for messages, want in [
        ([SYSTEM, USER], "[user]be brief\n\nhello"),
        ([SYSTEM, SYSTEM, USER, ANSWER, USER], "[user]be brief\n\nbe brief\n\nhello[assistant]ja[user]hello"),
        ([USER, ANSWER, SYSTEM, USER], "[user]hello[assistant]ja[user]be brief\n\nhello"),
        ([USER, SYSTEM], "[user]hello\n\nbe brief"),
        ([SYSTEM, ANSWER, USER], "[user]be brief[assistant]ja[user]hello"),
        ([{**SYSTEM, "role": "developer"}, USER], "[user]be brief\n\nhello"),
        ([SYSTEM], "[user]be brief"),
        ([USER, USER], "[user]hello[user]hello"),
    ]:
        assert chat_templates.fill(tokenizer, messages) == want


def test_folded_messages_alternate(tokenizer):
    tokenizer.chat_template = STRICT + TURNS
    want = "[user]be brief\n\nhello[assistant]ja[user]hello"
    assert chat_templates.fill(tokenizer, [SYSTEM, USER, ANSWER, USER]) == want


def test_neighbours_of_one_role_are_joined_where_roles_must_alternate(tokenizer):
    tokenizer.chat_template = STRICT + TURNS
    other, empty = {"role": "user", "content": "and?"}, {"role": "assistant", "content": ""}
    for messages, want in [
        ([USER, other], "[user]hello\n\nand?"),
        ([USER, ANSWER, empty, ANSWER, other], "[user]hello[assistant]ja\n\nja[user]and?"),
        ([SYSTEM, USER, other, ANSWER, other], "[user]be brief\n\nhello\n\nand?[assistant]ja[user]and?"),
    ]:
        assert chat_templates.fill(tokenizer, messages) == want
    with pytest.raises(InputError, match="turns must alternate"):
        chat_templates.fill(tokenizer, [ANSWER, USER])  # nothing was said that could come first


def calling(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_a_result_may_be_followed_by_a_message_where_roles_must_alternate(tokenizer):
    tokenizer.chat_template = STRICT + TURNS
    result = {"role": "tool", "tool_call_id": "a", "content": "19 degrees"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}, result, USER]}
    (messages,) = requests.read(requests.CHAT, body).prompts
    assert chat_templates.fill(tokenizer, messages).endswith(
        "[user]<tool_response>\n19 degrees\n</tool_response>\n\nhello"
    )


def test_arguments_that_are_no_object_do_not_end_a_conversation(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for call in m.tool_calls %}"
        "{% for name, value in call.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}{% endfor %}"
        "{% endfor %}"
    )
    for given, want in [({"x": 1}, "x=1"), ('{"x": ', 'arguments={"x": '), ("[1]", "arguments=[1]")]:
        assert (
            chat_templates.fill(tokenizer, [USER, calling(given), USER]) == f"[user]hello[assistant]{want}[user]hello"
        )
    tokenizer.chat_template = "{{ messages | tojson }}"  # takes a text as it is
    assert '"arguments": "[1]"' in chat_templates.fill(tokenizer, [USER, calling("[1]"), USER])


def test_calls_are_shown_without_tools_where_a_template_of_their_own_shows_them(tokenizer):
    tokenizer.chat_template = {"default": TURNS, "tool_use": "{{ messages | tojson }}"}
    assert chat_templates.fill(tokenizer, [USER]) == "[user]hello"
    assert '"name": "f"' in chat_templates.fill(tokenizer, [USER, calling({}), USER])


def test_folding_is_said_once(tokenizer, caplog):
    tokenizer.chat_template = NO_SYSTEM["refused"] + "{{ messages[0].content }}"
    for _ in range(2):
        assert chat_templates.fill(tokenizer, [SYSTEM, USER]) == "be brief\n\nhello"
    assert [message for message in caplog.messages if "system messages" in message] == caplog.messages
    assert len(caplog.messages) == 1
    assert "becomes part of the user's messages beside them" in caplog.text
    assert chat_templates.fill(tokenizer, [USER, SYSTEM]) == "hello\n\nbe brief"


def test_a_template_with_one_system_message_keeps_it(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('must be first') }}"
        "{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    given = [SYSTEM, {"role": "developer", "content": "be kind"}, USER, ANSWER, SYSTEM, USER]
    assert chat_templates.fill(tokenizer, [SYSTEM, SYSTEM, USER]) == "[system]be brief\n\nbe brief[user]hello"
    assert chat_templates.fill(tokenizer, given) == (
        "[system]be brief\n\nbe kind[user]hello[assistant]ja[user]be brief\n\nhello"
    )


ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "a power": "{{ 10 ** (10 ** 10) }}",
}
LARGE = {
    "a text": "{{ 'a' * 10 ** 11 }}",
    "a text that doubles": "{% set ns = namespace(t='a') %}{% for i in range(60) %}"
    "{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
    "{{ ns.t | length }}",
    "a text that fits": "{{ 'a' * 10 ** 8 }}",
    "a padded text": "{{ 'a' | center(10 ** 11) }}",
    "a format": "{{ '%99999999999d' % 1 }}",
    "a list": "{{ (range(99999) | list * 9999999) | length }}",
}


@pytest.mark.slow
@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS.keys())
def test_a_template_without_an_end_is_ended_and_the_next_one_is_filled_in(template, tokenizer, monkeypatch):
    monkeypatch.setattr(chat_templates, "TIMEOUT_S", 0.3)
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"chat template fails .* Use `raw=True`"):
        chat_templates.fill(tokenizer, MESSAGES)
    monkeypatch.undo()
    tokenizer.chat_template = "{{ messages[0].role }}{{ messages[0].content }}"
    assert chat_templates.fill(tokenizer, MESSAGES) == "user" + MESSAGES[0]["content"]


@pytest.mark.parametrize("template", LARGE.values(), ids=LARGE.keys())
def test_a_template_that_takes_much_memory_ends(template, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="chat template fails"):
        chat_templates.fill(tokenizer, MESSAGES)


FAILING = {
    "a macro that calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a loop over too much": "{% for i in range(10**9) %}{% endfor %}",
    "Python": "{{ ''.__class__.__mro__[1].__subclasses__() | length }}{{ 1 // 0 }}",
    "its own complaint": "{{ raise_exception('no system role') }}",
    "no template": "{% for %}",
    "a name that is not there": "{{ nowhere.else }}",
    "a text that is no UTF-8": "{{ '\ud800' }}{{ 1 // 0 }}",
}


@pytest.mark.parametrize("template", FAILING.values(), ids=FAILING.keys())
def test_a_template_that_fails_says_why(template, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"chat template fails \(\w+: .*Use `raw=True`"):
        chat_templates.fill(tokenizer, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("template", [{"tool_use": "x"}, {}], ids=["no default", "none"])
def test_templates_without_a_default(template, tokenizer):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=r"chat template cannot be used .*Use `raw=True`"):
        chat_templates.fill(tokenizer, MESSAGES)


def test_a_long_prompt_stays_whole(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    text = "é\n" * 10**6
    assert chat_templates.fill(tokenizer, [{"role": "user", "content": text}]) == text


@pytest.mark.long
def test_a_process_that_was_ended_is_started_again(tokenizer):
    tokenizer.chat_template = "{{ messages[0].role }}{{ messages[0].content }}"
    chat_templates.fill(tokenizer, MESSAGES)
    chat_templates._WORKER._process.kill()
    chat_templates._WORKER._process.wait()
    assert chat_templates.fill(tokenizer, MESSAGES) == "user" + MESSAGES[0]["content"]


def test_threads_get_their_own_texts(tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    found = {}

    def ask(n):
        found[n] = chat_templates.fill(tokenizer, [{"role": "user", "content": str(n)}])

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: str(n) for n in range(20)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # newer versions of Python warn of forks beside threads
def test_a_forked_process_fills_in_templates_by_itself(tokenizer):
    """With the parent's process it would wait for ever, and take the parent's answers."""
    tokenizer.chat_template = "{{ messages[0].content }}"
    chat_templates.fill(tokenizer, MESSAGES)
    child = os.fork()
    if not child:
        signal.alarm(60)
        found = chat_templates.fill(tokenizer, [{"role": "user", "content": "of the child"}])
        chat_templates._WORKER.end()
        os._exit(0 if found == "of the child" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert chat_templates.fill(tokenizer, MESSAGES) == MESSAGES[0]["content"]


@pytest.mark.parametrize(
    ("body", "limit_s", "why"),
    [
        ("exit 3", 300.0, "ends with code 3"),
        ("kill -9 $$", 300.0, "ends with code -9"),
        ("exec sleep 600", 1.0, "not ready after 1 s"),
    ],
)
def test_a_process_that_does_not_start(body, limit_s, why, tokenizer, monkeypatch, tmp_path):
    tokenizer.chat_template = "x"
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setattr(chat_templates, "_WORKER", chat_templates._new())
    monkeypatch.setattr(sandbox, "_START_S", limit_s)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(InputError, match=f"does not start .*{why}"):
        chat_templates.fill(tokenizer, MESSAGES)


def test_a_template_reads_more_variables(tokenizer):
    tokenizer.chat_template = (
        "{{ enable_thinking }} {{ messages[0].content }}{% if add_generation_prompt %}!{% endif %}"
    )
    asked = {"enable_thinking": False, "add_generation_prompt": False}
    assert chat_templates.fill(tokenizer, [{"role": "user", "content": "x"}], variables=asked) == "False x"


@pytest.mark.parametrize("name", ["messages", "conversations", "tools", "chat_template"])
def test_variables_do_not_replace_the_conversation(name, tokenizer):
    tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(InputError, match=f"cannot be given the variable {name}"):
        chat_templates.fill(tokenizer, MESSAGES, variables={name: "x"})


def test_a_template_process_that_gives_no_answer_is_said_to_have_no_end(tokenizer, monkeypatch):
    tokenizer.chat_template = model_folders.TEMPLATE
    monkeypatch.setattr(chat_templates, "_asked", lambda line: None)
    with pytest.raises(chat_templates.EndlessTemplateError, match=r"it takes more than \d+ s or \d+ MiB"):
        chat_templates.fill(tokenizer, MESSAGES)
