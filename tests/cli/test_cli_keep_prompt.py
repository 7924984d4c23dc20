"""``--keep-prompt`` on commands, in lines of a batch job, bodies of a server and ``kvkeep.toml``."""

import json

import model_folders
import pytest
from commands import run, write
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli.main import app
from kvkeep.config import Config
from kvkeep.errors import InputError
from kvkeep.openai import requests as openai

LONG = "Anna has a red ball. Tom has a blue car. " * 12
SHORT = "Anna has a red ball."


@pytest.fixture(autouse=True)
def _fast():
    with model_folders.one_thread():
        yield


def kv(*words, code=0):
    done = CliRunner().invoke(app, [*map(str, words)], env={"COLUMNS": "120"})
    assert done.exit_code == code, (done.output, done.exception)
    assert "Traceback" not in done.output
    return done


@pytest.mark.long
def test_generate_keeps_the_prompt():
    words = ("generate", model_folders.folder(), "-p", SHORT, "--policy", "local", "-b", 24, "-n", 30, "--json")
    plain, kept = (json.loads(kv(*words, *more).stdout) for more in ((), ("--keep-prompt", "true")))
    assert (plain["policy"], kept["policy"]) == ("local", "local:keep_prompt=1.0")
    assert plain["token_ids"] != kept["token_ids"]
    half = json.loads(kv(*words, "--keep-prompt", "0.5").stdout)
    assert half["policy"] == "local:keep_prompt=0.5"
    refused = kv(*words, "-b", 12, "--keep-prompt", "true", code=2)
    assert "keep_prompt keeps all" in refused.stderr
    assert "keep_prompt=0.5 cuts it" in refused.stderr


@pytest.mark.parametrize("share", ["0", "1.5", "-1", "nan", "", "half", "0,5"])
@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_shares_that_do_not_exist(command, share):
    more = ("-p", "a") if command == "generate" else ()
    done = kv(command, model_folders.folder(), *more, "--keep-prompt", share, code=2)
    assert f"--keep-prompt {share!r} is neither true nor false nor a share" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_memory_has_its_own_setting(tmp_path):
    (tmp_path / "text.txt").write_text(SHORT)
    file = tmp_path / "text.kvkeep"
    kv(
        "remember",
        model_folders.folder(),
        "-f",
        tmp_path / "text.txt",
        "-o",
        file,
        "--policy",
        "local",
        "-b",
        40,
        "--raw",
    )
    done = kv("generate", "--memory", file, "-p", "Who?", "--keep-prompt", "true", "--raw", code=2)
    assert "--keep-prompt 1.0 is not that of" in done.stderr


@pytest.mark.long
def test_lines_of_a_job_have_a_setting_of_their_own(tmp_path):
    lines = [
        {"prompt": SHORT},
        *({"prompt": SHORT, "options": {"keep_prompt": keep}} for keep in (True, 0.5, False, 1)),
    ]
    source, target = write(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    done = run("-i", source, "-o", target, "-b", 24, "-n", 40, "--policy", "local", "--keep-prompt", "true")
    assert done.exit_code == 0, done.said
    found = [json.loads(raw)["completion"] for raw in target.read_bytes().splitlines()]
    texts = {entry["line"]: entry["text"] for entry in found}
    assert texts[1] == texts[2] == texts[5]
    assert len({texts[1], texts[4]}) == 2
    bad = write(tmp_path / "bad.jsonl", {"prompt": LONG, "options": {"keep_prompt": True}}, {"prompt": "a"})
    done = run("-i", bad, "-o", tmp_path / "other.jsonl", "-b", 40, "-n", 4, "--policy", "local")
    assert "keep_prompt keeps all" in " ".join(done.said.split())
    wrong = write(tmp_path / "wrong.jsonl", {"prompt": "a", "options": {"keep_prompt": "half"}})
    assert "keep_prompt" in run("-i", wrong, "-o", tmp_path / "none.jsonl", "-b", 40).said


def test_a_configuration_may_say_it(tmp_path):
    file = tmp_path / "kvkeep.toml"
    file.write_text('policy = "local"\nbudget = 40\nkeep_prompt = true\n')
    words = ("generate", model_folders.folder(), "-p", SHORT, "-n", 3, "--json", "--config", file)
    assert json.loads(kv(*words).stdout)["policy"] == "local:keep_prompt=1.0"
    assert json.loads(kv(*words, "--keep-prompt", "false").stdout)["policy"] == "local"
    assert Config.of({"keep_prompt": 0.5}).settings() == {"keep_prompt": 0.5}
    for wrong in (0, 2, "yes", [0.5], -0.5):
        with pytest.raises(InputError, match="keep_prompt"):
            Config.of({"keep_prompt": wrong})


def test_bodies_may_say_it():
    body = {"model": "m", "prompt": "a", "keep_prompt": 0.5}
    assert openai.read(openai.COMPLETIONS, body).options["keep_prompt"] == 0.5
    with pytest.raises(openai.ParameterError, match="keep_prompt"):
        openai.read(openai.COMPLETIONS, {**body, "keep_prompt": "half"})


def test_every_policy_takes_it_in_its_string():
    for name in kvkeep.available_policies():
        assert kvkeep.parse(f"{name}:keep_prompt=0.5").keep_prompt == 0.5
    shown = json.loads(kv("policies", "show", "local:keep_prompt=1", "--json").stdout)
    assert shown["options"] == []
    assert shown["asked"]["options"] == "local:keep_prompt=1.0"
