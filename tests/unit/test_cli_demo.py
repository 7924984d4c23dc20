"""``kvkeep demo``: what it shows; the scenes are cut short here."""

from typer.testing import CliRunner

from kvkeep.cli import showcase
from kvkeep.cli.main import app
from kvkeep.models import tiny


def test_shows_a_story_a_table_and_what_to_try_next(monkeypatch):
    monkeypatch.setattr(showcase, "STORY_TOKENS", 140)
    monkeypatch.setattr(showcase, "POLICIES", ("full", "snapkv", "local"))
    done = CliRunner().invoke(app, ["demo"], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    text = done.stdout
    assert text.index("1  A story") < text.index("2  A question") < text.index("3  What to try next")
    assert "Once upon a time" in text
    assert "128 of 1" in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith(("full  ", "snapkv  ", "local  "))}
    assert "chosen because the full cache answers it" in text
    assert "right" in lines["full"]
    assert "100%" in lines["full"]
    assert "wrong" in lines["local"]
    assert "20%" in lines["local"]
    assert text.count("kvkeep ") >= 3
    assert all(len(line) <= 100 for line in text.splitlines())


def test_another_question_was_not_chosen(monkeypatch):
    monkeypatch.setattr(showcase, "PROMPT_TOKENS", 200)
    monkeypatch.setattr(showcase, "DISTANCE_TOKENS", 100)
    monkeypatch.setattr(showcase, "STORY_TOKENS", 2)
    monkeypatch.setattr(showcase, "POLICIES", ("full",))
    done = CliRunner().invoke(app, ["demo", "--seed", "2"], env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "Asked at the end" in done.stdout
    assert "was chosen" not in done.stdout


def test_the_commands_to_try_next_exist():
    names = {command.name for command in app.registered_commands} | {group.name for group in app.registered_groups}
    for command, _ in showcase.NEXT:
        assert command.split()[1] in names


def test_refuses_a_damaged_installation(monkeypatch, tmp_path):
    monkeypatch.setattr(tiny, "WEIGHTS", "missing.safetensors")
    done = CliRunner().invoke(app, ["demo"])
    assert done.exit_code == 2
    assert "Traceback" not in done.output
    assert "embedded model" in done.stderr
