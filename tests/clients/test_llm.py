"""simonw's ``llm``, by its command line."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from server.running import NAME


@pytest.fixture
def run(server, tmp_path, monkeypatch):
    """Runs ``llm`` with a model that the server answers for."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    about = {"model_name": NAME, "api_base": f"{server.url}/v1"}
    models = [
        {"model_id": "kept", **about, "supports_schema": True, "supports_tools": True},
        {"model_id": "kept-completion", **about, "completion": True},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

    def run(*words):
        from llm.cli import cli

        done = CliRunner().invoke(cli, list(words))
        assert done.exit_code == 0, done.output
        return done.output

    return run


def test_a_prompt(run):
    streamed = run("-m", "kept", "Once upon a time", "-o", "max_tokens", "8", "-o", "temperature", "0")
    whole = run("-m", "kept", "Once upon a time", "--no-stream", "-o", "max_tokens", "8", "-o", "temperature", "0")
    assert streamed.strip() == whole.strip() != ""


def test_a_conversation_goes_on(run):
    run("-m", "kept", "Once upon a time", "-o", "max_tokens", "5")
    assert run("-c", "And then?", "-o", "max_tokens", "5").strip()


def test_a_schema(run):
    found = run("-m", "kept", "Who?", "--schema", json.dumps(SCHEMA), "-o", "max_tokens", "60")
    assert json.loads(found)["age"] in (1, 2)


SCHEMA = {
    "type": "object",
    "properties": {"age": {"enum": [1, 2]}},
    "required": ["age"],
    "additionalProperties": False,
}


def test_tools_are_offered(run):
    functions = 'def weather(city: str) -> str:\n    "Says the weather."\n    return "It rains."\n'
    assert run("-m", "kept", "Hello", "--functions", functions, "-o", "max_tokens", "8").strip()


def test_a_completion(run):
    assert run("-m", "kept-completion", "Once upon a time", "-o", "max_tokens", "5").strip()
