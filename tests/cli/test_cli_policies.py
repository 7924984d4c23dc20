"""``kvkeep policies`` and ``kvkeep env``: complete, readable at 80 columns, and plain data with ``--json``."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import env, policies
from kvkeep.cli.main import app
from kvkeep.errors import PolicyError
from kvkeep.policies import DEFAULT, builtin_names, registry


def invoke(*arguments: str):
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.parametrize("width", [80, 120])
def test_list_names_every_policy_in_the_width(monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    text = invoke("policies").stdout
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    for name in kvkeep.available_policies():
        assert any(line.split()[:1] == [name] for line in lines)
    words = " ".join(" ".join(lines).split())
    assert "Keeps random tokens: the control that every method has to beat," in words


@pytest.mark.parametrize("width", [80, 120])
def test_list_begins_with_four_to_start_from(monkeypatch: pytest.MonkeyPatch, width: int):
    monkeypatch.setenv("COLUMNS", str(width))
    lines = invoke("policies").stdout.splitlines()
    assert lines[0] == "to start from"
    assert [lines[n].strip() for n in (2, 4, 6, 8)] == [f"--policy {policy}" for policy in policies.STARTS.values()]
    assert "(the default)" in lines[1]
    assert lines[2].endswith(DEFAULT)
    assert lines[9] == ""
    for policy in policies.STARTS.values():
        assert registry.label(kvkeep.parse(policy)) == policy


def test_show_says_what_a_short_name_stands_for():
    shown = invoke("policies", "show", DEFAULT).stdout
    assert f"{DEFAULT} stands for snapkv:decode=score,window=8,kernel=13,recent=64, the default of prompts" in shown
    assert "stands for" not in invoke("policies", "show", "snapkv").stdout
    asked = json.loads(invoke("policies", "show", "keydiff:later", "--json").stdout)["asked"]
    assert asked == {"name": "keydiff:later", "options": "keydiff:recent=8,sinks=4"}


def test_a_preset_is_shown_from_its_source_as_its_class_would_be():
    """Reading the source takes a third of the time of importing torch."""
    presets = [f"{name}:{preset}" for name, cls in kvkeep.available_policies().items() for preset in cls.presets]
    assert DEFAULT in presets
    for text in presets:
        assert policies._describe_builtin(text) == policies._describe_asked(text), text
    assert policies._describe_builtin("snapkv:window=8") is policies._describe_builtin("mine") is None


@pytest.mark.parametrize("command", ["generate", "plan", "eval"])
def test_help_shows_the_whole_default(monkeypatch: pytest.MonkeyPatch, command: str):
    """The default's name is longer than a line of the help, which would cut it off."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = invoke(command, "--help").stdout
    assert DEFAULT in "".join(shown.split())  # a list of policies may be broken between lines
    assert "…" not in shown


def test_each_policy_is_of_one_kind():
    names = [name for kind in policies._by_kind(kvkeep.available_policies()).values() for name in kind]
    assert sorted(names) == sorted(kvkeep.available_policies())
    assert policies._by_kind(["local", "mine"]) == {
        "look at positions alone": ["local"],
        "of other packages": ["mine"],
    }


def test_list_as_json():
    assert invoke("policies", "--json").stdout == invoke("policies", "list", "--json").stdout
    found = json.loads(invoke("policies", "--json").stdout)
    assert [entry["policy"] for entry in found["start"]] == list(policies.STARTS.values())
    entries = found["policies"]
    assert {entry["name"]: entry["summary"] for entry in entries} == {
        name: registry.describe(name) for name in kvkeep.available_policies()
    }


@pytest.mark.parametrize("name", list(kvkeep.available_policies()))
def test_show_fits_80_columns_but_for_bibtex(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("policies", "show", name).stdout
    assert max(map(len, text.partition("@")[0].splitlines())) <= 80
    for section in ("Source", "Differs", "Fails when"):
        assert f"\n{section}" in text


def test_show_tells_all():
    text = invoke("policies", "show", "h2o").stdout
    words = " ".join(text.split())
    assert "arXiv:2306.14048" in words
    assert "compete or replace" in words
    assert "first tokens that are never evicted" in words
    assert kvkeep.available_policies()["h2o"].bibtex in text


def test_show_as_json():
    entry = json.loads(invoke("policies", "show", "h2o", "--json").stdout)
    assert entry["name"] == "h2o"
    assert entry["summary"] == registry.describe("h2o")
    assert entry["fails_when"].endswith(".")
    assert entry["options"][1] == {
        "name": "sinks",
        "type": "integer",
        "default": 0,
        "help": "first tokens that are never evicted",
    }
    assert [option["type"] for option in entry["options"]] == [
        "integer or none",
        "integer",
        "compete or replace",
        "number",
    ]


@pytest.mark.parametrize("name", ["h2p", "h2o:recnt=3", ""])
def test_show_of_what_does_not_exist(name: str):
    result = CliRunner().invoke(app, ["policies", "show", name])
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert "Known: " in result.stderr or "Did you mean" in result.stderr


@pytest.mark.parametrize(("value", "is_shown"), [("1", True), ("0", False), ("", False)])
def test_a_variable_decides_whether_an_error_shows_its_traceback(value, is_shown, monkeypatch):
    monkeypatch.setenv("KVKEEP_DEBUG", value)
    result = CliRunner().invoke(app, ["policies", "show", "h2p"])
    assert result.exit_code == 2
    assert ("Traceback" in result.stderr) == is_shown


def test_sections_of_a_docstring():
    doc = "Keeps.\n\nSource: one\n  two: three.\nDiffers: nothing.\n\nMore text.\nFails when: never."
    assert policies._split(doc) == (
        "Keeps.",
        {"source": "one two: three.", "differs": "nothing.", "fails_when": "never."},
    )
    assert policies._split("") == ("", {})


def test_help_of_policies():
    text = invoke("policies", "--help").stdout
    assert "list" in text
    assert "show" in text
    assert "--json" in invoke("policies", "list", "--help").stdout


def test_env_as_json():
    facts = json.loads(invoke("env", "--json").stdout)
    assert facts["kvkeep"] == kvkeep.__version__
    assert facts["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert facts["python"] == platform.python_version()
    assert facts["devices"][0]["name"] == "cpu"
    assert facts["threads"] == torch.get_num_threads()
    assert facts["policies"] == list(kvkeep.available_policies())
    assert all(facts[name] for name in ("transformers", "tokenizers", "platform", "cpu_count"))


def test_env_for_people(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("env").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert all(word in text for word in ("kvkeep", "torch", "cpu count", "GB", "streaming_llm"))


def test_env_names_a_broken_third_party_policy_and_goes_on(monkeypatch: pytest.MonkeyPatch):
    def broken() -> None:
        raise PolicyError("Entry point 'x:Y' is broken.")

    monkeypatch.setattr(registry, "available", broken)
    assert "cannot be listed: Entry point 'x:Y' is broken." in " ".join(invoke("env").stdout.split())


def test_env_where_memory_is_not_told(monkeypatch: pytest.MonkeyPatch):
    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(env.os, "sysconf", unknown)
    assert "unknown memory" in invoke("env").stdout


@pytest.mark.parametrize("name", builtin_names())
def test_a_policy_that_is_read_as_text_is_the_class(name: str):
    assert policies._describe_source(name) == policies._describe(name, registry.class_of(name))
