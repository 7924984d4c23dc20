"""``kvkeep demo``: what it shows; the scenes are cut short here."""

import re
import sys

import pytest
from typer.testing import CliRunner

from kvkeep import available_policies
from kvkeep.cli import console, demo
from kvkeep.cli.main import app
from kvkeep.models import tiny
from kvkeep.models.tiny.recall import question
from kvkeep.policies import DEFAULT


@pytest.mark.long
def test_shows_a_story_a_table_and_what_to_try_next(monkeypatch):
    monkeypatch.setattr(demo, "STORY_TOKENS", 140)
    monkeypatch.setattr(demo, "POLICIES", ("full", DEFAULT, "snapkv", "local"))
    done = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert text.index("1  A story") < text.index("2  A question") < text.index("3  What to try next")
    assert "Once upon a time" in text
    assert "128 of 1" in text
    starts = tuple(f"  {name}  " for name in ("full", "the default", "snapkv", "local"))
    lines = {line.split("  ")[1]: line for line in text.splitlines() if line.startswith(starts)}
    assert [line.rstrip() for line in text.splitlines() if line.rstrip() in demo.KINDS] == [
        *[*demo.KINDS][:2],
        "look at places",
    ]
    assert "right" in lines["the default"]
    assert f"The default is {DEFAULT}." in text
    assert "Why many are wrong" in text
    assert "chosen because the full cache answers it" in text
    assert "right" in lines["full"]
    assert "100%" in lines["full"]
    assert "wrong" in lines["local"]
    assert "20%" in lines["local"]
    assert text.count("kvkeep ") >= 3
    assert all(len(line) <= 100 for line in text.splitlines())


def test_names_are_whole_in_eighty_columns(monkeypatch):
    monkeypatch.setattr(demo, "STORY_TOKENS", 2)
    monkeypatch.setattr(
        demo,
        "_answers",
        lambda *_: (demo.Answer(name, 398, "a long answer, again and again", 1) for name in demo.POLICIES),
    )
    done = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    names = [name for name in demo.POLICIES if name != DEFAULT]
    assert [name for name in names if f"\n  {name} " not in done.stdout] == []
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if DEFAULT not in line)
    shares = [re.search(r"^  \S.* (right|wrong) .* (\S+)$", line) for line in done.stdout.splitlines()]
    assert len([one for one in shares if one]) > 20
    assert all(one[2].endswith("%") for one in shares if one)


def test_another_question_was_not_chosen(monkeypatch):
    monkeypatch.setattr(demo, "PROMPT_TOKENS", 200)
    monkeypatch.setattr(demo, "DISTANCE_TOKENS", 100)
    monkeypatch.setattr(demo, "STORY_TOKENS", 2)
    monkeypatch.setattr(demo, "POLICIES", ("full",))
    done = CliRunner().invoke(app, ["demo", "--seed", "3"], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "Asked at the end" in done.stdout
    assert "was chosen" not in done.stdout


def test_the_commands_to_try_next_exist():
    names = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    for command, _ in demo.NEXT:
        assert command.split()[0] in names


def test_commands_are_shown_as_this_shell_can_call_them(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "venv" / "bin" / "kvkeep"), "demo"])
    demo.show_next(console.out())
    assert "venv/bin/kvkeep policies" in capsys.readouterr().out
    (tmp_path / "kvkeep").touch(0o755)
    demo.show_next(console.out())
    assert "\n  kvkeep policies" in capsys.readouterr().out


def test_every_policy_is_asked():
    assert {name.partition(":")[0] for name in demo.POLICIES} == set(available_policies())


@pytest.mark.parametrize("seed", range(30))
def test_the_sentence_that_is_shown_is_the_one_that_was_asked_for(seed):
    asked = question(seed, kind="place", depth=0.25, n_facts=8, tokens=1990)
    said = demo._stated(asked)
    assert said in asked.prompt
    assert 400 < len(asked.prompt[asked.prompt.index(said) :].split()) * 1.45 < 1990
    assert {asked.facts[-1].owner, asked.facts[-1].thing, asked.answer} <= set(re.findall("[A-Za-z]+", said))


def test_refuses_a_damaged_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "WEIGHTS", "missing.safetensors")
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "embedded model" in done.stderr
