"""``kvkeep generate --json-schema``, and forms and tools in the lines of batch jobs."""

from __future__ import annotations

import json
from pathlib import Path

import model_folders
import pytest
from typer.testing import CliRunner

pytest.importorskip("llguidance")

from kvkeep.cli.main import app

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"enum": [1, 2]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def generate(*words):
    return CliRunner().invoke(app, ["generate", *map(str, words)])


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--json"], ["-t", "1", "--seed", "3"]], ids=str)
def test_the_answer_follows_the_schema(tmp_path, more):
    done = generate("-p", "Who is it?", "--json-schema", write(tmp_path / "s.json", SCHEMA), *more)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert list(json.loads(found["text"]) if "--json" in more else found) == ["name", "age"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"type": "objekt"}', "error: The JSON schema cannot be used: Invalid type: objekt."),
        ("{", "error: The JSON schema cannot be read (Expecting property name"),
        ("5", "error: The JSON schema 5 is no JSON object"),
        ("", "s.json is empty. Give a schema such as"),
    ],
)
def test_a_bad_schema_is_refused(tmp_path, text, message):
    done = generate("-p", "x", "--json-schema", write(tmp_path / "s.json", text))
    assert done.exit_code == 2
    assert message in done.stderr
    assert "Traceback" not in done.output


def test_it_goes_together_with_no_batch_job_and_needs_a_file(tmp_path):
    assert "cannot be read" in generate("-p", "x", "--json-schema", tmp_path / "none.json").stderr
    done = generate("-i", "a.jsonl", "-o", "b.jsonl", "--json-schema", write(tmp_path / "s.json", SCHEMA))
    assert "--json-schema and --compare are for a single one" in done.stderr


@pytest.mark.slow
def test_lines_of_batch_jobs_have_forms_and_tools(tmp_path):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 90}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    tools = {
        "tools": [{"type": "function", "function": CLOCK}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    url = {"method": "POST", "url": "/v1/chat/completions"}
    lines = [
        {"prompt": "Hi", "options": {"structured_outputs": {"choice": ["yes", "no"]}}},
        {"prompt": "Hi", "options": {"structured_outputs": {"choise": ["yes"]}}},
        {"prompt": "Hi", "options": {"structured_outputs": {"regex": "a["}}},
        {"custom_id": "form", **url, "body": {**body, "response_format": form, "n": 2, "temperature": 1}},
        {"custom_id": "call", **url, "body": {**body, **tools}},
        {"custom_id": "bad", **url, "body": {**body, "response_format": {"type": "xml"}}},
    ]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    refused = generate("-i", source, "-o", target)
    assert "Line 2 cannot be run: structured_outputs has no 'choise'; did you mean choice?" in refused.stderr
    done = generate("-i", source, "-o", target, "--skip-bad")
    assert done.exit_code == 0, done.output
    found = {str(one.get("custom_id")): one for one in map(json.loads, target.read_text().splitlines())}
    assert found["None"]["completion"]["text"] in ("yes", "no")
    assert found["None"]["completion"]["options"] == lines[0]["options"]
    first, second = found["form"]["response"]["body"]["choices"]
    assert (
        list(json.loads(first["message"]["content"]))
        == list(json.loads(second["message"]["content"]))
        == ["name", "age"]
    )
    (choice,) = found["call"]["response"]["body"]["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "clock", "arguments": "{}"}
    assert choice["finish_reason"] == "tool_calls"
    aside = Path(f"{target}.bad").read_text()
    assert "did you mean choice" in aside
    assert "unclosed character class" in aside
    assert "response_format.type" in aside
