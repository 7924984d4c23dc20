"""``kvkeep serve``: flags, variables and a file of settings; mistakes as one line; signals."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import model_folders
import processes
import pytest
from typer.testing import CliRunner

from kvkeep.cli import serve as command
from kvkeep.cli import serve_run
from kvkeep.cli.main import app
from kvkeep.cli.serve import ServeOptions
from kvkeep.errors import pip_install
from kvkeep.models.load import find
from kvkeep.server.errors import RefusalError
from kvkeep.server.run import ServerAddress
from kvkeep.server.settings import ServerSettings

from .running import WAIT_S, httpx


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in list(os.environ):
        if name.startswith("KVKEEP_"):
            monkeypatch.delenv(name)


def run(*words, code=0, **variables):
    found = CliRunner().invoke(app, ["serve", *map(str, words)], env={k: str(v) for k, v in variables.items()})
    assert found.exit_code == code, (found.output, found.exception)
    assert "Traceback" not in found.output
    return " ".join(found.output.split())


def checked(*words, **options):
    return run(model_folders.folder(), "--check", *words, **options)


def refused(*words, **options):
    said = checked(*words, code=2, **options)
    assert said.startswith("error: ")
    return said


def test_without_its_packages_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(command, "_NEEDED", ("nowhere_to_be_found",))
    assert pip_install("server") in run(code=2)


def test_settings_come_from_flags_then_variables_then_the_file(tmp_path, monkeypatch):
    taken = []
    monkeypatch.setattr("kvkeep.cli.serve_run.run", taken.append)
    file = tmp_path / "server.toml"
    file.write_text(
        'model = "from-file"\nbudget = 64\nkv-memory = "1MiB"\nmax_queue = 3\naccess-log = false\n'
        'queue-timeout = 5\nallow-origin = ["https://a.example"]\n',
        encoding="utf-8-sig",  # as some editors write it
    )
    run("--config", file, "--budget", "256", KVKEEP_BUDGET="128", KVKEEP_MAX_QUEUE="7", KVKEEP_PORT="0")
    (found,) = taken
    assert (found.model, found.budget, found.max_queue, found.kv_memory) == ("from-file", 256, 7, 2**20)
    assert (found.port, found.access_log, found.queue_timeout) == (0, False, 5.0)
    assert found.allow_origin == ("https://a.example",)
    run("mine", KVKEEP_MODEL="variable", KVKEEP_CONFIG=file)
    run(KVKEEP_MODEL="variable", KVKEEP_ACCESS_LOG="0")
    assert [one.model for one in taken[1:]] == ["mine", "variable"]
    assert (taken[1].budget, taken[2].access_log) == (64, False)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("budgt = 5", "unknown name budgt. Did you mean budget?"),
        ("xyz = 5", "See kvkeep serve --help"),
        ("check = true", "unknown name check"),
        ("budget = ", "is no TOML"),
        ("[server]\nbudget = 5", "unknown name server"),
        ("budget = [1]", "is no text, number or true/false"),
        ("port = 'many'", "port"),
        ("budget = 0", "budget"),
        ("access-log = 'perhaps'", "access-log"),
    ],
)
def test_files_of_settings_that_are_wrong(tmp_path, text, words):
    (tmp_path / "a.toml").write_text(text)
    assert words in refused("--config", tmp_path / "a.toml")


def test_numbers_of_variables_and_files_are_named(tmp_path):
    found = CliRunner().invoke(app, ["serve"], env={"KVKEEP_PORT": "abc"})
    assert (found.exit_code, found.output.split()[:3]) == (2, ["error:", "--port", "'abc'"])
    (tmp_path / "a.toml").write_text("max-queue = 'many'")
    assert "--max-queue 'many' is not a whole number" in refused("--config", tmp_path / "a.toml")


@pytest.mark.slow
def test_check(tmp_path):
    assert "can be used" in checked()
    assert "cannot be read" in refused("--config", tmp_path / "none.toml")
    for words, said in (
        (("--policy", "h20"), "Did you mean 'h2o'"),
        (("--port", "99999"), "--port 99999 is outside"),
        (("--max-queue", "-1"), "--max-queue -1"),
        (("--queue-timeout", "0"), "--queue-timeout 0 is no time"),
        (("--read-timeout", "nan"), "--read-timeout nan is no time"),
        (("--max-body", "5"), "--max-body '5' is not a size"),
        (("--max-model-len", "1"), "--max-model-len 1"),
        (("--prefix-memory", "1GiB"), "--prefill-chunk"),
        (("--conversations", "often"), "continue"),
        (("--conversation-ttl", "0"), "above 0"),
        (("--pin-system", "maybe"), "neither on nor off"),
        (("--host-rows", "-1"), "--host-rows -1 is outside"),
        (("--tls-cert", "a.pem"), "--tls-key"),
        (("--tls-cert", "a.pem", "--tls-key", "b.pem"), "no certificate"),
        (("--key-file", str(tmp_path)), "cannot be read"),
        (("--budget", "0"), "budget"),
        (("--guard", "7"), "--guard 7"),
        (("--guard", "0.2", "--device", "cpu"), "Leave --guard out, or give another policy"),
        (("--max-tokens", "5"), "--max-new-tokens"),
    ):
        assert said in refused(*words), words


@pytest.mark.parametrize(
    ("text", "words"),
    [("", "has no key"), ("# none\n", "has no key"), ("short", "8 or more"), ("a b c", "line 1: write KEY")],
)
def test_files_of_keys_that_are_wrong(tmp_path, text, words):
    (tmp_path / "keys").write_text(text)
    assert words in refused("--key-file", tmp_path / "keys")
    assert "KVKEEP_API_KEY is empty" in refused(KVKEEP_API_KEY=" ")


def test_keys_of_a_file_and_a_variable(tmp_path, monkeypatch):
    from kvkeep.cli.serve_run import read_keys

    (tmp_path / "keys").write_text("anna 0123456789  # hers\n\nabcdefghij\n", encoding="utf-8-sig")
    monkeypatch.setenv("KVKEEP_API_KEY", "from-the-shell")
    found = read_keys(str(tmp_path / "keys"))
    assert set(found.owners) == {"0123456789", "abcdefghij", "from-the-shell"}
    assert found.owner("Bearer 0123456789") == "anna"
    assert "0123456789" not in repr(found)


def start(tmp_path, *words):
    """A server in a process of its own, and its address."""
    err = tmp_path / "err"
    process = processes.kvkeep("serve", "--port", "0", *words, err=err)
    end = time.monotonic() + WAIT_S
    while not (found := re.search(r"(http://\S+)/v1", err.read_text() if err.exists() else "")):
        assert process.is_alive(), err.read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    return process, found[1], err


@pytest.mark.long
def test_sigterm_drains_and_no_text_is_logged(tmp_path):
    process, url, err = start(tmp_path, "--session-dir", tmp_path / "sessions")
    body = {"prompt": "a secret dog", "max_tokens": 150, "ignore_eos": True, "stream": True}
    pieces = []
    with httpx.Client(base_url=url, timeout=WAIT_S) as client:
        client.post("/v1/sessions", json={"id": "kept"})
        turn = {"messages": [{"role": "user", "content": "secret"}], "session_id": "kept", "max_tokens": 2}
        assert client.post("/v1/chat/completions", json=turn).status_code == 200
        with client.stream("POST", "/v1/completions", json=body) as answer:
            for line in answer.iter_lines():
                if line and not pieces:
                    os.kill(process.pid, signal.SIGTERM)
                pieces += [line] if line else []
    process.join(WAIT_S)
    assert process.exitcode == 0, err.read_text()
    assert pieces[-1] == "data: [DONE]"
    assert json.loads(pieces[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    log = err.read_text()
    assert re.search(r"127.0.0.1 everybody POST /v1/completions 200 \d", log)
    assert "secret" not in log
    said = " ".join(log.split())
    assert "a request without a temperature gets OpenAI's, 1, where kvkeep generate takes 0" in said
    assert "chat template" not in said  # the embedded model has one
    assert "Traceback" not in log
    assert (tmp_path / "sessions" / "everybody--kept.kvkeep").exists()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_at_once(tmp_path):
    process, url, err = start(tmp_path)
    body = {"prompt": "a dog", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    client = httpx.Client(base_url=url, timeout=WAIT_S)
    with client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGINT)
        process.join(WAIT_S)
        assert process.exitcode == 130, err.read_text()
        lines.close()
    assert "Traceback" not in err.read_text()


@pytest.mark.slow
def test_a_port_that_is_taken_is_one_line(tmp_path):
    process, url, _ = start(tmp_path, "--no-access-log")
    try:
        said = run("--port", url.rpartition(":")[2], code=2)
        assert "cannot be used: Address already in use. Give another --host or --port" in said
    finally:
        process.kill()
        process.join(WAIT_S)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("/models/smollm2/", "smollm2"),
        ("org/smollm2", "smollm2"),
        ("C:\\m\\smollm2", "smollm2"),
        ("m/smollm2.gguf", "smollm2"),
        ("mine", "mine"),
        ("/", "/"),
    ],
)
def test_a_model_answers_to_the_last_part_of_its_name(name, short):
    settings = ServerSettings(name=name, adapters=("sql",))
    for known in (name, short):
        assert (settings.adapter_of(known), settings.adapter_of(f"{known}:sql")) == (None, "sql")
    for unknown in (f"{short}:other", "models", "", f"x{short}"):
        with pytest.raises(RefusalError):
            settings.adapter_of(unknown)


def test_a_model_without_a_chat_template_says_so(capsys):
    serve_run._remark(ServeOptions(), ServerSettings(name="plain"), find(model_folders.folder()))
    said = " ".join(capsys.readouterr().err.split())
    assert said == "note: plain has no chat template, so it continues the messages of a chat as text"


def test_the_command_and_the_library_have_the_same_defaults():
    command, settings, address = ServeOptions(), ServerSettings(name="a model"), ServerAddress()
    for name in ("max_new_tokens", "max_model_len", "max_queue", "key_requests", "key_tokens", "page"):
        assert getattr(command, name) == getattr(settings, name)
    for name in ("queue_timeout", "request_timeout", "read_timeout"):
        assert getattr(command, name) == getattr(settings, f"{name}_s")
    assert command.max_body == settings.max_body_bytes
    assert (command.host, command.port) == (address.host, address.port)
    assert (command.grace, command.read_timeout) == (address.grace_s, address.read_timeout_s)
