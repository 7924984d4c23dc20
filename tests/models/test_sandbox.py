"""The process that fills in chat templates, inside this one: what it answers, how it is served, and its memory."""

from __future__ import annotations

import io
import json
import os
import runpy
import sys
from pathlib import Path

import model_folders
import pytest

from kvkeep.models import sandbox_limits as limits_of
from kvkeep.models import sandbox_render
from kvkeep.models.sandbox import SandboxProcess

resource = pytest.importorskip("resource", reason="limits of POSIX")
MESSAGES = [{"role": "user", "content": "Grüße"}]


def answer(template: str, **changes: object) -> dict[str, str]:
    return sandbox_render._answer(json.dumps({"messages": MESSAGES, "chat_template": template, **changes}))


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of memory that are asked for; none of them holds."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: found.append(limit))
    return found


def test_an_answer_is_the_text_of_the_template():
    assert answer("{{ bos_token }}{{ messages[0].content }}", bos_token="<s>") == {"text": "<s>Grüße"}
    assert answer(model_folders.TEMPLATE, add_generation_prompt=True)["text"].count("Grüße") == 1


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role') }}", "TemplateError: no system role"),
        ("{% for %}", "TemplateSyntaxError: "),
        ("{{ nowhere.else }}", "UndefinedError: 'nowhere' is undefined"),
    ],
)
def test_an_answer_is_the_error_of_the_template(template: str, message: str):
    found = answer(template)
    assert found.keys() == {"error"}
    assert found["error"].startswith(message)


def test_a_line_that_is_no_question_is_an_error():
    assert sandbox_render._answer("nonsense")["error"].startswith("JSONDecodeError: ")
    assert sandbox_render._answer("{}")["error"] == "KeyError: 'messages'"


def test_a_text_that_is_too_long_is_an_error_and_errors_are_short():
    error = answer("{{ 'a' * 2000000 }}")["error"]
    assert error.startswith("ValueError: it makes 2000000 characters of ")
    assert len(answer("{{ raise_exception('x' * 1000) }}")["error"]) == 200


def test_the_process_says_that_it_is_ready_and_answers_line_by_line(
    monkeypatch: pytest.MonkeyPatch, limits: list[tuple[int, int]]
):
    asked = [{"messages": MESSAGES, "chat_template": text} for text in ("{{ messages[0].role }}", "{{ 1 // 0 }}", "b")]
    answers, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{json.dumps(one)}\n" for one in asked)))
    monkeypatch.setattr(sys, "stdout", answers)
    monkeypatch.setattr(sys, "stderr", errors)
    monkeypatch.setattr(sys, "argv", ["render.py", "1000000"])
    runpy.run_path(sandbox_render.__file__, run_name="__main__")
    ready, *found = map(json.loads, answers.getvalue().splitlines())
    assert ready == {}
    assert [*map(list, found)] == [["text"], ["error"], ["text"]]
    assert (found[0]["text"], found[2]["text"]) == ("user", "b")
    assert sys.stdout is errors  # a template that prints does not spoil the answers
    assert len(limits) == 1


def test_the_limit_is_above_the_memory_that_is_used_already(limits: list[tuple[int, int]]):
    limits_of.limit_memory(10**6)
    limits_of.limit_memory(10**9)
    (low, _), (high, both) = limits
    assert high == both
    assert low > 10**6
    assert 9 * 10**8 < high - low < 11 * 10**8


def test_a_system_that_sets_no_limit_answers_all_the_same(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    limits_of.limit_memory(10**6)
    assert answer("a") == {"text": "a"}


@pytest.mark.long
def test_ctrl_c_on_a_terminal_does_not_end_the_process():
    """A terminal interrupts all processes of the group that it shows."""
    process = SandboxProcess(Path(sandbox_render.__file__), 2**28)
    line = json.dumps({"messages": MESSAGES, "chat_template": "{{ messages[0].content }}"})
    assert process.ask(line, 30.0) == {"text": "Grüße"}
    assert process._process is not None
    assert os.getpgid(process._process.pid) != os.getpgid(0)
    process.end()


@pytest.mark.slow
def test_an_answer_that_nobody_waited_for_is_not_taken_for_the_next_ones(monkeypatch: pytest.MonkeyPatch):
    process = SandboxProcess(Path(sandbox_render.__file__), 2**28)
    line = {"messages": MESSAGES, "chat_template": "{{ messages[0].content }}"}
    assert process.ask(json.dumps(line), 30.0) == {"text": "Grüße"}

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SandboxProcess, "_read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.ask(json.dumps({**line, "chat_template": "late"}), 30.0)
    assert process.ask(json.dumps(line), 30.0) == {"text": "Grüße"}
    process.end()
