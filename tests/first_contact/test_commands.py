"""Every command as a user runs it: in narrow and wide terminals, in an empty home, with and without colours."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import memories
import model_folders
import pytest
import result_folders
from typer.main import get_command
from typer.testing import CliRunner

from kvkeep.cli import help as help_pages
from kvkeep.cli.eval_run import parts
from kvkeep.cli.help import EXAMPLES
from kvkeep.cli.main import app
from kvkeep.evals.report import Table

KVKEEP = [sys.executable, "-m", "kvkeep"]
COMMAND_EXAMPLES = {
    **EXAMPLES,
    **{name: help_pages.examples(command, name) for name, command in get_command(app).commands.items()},
}
NAMES = [name for name in COMMAND_EXAMPLES if name]
WIDTHS = (60, 80, 120)

MODEL = str(model_folders.folder())
COMMANDS = [
    [],
    ["--version"],
    *(["--help"], *([*name.split(), "--help"] for name in NAMES)),
    ["policies"],
    ["policies", "show", "scissorhands_release"],
    ["env"],
    ["theory", "--only", "h2o-algorithm-1,ahakv-gain"],
    ["plan"],
    ["plan", "--memory", "24GiB", "--rows", "4", "--bandwidth", "100GB/s", "--context", "32k", "--policy", "adakv"],
    ["generate", "-p", "Once upon a time", "-n", "8", "--budget", "12"],
    ["generate", "-p", "Once upon a time", "-n", "4", "--policy", "full"],
    [
        "generate",
        "-p",
        "Once upon a time",
        "-n",
        "8",
        "--budget",
        "12",
        "--compare",
        "--policy",
        "h2o:recent=2,sinks=1",
    ],
    ["generate", "-i", "prompts.jsonl", "-o", "answers.jsonl", "-n", "4"],
    ["eval", "--report", "results"],
    ["memory", "report.kvkeep"],
    ["remember", "-f", "prompts.jsonl", "-o", "new.kvkeep", "--budget", "12"],
    ["generate", MODEL, "--memory", "report.kvkeep", "-p", "Why", "-n", "4"],
    ["explain", "-f", "prompts.jsonl", "--policies", "local", "-b", "8", "-n", "2", "--terminal"],
    ["chat", "--list"],
    ["chat", MODEL, "-s", "trip", "-n", "4"],
]


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, in which a user works."""
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("KVKEEP_SESSIONS", str(tmp_path / "sessions"))
    monkeypatch.setenv("KVKEEP_BACKEND", "torch")  # the kernel would be compiled again
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n')
    result_folders.evaluation(tmp_path / "results")
    memories.save(tmp_path / "report.kvkeep")
    return tmp_path


def run(words, width):
    said = "Hello\n/help\n/memory\n" if words[:1] == ["chat"] else None
    with model_folders.one_thread():
        return CliRunner().invoke(app, words, env={"COLUMNS": str(width)}, input=said)


@pytest.mark.parametrize(
    "width", [pytest.param(60, marks=pytest.mark.slow), 80, pytest.param(120, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words).replace(MODEL, "MODEL"))
def test_output_fits_the_terminal(words, width, home):
    result = run(words, width)
    assert result.exit_code == (0 if words else 2), result.output
    shown = result.stderr if words[:1] == ["generate"] and "--compare" not in words else result.output
    said = shown.partition("\n@")[0]  # BibTeX stands at the end
    long = [line for line in said.splitlines() if len(line) > width and not re.match("  (pytest|  kvkeep) ", line)]
    assert long == []
    assert "…" not in said


@pytest.mark.parametrize("name", NAMES)
def test_wide_terminals_are_used(name, home):
    narrow, wide = (run([*name.split(), "--help"], width).stdout for width in (60, 120))
    assert len(wide.splitlines()) <= len(narrow.splitlines())
    assert "".join(wide.split()) == "".join(narrow.split())


def test_pages_of_help_lose_no_words_in_brackets():
    """Marks of rich that are no style would be taken out of a text, such as the extra in a command for pip."""
    for name, command in get_command(app).commands.items():
        for text in (command.help or "", *(getattr(param, "help", None) or "" for param in command.params)):
            assert set(re.findall(r"(?<!\\)\[(/?[a-z][^\]]*)\]", text)) <= {"b", "/b"}, (name, text)


@pytest.mark.slow
def test_pages_of_help_name_no_types(home):
    for name in ("", *NAMES):
        assert not re.search(r"<\w+>|BOOLEAN|INTEGER|\{\w+\}", run([*name.split(), "--help"], 80).stdout)


def test_every_command_has_an_example_and_every_example_its_command(home):
    commands = re.findall(r"^  ([a-z-]+)  ", run(["--help"], 80).stdout, flags=re.MULTILINE)
    assert {name.split()[0] for name in NAMES} == set(commands)
    for name, examples in COMMAND_EXAMPLES.items():
        assert examples
        for line, remark in examples.items():
            assert name in line.partition("kvkeep ")[2] or name in ("policies list",)
            assert len(line) <= 56  # with its indentation it fits into 60 columns
            assert not remark.endswith(".")


def test_tables_of_many_budgets_continue_below():
    found = Table("recall", [f"{i}%" for i in range(30)], {"h2o": ["97 ± 1%"] * 30, "p" * 90: ["1%"] * 30})
    for width in WIDTHS:
        made = list(parts(found, width))
        assert sum(len(part.columns) - 1 for part in made) == 30
        assert all(part.columns[0].max_width <= width // 2 for part in made)
    assert len(list(parts(found, 10_000))) == 1
    assert len(list(parts(found, 5))) == 30


FRESH = [
    ["policies"],
    ["plan", "--memory", "24GiB"],
    ["generate", "-p", "Once upon a time", "-n", "4"],
    ["generate", "nobody/nothing", "-p", "Once"],
]
SCRIPT = """
import contextlib, io, json, sys
from kvkeep.cli import main
found = []
for words in json.loads(sys.argv[1]):
    sys.argv[1:] = words
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        try:
            main.run()
        except SystemExit as end:
            found.append([end.code, out.getvalue(), err.getvalue()])
print(json.dumps(found))
"""


def fresh_environment(home, **more):
    """The environment of somebody who has just logged in, without a network."""
    plain = {"HOME": str(home / "home"), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    return {**plain, "KVKEEP_BACKEND": "torch", "HF_ENDPOINT": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1", **more}


@pytest.mark.slow
def test_a_fresh_process_in_an_empty_home(home):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(FRESH)],
        env=fresh_environment(home),
        capture_output=True,
        text=True,
        check=True,
    )
    policies, plan, text, nothing = json.loads(done.stdout)
    assert (policies[0], plan[0], text[0]) == (0, 0, 0), done.stdout
    assert "h2o" in policies[1]
    assert "rows that fit" in plan[1]
    assert text[1].strip()
    assert "nothing was evicted" in text[2]
    assert nothing[0] == 2
    assert "nobody/nothing" in nothing[2]
    assert done.stderr == ""


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "forbidden"),
    [({"TERM": "dumb"}, r"\x1b"), ({"TERM": "xterm", "NO_COLOR": "1"}, r"\x1b\[[\d;]*[34]\d")],
    ids=["dumb", "no-color"],
)
def test_a_terminal_without_colours(environment, forbidden, home):
    leader, follower = pty.openpty()
    command = [*KVKEEP, "generate", "--bugdet", "3"]
    env = fresh_environment(home, COLUMNS="30", **environment)
    done = subprocess.run(command, env=env, stdout=follower, stderr=follower, check=False)
    os.close(follower)
    said = os.read(leader, 100_000).decode()
    os.close(leader)
    assert done.returncode == 2
    assert not re.search(forbidden, said)
    lines = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in said.split("\r\n")]
    assert max(map(len, lines)) <= (80 if environment["TERM"] == "dumb" else 30)  # wrapped between words
    assert "Did you mean --budget?" in " ".join("".join(f"{line} " for line in lines).split())


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_the_demo_fits_the_terminal(width, home):
    """In a narrower one its commands stay whole, to be copied."""
    result = run(["demo"], width)
    assert result.exit_code == 0
    assert max(map(len, result.output.splitlines())) <= width


@pytest.mark.slow
def test_the_first_run_in_an_empty_home_with_the_compiled_kernel(home):
    env = fresh_environment(home)
    del env["KVKEEP_BACKEND"]
    command = [*KVKEEP, "generate", "-p", "Once upon a time", "-n", "4"]
    for _ in range(2):
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()
    assert "KV memory" in done.stderr
