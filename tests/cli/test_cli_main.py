"""The command as a whole: version, help, exit codes, closed pipes, Ctrl-C, and a light start."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

import kvkeep
from kvkeep.cli import console, main, options
from kvkeep.errors import InputError, KVKeepError

KVKEEP = [sys.executable, "-c", "from kvkeep.cli.main import run; run()"]


def invoke(*arguments: str):
    return CliRunner().invoke(main.app, list(arguments))


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"kvkeep {kvkeep.__version__}\n")


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_names_all_commands(option: str):
    result = invoke(option)
    assert result.exit_code == 0
    assert all(name in result.stdout for name in ("generate", "policies", "env"))


def test_help_of_generate_has_its_groups_and_options(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = invoke("generate", "--help").stdout
    for group in ("Prompt", "KV memory", "Sampling", "Model", "Output"):
        assert f"─ {group} ─" in text
    for option in ("--prompt-file", "--keep-ratio", "--prefill-chunk", "--max-new-tokens", "--compare", "--debug"):
        assert option in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [["nonsense"], ["generate", "--bugdet", "3"], ["generate", "--temperature", "x"], ["env", "x"]]
)
def test_usage_errors(arguments: list[str]):
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_run_ends_with_130_after_an_interrupt(monkeypatch: pytest.MonkeyPatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "app", interrupt)
    with pytest.raises(SystemExit) as stop:
        main.run()
    assert stop.value.code == 130


def test_interrupt_in_a_command_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch):
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(console, "write_json", interrupt)
    result = invoke("env", "--json")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_real_command_one_line_and_exit_code(tmp_path: Path):
    command = [*KVKEEP, "generate", "--prompt-file", str(tmp_path / "nothing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"error: The prompt file {tmp_path / 'nothing'} cannot be read: No such file or directory.\n"


@pytest.mark.skipif(os.name == "nt", reason="pipes of another kind")
def test_closed_pipe_gives_no_traceback():
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*KVKEEP, "policies", "--json"], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert done.returncode == 1
    assert done.stderr == ""


def test_pipe_that_closes_while_text_is_written(monkeypatch: pytest.MonkeyPatch):
    def closed(*_: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(console, "write_json", closed)
    result = invoke("env", "--json")
    assert result.exit_code == 1
    assert result.stderr == ""


def test_command_line_itself_starts_without_torch():
    """Modules of the command line, with a stand-in for the package's ``__init__``, which may import what it likes."""
    script = f"""
import sys, types
package = types.ModuleType("kvkeep")
package.__path__ = [{str(Path(kvkeep.__file__).parent)!r}]
sys.modules["kvkeep"] = package
import kvkeep.cli.main
assert not {{"torch", "transformers", "numpy"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


def test_help_of_every_command_needs_no_torch():
    script = """
import sys
from typer.testing import CliRunner
from kvkeep.cli.main import app
names = [one.name for one in (*app.registered_commands, *app.registered_groups)]
for words in ([], *([name] for name in names), ["policies", "list"], ["policies", "show"]):
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0, words
assert len(names) == 8
assert not {"torch", "transformers", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)


# arguments of Python as flags


@console.one_line_errors
def fail(
    message: str,
    max_rows: Annotated[int | None, typer.Option()] = None,
    budgets: Annotated[str, typer.Option("--budgets", "-b")] = "1",
    kv_memory: Annotated[str | None, typer.Option(metavar="SIZE")] = None,
    raw: Annotated[bool, typer.Option("--raw")] = False,
    model: Annotated[str | None, typer.Argument(metavar="MODEL")] = None,
) -> None:
    raise KVKeepError(message)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("Give `budgets`.", "Give --budgets."),
        ("Give `budgets=3,4`, or fewer.", "Give --budgets 3,4, or fewer."),
        ("budgets=0 keeps nothing", "--budgets 0 keeps nothing"),
        ("Line 3: budgets=0 keeps nothing", "Line 3: budgets=0 keeps nothing"),
        ("local:budgets=3 is odd", "local:budgets=3 is odd"),
        ("budget=0 keeps nothing", "--budgets 0 keeps nothing"),
        ("Use fewer `rows`.", "Use fewer --max-rows."),
        ("Use `raw=True`.", "Use --raw."),
        ("Use `raw=False`.", "Use --no-raw."),
        ("Give a `model`.", "Give a MODEL."),
        ("Give `kv_memory=24000000`.", "Give --kv-memory 24MB."),
        ("Give `kv_memory=24000001`.", "Give --kv-memory 24000001B."),
        ("Lower `prefill_chunk`.", "Lower prefill chunk."),
        ("prefill_chunk=0 takes no token", "prefill_chunk=0 takes no token"),
        ("Log in with `hf auth login`.", "Log in with `hf auth login`."),
    ],
)
def test_a_message_names_the_flags_of_its_command(capsys: pytest.CaptureFixture[str], message: str, line: str):
    with pytest.raises(typer.Exit):
        fail(message)
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_message_outside_of_a_command_stays_readable(capsys: pytest.CaptureFixture[str]):
    console.error("budgets=0 is not a `prefill_chunk`")
    assert capsys.readouterr().err == "error: budgets=0 is not a prefill chunk\n"


# numbers


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1024", 1024), ("4K", 4096), ("4k", 4000), ("1.5k", 1500), ("1M", 2**20), ("2m", 2_000_000), ("-3", -3)],
)
def test_tokens(text: str, tokens: int):
    assert options.parse_tokens(text, "--budget") == tokens


@pytest.mark.parametrize("text", ["", "k", "K", "1.5", "nan", "inf", "infk", "1e400", "4kk", "0x10", "4 K x"])
def test_tokens_that_are_none(text: str):
    with pytest.raises(InputError, match="whole number"):
        options.parse_tokens(text, "--budget")


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (999_960, "1.00 MB"), (5 * 10**12, "5.00 TB")],
)
def test_bytes(number: int, text: str):
    assert console.show_bytes(number) == text


@pytest.mark.parametrize(("factor", "text"), [(4.0, "4.0×"), (0.95, "0.9×"), (0.04, "0.04×"), (123.45, "123.5×")])
def test_factor(factor: float, text: str):
    assert console.show_factor(factor) == text
