"""Completion in shells: the words that are offered, and the scripts that ask for them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import model_folders
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvkeep.cli import shell_completion
from kvkeep.cli.main import app
from kvkeep.policies.registry import available, parse

SCRIPT = f'#!/bin/sh\nexec {sys.executable} -m kvkeep "$@"\n'


def offered(line, shell="bash"):
    """The words that a shell is offered at the end of a line."""
    if shell == "bash":
        words = [""]
        for character in line:  # as bash splits them
            if character == " ":
                words.append("")
            elif character in ":=":
                words = [*(words if words[-1] else words[:-1]), character, ""]
            else:
                words[-1] += character
        if words[-1] == "" and words[-2:-1] and words[-2] in (":", "="):
            del words[-1]
        asked = {"COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    else:
        asked = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    env = {"_KVKEEP_COMPLETE": f"complete_{shell}", "NO_COLOR": "1", **asked}
    result = CliRunner().invoke(app, [], env=env, prog_name="kvkeep")
    assert "Traceback" not in result.output
    return list(filter(None, result.stdout.splitlines()))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("kvkeep gen", ["generate"]),
        ("kvkeep ", [name for name, command in get_command(app).commands.items() if not command.hidden]),
        ("kvkeep policies s", ["show"]),
        ("kvkeep policies show scis", ["scissorhands", "scissorhands_release"]),
        ("kvkeep generate --max-n", ["--max-new-tokens"]),
        ("kvkeep generate --policy tov", ["tova"]),
        ("kvkeep generate --policy=tov", ["tova"]),
        ("kvkeep generate --policy h2o:gr", ["graduate=compete", "graduate=replace"]),
        ("kvkeep generate --policy h2o:graduate=", ["compete", "replace"]),
        ("kvkeep generate --policy h2o:graduate=re", ["replace"]),
        ("kvkeep generate --policy h2o:recent=8,si", ["8,sinks=0"]),
        ("kvkeep generate --policy h2o:recent=8,re", []),
        ("kvkeep generate --policy nobody:x", []),
        ("kvkeep eval --policies full,tov", ["full,tova"]),
        ("kvkeep eval --policies full,h2o:recent=8,si", ["8,sinks=0"]),
        ("kvkeep eval --ask l", ["later"]),
        ("kvkeep generate --positions s", ["slot"]),
        ("kvkeep generate --dtype b", ["bfloat16"]),
        ("kvkeep generate --load-in 4", ["4bit"]),
        ("kvkeep plan --device c", ["cpu", "cuda"]),
        ("kvkeep generate -f rep", []),
        ("kvkeep rem", ["remember"]),
        ("kvkeep remember --over", ["--overwrite"]),
        ("kvkeep remember --policy tov", ["tova"]),
        ("kvkeep chat --sess", ["--session", "--sessions"]),
        ("kvkeep chat --policy=tov", ["tova"]),
    ],
)
def test_words_in_bash(line, words):
    assert offered(line) == words


def test_names_of_all_policies():
    assert offered("kvkeep generate --policy ") == list(available())
    assert [name for name, _ in shell_completion.policies("")] == list(available())


@pytest.mark.parametrize("name", available())
def test_options_that_are_offered_are_options(name):
    for word, _ in shell_completion.policies(f"{name}:"):
        if not word.endswith("="):  # the default is none
            parse(word)


def test_other_shells_get_whole_words():
    assert offered("kvkeep generate --policy h2o:gra", "zsh") == [
        "_arguments '*: :((" + '"h2o\\\\:graduate=compete":"' + _help("graduate") + '"',
        '"h2o\\\\:graduate=replace":"' + _help("graduate") + "\"))'",
    ]
    assert offered("kvkeep generate --policy h2o:graduate=re", "fish") == [f"h2o:graduate=replace\t{_help('graduate')}"]


def _help(option):
    return next(remark for word, remark in shell_completion.policies("h2o:") if word.startswith(f"h2o:{option}"))


def test_models_are_folders_and_what_the_cache_holds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--Qwen--Qwen3-0.6B").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    model_folders.copy(tmp_path / "mine")
    model_folders.copy(tmp_path / "several" / "one")
    assert offered("kvkeep generate ") == ["mine", "several/one", "Qwen/Qwen3-0.6B"]
    assert offered("kvkeep plan mi") == ["mine"]
    assert offered("kvkeep eval several/") == ["several/one"]
    assert offered("kvkeep generate ./se") == ["./several/one"]
    assert offered(f"kvkeep generate {tmp_path}/mi") == [f"{tmp_path}/mine"]
    assert offered("kvkeep generate Qwen/") == ["Qwen/Qwen3-0.6B"]
    assert offered("kvkeep generate nothing/here/") == []
    assert offered("kvkeep generate ~nosuchuser/") == []


def test_saved_memories_and_conversations(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVKEEP_SESSIONS", str(tmp_path / "sessions"))
    (tmp_path / "sessions" / "trip").mkdir(parents=True)
    (tmp_path / "sessions" / "trip" / "memory.kvkeep").touch()
    (tmp_path / "report.kvkeep").touch()
    (tmp_path / "report.txt").touch()
    assert offered("kvkeep generate --memory rep") == ["report.kvkeep"]
    assert offered("kvkeep chat --memory rep") == ["report.kvkeep"]
    assert offered("kvkeep chat --session t") == ["trip"]
    assert offered("kvkeep chat -s x") == []


@pytest.mark.parametrize(
    "environment",
    [{"COMP_WORDS": "kvkeep", "COMP_CWORD": "x"}, {"COMP_WORDS": "", "COMP_CWORD": "0"}, {"COMP_WORDS": 'kvkeep\n"a'}],
    ids=str,
)
def test_odd_words_of_a_shell(environment):
    env = {"_KVKEEP_COMPLETE": "complete_bash", "COMP_CWORD": "1", **environment}
    result = CliRunner().invoke(app, [], env=env, prog_name="kvkeep")
    assert isinstance(result.exception, SystemExit | ValueError | None)


@pytest.mark.parametrize(("shell", "file"), [("bash", ".bashrc"), ("zsh", ".zshrc")])
def test_completion_can_be_installed(shell, file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("typer._completion_shared._get_shell_name", lambda: shell)
    result = CliRunner().invoke(app, ["--install-completion"], prog_name="python -m kvkeep")
    assert result.exit_code == 0, result.output
    assert f"{shell} completion installed in {tmp_path}" in result.output.replace("\n", "")
    scripts = [path for path in tmp_path.rglob("*kvkeep*") if path.is_file()]
    assert "_KVKEEP_COMPLETE=complete_" in scripts[0].read_text()
    assert (tmp_path / file).exists()


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written(tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    check_refusal(tmp_path, monkeypatch)


def test_a_home_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "home").write_text("")
    check_refusal(tmp_path / "home", monkeypatch)


def check_refusal(home, monkeypatch):
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("typer._completion_shared._get_shell_name", lambda: "bash")
    result = CliRunner().invoke(app, ["--install-completion"])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert "kvkeep --show-completion" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("kvkeep gen", "kvkeep generate "),
        ("kvkeep generate --policy=ahak", "kvkeep generate --policy=ahakv "),
        ("kvkeep generate --policy h2o:graduate=re", "kvkeep generate --policy h2o:graduate=replace "),
    ],
)
def test_in_a_real_bash(line, completed, tmp_path):
    import pty

    (tmp_path / "kvkeep").write_text(SCRIPT)
    (tmp_path / "kvkeep").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path), "PS1": "$ "}
    leader, follower = pty.openpty()
    with subprocess.Popen(
        ["bash", "--norc", "-i"], env={**env, "TERM": "dumb"}, stdin=follower, stdout=follower, stderr=follower
    ) as shell:
        os.write(leader, b'eval "$(_KVKEEP_COMPLETE=source_bash kvkeep)"; echo read""y\n')
        wait_for(leader, b"ready")
        os.write(leader, line.encode() + b"\t")
        wait_for(leader, completed.encode())
        os.write(leader, b"\x03\nexit\n")
        shell.wait(timeout=30)
    os.close(leader)
    os.close(follower)


def wait_for(terminal, text):
    said, end = b"", time.monotonic() + 60
    while text not in said:
        assert time.monotonic() < end, said
        said += os.read(terminal, 4096)
