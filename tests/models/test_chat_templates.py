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
    "{{ ns.n }}",
    "the prompt of an answer": "{% if add_generation_prompt %}answer:{% endif %}",
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
    tokenizer.chat_template = "{{ messages[0].role }}"
    assert chat_templates.fill(tokenizer, MESSAGES) == "user"


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


def test_a_process_that_was_ended_is_started_again(tokenizer):
    tokenizer.chat_template = "{{ messages[0].role }}"
    chat_templates.fill(tokenizer, MESSAGES)
    chat_templates._WORKER._process.kill()
    chat_templates._WORKER._process.wait()
    assert chat_templates.fill(tokenizer, MESSAGES) == "user"


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
