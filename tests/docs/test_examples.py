"""Each script of examples/ runs on the embedded model, and its compose file agrees with the server."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import typer

import kvkeep
from kvkeep.cli.main import app
from kvkeep.testing import LAWS

EXAMPLES = Path(__file__).parents[2] / "examples"
if not EXAMPLES.is_dir():
    pytest.skip("the examples are not part of this copy", allow_module_level=True)
PAGE = (EXAMPLES.parent / "docs" / "examples.md").read_text()


@pytest.fixture
def run(tmp_path, monkeypatch, capsys, no_checked_annotations):
    monkeypatch.chdir(tmp_path)

    def ran(name, *words):
        monkeypatch.setattr(sys, "argv", [name, *map(str, words)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return ran


def test_text_is_generated_in_fewer_bytes_than_a_full_cache_has(run):
    found = re.search(r"takes ([\d,]+) bytes; a full one would hold ([\d,]+)", run("bounded.py"))
    taken, full = (int(number.replace(",", "")) for number in found.groups())
    assert taken < full / 3


def test_a_batch_job_answers_what_is_left_after_a_stop(run):
    prompts = runpy.run_path(str(EXAMPLES / "batch_job.py"))["PROMPTS"]
    lines = [json.dumps({"id": key, "text": "", "finish_reason": "stop"}) for key in prompts]
    path = Path("answers.jsonl")
    cut = '{"id": "dog-garden", "text": "ü'.encode()[:-1]  # stopped in the middle of a character
    path.write_bytes("".join(f"{line}\n" for line in lines[:13]).encode() + cut)
    assert "13 prompts are answered, 3 are left" in run("batch_job.py")
    again = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(line["id"] for line in again) == sorted(prompts)
    assert all(line["text"] for line in again[13:])


def test_a_prompt_that_failed_is_tried_again(run, monkeypatch):
    monkeypatch.setattr(kvkeep.Engine, "run", lambda self, requests: [(0, SimpleNamespace(error="no room"))])
    assert "dog-garden has no answer: no room" in run("batch_job.py")
    assert Path("answers.jsonl").read_text() == ""


def test_a_metric_that_a_system_does_not_tell_is_no_error(monkeypatch):
    for name in ("agents", "agents.run", "openai", "openai.types", "openai.types.responses"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    module = runpy.run_path(str(EXAMPLES / "agent.py"))
    text = "kvkeep_row_bytes 5.0\nkvkeep_session_memory_bytes 7.0\n"
    monkeypatch.setattr("httpx.get", lambda url: SimpleNamespace(text=text))
    *held, process = module["bytes_held"]("http://x")
    assert held == [5.0, 7.0]
    assert process != process


@pytest.mark.long
def test_a_document_is_asked_about_many_times(run):
    answers = re.findall(r"\? (\w+)  \(", run("document.py"))
    assert answers == ["attic", "Pepper", "cellar"]


@pytest.mark.long
def test_a_policy_of_ones_own_obeys_the_laws(run):
    assert f"{len(LAWS)} laws hold" in run("own_policy.py")


@pytest.mark.slow  # importing openai takes seconds
def test_the_check_for_open_webui_finds_the_conversation_again(run):
    pytest.importorskip("openai")
    from server.running import serve

    with serve(budget=256, engine={"conversation_memory": 2**28}) as server:
        said = run("open_webui/check.py", f"http://127.0.0.1:{server.port}/v1")
    (first, whole), (later, longer) = re.findall(r"\((\d+) of (\d+) tokens were read\)", said)
    assert first == whole
    assert int(later) < int(longer) / 2


def test_the_compose_file_for_open_webui_agrees_with_the_server():
    yaml = pytest.importorskip("yaml")
    folder = EXAMPLES / "open_webui"
    services = yaml.safe_load((folder / "compose.yml").read_text())["services"]
    command = typer.main.get_command(app).commands["serve"]
    known = {f"KVKEEP_{option.name.upper()}" for option in command.params} | {"KVKEEP_API_KEY"}
    given, page = services["kvkeep"]["environment"], services["open-webui"]["environment"]
    assert set(given) <= known
    build = services["kvkeep"]["build"]
    assert (folder / build["context"] / build["dockerfile"]).is_file()
    assert page["OPENAI_API_BASE_URL"] == f"http://{given['KVKEEP_ALLOWED_HOST']}:8000/v1"
    assert "KVKEEP_API_KEY" in page["OPENAI_API_KEY"]
    assert given["KVKEEP_ALLOWED_HOST"] in services


@pytest.mark.parametrize("path", sorted(EXAMPLES.rglob("*.py")), ids=lambda path: path.name)
def test_the_page_shows_each_script(path):
    assert f"python examples/{path.relative_to(EXAMPLES)}" in PAGE
