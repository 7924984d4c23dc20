"""Each tutorial works as it is written, from its first line to its last."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pages
import pytest
from typer.main import get_command

from kvkeep.cli.main import app

FOLDER = Path(__file__).parents[2] / "docs" / "tutorials"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("KVKEEP_SESSIONS", str(tmp_path / "sessions"))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        if getattr(sys.modules[name], "__file__", None) and Path(sys.modules[name].__file__).parent == tmp_path:
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first-run", "batch-job", "remembered-document", "choosing-a-policy", "own-policy"])
def test_the_tutorial_runs(name, place, capsys):
    names = {}
    pages.run((FOLDER / f"{name}.md").read_text(), place, names)
    said = capsys.readouterr().out
    assert said
    if name == "remembered-document":
        assert re.findall("Pepper|attic", said) == ["Pepper", "attic"]
    if name == "own-policy":
        assert said.count("holds:") > 5


@pytest.mark.slow
def test_the_tutorial_of_the_server_runs(place, capsys, monkeypatch):
    pytest.importorskip("fastapi")
    pytest.importorskip("openai")
    from server import running

    monkeypatch.setattr(running, "NAME", "embedded")
    with running.serve() as server:
        names = {}
        text = (FOLDER / "serving.md").read_text().replace("http://127.0.0.1:8000", server.url)
        pages.run(text, place, names)
        names["client"].close()
        names["http"].close()
    said = capsys.readouterr().out
    assert "kept_tokens" in said
    assert re.findall(r"'cached_tokens': (\d+)", said)[-1] != "0"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first-run.md", "remembered-document.md"])
def test_questions_are_answered_as_the_page_says(name, place):
    """The facts of the page are found; the page says so, or shows it."""
    from typer.testing import CliRunner

    text = (FOLDER / name).read_text()
    (story,) = [content for _, title, content in pages.fences(text) if title == "lighthouse.txt"]
    (place / "lighthouse.txt").write_text(story)
    done = CliRunner().invoke(app, ["remember", "-f", "lighthouse.txt", "-o", "a.kvkeep", "--budget", "96"])
    assert done.exit_code == 0, done.output
    for question, answer in (
        ("Where does Anna keep her lantern?", "attic"),
        ("Where does Boris keep his rope?", "cellar"),
    ):
        done = CliRunner().invoke(app, ["generate", "--memory", "a.kvkeep", "-p", question])
        assert answer in done.stdout


def test_every_command_of_the_tutorials_exists():
    known = set(get_command(app).commands)
    for page in FOLDER.glob("*.md"):
        for word in re.findall(r"^(?:.* \| )?kvkeep ([a-z]+)|`kvkeep ([a-z]+)", page.read_text(), flags=re.MULTILINE):
            assert set(word) & known, (page.name, word)
